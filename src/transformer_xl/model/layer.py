"""One layer: attention over memory and segment, then a feed-forward network.

Its parts, in this order: attention, feed-forward, the layer, its initial weights.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.parts import PostNorm, PreNorm, own_keys
from transformer_xl.model.positions import LayerPositions, Positions
from transformer_xl.model.segment import NO_LIMITS, View
from transformer_xl.model.variants.gates import GATE_BIAS, GatedPreNorm, GRUGate
from transformer_xl.model.variants.key_offset import offset_keys
from transformer_xl.model.variants.norms import RMSNorm, make_norm
from transformer_xl.model.variants.scalable_softmax import initial_growth, make_scale
from transformer_xl.ops import (
    Linear,
    dropout,
    reference,
    rel_attention,
    relu_dropout,
)


def is_fast(module: nn.Module) -> bool:
    """Whether a module is a :class:`Linear` whose ``forward`` was not replaced."""
    return type(module) is Linear and "forward" not in vars(module)


def project(
    qkv_proj: nn.Module,
    x: Float[Tensor, "B T D"],
    memory: Float[Tensor, "B M D"] | None,
    n_head: int,
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
    """Project a segment to queries, and memory and segment to keys and values.

    q = W_q h, k = W_{k,E} h~ and v = W_v h~ with h~ = [SG(memory), h] (section 3.2). Both parts are
    projected apart and their keys and values concatenated, which is the same.

    A :class:`Linear` is called for each of them: queries of the memory, which nobody
    needs, would be a third of its products. A module that was put in its place may not know how to
    leave them out, and is called once for both.

    Returns:
        Queries, keys and values; the latter with heads outermost in memory, as attention reads
        them.
    """
    past = None
    if memory is None:
        projected = qkv_proj(x)
    elif is_fast(qkv_proj):
        projected = qkv_proj(x)
        past = qkv_proj(memory, first_row=projected.shape[-1] // 3)
    else:
        past, projected = qkv_proj(torch.cat([memory, x], 1)).split(
            [memory.shape[1], x.shape[1]], 1
        )
        past = past[..., projected.shape[-1] // 3 :]
    q, k, v = projected.unflatten(-1, (3, n_head, -1)).unbind(2)
    if past is None:
        return q, k, v
    before = past.unflatten(-1, (2, n_head, -1)).unbind(2)
    k, v = (
        torch.cat([y.permute(2, 0, 1, 3) for y in pair], 2).permute(1, 2, 0, 3)
        for pair in zip(before, (k, v), strict=True)
    )
    # `q` is a view of `projected`: a copy lets autograd free that, whose keys and values are in `k`
    # and `v` already.
    return q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), k, v


class Attention(nn.Module):
    """The projections of multi-head attention, whose scores are up to a subclass.

    Projections have no bias. Queries and keys may be normalized (QK-norm; Henry et al., 2020), with
    learned scales, before u and v are added. Position keys are not: they do not depend on the
    input, and through their norm a head learns which distances matter.
    """

    def __init__(self, config: ModelConfig, *, has_r_proj: bool = False) -> None:
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.head_width
        width = self.n_head * self.d_head
        self.qkv_proj = Linear(config.d_model, 3 * width, bias=False)
        if has_r_proj:
            self.r_proj = Linear(config.d_model, width, bias=False)
        self.o_proj = Linear(width, config.d_model, bias=False)
        self.attn_dropout, self.qkv_dropout = config.attn_dropout, config.qkv_dropout
        self.is_locked = config.variational_dropout
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.d_head, config.norm_eps) for _ in range(2))

    def merged(self, attended: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T D"]:
        """Project the attended values of all heads to the width of the model."""
        return self.o_proj(attended.flatten(2))

    def weights(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S H K"],
        positions: Any,
        view: View,
    ) -> Float[Tensor, "B H T S"]:
        """Return the attention weights, without dropout."""
        none = q.new_zeros(k.shape[1:])
        if not isinstance(positions, Positions):
            # A part of the input, so that the scores are those of the content.
            positions = Positions(none, none[0], none[0])
        *terms, bias = positions.to(q.dtype)
        limits = {"attn_len": view.attn_len, "first_key": view.first_key}
        return reference.attention_weights(q, k.to(q.dtype), *terms, distance_bias=bias, **limits)

    def attended_with_weights(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S H K"],
        v: Float[Tensor, "B S H K"],
        positions: Any,
        view: View,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B H T S"]]:
        """Return what a call does, by the reference, with the attention weights."""
        weights = self.weights(q, k, positions, view)
        dropped = F.dropout(weights.type_as(q), self.attn_dropout if self.training else 0.0)
        return self.merged(torch.einsum("bhts,bshk->bthk", dropped, v.to(q.dtype))), weights

    def project(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B M D"] | None = None
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Project the segment to queries, and memory and segment to keys and values."""
        q, k, v = project(self.qkv_proj, x, memory, self.n_head)
        return self._finished(q, self.q_norm), self._finished(k, self.k_norm), self._finished(v)

    def queries(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        """Project to queries only."""
        return self._finished(self._heads(self.qkv_proj(x).chunk(3, -1)[0]), self.q_norm)

    def keys_and_values(
        self, x: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Project hidden states to keys and values only."""
        width, proj = self.n_head * self.d_head, self.qkv_proj
        both = proj(x, first_row=width) if is_fast(proj) else proj(x)[..., width:]
        k, v = both.chunk(2, -1)
        return self._finished(self._heads(k), self.k_norm), self._finished(self._heads(v))

    def position_keys(self, encoding: Float[Tensor, "S D"]) -> Float[Tensor, "S H K"]:
        """Project position encodings to keys: W_{k,R} R of section 3.3, for each layer its own."""
        return self._finished(self._heads(self.r_proj(encoding)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_head, self.d_head))

    def _finished(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Apply normalization and dropout to projected heads."""
        if norm is None and not (self.training and self.qkv_dropout > 0):
            return x
        # Preserves the memory layout, in which heads are outermost.
        x = x.movedim(-2, 0) if norm is None else norm(x.movedim(-2, 0))
        return dropout(x, self.qkv_dropout, self.training, self.is_locked).movedim(0, -2)


class RelAttention(Attention):
    """Relative attention (section 3.3): content and position scores."""

    def __init__(self, config: ModelConfig, *, has_r_proj: bool = True) -> None:
        super().__init__(config, has_r_proj=has_r_proj)

    def forward(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S H K"],
        v: Float[Tensor, "B S H K"],
        positions: Positions,
        view: View = NO_LIMITS,
    ) -> Float[Tensor, "B T D"]:
        """Attend with the queries of a segment to the keys and values of memory and segment."""
        r, content_bias, position_bias, distance_bias = positions.to(q.dtype)
        attended = rel_attention(
            *(q, k.to(q.dtype), v.to(q.dtype), r, content_bias, position_bias),
            distance_bias=distance_bias,
            attn_len=view.attn_len,
            first_key=view.first_key,
            dropout=self.attn_dropout if self.training else 0.0,
        )
        return self.merged(attended)


def _dropped(unit: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda inner, *drops: dropout(unit(inner), *drops)


def _gated(unit: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def activate(inner: Tensor, *drops: Any) -> Tensor:
        gate, value = inner.chunk(2, -1)
        return dropout(unit(gate) * value, *drops)

    return activate


_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": relu_dropout,
    "relu_squared": _dropped(lambda inner: F.relu(inner).square()),
    "gelu": _dropped(F.gelu),
    "geglu": _gated(F.gelu),
    "swiglu": _gated(F.silu),
}
"""The activations, with the dropout behind them."""


class FeedForward(nn.Module):
    """Two linear maps with an activation between them, applied to each position.

    In a gated layer (GLU) the first map has twice as many outputs: the activation of one half
    multiplies the other, and there are 3 D F weights instead of 2 D F.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.inner = Linear(config.d_model, (1 + config.is_gated) * config.d_inner)
        self.outer = Linear(config.d_inner, config.d_model)
        self.dropout = config.dropouts.feed_forward
        self.is_locked = config.variational_dropout

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Transform each position."""
        activate = _ACTIVATIONS[self.activation]
        inner = activate(self.inner(x), self.dropout, self.training, self.is_locked)
        return self.outer(inner)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual connection and a normalization.

    Post-norm (the paper) normalizes the sum of input and output of a block; pre-norm normalizes
    the input.

    Args:
        config: Widths and options.
        number: The number of the layer, from 0.
        attention: Its attention. None: that of the paper.
    """

    def __init__(
        self, config: ModelConfig, number: int = 0, attention: Attention | None = None
    ) -> None:
        super().__init__()
        self.number = number
        self.attention = attention or RelAttention(config, has_r_proj=config.attn_type == 0)
        self.attention_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = make_norm(config)
        self.attention_gate = self.feed_forward_gate = None
        self.residual = PreNorm() if config.norm_first else PostNorm()
        if config.gate == "gru":
            self.attention_gate, self.feed_forward_gate = GRUGate(config), GRUGate(config)
            self.residual = GatedPreNorm()
        self.arrange = offset_keys if config.key_offset else own_keys
        self.scale = make_scale(config)
        self.dropout = config.dropout
        self.is_locked = config.variational_dropout

    @property
    def matrices(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        """The large matrices, which are read for each token; positions are cached."""
        attention, feed_forward = self.attention, self.feed_forward
        return attention.qkv_proj, attention.o_proj, feed_forward.inner, feed_forward.outer

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        past: Float[Tensor, "B M D"],
        positions: LayerPositions,
        view: View = NO_LIMITS,
    ) -> Float[Tensor, "B T D"]:
        """Transform the hidden states of a segment.

        Args:
            x: Hidden states of the segment.
            past: The memory of this layer; empty if its keys and values are cached.
            positions: The positions of memory and segment.
            view: What the queries may see.
        """
        q, k, v = self.project(x, past)
        k, v = view.joined(self.number, k, v)
        q, k = self.scale(q, k.shape[1], view), self.arrange(k, view)
        return self.finish(x, self.attention(q, k, v, positions, view))

    def project(
        self, x: Float[Tensor, "B T D"], past: Float[Tensor, "B M D"]
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Project the segment to queries, and memory and segment to keys and values."""
        before, norm = self.residual.before, self.attention_norm
        if not past.shape[1]:
            return self.attention.project(before(norm, x))
        # Projected, and with pre-norm normalized, for each segment, as weights may have changed.
        return self.attention.project(before(norm, x), before(norm, past.to(x.dtype)))

    def finish(
        self, x: Float[Tensor, "B T D"], attended: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        """Return the output of the layer, given its input and what attention made of it."""
        before, after = self.residual.before, self.residual.after
        x = after(self.attention_norm, self.attention_gate, x, self._dropped(attended))
        transformed = self._dropped(self.feed_forward(before(self.feed_forward_norm, x)))
        return after(self.feed_forward_norm, self.feed_forward_gate, x, transformed)

    def keys_and_values(
        self, x: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Project inputs of the layer to keys and values."""
        return self.attention.keys_and_values(self.residual.before(self.attention_norm, x))

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training, self.is_locked)


@torch.no_grad()
def draw_weights(parameters: Iterable[tuple[str, Tensor]], config: ModelConfig) -> None:
    """Draw the initial weights of a model of these layers, by the names of the parameters."""
    std, limit = config.init_std, config.init_range if config.init == "uniform" else None
    of_words = {"uniform": config.embed_init_range, "normal": None, None: limit}[config.embed_init]
    table: tuple[tuple[tuple[str, ...], float, float, float | None], ...] = (
        # (names end in, mean, standard deviation, limit of a uniform distribution)
        (("norm.weight",), 1.0, std, None),
        (("gate.bias",), GATE_BIAS, 0.0, None),
        (("embedding.bias",), 0.0, std, limit),
        (("norm.bias", "inner.bias", "outer.bias", "softmax.bias"), 0.0, 0.0, None),
        (("cluster_bias", "distance_bias"), 0.0, 0.0, None),
        (("embedding.proj.weight", "softmax.proj.weight"), 0.0, config.proj_init_std, None),
        (("_proj.weight", "inner.weight", "outer.weight"), 0.0, std, limit),
        (("softmax.weight", "cluster_weight"), 0.0, std, limit),
        (("embedding.weight",), 0.0, std, of_words),
        (("content_bias", "position_bias"), 0.0, std, limit),
        (("embedding_first", "input_decay"), 0.0, std, limit),
        (("embedding_own",), 1.0, 0.0, None),
        (("scale.growth",), initial_growth(config), 0.0, None),
        (("distance_embedding", "position_embedding"), 0.0, std, limit),
    )
    for name, parameter in parameters:
        # Schemes of users draw their own; on the meta device, normal_ would import the compiler.
        if name.startswith("positions.") or parameter.is_meta:
            continue
        # Parameters of clusters have an index.
        name = re.sub(r"weights\.\d+", "weight", re.sub(r"projs\.\d+", "proj", name))
        mean, spread, bound = next(row[1:] for row in table if name.endswith(row[0]))
        if bound is None:
            parameter.normal_(mean, spread)
        else:
            parameter.uniform_(-bound, bound)
