"""Word embeddings: one table, or one for each cluster of an adaptive vocabulary."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.wrapping import unwrapped
from transformer_xl.ops import dropout


class Embedding(nn.Embedding):
    """Word embeddings times sqrt(D); where they are not as wide as the model, before that.

    Then :meth:`widened` projects and multiplies them: an adapter adds to what is looked up.

    Attributes:
        embed_scale: What they are multiplied by here. Adapters look for it under this name, and
            multiply what they add.
    """

    def __init__(self, config: ModelConfig) -> None:
        V, E, D = config.vocab_size, config.embed_width, config.d_model
        # With a table, so that none is drawn.
        super().__init__(V, E, _weight=torch.empty(V, E))
        self.proj = None
        if E != D:
            self.proj = nn.Linear(E, D, bias=False)
        self.embed_scale = 1.0 if E != D else D**0.5
        self.scale = D**0.5
        self.word_dropout = config.embed_dropout

    def forward(self, input: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch E"]:
        """Look tokens up."""
        embedded = _looked_up(input, self.weight, self.word_dropout, self.training)
        return embedded if self.proj is not None else embedded * self.embed_scale

    def widened(self, embedded: Float[Tensor, "B T E"]) -> Float[Tensor, "B T D"]:
        """Return what the layers read, given what was looked up."""
        if self.proj is None:
            return embedded
        # Under autocast too, what the layers add up stays in the precision of the weights.
        return self.proj(embedded).to(self.weight.dtype) * self.scale


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

    def extra_repr(self) -> str:
        """Say what can be adapted, to whoever refuses to adapt this."""
        return (
            "several tables; what can be adapted: embedding.projs and the linear maps of the layers"
        )

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

    def widened(self, embedded: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Return what was looked up: it is as wide as the model already."""
        return embedded

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


def embedded(module: nn.Module, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    """Return what the layers read, from the module of a model for this or what wraps it."""
    return unwrapped(module, "widened").widened(module(tokens))


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
