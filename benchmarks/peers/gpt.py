"""A plain GPT with a memory: pre-norm, rotary positions, no position term in the scores.

What a Transformer-XL would cost if it did not know its distances: the bound to compare with. Its
attention is torch's ``scaled_dot_product_attention``.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from shapes import Job, Shape
from torch import Tensor, nn

import peers


class Recall(Protocol):
    """What the layers remember."""

    def queries_keys_values(self, n: int, layer: "Layer", x: Tensor) -> list[Tensor]:
        """Return rotated queries of the segment, rotated keys and values of all, heads first."""
        ...


class Layer(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        D, self.n_head = shape.d_model, shape.n_head
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.inner, self.outer = nn.Linear(D, shape.d_inner), nn.Linear(shape.d_inner, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, recall: Recall, n: int, mask: Tensor | None) -> Tensor:
        """Transform a segment."""
        q, k, v = recall.queries_keys_values(n, self, x)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        inner = F.relu(self.inner(self.feed_forward_norm(x)), inplace=True)
        return x + self.dropout(self.outer(inner))

    def heads(self, x: Tensor) -> Tensor:
        """Divide the last dimension among the heads; they come first."""
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)


class GPT(nn.Module):
    """Embedding, layers, softmax."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.d_model)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.n_layer))
        self.norm = nn.LayerNorm(shape.d_model)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.embedding.weight, 0, 0.02)

    def forward(self, tokens: Tensor, recall: Recall, mask: Tensor | None) -> Tensor:
        """Return the logits."""
        x = self.dropout(self.embedding(tokens))
        for n, layer in enumerate(self.layers):
            x = layer(x, recall, n, mask)
        return F.linear(self.norm(x), self.embedding.weight)


class Rotation:
    """Turns queries and keys by their places, of which it has a table on the device."""

    def __init__(self, n_places: int, width: int, like: Tensor) -> None:
        frequency = 1e4 ** (-torch.arange(0, 1, 2 / width, dtype=torch.float64))
        angle = torch.outer(torch.arange(n_places, dtype=torch.float64), frequency)
        cos, sin = angle.cos(), angle.sin()
        self.cos, self.sin = torch.cat([cos, cos], 1).to(like), torch.cat([-sin, sin], 1).to(like)

    def __call__(self, x: Tensor, stop: int) -> Tensor:
        """Turn what stands at the last places before ``stop``."""
        places = slice(stop - x.shape[2], stop)
        turned = torch.cat(x.chunk(2, -1)[::-1], -1)
        return torch.addcmul(x * self.cos[places], turned, self.sin[places])


class States:
    """Hidden states, projected again for each segment, as the weights have moved."""

    def __init__(self, shape: Shape, like: Tensor, dtype: torch.dtype) -> None:
        size = shape.batch, shape.mem_len, shape.d_model
        self.states = [torch.randn(size).to(like) for _ in range(shape.n_layer)]
        self.S, self.M = shape.mem_len + shape.length, shape.mem_len
        self.rotation = Rotation(self.S, shape.d_model // shape.n_head, like.to(dtype))

    def begin(self, T: int) -> None:
        """Nothing has to be prepared."""

    def copy(self) -> None:
        """Copy what is remembered to memory of its own."""
        self.states = [x.clone() for x in self.states]

    def queries_keys_values(self, n: int, layer: Layer, x: Tensor) -> list[Tensor]:
        """Project the memory and the segment."""
        T, D = x.shape[1:]
        both = torch.cat([self.states[n].to(x.dtype), x], 1)
        self.states[n] = both[:, T + self.states[n].shape[1] - self.M :].detach()
        normed = layer.attention_norm(both)
        q = F.linear(normed[:, -T:], layer.qkv.weight[:D])
        k, v = F.linear(normed, layer.qkv.weight[D:]).chunk(2, -1)
        q, k, v = map(layer.heads, (q, k, v))
        return [self.rotation(q, self.S), self.rotation(k, self.S), v]


class Kept:
    """Keys and values, rotated by their absolute places: only differences matter.

    Without gradients they lie in a room for twice the memory, so that most segments move nothing.
    """

    def __init__(self, shape: Shape, like: Tensor, dtype: torch.dtype) -> None:
        self.width, self.like, self.M = shape.d_model // shape.n_head, like.to(dtype), shape.mem_len
        self.n_read, self.stop = self.M, self.M
        self.room = 2 * self.M + shape.length
        size = 2, shape.batch, shape.n_head, self.room, self.width
        self.kept = [torch.randn(size).to(self.like) for _ in range(shape.n_layer)]
        self._place(self.room)

    def copy(self) -> None:
        """Copy what is remembered to memory of its own."""
        self.kept = [x.clone() for x in self.kept]

    def begin(self, T: int) -> None:
        """Make room for a segment."""
        if not torch.is_grad_enabled():
            if self.stop + T > self.room:
                for x in self.kept:
                    x[:, :, :, : self.M] = x[:, :, :, self.stop - self.M : self.stop].clone()
                self.stop = self.M
            self.stop += T
        self.n_read += T
        if self.n_read > self.n_places:
            self._place(2 * self.n_read)

    def _place(self, n_places: int) -> None:
        self.n_places, self.rotation = n_places, Rotation(n_places, self.width, self.like)

    def queries_keys_values(self, n: int, layer: Layer, x: Tensor) -> list[Tensor]:
        """Project the segment."""
        q, k, v = map(layer.heads, layer.qkv(layer.attention_norm(x)).chunk(3, -1))
        q, k = self.rotation(q, self.n_read), self.rotation(k, self.n_read)
        if torch.is_grad_enabled():
            k, v = (
                torch.cat([old[:, :, : self.M], new], 2)
                for old, new in zip(self.kept[n], (k, v), strict=True)
            )
            self.kept[n] = torch.stack([k, v])[:, :, :, k.shape[2] - self.M :].detach()
            return [q, k, v]
        T = x.shape[1]
        kept = self.kept[n]
        kept[0, :, :, self.stop - T : self.stop] = k
        kept[1, :, :, self.stop - T : self.stop] = v
        return [q, *kept[:, :, :, self.stop - T - self.M : self.stop]]


class Peer(peers.Peer):
    """Hidden states are remembered in training, keys and values otherwise.

    The variant ``kept`` keeps keys and values in training too, though older weights made them.
    """

    can_be_captured = True

    def __init__(self, job: Job, variant: str) -> None:
        self.model = GPT(job.shape, job.dropout)
        self.job = job
        self.kind = States if variant == "states" and job.work == "training" else Kept
        self.masks: dict[int, Tensor | None] = {1: None}

    def remember(self) -> None:
        """Fill the memory."""
        weight = self.model.embedding.weight
        self.recall = self.kind(self.job.shape, weight, self.job.product_dtype)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Read a segment and predict its targets."""
        loss = super().loss(tokens, targets)
        if self.is_captured:
            self.recall.copy()
        return loss

    def read(self, tokens: Tensor) -> Tensor:
        """Return the logits of a segment."""
        T, M = tokens.shape[1], self.recall.M
        if T not in self.masks:
            self.masks[T] = self._mask(T, M + T)
        self.recall.begin(T)
        return self.model(tokens, self.recall, self.masks[T])

    def _mask(self, T: int, S: int) -> Tensor:
        """Hide the future; on a processor as numbers to add, as its kernel wants them."""
        if self.job.device != "cpu":
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(T, S)
        hidden = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
        return torch.zeros(T, S, dtype=self.job.product_dtype).masked_fill(hidden, -torch.inf)
