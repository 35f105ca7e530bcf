"""Both ends of a model, which share a table: the embedding of tokens, and the softmax over them.

Its parts, in this order: embeddings, the softmax, what it samples and estimates.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.errors import CheckpointError
from transformer_xl.model.arguments import explain_unknown
from transformer_xl.model.calling import is_plain, unwrapped
from transformer_xl.ops import IGNORED, dropout, linear, linear_nll, native


class Embedding(nn.Embedding):
    """Token embeddings, scaled by sqrt(D).

    Embeddings of another width than the model are projected and scaled by :meth:`widened` instead,
    so that an adapter can add to the looked-up vectors.

    Attributes:
        embed_scale: Factor that :meth:`forward` applies. Adapters read it under this name, to scale
            what they add.
    """

    def __init__(self, config: ModelConfig) -> None:
        V, E, D = config.vocab_size, config.embed_width, config.d_model
        # With a table given, nn.Embedding draws no random numbers.
        super().__init__(V, E, _weight=torch.empty(V, E))
        self.proj = None
        if E != D:
            self.proj = nn.Linear(E, D, bias=False)
        self.embed_scale = 1.0 if E != D else D**0.5
        self.scale = D**0.5
        self.word_dropout, self.markers = config.embed_dropout, markers(config)

    def forward(self, input: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch E"]:
        """Look up tokens."""
        embedded = F.embedding(input, self.weight)
        if self.training and self.word_dropout > 0:
            embedded = embedded * kept_words(input, self.weight, self.word_dropout, self.markers)
        return embedded if self.proj is not None else embedded * self.embed_scale

    def widened(self, embedded: Float[Tensor, "B T E"]) -> Float[Tensor, "B T D"]:
        """Project looked-up vectors to the width of the model, where needed."""
        # Under autocast too, the residual stream stays in the precision of the weights.
        proj, dtype = self.proj, self.weight.dtype
        return embedded if proj is None else proj(embedded).to(dtype) * self.scale


class FeatureEmbedding(nn.Linear):
    """Linear projection of real-valued inputs to the width of the model, scaled by sqrt(D).

    The bias is drawn like the weights: without it, a first normalization would leave only the sign
    of a single feature.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.n_features, config.d_model)
        self.scale = config.d_model**0.5

    def reset_parameters(self) -> None:
        """Do nothing: the model initializes its weights."""

    def forward(self, input: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch D"]:
        """Project the inputs."""
        # Real inputs are not rounded under autocast, and the residual stream neither.
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.to(self.weight.dtype)) * self.scale

    def widened(self, embedded: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Return the argument: it has the width of the model already."""
        return embedded


def embedded(
    module: nn.Module,
    tokens: Int[Tensor, "B T"] | Float[Tensor, "B T F"],
    look_up: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "B T D"]:
    """Embed a segment at the width of the model, with the embedding or a wrapper around it.

    ``look_up``: what is called in the place of ``module``.

    Raises:
        InputError: A token is outside the vocabulary (on a GPU, a device-side assertion).
    """
    embedding = unwrapped(module, "widened")
    try:
        return embedding.widened((look_up or module)(tokens))
    except (IndexError, RuntimeError):
        if not isinstance(embedding, FeatureEmbedding):
            explain_unknown(tokens, embedding.num_embeddings)
        raise


def markers(config: ModelConfig) -> list[int]:
    """Return the symbols that are never dropped: where a completion or a document begins."""
    return [x for x in (config.completion_at, config.reset_at) if x is not None]


def kept_words(
    tokens: Int[Tensor, "*batch"],
    weight: Float[Tensor, "V E"],
    p: float,
    markers: Sequence[int],
    places: Int[Tensor, "*batch"] | None = None,
) -> Float[Tensor, "*batch 1"]:
    """Return the factor of each token: 0 if its word is dropped, as is each with probability ``p``.

    The first words of a segment are kept, and the symbols at which documents begin. Without a
    memory they see nothing but themselves, and if that is zero, so are their states in all layers:
    each normalization of zeros multiplies the gradient by 316, and 16 layers make it infinite.

    Args:
        tokens: Rows of the table.
        weight: The table.
        p: Probability with which a word is dropped.
        markers: Words that are not dropped.
        places: The place of each token in its segment. None: the last dimension is the segment.
    """
    # One mask value per word: a dropped word is zero at all of its occurrences.
    mask = dropout(weight.new_ones(len(weight), 1), p, True)
    for marker in markers:
        mask[marker] = 1
    if places is None:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
    return F.embedding(tokens, mask).masked_fill((places == 0)[..., None], 1)


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
        return log_softmax(self.logits(hidden))

    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Return -log p of each target in nats; in training, by the sampled softmax if set.

        From all log-probabilities at once; :class:`Softmax` overrides it by ``ops.linear_nll``.
        """
        ignored = targets == IGNORED
        targets = targets.masked_fill(ignored, 0)
        if self.training and self.n_samples:
            logits, flat = self.logits(hidden).flatten(0, -2), targets.flatten()
            words = log_uniform_words(self.n_samples, logits.shape[-1], flat.device)
            target_logits = logits.gather(1, flat[:, None])[:, 0]
            nll = _sampled_nll(target_logits, logits[:, words], flat, words, logits.shape[-1])
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

    def __init__(self, config: ModelConfig, embedding: Embedding | FeatureEmbedding) -> None:
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
            x, flat = input.flatten(0, -2), targets.flatten()
            if self.training and self.n_samples:
                words = log_uniform_words(self.n_samples, self.out_features, x.device)
                return sampled_nll(x, self.weight, self.bias, flat, words).view(targets.shape)
            return linear_nll(x, self.weight, self.bias, flat).view(targets.shape)
        if native.multiplies(input, self.weight):
            # Of a few rows, by the threads that also step the layers.
            rows = native.product(input.flatten(0, -2), self.weight, self.bias)
            return rows.unflatten(0, input.shape[:-1])
        return linear(input, self.weight, self.bias)

    def logits(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the unnormalized log-probabilities."""
        return self(self.narrowed(hidden))

    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """See :meth:`Predictor.nll`; unless hooked, without all logits (:func:`linear_nll`)."""
        # Hooks are given logits; while tracing, it is not known whether there are any.
        is_traced = torch.compiler.is_compiling() and not (self.training and self.n_samples)
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


def log_softmax(logits: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch V"]:
    """Return log-probabilities, in float32 at least."""
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
        CheckpointError: The probabilities are not finite.
    """
    sums = probs.double().cumsum(-1)
    if not sums[:, -1].isfinite().all():
        raise CheckpointError("the model's probabilities are not finite: its weights are damaged")
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
    target_logits = (x * F.embedding(targets, weight)).sum(-1) + bias[targets]
    others = F.linear(x, F.embedding(words, weight), bias[words])
    nll = _sampled_nll(target_logits, others, targets, words, len(weight))
    return nll.masked_fill(ignored, 0.0)


def _sampled_nll(
    target_logits: Tensor, others: Tensor, targets: Tensor, words: Tensor, V: int
) -> Tensor:
    """Estimate -log p of each target from its logit and those of a sample of words."""
    q = ((words + 2).double() / (words + 1)).log() / math.log(V + 1)
    dtype = torch.promote_types(others.dtype, torch.float32)
    others = others.to(dtype) - (len(words) * q).log().to(dtype)
    others = others.masked_fill(words == targets[:, None], -torch.inf)
    target_logits = target_logits.to(dtype)
    return torch.cat([target_logits[:, None], others], 1).logsumexp(1) - target_logits
