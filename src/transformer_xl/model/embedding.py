"""Embeddings: of tokens by one table or one for each cluster, of real vectors by a projection."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.arguments import explain_unknown
from transformer_xl.model.calling import unwrapped
from transformer_xl.ops import dropout


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
        p = self.word_dropout if self.training else 0.0
        embedded = looked_up(input, self.weight, p, self.markers)
        return embedded if self.proj is not None else embedded * self.embed_scale

    def widened(self, embedded: Float[Tensor, "B T E"]) -> Float[Tensor, "B T D"]:
        """Project looked-up vectors to the width of the model, where needed."""
        if self.proj is None:
            return embedded
        # Under autocast too, the residual stream stays in the precision of the weights.
        return self.proj(embedded).to(self.weight.dtype) * self.scale


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
        ValueError: A token is outside the vocabulary (on a GPU, a device-side assertion).
    """
    own = unwrapped(module, "widened")
    try:
        return own.widened((look_up or module)(tokens))
    except (IndexError, RuntimeError):
        if not isinstance(own, FeatureEmbedding):
            explain_unknown(tokens, own.num_embeddings)
        raise


def markers(config: ModelConfig) -> list[int]:
    """Return the symbols that are never dropped: where a completion or a document begins."""
    return [x for x in (config.completion_at, config.reset_at) if x is not None]


def looked_up(
    tokens: Int[Tensor, "*batch"],
    weight: Float[Tensor, "V E"],
    p: float,
    markers: Sequence[int],
    places: Int[Tensor, "*batch"] | None = None,
) -> Float[Tensor, "*batch E"]:
    """Look up words; drop each row of the table but ``markers`` with probability ``p``.

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
    embedded = F.embedding(tokens, weight)
    if p == 0:
        return embedded
    # One mask value per word: a dropped word is zero at all of its occurrences.
    kept = dropout(weight.new_ones(len(weight), 1), p, True)
    for marker in markers:
        kept[marker] = 1
    if places is None:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
    return embedded * F.embedding(tokens, kept).masked_fill((places == 0)[..., None], 1)
