"""The step of decoding as one call of a compiled library (``native.cpp``), on a CPU.

One token of each stream goes through all layers in one call: for small models the cost of a step is
that of its operations and barriers, and for large ones weights, keys and values are read once. The
library is compiled when the package is built, once for each level of vector instructions; where
there is none, decoding uses the operations of torch.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import c_double, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level  # pyright: ignore[reportMissingImports]
from torch.autograd import forward_ad

from transformer_xl.errors import InputError
from transformer_xl.ops.packed import Int4Weight, Int8Weight, PackedWeight

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 3}
_PACKED = {Int8Weight: 2, Int4Weight: 4}
_MOST_COLUMNS = 16_000
"""Columns of a packed matrix, at most: sums of integers overflow with more."""
_MATRICES_IN = {
    torch.float32: (torch.float32, torch.bfloat16),
    torch.bfloat16: (torch.float32, torch.bfloat16),
    torch.float64: (torch.float64,),
}
"""Precisions of matrices by that of keys and values."""
MOST_ROWS = 16
"""Rows of a product for which torch is not faster."""
_ACTIVATIONS = ("relu", "relu_squared", "gelu", "geglu", "swiglu")
_MATRICES = ("qkv", "o", "inner", "outer")


_VECTORS = (
    *("attention_norm", "attention_norm_bias", "feed_forward_norm", "feed_forward_norm_bias"),
    *("q_norm", "k_norm", "query_growth", "content_bias", "position_bias"),
)
_FACTORS = ("embedding_own", "embedding_first", "growth_from")


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scales", "bias")),
        *((name, c_int32) for name in ("kind", "rows", "columns", "stride")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in _MATRICES),
        *((name, c_void_p) for name in (*_VECTORS, "r", "distance_bias", "keys", "values")),
        *((name, c_int64) for name in ("r_row", "r_head", "bias_row", "bias_head")),
        ("attn_len", c_int64),
        *((name, c_double) for name in _FACTORS),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "final_norm", "final_norm_bias", "x", "n_keys")),
        ("scratch", c_void_p),
        *((name, c_int64) for name in ("newest", "capacity", "n_positions")),
        ("eps", c_double),
        *((name, c_int32) for name in ("n_layer", "B", "D", "H", "K", "F")),
        *((name, c_int32) for name in ("kind", "cache_kind", "activation", "norm_first")),
        *((name, c_int32) for name in ("is_rms", "n_threads", "n_offset")),
    )


_NO_MEMORY = 2
_VERSION = 11
_LAYOUT = _VERSION << 32 | ctypes.sizeof(_Step) << 16 | ctypes.sizeof(_Layer)
"""What the library returns if it was built from the same version of ``native.cpp``."""


def level() -> str:
    """Return the level of vector instructions that torch uses here, as the library names it.

    ``ATEN_CPU_CAPABILITY`` chooses another one, as it does for torch.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    return capability.lower() if capability in ("AVX2", "AVX512") else "default"


@cache
def library() -> Any:
    """Load the library for this processor; None: there is none that fits."""
    for path in sorted(Path(__file__).parent.glob(f"_native_{level()}.*so")):
        # One that is damaged, or was built for another system or version, is as good as none.
        with suppress(OSError, AttributeError):
            loaded = ctypes.CDLL(str(path))
            loaded.txl_layout.restype = loaded.txl_scratch_size.restype = c_int64
            if loaded.txl_layout() == _LAYOUT:
                return loaded
    return None


def reason_against(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the library cannot be used, for display; None: it can."""
    if device.type != "cpu":
        return f"the compiled step is for a CPU, not for {device.type}"
    if os.environ.get("TXL_NATIVE") == "0":
        return "the compiled step is switched off by TXL_NATIVE=0"
    if library() is None:
        return f"this installation has no compiled step for {level()} processors"
    if dtype not in _MATRICES_IN:
        return f"the compiled step does not compute {dtype}"
    return None


def can_read(weight: Any, dtype: torch.dtype) -> bool:
    """Whether a matrix is one that the step reads, with keys and values in ``dtype``."""
    if isinstance(weight, PackedWeight):
        return dtype != torch.float64 and weight.columns <= _MOST_COLUMNS
    # Tensors of other classes have their numbers elsewhere.
    return type(weight) in (Tensor, nn.Parameter) and weight.dtype in _MATRICES_IN[dtype]


def multiplies(x: Float[Tensor, "*batch D"], weight: Any) -> bool:
    """Whether :func:`product` is there for these operands and faster than torch."""
    return (
        not torch.is_grad_enabled()
        and not _is_observed()
        and type(x) is Tensor
        and x.ndim > 1
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and x.dtype in _MATRICES_IN
        and can_read(weight, x.dtype)
        and weight.device == x.device
        # A product in the precision of the operands.
        and (isinstance(weight, PackedWeight) or weight.dtype == x.dtype)
        and weight.shape[1] == x.shape[-1]
        and (isinstance(weight, PackedWeight) or weight.stride(1) == 1)
        and len(weight) > 0
        and not torch.is_autocast_enabled(x.device.type)
        and reason_against(x.device, x.dtype) is None
    )


def _is_observed() -> bool:
    """Whether torch records or replaces operations, which it could not with a compiled one."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or torch._C._len_torch_dispatch_stack() > 0
        or maybe_current_level() is not None
        or forward_ad._current_level >= 0
    )


def product(
    x: Float[Tensor, "B D"],
    weight: Float[Tensor, "V D"] | PackedWeight,
    bias: Float[Tensor, " V"] | None,
) -> Float[Tensor, "B V"]:
    """Return ``x weight^T + bias`` by the threads of the compiled step.

    Beside a step this is faster than a product of torch, whose threads would wait for each other
    while those of the step still spin. Sums are in float32, or in float64 if ``x`` is.
    """
    dtype, kept = torch.float64 if x.dtype == torch.float64 else torch.float32, []
    matrix = _described(weight, bias, dtype, kept)
    rows = x.to(dtype).contiguous()
    out = rows.new_empty(len(x), len(weight))
    settings = _KINDS[dtype], len(x), torch.get_num_threads()
    pointers = (c_void_p(tensor.data_ptr()) for tensor in (rows, out))
    _checked(library().txl_product(ctypes.byref(matrix), *pointers, *settings))
    return out.to(x.dtype)


def _checked(error: int) -> None:
    if error:
        raise MemoryError("the compiled step") if error == _NO_MEMORY else AssertionError(error)


class Layers:
    """The layers of a model with keys and values, for one token of each stream at a time.

    Sums are in float32, or in float64 if keys and values are. The weights must be fixed: matrices
    are read where they lie, but small tensors in another precision are copied.

    Args:
        layers: For each layer its matrices ``qkv``, ``o``, ``inner`` and ``outer``, tensors or
            :class:`PackedWeight`; the vectors ``inner_bias``, ``outer_bias``, ``attention_norm``,
            ``feed_forward_norm``, ``content_bias`` and ``position_bias``, and if it has them
            ``attention_norm_bias``, ``feed_forward_norm_bias``, ``q_norm``, ``k_norm`` and
            ``query_growth``, a number for each head, for queries that see more than ``growth_from``
            keys; the keys of the distances ``r``, (capacity, H, K), and ``distance_bias``,
            (capacity, H), farthest first; the caches ``keys`` and ``values``, (H, B, capacity, K);
            ``attn_len``, how many keys a token sees at most; and the factors of residuals,
            ``embedding_own`` and ``embedding_first``.
        final_norm: Weight and bias of a normalization of the output, or None.
        activation: That of the feed-forward layers: relu, relu_squared, gelu, geglu or swiglu.
        norm_first: Pre-norm.
        is_rms: RMS normalization, without the mean.
        eps: Epsilon of the normalization.
        n_offset: How many features of a key, the last ones, are those of the position before.

    Raises:
        InputError: The step cannot read the tensors in their precision.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, Any]],
        final_norm: tuple[Tensor, Tensor | None] | None,
        *,
        activation: str,
        norm_first: bool,
        is_rms: bool,
        eps: float,
        n_offset: int,
    ) -> None:
        first = layers[0]
        H, B, capacity, K = first["keys"].shape
        dtype = self._cache_dtype = first["keys"].dtype
        if reason := reason_against(first["keys"].device, dtype):
            raise InputError(reason)
        of_distances = [first[x] for x in ("r", "distance_bias") if first.get(x) is not None]
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        # What the library has addresses of.
        self._kept: list[Any] = [layers]
        described = (_Layer * len(layers))(*(self._layer(each) for each in layers))
        weight, bias = final_norm or (None, None)
        self._step = _Step(
            layers=ctypes.addressof(described),
            final_norm=self._vector(weight),
            final_norm_bias=self._vector(bias),
            capacity=capacity,
            n_positions=len(of_distances[0]) if of_distances else 0,
            eps=eps,
            n_layer=len(layers),
            B=B,
            D=len(first["attention_norm"]),
            H=H,
            K=K,
            F=described[0].outer.columns,
            kind=_KINDS[self._dtype],
            cache_kind=_KINDS[dtype],
            activation=_ACTIVATIONS.index(activation),
            norm_first=norm_first,
            is_rms=is_rms,
            n_offset=n_offset,
        )
        size = library().txl_scratch_size(ctypes.byref(self._step))
        scratch = torch.empty(size, dtype=torch.uint8)
        self._step.scratch = scratch.data_ptr()
        self._kept += [described, scratch]

    def __call__(
        self, x: Float[Tensor, "B D"], n_keys: Int[Tensor, " B"], newest: int
    ) -> Float[Tensor, "B D"]:
        """Read a token of each stream; return the output of the layers.

        Its keys and values are written into slot ``newest`` of each layer, which then attends to
        the ``n_keys`` newest slots, or to ``attn_len`` if these are fewer.

        Args:
            x: The embedded tokens.
            n_keys: How many keys each stream has, counting that of the token.
            newest: The slot of the token; the slots before it hold earlier positions, in order.
        """
        step, out = self._step, x.to(self._dtype, copy=True).contiguous()
        n_keys = n_keys.contiguous()
        step.x, step.n_keys, step.newest = out.data_ptr(), n_keys.data_ptr(), newest
        step.n_threads = torch.get_num_threads()
        _checked(library().txl_step(ctypes.byref(step)))
        return out.to(x.dtype)

    def _layer(self, tensors: Mapping[str, Any]) -> _Layer:
        described = _Layer(**{name: tensors[name] for name in (*_FACTORS, "attn_len")})
        for name in _MATRICES:
            setattr(described, name, self._matrix(tensors[name], tensors.get(f"{name}_bias")))
        for name in _VECTORS:
            setattr(described, name, self._vector(tensors.get(name)))
        described.keys, described.values = (tensors[x].data_ptr() for x in ("keys", "values"))
        if (r := tensors.get("r")) is not None:
            # Heads outermost in memory.
            r = r.detach().to(self._cache_dtype).transpose(0, 1).contiguous().transpose(0, 1)
            described.r, (described.r_row, described.r_head, _) = r.data_ptr(), r.stride()
            self._kept.append(r)
        if (bias := tensors.get("distance_bias")) is not None:
            bias = bias.detach().to(self._cache_dtype)
            described.distance_bias = bias.data_ptr()
            described.bias_row, described.bias_head = bias.stride()
            self._kept.append(bias)
        return described

    def _matrix(self, weight: Tensor | PackedWeight, bias: Tensor | None) -> _Matrix:
        if not can_read(weight, self._cache_dtype):
            raise InputError(
                f"the compiled step cannot read a {type(weight).__name__} in {weight.dtype} with "
                f"keys and values in {self._cache_dtype}"
            )
        return _described(weight, bias, self._dtype, self._kept)

    def _vector(self, x: Tensor | None) -> int | None:
        """Return the address of a small tensor in the precision of the sums."""
        return _address(x, self._dtype, self._kept)


def _described(
    weight: Tensor | PackedWeight, bias: Tensor | None, dtype: torch.dtype, kept: list[Any]
) -> _Matrix:
    """Describe a matrix.

    Args:
        weight: The matrix.
        bias: What is added to a product, or None.
        dtype: The precision of the sums.
        kept: To it is added what the description has addresses of.
    """
    rows, columns = weight.shape
    if isinstance(weight, PackedWeight):
        values, kind, scales = weight.values, _PACKED[type(weight)], weight.scales
        # Of groups as they are, as there are many.
        scales_dtype = dtype if scales.ndim == 1 else scales.dtype
    else:
        values, kind, scales, scales_dtype = weight.detach(), _KINDS[weight.dtype], None, dtype
    values = values if values.stride(1) == 1 else values.contiguous()
    kept.append(values)
    return _Matrix(
        weight=values.data_ptr(),
        scales=_address(scales, scales_dtype, kept),
        bias=_address(bias, dtype, kept),
        kind=kind,
        rows=rows,
        columns=columns,
        stride=values.stride(0),
    )


def _address(x: Tensor | None, dtype: torch.dtype, kept: list[Any]) -> int | None:
    """Return the address of a tensor in a precision, after adding it to ``kept``."""
    if x is None:
        return None
    kept.append(x.detach().to(dtype).contiguous())
    return kept[-1].data_ptr()
