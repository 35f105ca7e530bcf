"""Attention over the memory and the segment, with relative positions or without."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.norm import RMSNorm
from transformer_xl.model.positions import Positions
from transformer_xl.model.wrapping import is_plain, projected
from transformer_xl.ops import attention, dropout, linear, project, reference, rel_attention


class RelAttention(nn.Module):
    """Multi-head relative attention without the residual connection around it.

    Projections have no bias; in their place stand ``u`` and ``v``, which the model hands in with
    the positions. Absolute positions are part of what is read already; then there are none.

    Queries and keys may be normalized (Henry et al., 2020), each with a weight for every number of
    a head, before ``u`` and ``v`` are added. The keys of positions never are: they are functions
    of the weights alone, so they cannot grow with what is read, and their size is how a head
    learns which distances matter.
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
        positions: Positions | None,
        attn_len: int | None = None,
        first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Attend with queries to keys and values, by content alone without positions."""
        k, v = k.to(q.dtype), v.to(q.dtype)
        dropped = self.attn_dropout if self.training else 0.0
        seen = {"attn_len": attn_len, "first_key": first_key, "dropout": dropped}
        if positions is None:
            attended = attention(q, k, v, **seen)
        else:
            r, content_bias, position_bias, bias = positions.to(q.dtype)
            attended = rel_attention(
                q, k, v, r, content_bias, position_bias, distance_bias=bias, **seen
            )
        return projected(self.o_proj, attended.flatten(2))

    def weights(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S H K"],
        positions: Positions | None,
        attn_len: int | None = None,
        first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B H T S"]:
        """Return how much :meth:`forward` takes of each key's value, nothing dropped."""
        k = k.to(q.dtype)
        if positions is None:
            none = k.new_zeros(k.shape[1:])
            positions = Positions(none, none[0], none[0])
        r, content_bias, position_bias, bias = positions.to(q.dtype)
        return reference.attention_weights(
            q,
            k,
            r,
            content_bias,
            position_bias,
            distance_bias=bias,
            attn_len=attn_len,
            first_key=first_key,
        )

    def project(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B M D"] | None = None
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Project the segment to queries, and memory and segment to keys and values."""
        qkv_proj = self.qkv_proj
        if is_plain(qkv_proj):
            q, k, v = project(x, memory, qkv_proj.weight, self.n_head)
        else:
            read = x if memory is None else torch.cat([memory, x], 1)
            q, k, v = (self._heads(y) for y in qkv_proj(read).chunk(3, -1))
            q = q[:, read.shape[1] - x.shape[1] :]
        return self._finished(q, self.q_norm), self._finished(k, self.k_norm), self._finished(v)

    def queries(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        """Project to queries alone."""
        return self._finished(self._heads(self._parts(x, slice(1))), self.q_norm)

    def keys_and_values(
        self, x: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Project hidden states to keys and values alone."""
        k, v = self._parts(x, slice(1, 3)).chunk(2, -1)
        return self._finished(self._heads(k), self.k_norm), self._finished(self._heads(v))

    def positions(self, encoding: Float[Tensor, "S D"]) -> Float[Tensor, "S H K"]:
        """Project position encodings."""
        return self._finished(self._heads(self.r_proj(encoding)))

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
        """Normalize what was projected, and drop some of it."""
        drops = self.training and self.qkv_dropout > 0
        if norm is None and not drops:
            return x
        # Heads are outermost in memory, and stay so.
        x = x.movedim(-2, 0)
        x = x if norm is None else norm(x)
        return dropout(x, self.qkv_dropout, self.training, self.is_locked).movedim(0, -2)
