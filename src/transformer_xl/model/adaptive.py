"""The adaptive softmax: a distribution over a large vocabulary, in two steps.

Words are sorted by frequency and divided into clusters (Grave et al., 2017). The head is a
distribution over the words of the first cluster and one symbol for each further cluster; a word
of such a tail has the probability of its cluster times its own within it. Rarer clusters may have
narrower weights, as in :class:`~transformer_xl.model.embedding.AdaptiveEmbedding`.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.embedding import AdaptiveEmbedding, Embedding
from transformer_xl.model.softmax import Transposed, drawn
from transformer_xl.ops import linear_nll

# Made when it is needed, as it loads the compiler, which takes seconds; kept, as code that was
# compiled for one such function is compiled again for another. No cache that it cannot see through.
_disabled: Callable[..., Tensor] | None = None


class AdaptiveSoftmax(nn.Module):
    """Softmax over clusters of words; its weights can be those of the embedding.

    No table of all words for all tokens is ever made but by :meth:`log_probs`, which returns one.
    All methods are calls of the module: what hangs on it sees them.
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
            self.weights = nn.ParameterList(
                embedding.weights if config.tie_embeddings else [torch.empty(*x) for x in sizes]
            )
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        if n_tails := len(self.clusters) - 1:
            self.cluster_weight = nn.Parameter(torch.empty(n_tails, config.embed_width))
            self.cluster_bias = nn.Parameter(torch.empty(n_tails))
        # Kept in the embedding's orientation, so that they can be the same matrices.
        self.projs: Sequence[nn.Module] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            Transposed(config, cluster.width) if cluster.has_proj else nn.Identity()
            for cluster in self.clusters
        )
        for i, cluster in enumerate(self.clusters):
            if cluster.ties_proj:
                tied = embedding.proj if isinstance(embedding, Embedding) else embedding.projs[i]
                assert isinstance(tied, nn.Linear)
                self.projs[i].weight = tied.weight

    def extra_repr(self) -> str:
        """Say what can be adapted, to whoever refuses to adapt this."""
        return (
            "several tables; what can be adapted: embedding.projs and the linear maps of the layers"
        )

    def forward(self, hidden: Float[Tensor, "*batch D"], what: str, *given: Any) -> Any:
        """Find what one of the methods below is to return."""
        return getattr(self, f"_{what}")(hidden, *given)

    def log_probs(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the logarithm of the probability of each symbol, in natural units."""
        return self(hidden, "log_probs")

    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Return -log p of each target in nats, in the order of the targets.

        How many targets a cluster has is not known before: compiled code leaves this to be run as
        it is, and the compiled part ends with the hidden states.
        """
        return self(hidden, "nll", targets)

    def top_k(
        self, hidden: Float[Tensor, "B D"], k: int
    ) -> tuple[Float[Tensor, "B k"], Int[Tensor, "B k"]]:
        """Return the log-probabilities of the ``k`` likeliest symbols, falling, and the symbols.

        No word is likelier than its cluster: a cluster less likely than ``k`` words found before
        is not looked into.
        """
        return self(hidden, "top_k", k)

    def draw(self, hidden: Float[Tensor, "B D"], numbers: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Draw a symbol from each distribution, given a random number from [0, 1) for it.

        It comes from the head, or from the one cluster that was drawn there.
        """
        return self(hidden, "draw", numbers)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        tables = self._tables()
        head = self._log_softmax(hidden, 0, *self._head(tables))
        parts = [head[..., : self.clusters[0].stop]]
        for i, (weight, bias) in enumerate(tables[1:], 1):
            own = self._log_softmax(hidden, i, weight, bias)
            parts.append(own + head[..., self._symbol(i), None])
        return torch.cat(parts, -1)

    def _nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return _outside_of_graphs(self, hidden, targets)
        x, target = hidden.flatten(0, -2), targets.flatten()
        tables = self._tables()
        symbol = target
        tails = []
        for i, cluster in enumerate(self.clusters[1:], 1):
            is_in = (target >= cluster.start) & (target < cluster.stop)
            symbol = torch.where(is_in, self._symbol(i), symbol)
            tails.append(is_in.nonzero()[:, 0])
        nll = linear_nll(self._projected(x, 0), *self._head(tables), symbol)
        for i, rows in enumerate(tails, 1):
            # Without any row, too: every weight has a gradient, if only zeros.
            own = target[rows] - self.clusters[i].start
            tail = linear_nll(self._projected(x[rows], i), *tables[i], own)
            nll = nll.index_add(0, rows, tail)
        return nll.view(targets.shape)

    def _top_k(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        tables = self._tables()
        k = min(k, self.clusters[-1].stop)
        head = self._log_softmax(hidden, 0, *self._head(tables))
        n_head = self.clusters[0].stop
        values, tokens = head[:, :n_head].topk(min(k, n_head))
        # Room for k words, if there are not as many in the head.
        missing = (0, k - values.shape[1])
        values, tokens = F.pad(values, missing, value=-torch.inf), F.pad(tokens, missing)
        # What is likeliest first: it may make the others needless.
        for symbol in head[:, n_head:].amax(0).argsort(descending=True).tolist():
            i, of_cluster = symbol + 1, head[:, n_head + symbol]
            rows = (of_cluster > values[:, -1]).nonzero()[:, 0]
            if not len(rows):
                continue
            own = self._log_softmax(hidden[rows], i, *tables[i]) + of_cluster[rows, None]
            best, place = own.topk(min(k, own.shape[1]))
            best, order = torch.cat([values[rows], best], 1).sort(descending=True, stable=True)
            found = torch.cat([tokens[rows], place + self.clusters[i].start], 1).gather(1, order)
            values[rows], tokens[rows] = best[:, :k], found[:, :k]
        return values, tokens

    def _draw(self, hidden: Tensor, numbers: Tensor) -> Tensor:
        tables = self._tables()
        head = self._log_softmax(hidden, 0, *self._head(tables))
        symbols, rest = drawn(head.exp(), numbers)
        tokens = symbols.clone()
        for i, cluster in enumerate(self.clusters[1:], 1):
            rows = (symbols == self._symbol(i)).nonzero()[:, 0]
            if len(rows):
                within = self._log_softmax(hidden[rows], i, *tables[i]).exp()
                tokens[rows] = cluster.start + drawn(within, rest[rows])[0]
        return tokens

    def _symbol(self, i: int) -> int:
        """The symbol by which the head names a further cluster."""
        return self.clusters[0].stop + i - 1

    def _tables(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases of each cluster."""
        sizes = [cluster.stop - cluster.start for cluster in self.clusters]
        # Cut at once: the gradient of the whole is then put together once.
        weights = list(self.weights) if self.weight is None else self.weight.split(sizes)
        return list(zip(weights, self.bias.split(sizes), strict=True))

    def _head(self, tables: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        weight, bias = tables[0]
        if len(tables) == 1:
            return weight, bias
        return torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])

    def _projected(self, hidden: Tensor, i: int) -> Tensor:
        return self.projs[i](hidden)

    def _log_softmax(self, hidden: Tensor, i: int, weight: Tensor, bias: Tensor) -> Tensor:
        logits = F.linear(self._projected(hidden, i), weight, bias)
        # Sums over a vocabulary need more digits than half precision has.
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _outside_of_graphs(*arguments: Any) -> Tensor:
    global _disabled
    nll = _disabled
    if nll is None:
        nll = _disabled = cast(Any, torch.compiler.disable(AdaptiveSoftmax._nll))
    return nll(*arguments)
