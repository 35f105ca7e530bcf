"""One layer: attention over memory and segment, then a feed-forward network."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.attention import RelAttention
from transformer_xl.model.gate import GRUGate
from transformer_xl.model.memory import Past, Present
from transformer_xl.model.norm import make_norm
from transformer_xl.model.positions import Positions
from transformer_xl.model.wrapping import projected
from transformer_xl.ops import dropout, relu_dropout, relu_squared_dropout

_UNITS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "geglu": F.gelu, "swiglu": F.silu}


class FeedForward(nn.Module):
    """Two linear maps with an activation between them, applied to each position.

    With a gate the first map has twice as many outputs: the activation of one half multiplies the
    other. There are then 3 D F weights instead of 2 D F.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_gated, self.activation = config.is_gated, config.activation
        self.inner = nn.Linear(config.d_model, (1 + self.is_gated) * config.d_inner)
        self.outer = nn.Linear(config.d_inner, config.d_model)
        self.dropout = config.dropouts.feed_forward
        self.is_locked = config.variational_dropout

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Transform each position."""
        inner = projected(self.inner, x)
        drops = self.dropout, self.training, self.is_locked
        if self.activation == "relu":
            inner = relu_dropout(inner, *drops)
        elif self.activation == "relu_squared":
            inner = relu_squared_dropout(inner, *drops)
        else:
            unit = _UNITS[self.activation]
            if self.is_gated:
                gate, value = inner.chunk(2, -1)
                inner = unit(gate) * value
            else:
                inner = unit(inner)
            inner = dropout(inner, *drops)
        return projected(self.outer, inner)


class DecoderLayer(nn.Module):
    r"""Attention and feed-forward, each with its residual connection and normalization.

    Post-norm, the paper's, normalizes the sum of what goes in and what comes out; pre-norm
    normalizes what goes in and leaves the sum alone.

    With ``gate="gru"`` a gate takes the place of each sum, and what a block has made goes through
    a ReLU first, because two linear maps would follow one another: the layer of GTrXL (Parisotto
    et al., 2019, sections 3.1 and 3.2). With E what the layer reads, M its memory, f the
    feed-forward network:

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

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        past: Past,
        positions: Positions | None,
        attn_len: int | None = None,
        first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Present]:
        """Transform the segment, given what the layer remembers of the text before it.

        Args:
            x: Hidden states of the segment.
            past: Hidden states this layer has read before, or what joins the segment's keys and
                values to those that are remembered.
            positions: The relative positions of the keys. None: by content alone.
            attn_len: How many keys a query sees, counting its own.
            first_key: For each stream, or for each query, the first key that it sees.

        Returns:
            The hidden states, and what is to be remembered of the segment.
        """
        normalized = self.attention_norm(x) if self.norm_first else x
        if isinstance(past, Tensor):
            # A memory is normalized anew each time, as it is projected anew: the weights moved.
            before = past.to(x.dtype)
            before = self.attention_norm(before) if self.norm_first else before
            q, k, v = self.attention.project(normalized, before if before.shape[1] else None)
        else:
            q, k, v = self.attention.project(normalized)
            k, v = past(k, v)
        if self.has_raw_queries:
            q = self.attention.queries(x)
        out = self.finish(x, self.attention(q, k, v, positions, attn_len, first_key))
        if isinstance(past, Tensor):
            return out, out if self.is_recurrent else x
        return out, self.keys_and_values(out) if self.is_recurrent else None

    def finish(
        self, x: Float[Tensor, "B T D"], attended: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        """Do what follows the attention: merge what was attended, and transform each position."""
        x = self._merged(x, attended, self.attention_gate)
        if not self.norm_first:
            x = self.attention_norm(x)
        transformed = self.feed_forward(self.feed_forward_norm(x) if self.norm_first else x)
        x = self._merged(x, transformed, self.feed_forward_gate)
        return x if self.norm_first else self.feed_forward_norm(x)

    def _merged(self, x: Tensor, made: Tensor, gate: GRUGate | None) -> Tensor:
        made = dropout(made, self.dropout, self.training, self.is_locked)
        return x + made if gate is None else gate(x, torch.relu(made))

    def keys_and_values(
        self, x: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Make keys and values from what the layer reads or has read."""
        return self.attention.keys_and_values(self.attention_norm(x) if self.norm_first else x)
