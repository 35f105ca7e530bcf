"""labml_nn 0.5.1: the annotated Transformer-XL, pre-norm, with a learned table of distances."""

import sys

import torch
import torch.nn.functional as F
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.xl import TransformerXL, TransformerXLLayer
from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention
from shapes import Job
from torch import Tensor, nn

import peers


class Model(nn.Module):
    """The layers, with word embeddings and a softmax."""

    def __init__(self, layers: TransformerXL, vocab: int, d_model: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        self.layers = layers
        self.output = nn.Linear(d_model, vocab)
        self.output.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, 0, 0.02)

    def forward(self, tokens: Tensor, mems: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, time first, and what the layers read."""
        x = self.embedding(tokens.T)
        T, M = len(x), len(mems[0]) if mems else 0
        mask = torch.ones(T, M + T, device=x.device).tril(M)[:, :, None]
        x, states = self.layers(x, mems, mask)
        return self.output(x), states


class Peer(peers.Peer):
    """Hidden states are remembered. The word embeddings and the softmax around it are ours."""

    def __init__(self, job: Job, variant: str) -> None:
        shape, p = job.shape, job.dropout
        attention = RelativeMultiHeadAttention(shape.n_head, shape.d_model, 0.0)
        if shape.length + shape.mem_len > attention.P:
            sys.exit(f"labml: its table has {attention.P} distances; choose a smaller memory")
        layer = TransformerXLLayer(
            d_model=shape.d_model,
            self_attn=attention,
            feed_forward=FeedForward(shape.d_model, shape.d_inner, p),
            dropout_prob=p,
        )
        self.model = Model(TransformerXL(layer, shape.n_layer), shape.vocab, shape.d_model)
        self.shape = shape

    def remember(self) -> None:
        """Fill the memory."""
        x, shape = self.model.embedding.weight, self.shape
        size = shape.mem_len, shape.batch, shape.d_model
        self.mems = [x.new_empty(size).normal_() for _ in range(shape.n_layer)]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Read a segment and predict its targets."""
        return F.cross_entropy(self._read(tokens).flatten(0, 1).float(), targets.T.flatten())

    def scores(self, tokens: Tensor) -> Tensor:
        """Read a segment and predict what follows."""
        return self._read(tokens)[-1]

    def _read(self, tokens: Tensor) -> Tensor:
        logits, states = self.model(tokens, self.mems)
        T = len(logits)
        self.mems = [torch.cat(pair)[T:] for pair in zip(self.mems, states, strict=True)]
        return logits
