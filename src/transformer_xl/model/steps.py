"""The steps of a decoder on its cache: a token of each stream through all layers at once.

:class:`CompiledStep` is a call of the compiled library, on a CPU; :class:`CapturedStep` a replayed
CUDA graph, on a GPU. Both have the addresses of the tensors of a
:class:`~transformer_xl.model.stream_cache.StreamCache`, and are made again when it has others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.model.capture import captured
from transformer_xl.model.positions import Positions
from transformer_xl.model.stream_cache import StreamCache
from transformer_xl.model.tokens import embedded
from transformer_xl.model.variants.adaptive import AdaptiveEmbedding
from transformer_xl.ops import native, triton

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL


class Step(ABC):
    """A step with the addresses of a cache.

    Args:
        model: The model, in evaluation mode and with fixed weights.
        cache: Keys and values; in fixed buffers if ``is_fixed``.
        positions: The positions of as many distances as a token can see, for each layer; of a cache
            that is fixed, of as many as it has slots.
        attn_lens: How many keys a token sees at most in each layer, its own included.

    Attributes:
        kind: How it runs.
        is_fixed: Whether the cache must never move.
        tensors: Those of the cache that it has the addresses of.
    """

    kind: ClassVar[str]
    is_fixed: ClassVar[bool]

    def __init__(
        self,
        model: "TransformerXL",
        cache: StreamCache,
        positions: Sequence[Positions],
        attn_lens: Sequence[int],
    ) -> None:
        self._model, self._cache, self._attn_lens = model, cache, attn_lens
        self._positions, self.tensors = positions, cache.tensors
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Make what a step needs of model and cache."""

    @abstractmethod
    def __call__(self, tokens: Tensor) -> Float[Tensor, "B D"]:
        """Read a token of each stream into the next slot; return the output of the layers."""


class CompiledStep(Step):
    """One call of a compiled library (:mod:`transformer_xl.ops.native`).

    A stream reads the keys that it sees, in at most two runs of slots: nothing is masked or
    gathered. Results do not depend on the number of threads.
    """

    kind = "compiled"
    is_fixed = False

    def _prepare(self) -> None:
        self._layers = _described(self._model, self._cache, self._positions, self._attn_lens)
        self._is_recurrent = self._model.input_decay is not None

    @staticmethod
    def reason_against(model: "TransformerXL", dtype: torch.dtype) -> str | None:
        """Return why it cannot read keys and values in a precision, for display; None: it can."""
        config = model.config
        for is_set, what in (
            (config.gate != "none", f"gate={config.gate!r}"),
            (config.enhanced_recurrence, "enhanced_recurrence=True"),
            ("raw_queries" in config.quirks, "the quirk raw_queries"),
        ):
            if is_set:
                return f"the compiled step does not support {what}"
        if reason := native.reason_against(model.device, dtype):
            return reason
        for weight in (linear.weight for layer in model.layers for linear in layer.matrices):
            if not native.can_read(weight, dtype):
                return f"the compiled step cannot read a {type(weight).__name__} in {weight.dtype}"
        return None if dtype == model.dtype else f"keys and values in {dtype}"

    def __call__(self, tokens: Tensor) -> Float[Tensor, "B D"]:
        """See :class:`Step`. A token outside the vocabulary raises before anything is modified."""
        cache, model = self._cache, self._model
        x = embedded(model.embedding, tokens[:, None])[:, 0]
        if (reset_at := model.config.reset_at) is not None:
            cache.first[tokens == reset_at] = cache.position
        n_keys = cache.position + 1 - cache.first
        newest = cache.next_slot
        if cache.n_offset and (begins := cache.first == cache.position).any():
            # The first key of a document has nothing of the token before.
            for keys in cache.keys:
                keys[:, begins, newest, -cache.n_offset :] = 0
        if self._is_recurrent:
            x = recurrent(model, cache, x, cache.position, (newest - 1) % cache.capacity)
            cache.inputs[:, newest] = x
            x = x.to(model.dtype)
        return self._layers(x, n_keys, newest)


class CapturedStep(Step):
    """A step of fixed shapes and addresses, captured once as a CUDA graph and then replayed.

    The index of the newest position is a tensor on the device.
    """

    kind = "captured"
    is_fixed = True

    def _prepare(self) -> None:
        model, cache = self._model, self._cache
        B, config, device = cache.batch_size, model.config, cache.first.device
        # Inputs and output of a step, at fixed addresses.
        self._position, self._newest = (
            torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((), (1,))
        )
        self._tokens = torch.zeros(B, dtype=torch.int64, device=device)
        if config.n_features:
            self._tokens = torch.zeros(B, config.n_features, dtype=model.dtype, device=device)
        self._hidden = cache.keys[0].new_zeros(B, config.d_model)
        self._replay: Callable[[], None] | None = None

    def __call__(self, tokens: Tensor) -> Float[Tensor, "B D"]:
        """See :class:`Step`."""
        self._tokens.copy_(tokens)
        self._position.fill_(self._cache.position)
        self._newest.fill_(self._cache.next_slot)
        if self._replay is None:
            self._replay = captured(self._step, self._cache.first)
        self._replay()
        return self._hidden.clone()

    def _step(self) -> None:
        model, cache, tokens = self._model, self._cache, self._tokens
        x = self._embedded(tokens[:, None])
        if (reset_at := model.config.reset_at) is not None:
            is_reset = tokens == reset_at
            cache.first.copy_(torch.where(is_reset, self._position, cache.first))
        if model.input_decay is not None:
            before = (self._newest - 1) % cache.capacity
            exact = recurrent(model, cache, x[:, 0], self._position, before)
            cache.inputs.index_copy_(1, self._newest, exact[:, None])
            x = exact.to(x.dtype)[:, None]
        n_keys = self._position + 1 - cache.first
        n_seen = {x: n_keys.clamp(max=x) for x in set(self._attn_lens)}
        layer_input, nothing = model.residuals(model, x), x[:, :0]
        for n, layer in enumerate(model.layers):
            x = layer_input(n, x)
            q, k, v = layer.project(x, nothing)
            n_own = n_seen[self._attn_lens[n]]
            q = layer.scale.scaled(q, n_own[:, None])
            attended = self._attended(n, q, k, v, n_own)
            x = layer.finish(x, layer.attention.merged(attended))
            if model.config.enhanced_recurrence:
                present = layer.keys_and_values(x)
                for cached, new in zip((cache.keys[n], cache.values[n]), present, strict=True):
                    cached.index_copy_(2, self._newest, new.permute(2, 0, 1, 3).to(cached.dtype))
        self._hidden.copy_(model.final_norm(x)[:, 0])

    def _embedded(self, tokens: Int[Tensor, "B 1"]) -> Float[Tensor, "B 1 D"]:
        embed = self._model.embedding
        if isinstance(embed, AdaptiveEmbedding):
            return embedded(embed, tokens, embed.in_fixed_shapes)
        return embedded(embed, tokens)

    def _attended(
        self, n: int, q: Tensor, k: Tensor, v: Tensor, n_seen: Int[Tensor, " B"]
    ) -> Float[Tensor, "B 1 H K"]:
        """Write the keys and values, (B, 1, H, K), into the cache of layer ``n``; attend to it."""
        keys, values, position = self._cache.keys[n], self._cache.values[n], self._positions[n]
        q, k, v, r = (x.to(keys.dtype) for x in (q, k, v, position.r))
        after, n_offset, own = (self._newest + 1) % self._cache.capacity, self._cache.n_offset, k
        if n_offset:
            # The first of a document has no token before it, nor has the oldest.
            before = keys[..., -n_offset:].index_select(2, self._newest).permute(1, 2, 0, 3)
            begins = self._cache.first == self._position
            before = before.masked_fill(begins[:, None, None, None], 0)
            k = torch.cat([k[..., :-n_offset], before], -1)
            keys[..., -n_offset:].index_fill_(2, after, 0)
        attended = triton.attend_step(
            *(q, k, v, keys, values, r, position.content_bias, position.position_bias),
            distance_bias=position.distance_bias,
            newest=self._newest,
            n_seen=n_seen,
        )
        if n_offset:
            last = own[..., -n_offset:].permute(2, 0, 1, 3)
            keys[..., -n_offset:].index_copy_(2, after, last)
        return attended


def recurrent(
    model: "TransformerXL",
    cache: StreamCache,
    x: Float[Tensor, "B D"],
    position: int | Tensor,
    before: int | Tensor,
) -> Float[Tensor, "B D"]:
    """Return the inputs of the first layer by the recurrence of the inputs, in their precision.

    Args:
        model: A model with ``input_recurrence``.
        cache: The cache of the inputs.
        x: The embedded tokens.
        position: Their position.
        before: The slot of the position before.
    """
    assert model.input_decay is not None
    last = cache.inputs[:, before].reshape(x.shape)
    factor = model.input_decay.to(last.dtype).tanh()
    # Without a memory, each position is the first one.
    is_first = (cache.first >= position) | (not cache.mem_len)
    return x.to(last.dtype) + (last * factor).masked_fill(is_first[:, None], 0)


def _described(
    model: "TransformerXL",
    cache: StreamCache,
    positions: Sequence[Positions],
    attn_lens: Sequence[int],
) -> native.Layers:
    """Describe the layers of a model and their caches for the compiled library."""
    config = model.config
    final = model.final_norm
    factors = [(1.0, 0.0)] * config.n_layer
    if model.embedding_own is not None and model.embedding_first is not None:
        others = model.embedding_own.tolist(), model.embedding_first.tolist()
        factors[1:] = zip(*others, strict=True)
    layers = []
    for n, layer in enumerate(model.layers):
        tensors: dict[str, object] = {"keys": cache.keys[n], "values": cache.values[n]}
        tensors |= positions[n]._asdict() | {"attn_len": attn_lens[n]}
        for name, matrix in zip(("qkv", "o", "inner", "outer"), layer.matrices, strict=True):
            tensors |= {name: matrix.weight, f"{name}_bias": matrix.bias}
        for name in ("attention_norm", "feed_forward_norm"):
            norm = getattr(layer, name)
            tensors |= {name: norm.weight, f"{name}_bias": getattr(norm, "bias", None)}
        for name in ("q_norm", "k_norm"):
            norm = getattr(layer.attention, name)
            tensors[name] = None if norm is None else norm.weight
        tensors |= {"query_growth": layer.scale.growth, "growth_from": layer.scale.n_keys}
        tensors["embedding_own"], tensors["embedding_first"] = factors[n]
        layers.append(tensors)
    return native.Layers(
        layers,
        None if isinstance(final, nn.Identity) else (final.weight, getattr(final, "bias", None)),
        activation=config.activation,
        norm_first=config.norm_first,
        is_rms=config.norm == "rms",
        eps=config.norm_eps,
        n_offset=cache.n_offset,
    )
