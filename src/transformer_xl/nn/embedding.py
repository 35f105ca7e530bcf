"""Word embeddings: one table, or one for each cluster of an adaptive vocabulary."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.ops import dropout


class Embedding(nn.Module):
    """Word embeddings, projected to the model's width where theirs is another, times sqrt(D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.embed_width))
        self.proj = None
        if config.embed_width != config.d_model:
            self.proj = nn.Linear(config.embed_width, config.d_model, bias=False)
        self.scale = config.d_model**0.5
        self.word_dropout = config.embed_dropout

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Embed the tokens."""
        embedded = _looked_up(tokens, self.weight, self.word_dropout, self.training)
        if self.proj is not None:
            # Under autocast too, what the layers add up stays in the precision of the weights.
            embedded = self.proj(embedded).to(self.weight.dtype)
        return embedded * self.scale


class AdaptiveEmbedding(nn.Module):
    """Word embeddings that are narrower for rarer words (Baevski and Auli, 2019).

    Each cluster of the vocabulary has a table of its own width and a projection to the model's.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.clusters = config.clusters
        self.weights = nn.ParameterList(
            torch.empty(cluster.stop - cluster.start, cluster.width) for cluster in self.clusters
        )
        self.projs: Sequence[nn.Module] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            nn.Linear(cluster.width, config.d_model, bias=False)
            if cluster.has_proj
            else nn.Identity()
            for cluster in self.clusters
        )
        self.scale = config.d_model**0.5
        self.word_dropout = config.embed_dropout

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Embed the tokens."""
        if torch.compiler.is_compiling():
            return self.in_fixed_shapes(tokens)
        # A view of every other token, say, stays one when it is flattened, which bucketize copies
        # with a warning.
        flat = tokens.flatten().contiguous()
        places, parts = [], []
        # Every token is in some cluster; one outside the vocabulary is then outside its table.
        starts = torch.tensor([x.start for x in self.clusters[1:]], device=tokens.device)
        clusters = torch.bucketize(flat, starts, right=True)
        for i, (cluster, weight, proj) in enumerate(
            zip(self.clusters, self.weights, self.projs, strict=True)
        ):
            own = (clusters == i).nonzero()[:, 0]
            places.append(own)
            rows = flat[own] - cluster.start
            embedded = _looked_up(rows, weight, self.word_dropout, self.training)
            parts.append(proj(embedded).to(weight.dtype))
        # Sorted by cluster; the inverse of that order brings the tokens back to their places.
        back = torch.cat(places).argsort()
        return torch.cat(parts)[back].unflatten(0, tokens.shape) * self.scale

    def in_fixed_shapes(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Embed the tokens, in shapes that do not depend on them: for graphs.

        Of each token a row of every cluster's table is looked up and projected, and all but one
        are left out of the sum. To sort the tokens by cluster is to wait for the device.
        """
        parts, last = [], len(self.clusters) - 1
        for i, (cluster, weight, proj) in enumerate(
            zip(self.clusters, self.weights, self.projs, strict=True)
        ):
            row = own = tokens - cluster.start
            # What is outside the vocabulary stays outside the first table or the last.
            if i > 0:
                row = row.clamp(min=0)
            if i < last:
                row = row.clamp(max=len(weight) - 1)
            embedded = _looked_up(row, weight, self.word_dropout, self.training)
            embedded = proj(embedded).to(weight.dtype)
            parts.append(embedded.masked_fill((row != own)[..., None], 0.0))
        return torch.stack(parts).sum(0) * self.scale


def _looked_up(
    tokens: Int[Tensor, "*batch"], weight: Float[Tensor, "V E"], p: float, training: bool
) -> Float[Tensor, "*batch E"]:
    """Look words up in a table of which, in training, a share ``p`` of the rows is dropped."""
    embedded = F.embedding(tokens, weight)
    if not training or p == 0:
        return embedded
    # A number for each word of the table: a word is dropped wherever it stands.
    kept = dropout(weight.new_ones(len(weight), 1), p, True)
    return embedded * F.embedding(tokens, kept)
