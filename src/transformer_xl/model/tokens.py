"""Both ends of a model, which share a table: the embedding of tokens, and the softmax over them.

Its parts, in this order: embeddings, the softmax.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.arguments import explain_unknown
from transformer_xl.model.calling import is_plain, unwrapped
from transformer_xl.ops import IGNORED, PackedWeight, dropout, linear, linear_nll, native


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
        weight = self.weight
        if isinstance(weight, PackedWeight):
            embedded = weight.rows(input)
        else:
            embedded = F.embedding(input, weight)
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
    """A distribution over the vocabulary, given hidden states."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the unnormalized log-probabilities."""

    def log_probs(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the log-probability of each symbol, in nats."""
        return log_softmax(self.logits(hidden))

    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Return -log p of each target in nats.

        From all log-probabilities at once; :class:`Softmax` overrides it by ``ops.linear_nll``.
        """
        ignored = targets == IGNORED
        places = targets.masked_fill(ignored, 0)[..., None]
        return -self.log_probs(hidden).gather(-1, places)[..., 0].masked_fill(ignored, 0.0)


class Softmax(Predictor, nn.Linear):
    """Softmax over the whole vocabulary; its weights may be tied to the embedding.

    :meth:`forward` maps states of the embedding's width to logits, so that adapters can wrap it.
    """

    def __init__(self, config: ModelConfig, embedding: Embedding | FeatureEmbedding) -> None:
        super().__init__(config.embed_width, config.vocab_size)
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
            weight = self.weight
            weight = weight.dequantize().to(x.dtype) if isinstance(weight, PackedWeight) else weight
            return linear_nll(x, weight, self.bias, flat).view(targets.shape)
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
        if torch.compiler.is_compiling() or not is_plain(self, Softmax):
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

    def logits(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the unnormalized log-probabilities."""
        return self._module(self._own.narrowed(hidden))


def log_softmax(logits: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch V"]:
    """Return log-probabilities, in float32 at least."""
    # Sums over a vocabulary need more precision than float16 or bfloat16 have.
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
