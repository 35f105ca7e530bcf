"""Experimental changes to the layers, each a setting that is off by default."""

from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transformer_xl.config import ModelConfig

ROTARY_BASE = 10_000.0
"""Ratio of the longest wavelength of the rotations to the shortest, roughly."""


class ShortConv(nn.Module):
    r"""A causal convolution over memory and segment, each feature by itself, with a residual.

    $$y_t = x_t + \sum_{j=1}^{w-1} w_j x_{t-j}$$

    On the input of the attention, as "Canon-A" of Allen-Zhu (2025, Physics of Language Models 4.1);
    that of queries, keys and values after their projection (Primer) has 2.5 times its cost. It
    starts as the identity. The position itself has no weight, as the projection behind it has one.
    Before the first position of the memory, or of a document, there are zeros.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Of three dimensions, so that optimizers do not take it for a matrix.
        self.weight = nn.Parameter(torch.empty(config.short_conv - 1, 1, config.d_model))

    def forward(
        self,
        memory: Float[Tensor, "B M D"],
        x: Float[Tensor, "B T D"],
        first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B T D"]]:
        """Return both, convolved.

        Args:
            memory: Inputs of the attention of the memory.
            x: Those of the segment.
            first_key: Index of the first position that a stream, or a position, sees.
        """
        weight = self.weight.to(x.dtype)
        if first_key is None:
            return cast(Any, _ShortConv.apply(memory, x, weight))
        M, T = memory.shape[1], x.shape[1]
        joined = torch.cat([memory, x], 1)
        # What a position of the memory sees before the first one that the segment sees, is hidden.
        first = first_key.view(len(first_key), -1)
        first = torch.cat([first[:, :1].expand(-1, M), first.expand(-1, T)], 1)
        place = torch.arange(M + T, device=x.device)
        out = joined
        for j, factor in enumerate(weight, 1):
            if j >= M + T:
                break
            seen = (place - j >= first)[..., None]
            out = out + F.pad(joined[:, :-j], (0, 0, j, 0)) * factor * seen
        return out[:, :M], out[:, M:]


class _ShortConv(torch.autograd.Function):
    """The convolution of two adjoining parts, without joining or copying them."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(memory, x, weight)
        made = memory.clone(), x.clone()
        for j, factor in enumerate(weight, 1):
            for (into, to), (source, at) in _shifts(made, (memory, x), j):
                into[:, to].addcmul_(source[:, at], factor)
        return made

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        memory, x, weight = ctx.saved_tensors
        dy = grad_outputs
        d_memory, dx = (x.clone() for x in dy)
        dw = torch.zeros_like(weight)
        for j, (factor, d_factor) in enumerate(zip(weight, dw, strict=True), 1):
            # The same pairs of places, from the outputs back to the inputs.
            pairs = zip(_shifts(dy, (d_memory, dx), j), _shifts(dy, (memory, x), j), strict=True)
            for ((d_out, to), (d_in, at)), (_, (source, _)) in pairs:
                d_in[:, at].addcmul_(d_out[:, to], factor)
                d_factor += (d_out[:, to] * source[:, at]).sum((0, 1))
        return d_memory, dx, dw


def _shifts(
    made: tuple[Tensor, ...], sources: tuple[Tensor, ...], j: int
) -> list[tuple[tuple[Tensor, slice], tuple[Tensor, slice]]]:
    """Pair places of memory and segment with those ``j`` positions before them."""
    M, T = sources[0].shape[1], sources[1].shape[1]
    found = []
    if j < M:
        found.append(((made[0], slice(j, M)), (sources[0], slice(0, M - j))))
    start, stop = max(0, j - M), min(j, T)
    if start < stop:
        at = slice(M + start - j, M + stop - j)
        found.append(((made[1], slice(start, stop)), (sources[0], at)))
    if j < T:
        found.append(((made[1], slice(j, T)), (sources[1], slice(0, T - j))))
    return found


def rotated(x: Float[Tensor, "B n H K"], n_rotated: int, S: int) -> Float[Tensor, "B n H K"]:
    """Rotate the last ``n`` of ``S`` positions in their first ``n_rotated`` features.

    Neighbouring features are a pair (Su et al., 2021, arXiv 2104.09864).
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    turns = _turns(S, n_rotated, dtype, x.device)[S - x.shape[1] :, None]
    part = x if n_rotated == x.shape[-1] else x[..., :n_rotated]
    pairs = torch.view_as_complex(part.to(dtype).unflatten(-1, (-1, 2)))
    part = torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
    return part if n_rotated == x.shape[-1] else torch.cat([part, x[..., n_rotated:]], -1)


@lru_cache(maxsize=64)
def _turns(S: int, n_rotated: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the rotations of S positions as complex numbers, (S, n_rotated / 2)."""
    powers = torch.arange(0, n_rotated, 2, dtype=torch.float64) / n_rotated
    angles = torch.arange(S, dtype=torch.float64)[:, None] * ROTARY_BASE**-powers
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    return torch.polar(torch.ones_like(angles), angles).to(device, complex_dtype)


class HashEmbedding(nn.Module):
    """Embeddings of pairs of neighbouring tokens, in a table that is indexed by a hash.

    The first token of a segment, and of a document, has none. It starts as zeros.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hash_embedding, config.d_model))
        self.vocab_size, self.scale = config.vocab_size, config.d_model**0.5

    def forward(
        self, tokens: Int[Tensor, "B T"], starts: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Embed each token with the one before it."""
        before = F.pad(tokens[:, :-1], (1, 0))
        # Multiplicative hashing (Knuth), whose high bits are well mixed.
        row = ((before * self.vocab_size + tokens) * 2_654_435_761 >> 12) % len(self.weight)
        alone = torch.zeros_like(tokens, dtype=torch.bool)
        alone[:, 0] = True
        if starts is not None:
            alone |= starts
        return F.embedding(row, self.weight).masked_fill(alone[..., None], 0.0) * self.scale


def unscaled_rms_norm(x: Float[Tensor, "B T D"], config: ModelConfig) -> Float[Tensor, "B T D"]:
    """Normalize by the root mean square, without weights."""
    return x * (x.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt()


def initial_std(config: ModelConfig, name: str, parameter: Tensor, std: float) -> float:
    """Return the standard deviation of the initial values of a parameter, for ``config.init``.

    Args:
        config: The settings.
        name: Name of the parameter.
        parameter: The parameter.
        std: That of ``init="normal"``.
    """
    if config.init == "normal":
        return std
    if name.endswith("norm.weight"):
        return 0.0
    if not name.startswith("layers.") or parameter.ndim != 2 or std == 0:
        return std
    leads_out = name.endswith(("o_proj.weight", "outer.weight"))
    if config.init == "zero":
        # Half of what keeps the variance, as in the speed runs of NanoGPT by Jordan and others.
        return 0.0 if leads_out else 0.5 * parameter.shape[1] ** -0.5
    return parameter.shape[1] ** -0.5 / ((2 * config.n_layer) ** 0.5 if leads_out else 1.0)
