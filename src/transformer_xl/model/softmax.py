"""The output layer: a softmax over the vocabulary, full or adaptive."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.calling import is_plain, unwrapped
from transformer_xl.model.embedding import (
    AdaptiveEmbedding,
    Embedding,
    FeatureEmbedding,
    Tables,
)
from transformer_xl.ops import linear, linear_nll, native
from transformer_xl.ops.nll import IGNORED


class Transposed(nn.Module):
    """A linear map from D to E that uses, and may share, the weight of one from E to D.

    Adapters do not support it; they adapt the projection of the embedding.
    """

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, config.d_model, bias=False).weight

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """Multiply by the transposed weight."""
        return linear(x, self.weight.T, None)


class Predictor(ABC):
    """A distribution over the vocabulary, given hidden states.

    Attributes:
        training: Whether the model is trained.
        n_samples: In training, how many words stand for all others; 0: all.
    """

    training: bool
    n_samples: int

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the unnormalized log-probabilities."""

    def log_probs(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the log-probability of each symbol, in nats."""
        return _log_softmax(self.logits(hidden))

    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Return -log p of each target in nats; in training, by the sampled softmax if set."""
        ignored = targets == IGNORED
        targets = targets.masked_fill(ignored, 0)
        if self.training and self.n_samples:
            logits, flat = self.logits(hidden).flatten(0, -2), targets.flatten()
            words = log_uniform_words(self.n_samples, logits.shape[-1], flat.device)
            own = logits.gather(1, flat[:, None])[:, 0]
            nll = _sampled_nll(own, logits[:, words], flat, words, logits.shape[-1])
        else:
            nll = -self.log_probs(hidden).gather(-1, targets[..., None])[..., 0]
        return nll.view(targets.shape).masked_fill(ignored, 0.0)

    def top_k(
        self, hidden: Float[Tensor, "B D"], k: int
    ) -> tuple[Float[Tensor, "B k"], Int[Tensor, "B k"]]:
        """Return the ``k`` largest log-probabilities, in descending order, and their symbols."""
        log_probs = self.log_probs(hidden)
        values, tokens = log_probs.topk(min(k, log_probs.shape[-1]))
        return values, tokens

    def draw(self, hidden: Float[Tensor, "B D"], numbers: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Sample a symbol from each distribution, given a uniform number from [0, 1) for it."""
        return drawn(self.log_probs(hidden).exp(), numbers)[0]


class Softmax(Predictor, nn.Linear):
    """Softmax over the whole vocabulary; its weights may be tied to the embedding.

    :meth:`forward` maps states of the embedding's width to logits, so that adapters can wrap it.
    """

    def __init__(
        self, config: ModelConfig, embedding: Embedding | AdaptiveEmbedding | FeatureEmbedding
    ) -> None:
        super().__init__(config.embed_width, config.vocab_size)
        self.n_samples = config.sample_softmax
        self.proj = None
        if isinstance(embedding, FeatureEmbedding):
            return
        assert isinstance(embedding, Embedding)
        if config.tie_embeddings:
            self.weight = embedding.weight
        if config.embed_width != config.d_model:
            self.proj = Transposed(config, config.embed_width)
            if config.clusters[0].ties_proj and embedding.proj is not None:
                self.proj.weight = embedding.proj.weight

    def reset_parameters(self) -> None:
        """Do nothing: the model initializes its weights."""

    def forward(
        self, input: Float[Tensor, "*batch E"], targets: Int[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch V"] | Float[Tensor, "*batch"]:
        """Return the logits, or -log p of targets, without all logits at once."""
        if targets is not None:
            return self._nll(input.flatten(0, -2), targets.flatten()).view(targets.shape)
        if native.multiplies(input, self.weight):
            # Of a few rows, by the threads that also step the layers.
            rows = native.product(input.flatten(0, -2), self.weight, self.bias)
            return rows.unflatten(0, input.shape[:-1])
        return linear(input, self.weight, self.bias)

    def _nll(self, x: Float[Tensor, "n E"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        if self.training and self.n_samples:
            words = log_uniform_words(self.n_samples, self.out_features, x.device)
            return sampled_nll(x, self.weight, self.bias, targets, words)
        return linear_nll(x, self.weight, self.bias, targets)

    def logits(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the unnormalized log-probabilities."""
        return self(self.narrowed(hidden))

    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Return what :meth:`Predictor.nll` does, without all logits at once, unless hooked."""
        # Forward hooks are given logits; while tracing, it is not known whether there are any.
        is_sampled = self.training and self.n_samples > 0
        is_traced = torch.compiler.is_compiling() and not is_sampled
        if is_traced or not is_plain(self, Softmax):
            return super().nll(hidden, targets)
        return self(self.narrowed(hidden), targets)

    def narrowed(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """Project to the width of the embedding."""
        return hidden if self.proj is None else self.proj(hidden)


class CalledSoftmax(Predictor):
    """A softmax that was wrapped and must be called to get the logits.

    Args:
        module: The module in place of the softmax.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._own = module, unwrapped(module, "narrowed")
        self.training, self.n_samples = self._own.training, self._own.n_samples

    def logits(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the unnormalized log-probabilities."""
        return self._module(self._own.narrowed(hidden))


def _log_softmax(logits: Tensor) -> Tensor:
    # Sums over a vocabulary need more precision than float16 or bfloat16 have.
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def drawn(
    probs: Float[Tensor, "B n"], numbers: Float[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Sample by inversion of the cumulative distribution.

    Args:
        probs: Probabilities, or unnormalized weights.
        numbers: Uniform numbers from [0, 1), in float64 for the sake of rare symbols.

    Returns:
        The sampled indices, and the position of each number within its interval, which is uniform
        in [0, 1) again.

    Raises:
        RuntimeError: The probabilities are not finite.
    """
    sums = probs.double().cumsum(-1)
    if not sums[:, -1].isfinite().all():
        raise RuntimeError("the model's probabilities are not finite: its weights are damaged")
    points = numbers.to(sums)[:, None] * sums[:, -1:]
    places = torch.searchsorted(sums, points, right=True).clamp_(max=probs.shape[-1] - 1)
    width = probs.gather(1, places).double()
    rest = (points - (sums.gather(1, places) - width)) / width
    return places[:, 0], rest[:, 0].clamp(0, 1 - 2**-53)


def log_uniform_words(n: int, vocab_size: int, device: torch.device) -> Int[Tensor, " n"]:
    """Sample words, with replacement, from a vocabulary sorted by descending frequency.

    Word ``w`` has the log-uniform probability log((w + 2) / (w + 1)) / log(V + 1), close to Zipf's
    law.
    """
    power = torch.rand(n, dtype=torch.float64, device=device) * math.log(vocab_size + 1)
    return power.exp().long().sub_(1).clamp_(0, vocab_size - 1)


def sampled_nll(
    x: Float[Tensor, "n E"],
    weight: Float[Tensor, "V E"],
    bias: Float[Tensor, " V"],
    targets: Int[Tensor, " n"],
    words: Int[Tensor, " samples"],
) -> Float[Tensor, " n"]:
    r"""Estimate -log p of each target from a sample of the other words (Jean et al., 2015).

    With $q$ the log-uniform probabilities and $w_1 ... w_n$ drawn from them, the sum over the
    vocabulary, $e^{s_t} + \sum_{w \neq t} e^{s_w}$, is estimated without bias by
    $e^{s_t} + \frac{1}{n} \sum_{w_i \neq t} e^{s_{w_i}} / q_{w_i}$. For a target of -100 it is 0.
    """
    ignored = targets == IGNORED
    targets = targets.masked_fill(ignored, 0)
    own = (x * F.embedding(targets, weight)).sum(-1) + bias[targets]
    others = F.linear(x, F.embedding(words, weight), bias[words])
    nll = _sampled_nll(own, others, targets, words, len(weight))
    return nll.masked_fill(ignored, 0.0)


def _sampled_nll(own: Tensor, others: Tensor, targets: Tensor, words: Tensor, V: int) -> Tensor:
    """Estimate -log p of each target from its logit and those of a sample of words."""
    q = ((words + 2).double() / (words + 1)).log() / math.log(V + 1)
    dtype = torch.promote_types(others.dtype, torch.float32)
    others = others.to(dtype) - (len(words) * q).log().to(dtype)
    others = others.masked_fill(words == targets[:, None], -torch.inf)
    own = own.to(dtype)
    return torch.cat([own[:, None], others], 1).logsumexp(1) - own


def _through_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method of a module run in ``__call__``, so that hooks run."""

    @wraps(method)
    def call(self: "AdaptiveSoftmax", hidden: Tensor, *given: Any, **named: Any) -> Any:
        return self(hidden, method, *given, **named)

    return call


class AdaptiveSoftmax(nn.Module):
    """Adaptive softmax (Grave et al., 2017); its weights may be tied to the embedding.

    Words are sorted by frequency and divided into clusters. The head is a distribution over the
    words of the first cluster and one symbol for each further cluster; a word of such a tail has
    the probability of its cluster times its own within it. Rarer clusters may have narrower
    weights, as in :class:`~transformer_xl.model.embedding.AdaptiveEmbedding`.

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

    def extra_repr(self) -> str:
        """Say what can be adapted, to whoever refuses to adapt this."""
        return (
            "several tables; what can be adapted: embedding.projs and the linear maps of the layers"
        )

    def forward(
        self,
        hidden: Float[Tensor, "*batch D"],
        method: Callable[..., Any],
        *given: Any,
        **named: Any,
    ) -> Any:
        """Call one of the methods below."""
        return method(self, hidden, *given, **named)

    @_through_call
    def log_probs(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the log-probability of each symbol, in nats."""
        tables = self._tables()
        head = self._log_softmax(hidden, 0, *self._head(tables))
        parts = [head[..., : self.clusters[0].stop]]
        for i, (weight, bias) in enumerate(tables[1:], 1):
            own = self._log_softmax(hidden, i, weight, bias)
            parts.append(own + head[..., self._symbol(i), None])
        return torch.cat(parts, -1)

    def logits(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the log-probabilities: words of different clusters have no other common logits."""
        return self.log_probs(hidden)

    @_through_call
    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Return -log p of each target in nats, in the order of the targets.

        Shapes depend on how many targets each cluster has, so this breaks compiled graphs and runs
        eagerly.
        """
        if torch.compiler.is_dynamo_compiling():
            return _nll_eagerly(self, hidden, targets)
        return self._nll(hidden, targets)

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
            own = target[rows] - self.clusters[i].start
            tail = linear_nll(self.projs[i](x[rows]), *tables[i], own)
            nll = nll.index_add(0, rows, tail)
        return nll.view(targets.shape)

    @_through_call
    def top_k(
        self, hidden: Float[Tensor, "B D"], k: int
    ) -> tuple[Float[Tensor, "B k"], Int[Tensor, "B k"]]:
        """Return the ``k`` largest log-probabilities, in descending order, and their symbols.

        No word is likelier than its cluster, so clusters less likely than ``k`` known words are
        skipped.
        """
        tables = self._tables()
        k = min(k, self.clusters[-1].stop)
        head = self._log_softmax(hidden, 0, *self._head(tables))
        n_head = self.clusters[0].stop
        values, tokens = head[:, :n_head].topk(min(k, n_head))
        # Padded to k words, if the head has fewer.
        missing = (0, k - values.shape[1])
        values, tokens = F.pad(values, missing, value=-torch.inf), F.pad(tokens, missing)
        # The likeliest cluster first, as the others may then be skipped.
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

    @_through_call
    def draw(self, hidden: Float[Tensor, "B D"], numbers: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Sample a symbol from each distribution, given a uniform number from [0, 1) for it.

        Only the head and the sampled clusters are computed.
        """
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
        return _log_softmax(F.linear(self.projs[i](hidden), weight, bias))


# torch.compiler.disable imports the compiler, which takes seconds; cached, as another such function
# would trigger recompilation. functools.cache would break the graph.
_disabled: Callable[..., Tensor] | None = None


def _nll_eagerly(*arguments: Any) -> Tensor:
    global _disabled
    nll = _disabled
    if nll is None:
        nll = _disabled = cast(Any, torch.compiler.disable(AdaptiveSoftmax._nll))
    return nll(*arguments)
