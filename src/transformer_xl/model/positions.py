"""Positions: how a layer knows where a key is. The paper's are :class:`RelativeSinusoids`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.model.segment import View
from transformer_xl.ops import cached

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL

_MOST_PROJECTED = 4
"""Most tables of projected positions in a cache, one for each ``clamp_len`` and precision."""


class Positions(NamedTuple):
    """What terms (b), (c) and (d) of section 3.3 need in one layer: r, u and v.

    Example:
        >>> keys, bias = torch.randn(5, 2, 4), torch.zeros(2, 4)  # five distances, two heads
        >>> Positions(keys, bias, bias).without(2).r.shape
        torch.Size([3, 2, 4])
    """

    r: Float[Tensor, "S H K"]
    """Keys of the distances, farthest first."""
    content_bias: Float[Tensor, "H K"]
    """The bias ``u``."""
    position_bias: Float[Tensor, "H K"]
    """The bias ``v``."""
    distance_bias: Float[Tensor, "S H"] | None = None
    """Added to the scores of each distance, farthest first; None: nothing, as in the paper."""

    def placed(
        self, past: Float[Tensor, "B M D"], x: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B T D"]]:
        """Return memory and segment as the layer reads them.

        Relative positions are a part of the scores, so all of them are as given.
        """
        return past, x

    def without(self, n: int) -> "Positions":
        """Return the positions without the ``n`` largest distances."""
        bias = self.distance_bias
        return self._replace(r=self.r[n:], distance_bias=None if bias is None else bias[n:])

    def to(self, where: torch.dtype | torch.device | int | str) -> "Positions":
        """Return the positions in another precision or on another device."""
        return Positions(*(None if x is None else x.to(where) for x in self))  # pyright: ignore[reportArgumentType]


@runtime_checkable
class LayerPositions(Protocol):
    """The positions of one layer: parts of its scores (:class:`Positions`) or of its input."""

    def placed(
        self, past: Float[Tensor, "B M D"], x: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B T D"]]:
        """Return memory and segment as the layer reads them."""
        ...

    def without(self, n: int) -> "LayerPositions":
        """Return the positions without those of the ``n`` oldest keys."""
        ...


class PositionScheme(nn.Module, ABC):
    """How the layers of a :class:`TransformerXL` know where a key is.

    A model has one scheme, given when it is built: ``TransformerXL(config, positions=MyScheme())``.
    Without one it has that of ``config.attn_type``. Parameters of a scheme are a part of the model.

    Attributes:
        is_absolute: Whether positions are a part of the hidden states. Attention then has content
            scores only, keys and values cannot be cached, and results depend on the segmentation.
        has_projection: Whether each layer has a projection of position encodings,
            ``layer.attention.r_proj`` ($W_{k,R}$).

    Example:
        >>> from transformer_xl import ModelConfig, TransformerXL
        >>> class Nowhere(PositionScheme):
        ...     def encode(self, model, n_keys, n_queries, view):
        ...         none = torch.zeros(n_keys, model.config.n_head, model.config.head_width)
        ...         return [Positions(none, none[0], none[0])] * model.config.n_layer
        >>> config = ModelConfig(vocab_size=9, n_layer=2, n_head=2, d_model=8, d_inner=8)
        >>> model = TransformerXL(config, positions=Nowhere()).eval()
        >>> hidden = model(torch.tensor([[3, 3, 3]])).hidden[0]
        >>> torch.allclose(hidden[0], hidden[2])  # of equal tokens, none knows where it is
        True
    """

    is_absolute: ClassVar[bool] = False
    has_projection: ClassVar[bool] = False

    def add_parameters(self, model: "TransformerXL") -> None:
        """Register parameters on the model, for those whose names in files have no prefix."""

    @abstractmethod
    def encode(
        self, model: "TransformerXL", n_keys: int, n_queries: int, view: View
    ) -> Sequence[LayerPositions]:
        """Return the positions of a segment for each layer.

        Args:
            model: The model.
            n_keys: Length S of memory and segment together.
            n_queries: Length T of the segment, whose keys are the last ones.
            view: What the queries may see.
        """

    def project(
        self, model: "TransformerXL", n_keys: int, clamp_len: int | None
    ) -> Sequence[Float[Tensor, "S H K"]]:
        """Cache what depends on the weights alone, for up to ``n_keys`` keys; return it."""
        return ()

    def renew(self, model: "TransformerXL") -> None:
        """Drop what is cached if the weights have changed."""


class RelativeSinusoids(PositionScheme):
    r"""The paper's relative positions (section 3.3).

    $R_{i-j}$ is sinusoidal and projected by each layer's $W_{k,R}$; the biases u and v are shared
    by all layers, unless ``tie_biases`` is False.
    """

    has_projection = True

    def __init__(self) -> None:
        super().__init__()
        self._projected: dict[tuple[Any, ...], Sequence[Tensor]] = {}
        self._probe: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy everything but the cache of projected positions."""
        return {**vars(self), "_projected": {}, "_probe": None}

    def add_parameters(self, model: "TransformerXL") -> None:
        """Register the biases u and v."""
        model.content_bias = nn.Parameter(torch.empty(bias_shape(model)))
        model.position_bias = nn.Parameter(torch.empty(bias_shape(model)))

    def encode(
        self, model: "TransformerXL", n_keys: int, n_queries: int, view: View
    ) -> Sequence[Positions]:
        """See :meth:`PositionScheme.encode`."""
        if view.is_fixed:
            keys = self._cached(model, n_keys, view.clamp_len)
        else:
            encoding = model.dropped_input(encoding_of(model, n_keys, view.clamp_len))
            keys = [layer.attention.position_keys(encoding) for layer in model.layers]
        n_layer = len(model.layers)
        u, v = (x.expand(n_layer, -1, -1) for x in (model.content_bias, model.position_bias))
        return [Positions(*each) for each in zip(keys, u, v, strict=True)]

    def _cached(
        self, model: "TransformerXL", S: int, clamp_len: int | None
    ) -> Sequence[Float[Tensor, "S H K"]]:
        projected = self._projected.get(_cache_key(model, clamp_len))
        if projected is None or len(projected[0]) < S:
            if torch.compiler.is_compiling():
                # A traced program must not set attributes, and lengths may be symbols.
                encoding = encoding_of(model, S, clamp_len)
                return [layer.attention.position_keys(encoding) for layer in model.layers]
            # The size grows in powers of two while a memory fills up.
            projected = self.project(model, 1 << (S - 1).bit_length(), clamp_len)
        return [r[-S:] for r in projected]

    @torch.no_grad()
    def project(
        self, model: "TransformerXL", n_keys: int, clamp_len: int | None
    ) -> Sequence[Float[Tensor, "S H K"]]:
        """Project the positions of ``n_keys`` keys for each layer, and cache them.

        Calls with keys and values do this on demand; an exported program contains exactly the
        positions projected before.
        """
        encoding, key = encoding_of(model, n_keys, clamp_len), _cache_key(model, clamp_len)
        projected = [
            # Heads outermost in memory, as the attention reads them.
            layer.attention.position_keys(encoding).transpose(0, 1).contiguous().transpose(0, 1)
            for layer in model.layers
        ]
        if key not in self._projected and len(self._projected) == _MOST_PROJECTED:
            self._projected = {}
        self._projected[key] = projected
        return projected

    def renew(self, model: "TransformerXL") -> None:
        """Drop what is cached if the projections of a fixed vector have changed."""
        vector = torch.linspace(1, 2, model.config.d_model, device=model.device, dtype=model.dtype)
        with torch.autocast(model.device.type, enabled=False):
            # Adapters may require a batch dimension.
            probe = torch.stack([layer.attention.r_proj(vector[None]) for layer in model.layers])
        old = self._probe
        if (
            old is None
            or (old.device, old.dtype) != (probe.device, probe.dtype)
            or not torch.equal(old, probe)
        ):
            self._projected, self._probe = {}, probe


def _cache_key(model: "TransformerXL", clamp_len: int | None) -> tuple[Any, ...]:
    # Under autocast, projections are in half precision and must not be used outside of it.
    is_rounded = torch.is_autocast_enabled(model.device.type)
    return id(model), clamp_len, model.frequency_precision, is_rounded


def encoding_of(model: "TransformerXL", S: int, clamp_len: int | None) -> Float[Tensor, "S D"]:
    """Return the sinusoids of S distances, farthest first, at the width of a model."""
    kind = model.dtype, model.device, model.frequency_precision
    return relative_positions(S, model.config.d_model, clamp_len, *kind)


def bias_shape(model: "TransformerXL") -> tuple[int, int, int]:
    """Return the shape of the biases u and v: one for all layers, or one for each."""
    config = model.config
    return 1 if config.tie_biases else config.n_layer, config.n_head, config.head_width


def relative_positions(
    S: int,
    d_model: int,
    clamp_len: int | None,
    dtype: torch.dtype,
    device: torch.device,
    precision: torch.dtype = torch.float32,
) -> Float[Tensor, "S D"]:
    r"""Encode the distances ``S - 1, ..., 1, 0``, farthest first.

    $R_d = [\sin(d w), \cos(d w)]$ with $w_m = 10000^{-2m / D}$, all sines before all cosines
    (section 3.3 of the paper; the order is that of the authors' code). Distances above
    ``clamp_len`` are clamped. Frequencies are rounded to ``precision``, which is float32 in every
    published PyTorch checkpoint.

    Example:
        >>> relative_positions(3, 2, None, torch.float32, torch.device("cpu"))
        tensor([[ 0.9093, -0.4161],
                [ 0.8415,  0.5403],
                [ 0.0000,  1.0000]])
    """
    table = sinusoids(S, d_model, dtype, device, precision)
    if clamp_len is None or clamp_len >= S:
        return table[:S].flip(0)
    return table[distances(S, clamp_len, device)]


def distances(S: int, largest: int | None, device: torch.device) -> Int[Tensor, " S"]:
    """Return the distances ``S - 1, ..., 1, 0``, those above ``largest`` as ``largest``."""
    distance = torch.arange(S - 1, -1, -1, device=device)
    return distance if largest is None else distance.clamp(max=largest)


def sinusoids(
    S: int, width: int, dtype: torch.dtype, device: torch.device, precision: torch.dtype
) -> Float[Tensor, "more width"]:
    """Return the sinusoids of at least the distances 0 to S - 1."""
    # The size grows in powers of two while a memory fills up. An export bypasses the cache, as its
    # tensors are fake.
    sinusoids: Any = _sinusoids
    if torch.compiler.is_exporting():
        sinusoids = sinusoids.__wrapped__
    # A symbol has no bits to count.
    rows = 1 << (S - 1).bit_length() if isinstance(S, int) else S
    return sinusoids(rows, width, dtype, device, precision)


@cached(32)
def _sinusoids(
    S: int, d_model: int, dtype: torch.dtype, device: torch.device, precision: torch.dtype
) -> Tensor:
    # Angles are in float64, because bfloat16 cannot represent distances above 256.
    frequency = frequencies(d_model, precision).double()
    angle = torch.outer(torch.arange(S, dtype=torch.float64), frequency)
    return torch.cat([angle.sin(), angle.cos()], 1).to(device, dtype)


# Compiled code uses the cached table as a constant. torch.compiler.assume_constant_result does the
# same, but imports the compiler.
setattr(_sinusoids, "_dynamo_marked_constant", True)  # noqa: B010


def frequencies(d_model: int, precision: torch.dtype = torch.float32) -> Float[Tensor, " half"]:
    """Return the frequency of each pair of sine and cosine."""
    return 1 / (10_000 ** (torch.arange(0, d_model, 2, dtype=precision) / d_model))
