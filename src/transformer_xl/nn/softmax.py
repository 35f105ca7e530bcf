"""The distribution over the vocabulary."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.nn.embedding import Embedding


class Softmax(nn.Module):
    """Softmax over the whole vocabulary; its weights can be those of the embedding."""

    def __init__(self, config: ModelConfig, embedding: Embedding) -> None:
        super().__init__()
        if config.tie_embeddings:
            self.weight = embedding.weight
        else:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.embed_width))
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.proj = None
        if config.embed_width != config.d_model:
            # Kept in the embedding's orientation, so that it can be the same matrix.
            self.proj = nn.Linear(config.embed_width, config.d_model, bias=False)
            if config.tie_projections and embedding.proj is not None:
                self.proj.weight = embedding.proj.weight

    def log_probs(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the logarithm of the probability of each symbol, in natural units."""
        return F.log_softmax(self._logits(hidden), -1)

    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Return -log p of each target in nats."""
        logits = self._logits(hidden).flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.proj is not None:
            hidden = F.linear(hidden, self.proj.weight.T)
        logits = F.linear(hidden, self.weight, self.bias)
        # Sums over a vocabulary need more digits than half precision has.
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
