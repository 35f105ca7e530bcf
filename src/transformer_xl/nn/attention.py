"""Attention over the memory and the segment, with relative positions or without."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.nn.positions import Positions
from transformer_xl.ops import attention, linear, project, rel_attention


class RelAttention(nn.Module):
    """Multi-head relative attention without the residual connection around it.

    Projections have no bias; in their place stand ``u`` and ``v``, which the model hands in with
    the positions. Absolute positions are part of what is read already; then there are none.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.head_width
        width = self.n_head * self.d_head
        self.qkv_proj = nn.Linear(config.d_model, 3 * width, bias=False)
        if config.attn_type == 0:
            self.r_proj = nn.Linear(config.d_model, width, bias=False)
        self.o_proj = nn.Linear(width, config.d_model, bias=False)
        self.attn_dropout = config.attn_dropout

    def forward(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S H K"],
        v: Float[Tensor, "B S H K"],
        positions: Positions | None,
        attn_len: int | None = None,
        first_key: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Attend with queries to keys and values, by content alone without positions."""
        k, v = k.to(q.dtype), v.to(q.dtype)
        dropout = self.attn_dropout if self.training else 0.0
        seen = {"attn_len": attn_len, "first_key": first_key, "dropout": dropout}
        if positions is None:
            attended = attention(q, k, v, **seen)
        else:
            r, content_bias, position_bias = (x.to(q.dtype) for x in positions[:3])
            bias = positions.distance_bias
            bias = None if bias is None else bias.to(q.dtype)
            attended = rel_attention(
                q, k, v, r, content_bias, position_bias, distance_bias=bias, **seen
            )
        return linear(attended.flatten(2), self.o_proj.weight, None)

    def project(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B M D"] | None = None
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Project the segment to queries, and memory and segment to keys and values."""
        return project(x, memory, self.qkv_proj.weight, self.n_head)

    def queries(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        """Project to queries alone."""
        width = self.n_head * self.d_head
        return self._heads(linear(x, self.qkv_proj.weight[:width], None))

    def keys_and_values(
        self, x: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Project hidden states to keys and values alone."""
        width = self.n_head * self.d_head
        k, v = linear(x, self.qkv_proj.weight[width:], None).chunk(2, -1)
        return self._heads(k), self._heads(v)

    def positions(self, encoding: Float[Tensor, "S D"]) -> Float[Tensor, "S H K"]:
        """Project position encodings."""
        return self._heads(linear(encoding, self.r_proj.weight, None))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_head, self.d_head))
