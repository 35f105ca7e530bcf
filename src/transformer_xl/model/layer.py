"""One layer: attention over memory and segment, then a feed-forward network.

Its parts, in this order: normalization, the gate of GTrXL, attention, feed-forward, the layer, its
initial weights.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.memory import Past, Present
from transformer_xl.model.positions import Positions
from transformer_xl.model.wrapping import is_plain, projected
from transformer_xl.ops import (
    attention,
    dropout,
    linear,
    project,
    reference,
    rel_attention,
    relu_dropout,
    relu_squared_dropout,
    rms_norm,
)


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019): scales by the root mean square, without a bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Normalize each position."""
        return rms_norm(x, self.weight, self.eps)


def make_norm(config: ModelConfig) -> nn.LayerNorm | RMSNorm:
    """Create the configured normalization of hidden states."""
    if config.norm == "rms":
        return RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps)


GATE_BIAS = 2.0
"""Initial $b_g$, at which a gate is close to the identity."""


class GRUGate(nn.Module):
    r"""Interpolates elementwise between the input of a block and its output.

    The gate of GTrXL (Parisotto et al., 2019, arXiv 1910.06764, section 3.2, "Gated-Recurrent-Unit-
    type gating"), with x the input of a block and y its output:

    $$r = \sigma(W_r y + U_r x), \quad z = \sigma(W_z y + U_z x - b_g)$$
    $$\hat h = \tanh(W_g y + U_g (r \odot x)), \quad g(x, y) = (1 - z) \odot x + z \odot \hat h$$

    The larger $b_g$, the closer a layer is to the identity; it is initialized to 2 and learned.
    Each gate has 6 D^2 + D parameters.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.d_model
        # W_r, W_z and W_g; U_r and U_z; U_g.
        self.made_proj = nn.Linear(D, 3 * D, bias=False)
        self.old_proj = nn.Linear(D, 2 * D, bias=False)
        self.reset_proj = nn.Linear(D, D, bias=False)
        self.bias = nn.Parameter(torch.empty(D))

    def forward(
        self, x: Float[Tensor, "B T D"], y: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        """Gate a block.

        Args:
            x: Its input.
            y: Its output.
        """
        D = x.shape[-1]
        made, candidate = projected(self.made_proj, y).split([2 * D, D], -1)
        r, z = (made + projected(self.old_proj, x)).chunk(2, -1)
        candidate = candidate + projected(self.reset_proj, r.sigmoid() * x)
        z = (z - self.bias).sigmoid()
        # Under autocast too, the residual stream stays in the precision of the weights.
        return x + z * (candidate.tanh() - x)


Attend = Callable[
    [Float[Tensor, "B T H K"], Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]],
    Float[Tensor, "B T H K"],
]
"""Attends with queries, keys and values of a segment to those in a ring buffer, too."""


Mix = Callable[[Float[Tensor, "B S H K"]], Float[Tensor, "B S H K"]]
"""Mixes the values of a layer with those of the first one, or remembers them for the others."""


class RelAttention(nn.Module):
    """Multi-head relative attention (section 3.3), without the residual connection.

    Projections have no bias; the biases ``u`` and ``v`` are passed with the positions. With
    absolute positions, which are part of the input, there are none.

    Queries and keys may be normalized (QK-norm; Henry et al., 2020), with learned scales, before
    ``u`` and ``v`` are added. Position keys are not: they do not depend on the input, and through
    their norm a head learns which distances matter.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.head_width
        width = self.n_head * self.d_head
        self.qkv_proj = nn.Linear(config.d_model, 3 * width, bias=False)
        if config.attn_type == 0:
            self.r_proj = nn.Linear(config.d_model, width, bias=False)
        self.o_proj = nn.Linear(width, config.d_model, bias=False)
        self.attn_dropout, self.qkv_dropout = config.attn_dropout, config.qkv_dropout
        self.is_locked = config.variational_dropout
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.d_head, config.norm_eps) for _ in range(2))

    def forward(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S H K"],
        v: Float[Tensor, "B S H K"],
        positions: Positions | Attend | None,
        attn_len: int | None = None,
        first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Attend with queries to keys and values.

        Args:
            q: Queries of the segment.
            k: Keys of memory and segment.
            v: Their values.
            positions: Their relative positions; None: content scores only. Or another attention.
            attn_len: How many keys a query sees, counting its own.
            first_key: Index of the first key that each stream, or each query, sees.
        """
        if callable(positions):
            return projected(self.o_proj, positions(q, k, v).flatten(2))
        k, v = k.to(q.dtype), v.to(q.dtype)
        dropped = self.attn_dropout if self.training else 0.0
        seen = {"attn_len": attn_len, "first_key": first_key, "dropout": dropped}
        if positions is None:
            attended = attention(q, k, v, **seen)
        else:
            *given, bias = positions.to(q.dtype)
            attended = rel_attention(q, k, v, *given, distance_bias=bias, **seen)
        return projected(self.o_proj, attended.flatten(2))

    def weights(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S H K"],
        positions: Positions | None,
        attn_len: int | None = None,
        first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B H T S"]:
        """Return the attention weights of :meth:`forward`, without dropout."""
        if positions is None:
            none = k.new_zeros(k.shape[1:])
            positions = Positions(none, none[0], none[0])
        *given, bias = positions.to(q.dtype)
        seen = {"attn_len": attn_len, "first_key": first_key}
        return reference.attention_weights(q, k.to(q.dtype), *given, distance_bias=bias, **seen)

    def attended_with_weights(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S H K"],
        v: Float[Tensor, "B S H K"],
        positions: Positions | None,
        attn_len: int | None = None,
        first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B H T S"]]:
        """Return what :meth:`forward` does, by the reference, with the attention weights."""
        weights = self.weights(q, k, positions, attn_len, first_key)
        dropped = F.dropout(weights.type_as(q), self.attn_dropout if self.training else 0.0)
        attended = torch.einsum("bhts,bshk->bthk", dropped, v.to(q.dtype))
        return projected(self.o_proj, attended.flatten(2)), weights

    def project(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B M D"] | None = None
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Project the segment to queries, and memory and segment to keys and values."""
        if is_plain(self.qkv_proj):
            q, k, v = project(x, memory, self.qkv_proj.weight, self.n_head)
        else:
            q, k, v = self._called(x, memory)
        return self._finished(q, self.q_norm), self._finished(k, self.k_norm), self._finished(v)

    def _called(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project with a module that was wrapped, which must be called."""
        read = x if memory is None else torch.cat([memory, x], 1)
        q, k, v = (self._heads(y) for y in self.qkv_proj(read).chunk(3, -1))
        return q[:, read.shape[1] - x.shape[1] :], k, v

    def queries(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        """Project to queries only."""
        return self._finished(self._heads(self._parts(x, slice(1))), self.q_norm)

    def keys_and_values(
        self, x: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Project hidden states to keys and values only."""
        k, v = self._parts(x, slice(1, 3)).chunk(2, -1)
        return self._finished(self._heads(k), self.k_norm), self._finished(self._heads(v))

    def positions(self, encoding: Float[Tensor, "S D"]) -> Float[Tensor, "S H K"]:
        """Project position encodings."""
        return self._finished(self._heads(projected(self.r_proj, encoding)))

    def _parts(self, x: Tensor, parts: slice) -> Tensor:
        """Project to some of queries, keys and values, in this order."""
        width, qkv_proj = self.n_head * self.d_head, self.qkv_proj
        columns = slice((parts.start or 0) * width, parts.stop * width)
        if is_plain(qkv_proj):
            return linear(x, qkv_proj.weight[columns], None)
        return qkv_proj(x)[..., columns]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_head, self.d_head))

    def _finished(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Apply normalization and dropout to projected heads."""
        if norm is None and not (self.training and self.qkv_dropout > 0):
            return x
        # Preserves the memory layout, in which heads are outermost.
        x = x.movedim(-2, 0) if norm is None else norm(x.movedim(-2, 0))
        return dropout(x, self.qkv_dropout, self.training, self.is_locked).movedim(0, -2)


def _dropped(unit: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda inner, *drops: dropout(unit(inner), *drops)


def _gated(unit: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def activate(inner: Tensor, *drops: Any) -> Tensor:
        gate, value = inner.chunk(2, -1)
        return dropout(unit(gate) * value, *drops)

    return activate


_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": relu_dropout,
    "relu_squared": relu_squared_dropout,
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
        self.inner = nn.Linear(config.d_model, (1 + config.is_gated) * config.d_inner)
        self.outer = nn.Linear(config.d_inner, config.d_model)
        self.dropout = config.dropouts.feed_forward
        self.is_locked = config.variational_dropout

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Transform each position."""
        inner = projected(self.inner, x)
        if self.activation in ("relu", "relu_squared") and not is_plain(self.inner):
            # These work in place without gradients, and a forward hook may hold this tensor.
            inner = inner if inner.requires_grad else inner.clone()
        activate = _ACTIVATIONS[self.activation]
        inner = activate(inner, self.dropout, self.training, self.is_locked)
        return projected(self.outer, inner)


class DecoderLayer(nn.Module):
    r"""Attention and feed-forward, each with a residual connection and a normalization.

    Post-norm (the paper) normalizes the sum of input and output of a block; pre-norm normalizes
    the input.

    With ``gate="gru"``, gates replace the residual connections, and a ReLU is applied to the output
    of each block first: the layer of GTrXL (Parisotto et al., 2019, sections 3.1 and 3.2). With E
    the input of the layer, M its memory, f the feed-forward network:

    $$Y = g(E, \mathrm{ReLU}(\mathrm{Attention}(\mathrm{LayerNorm}([\mathrm{SG}(M) \circ E]))))$$
    $$E' = g'(Y, \mathrm{ReLU}(f(\mathrm{LayerNorm}(Y))))$$
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = RelAttention(config)
        self.attention_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = make_norm(config)
        self.attention_gate = self.feed_forward_gate = None
        if config.gate == "gru":
            self.attention_gate, self.feed_forward_gate = GRUGate(config), GRUGate(config)
        self.norm_first = config.norm_first
        self.has_raw_queries = config.norm_first and "raw_queries" in config.quirks
        self.is_recurrent = config.enhanced_recurrence
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
        past: Past,
        positions: Positions | Attend | None,
        attn_len: int | None = None,
        first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None,
        mix: Mix | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Present]:
        """Transform the hidden states of a segment.

        Args:
            x: Hidden states of the segment.
            past: The memory of this layer: hidden states, or a function that appends the segment's
                keys and values to the cached ones.
            positions: As in :meth:`RelAttention.forward`.
            attn_len: How many keys a query sees, counting its own.
            first_key: Index of the first key that each stream, or each query, sees.
            mix: Changes the projected values; None: nothing does.

        Returns:
            The hidden states, and what the memory stores of the segment.
        """
        normalized = self.attention_norm(x) if self.norm_first else x
        if isinstance(past, Tensor):
            # Normalized and projected for each segment, as the weights may have changed.
            before = past.to(x.dtype)
            before = self.attention_norm(before) if self.norm_first else before
            q, k, v = self.attention.project(normalized, before if before.shape[1] else None)
        else:
            q, k, v = self.attention.project(normalized)
        if mix is not None:
            v = mix(v)
        if not isinstance(past, Tensor):
            k, v = past(k, v)
        if self.has_raw_queries:
            q = self.attention.queries(x)
        attended = self.attention(q, k, v, positions, attn_len, first_key)
        y = self._merged(x, attended, self.attention_gate)
        if not self.norm_first:
            y = self.attention_norm(y)
        transformed = self.feed_forward(self.feed_forward_norm(y) if self.norm_first else y)
        y = self._merged(y, transformed, self.feed_forward_gate)
        if not self.norm_first:
            y = self.feed_forward_norm(y)
        if isinstance(past, Tensor):
            return y, y if self.is_recurrent else x
        return y, self.keys_and_values(y) if self.is_recurrent else None

    def _merged(self, x: Tensor, made: Tensor, gate: GRUGate | None) -> Tensor:
        made = dropout(made, self.dropout, self.training, self.is_locked)
        return x + made if gate is None else gate(x, torch.relu(made))

    def keys_and_values(
        self, x: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Project inputs of the layer to keys and values."""
        return self.attention.keys_and_values(self.attention_norm(x) if self.norm_first else x)


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
        (("value_own", "value_first"), 0.5, 0.0, None),
        (("embedding_own",), 1.0, 0.0, None),
        (("distance_embedding", "position_embedding"), 0.0, std, limit),
    )
    for name, parameter in parameters:
        # Parameters of clusters have an index.
        name = re.sub(r"weights\.\d+", "weight", re.sub(r"projs\.\d+", "proj", name))
        mean, std, limit = next(row[1:] for row in table if name.endswith(row[0]))
        # On the meta device, normal_ would import torch's compiler.
        if parameter.is_meta:
            continue
        if limit is None:
            parameter.normal_(mean, std)
        else:
            parameter.uniform_(-limit, limit)
