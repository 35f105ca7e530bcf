"""Adaptive embedding and softmax: clusters of a vocabulary sorted by frequency."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.tokens import (
    Embedding,
    Predictor,
    Transposed,
    kept_words,
    log_softmax,
    markers,
)
from transformer_xl.ops import linear_nll


class Tables(nn.ParameterList):
    """The tables of the clusters, which a call returns.

    A plain list of parameters is never called, so that hooks that load weights when they are used,
    of offloading, would not run.
    """

    __call__ = nn.Module.__call__

    def forward(self) -> list[nn.Parameter]:
        """Return the tables."""
        return list(self)


class AdaptiveEmbedding(nn.Module):
    """Adaptive input embeddings, narrower for rarer words (Baevski and Auli, 2019).

    Each cluster of the vocabulary has a table of its own width and a projection to ``d_model``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.clusters, self.num_embeddings = config.clusters, config.vocab_size
        self.weights = Tables(
            torch.empty(cluster.stop - cluster.start, cluster.width) for cluster in self.clusters
        )
        self.projs: Sequence[nn.Module] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            nn.Linear(cluster.width, config.d_model, bias=False)
            if cluster.has_proj
            else nn.Identity()
            for cluster in self.clusters
        )
        self.scale = config.d_model**0.5
        self.word_dropout, self.markers = config.embed_dropout, markers(config)

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Embed the tokens."""
        if torch.compiler.is_compiling():
            return self.in_fixed_shapes(tokens)
        # flatten() may return a non-contiguous view, which bucketize copies with a warning.
        flat = tokens.flatten().contiguous()
        places, parts = [], []
        # Tokens outside the vocabulary fall into the first or last cluster, and raise there.
        starts = torch.tensor([x.start for x in self.clusters[1:]], device=tokens.device)
        clusters = torch.bucketize(flat, starts, right=True)
        for i, (cluster, weight, proj) in enumerate(
            zip(self.clusters, self.weights(), self.projs, strict=True)
        ):
            members = (clusters == i).nonzero()[:, 0]
            places.append(members)
            rows = flat[members] - cluster.start
            drops = self.training and self.word_dropout > 0
            embedded = self._looked_up(
                i, rows, weight, members % tokens.shape[-1] if drops else None
            )
            parts.append(proj(embedded).to(weight.dtype))
        # Sorted by cluster; the inverse permutation restores the order.
        back = torch.cat(places).argsort()
        return torch.cat(parts)[back].unflatten(0, tokens.shape) * self.scale

    def widened(self, embedded: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Return the argument: it has the width of the model already."""
        return embedded

    def in_fixed_shapes(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Embed the tokens with static shapes, for graphs.

        Every token is looked up in every cluster, and all results but one are masked. Sorting the
        tokens by cluster would synchronize the device.
        """
        parts, last = [], len(self.clusters) - 1
        for i, (cluster, weight, proj) in enumerate(
            zip(self.clusters, self.weights(), self.projs, strict=True)
        ):
            row = offset = tokens - cluster.start
            # Tokens outside the vocabulary are not clamped, so that they still raise.
            if i > 0:
                row = row.clamp(min=0)
            if i < last:
                row = row.clamp(max=len(weight) - 1)
            embedded = self._looked_up(i, row, weight)
            embedded = proj(embedded).to(weight.dtype)
            parts.append(embedded.masked_fill((row != offset)[..., None], 0.0))
        return torch.stack(parts).sum(0) * self.scale

    def _looked_up(
        self,
        i: int,
        rows: Int[Tensor, "*batch"],
        weight: Float[Tensor, "words E"],
        places: Int[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*batch E"]:
        cluster = self.clusters[i]
        words = range(cluster.start, cluster.stop)
        markers = [symbol - cluster.start for symbol in self.markers if symbol in words]
        embedded = F.embedding(rows, weight)
        if not self.training or self.word_dropout == 0:
            return embedded
        return embedded * kept_words(rows, weight, self.word_dropout, markers, places)


class AdaptiveSoftmax(Predictor, nn.Module):
    """Adaptive softmax (Grave et al., 2017); its weights may be tied to the embedding.

    Words are sorted by frequency and divided into clusters. The head is a distribution over the
    words of the first cluster and one symbol for each further cluster; a word of such a tail has
    the probability of its cluster times its own within it. Rarer clusters may have narrower
    weights, as in :class:`~AdaptiveEmbedding`.

    Only :meth:`log_probs` allocates logits of the whole vocabulary for all tokens.
    """

    def __init__(self, config: ModelConfig, embedding: Embedding | AdaptiveEmbedding) -> None:
        super().__init__()
        self.clusters = config.clusters
        sizes = [(cluster.stop - cluster.start, cluster.width) for cluster in self.clusters]
        self.weight = None
        if isinstance(embedding, Embedding):
            # One table for all clusters, as the embedding has.
            self.weight = embedding.weight
            if not config.tie_embeddings:
                self.weight = nn.Parameter(torch.empty(config.vocab_size, config.embed_width))
        else:
            self.weights = Tables(
                embedding.weights if config.tie_embeddings else [torch.empty(*x) for x in sizes]
            )
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        if n_tails := len(self.clusters) - 1:
            self.cluster_weight = nn.Parameter(torch.empty(n_tails, config.embed_width))
            self.cluster_bias = nn.Parameter(torch.empty(n_tails))
        # In the embedding's orientation, so that they can be tied.
        self.projs: Sequence[nn.Module] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            Transposed(config, cluster.width) if cluster.has_proj else nn.Identity()
            for cluster in self.clusters
        )
        for i, cluster in enumerate(self.clusters):
            if cluster.ties_proj:
                tied = embedding.proj if isinstance(embedding, Embedding) else embedding.projs[i]
                assert isinstance(tied, nn.Linear)
                self.projs[i].weight = tied.weight

    def forward(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch V"] | Float[Tensor, "*batch"]:
        """Return the log-probability of each symbol, in nats, or -log p of targets.

        For targets, shapes depend on how many of them each cluster has, so that breaks compiled
        graphs and runs eagerly.
        """
        if targets is None:
            return self._log_probs(hidden)
        if torch.compiler.is_dynamo_compiling():
            return _nll_eagerly(self, hidden, targets)
        return self._nll(hidden, targets)

    def logits(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the log-probabilities: words of different clusters have no other common logits."""
        return self(hidden)

    log_probs = logits

    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """See :meth:`Predictor.nll`; no logits of the whole vocabulary are allocated."""
        return self(hidden, targets)

    def _log_probs(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        tables = self._tables()
        head = self._log_softmax(hidden, 0, *self._head(tables))
        parts = [head[..., : self.clusters[0].stop]]
        for i, (weight, bias) in enumerate(tables[1:], 1):
            within = self._log_softmax(hidden, i, weight, bias)
            parts.append(within + head[..., self._symbol(i), None])
        return torch.cat(parts, -1)

    def _nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        x, target = hidden.flatten(0, -2), targets.flatten()
        tables = self._tables()
        symbol, tails = target, []
        for i, cluster in enumerate(self.clusters[1:], 1):
            is_in = (target >= cluster.start) & (target < cluster.stop)
            symbol = torch.where(is_in, self._symbol(i), symbol)
            tails.append(is_in.nonzero()[:, 0])
        nll = linear_nll(self.projs[0](x), *self._head(tables), symbol)
        for i, rows in enumerate(tails, 1):
            # Also for empty clusters, so that every weight has a gradient.
            place = target[rows] - self.clusters[i].start
            tail = linear_nll(self.projs[i](x[rows]), *tables[i], place)
            nll = nll.index_add(0, rows, tail)
        return nll.view(targets.shape)

    def _symbol(self, i: int) -> int:
        """The symbol of a tail cluster in the head."""
        return self.clusters[0].stop + i - 1

    def _tables(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases of each cluster."""
        sizes = [cluster.stop - cluster.start for cluster in self.clusters]
        # One split, so that the backward pass concatenates the gradients once.
        weights = self.weights() if self.weight is None else self.weight.split(sizes)
        return list(zip(weights, self.bias.split(sizes), strict=True))

    def _head(self, tables: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        weight, bias = tables[0]
        if len(tables) == 1:
            return weight, bias
        return torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])

    def _log_softmax(self, hidden: Tensor, i: int, weight: Tensor, bias: Tensor) -> Tensor:
        return log_softmax(F.linear(self.projs[i](hidden), weight, bias))


# torch.compiler.disable imports the compiler, which takes seconds; cached, as another such function
# would trigger recompilation. functools.cache would break the graph.
_disabled: Callable[..., Tensor] | None = None


def _nll_eagerly(*arguments: object) -> Tensor:
    global _disabled
    nll = _disabled
    if nll is None:
        nll = _disabled = cast(Any, torch.compiler.disable(AdaptiveSoftmax._nll))
    return nll(*arguments)
