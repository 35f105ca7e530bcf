"""The distribution over the vocabulary."""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.embedding import AdaptiveEmbedding, Embedding
from transformer_xl.model.wrapping import is_plain, unwrapped
from transformer_xl.ops import linear_nll
from transformer_xl.ops.nll import IGNORED


class Transposed(nn.Module):
    """A linear map from D to E with the weight of one from E to D, which it may share.

    Adapters do not fit it: they adapt the projection of the embedding.
    """

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, config.d_model, bias=False).weight

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """Multiply by the transposed of the weight."""
        return F.linear(x, self.weight.T)


class Predictor(ABC):
    """Distributions over the vocabulary, given what the layers put out."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the logarithms of numbers in the proportion of the probabilities."""

    def log_probs(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the logarithm of the probability of each symbol, in natural units."""
        logits = self.logits(hidden)
        # Sums over a vocabulary need more digits than half precision has.
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    @abstractmethod
    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Return -log p of each target in nats; of the sampled softmax while training with one."""

    def top_k(
        self, hidden: Float[Tensor, "B D"], k: int
    ) -> tuple[Float[Tensor, "B k"], Int[Tensor, "B k"]]:
        """Return the log-probabilities of the ``k`` likeliest symbols, falling, and the symbols."""
        log_probs = self.log_probs(hidden)
        values, tokens = log_probs.topk(min(k, log_probs.shape[-1]))
        return values, tokens

    def draw(self, hidden: Float[Tensor, "B D"], numbers: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Draw a symbol from each distribution, given a random number from [0, 1) for it."""
        return drawn(self.log_probs(hidden).exp(), numbers)[0]


class Softmax(Predictor, nn.Linear):
    """Softmax over the whole vocabulary; its weights can be those of the embedding.

    Called, it returns the logits of states of the embedding's width: what an adapter adds to.
    """

    def __init__(self, config: ModelConfig, embedding: Embedding | AdaptiveEmbedding) -> None:
        super().__init__(config.embed_width, config.vocab_size)
        assert isinstance(embedding, Embedding)
        if config.tie_embeddings:
            self.weight = embedding.weight
        self.n_samples = config.sample_softmax
        self.proj = None
        if config.embed_width != config.d_model:
            self.proj = Transposed(config, config.embed_width)
            if config.clusters[0].ties_proj and embedding.proj is not None:
                self.proj.weight = embedding.proj.weight

    def reset_parameters(self) -> None:
        """Draw nothing: that is done for the model as a whole, or the weights are tied."""

    def logits(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the logarithms of numbers in the proportion of the probabilities."""
        return self(self.narrowed(hidden))

    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Return -log p of each target in nats; of the sampled softmax while training with one."""
        if not is_plain(self, Softmax):
            return CalledSoftmax(self).nll(hidden, targets)
        x, flat = self.narrowed(hidden).flatten(0, -2), targets.flatten()
        if self.training and self.n_samples:
            words = log_uniform_words(self.n_samples, self.out_features, flat.device)
            nll = sampled_nll(x, self.weight, self.bias, flat, words)
        else:
            nll = linear_nll(x, self.weight, self.bias, flat)
        return nll.view(targets.shape)

    def narrowed(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """Project to the width of the embedding."""
        return hidden if self.proj is None else self.proj(hidden)


class CalledSoftmax(Predictor):
    """What wraps the softmax of a model, or the softmax with hooks: called for all logits.

    Args:
        module: What takes the place of the softmax.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._own = module, unwrapped(module, "narrowed")

    def logits(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the logarithms of numbers in the proportion of the probabilities."""
        return self._module(self._own.narrowed(hidden))

    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Return -log p of each target in nats; of the sampled softmax while training with one."""
        n_samples = self._own.n_samples if self._own.training else 0
        ignored = targets == IGNORED
        targets = targets.masked_fill(ignored, 0)
        if not n_samples:
            nll = -self.log_probs(hidden).gather(-1, targets[..., None])[..., 0]
            return nll.masked_fill(ignored, 0.0)
        logits, flat = self.logits(hidden).flatten(0, -2), targets.flatten()
        words = log_uniform_words(n_samples, logits.shape[-1], flat.device)
        own = logits.gather(1, flat[:, None])[:, 0]
        nll = _sampled_nll(own, logits[:, words], flat, words, logits.shape[-1])
        return nll.view(targets.shape).masked_fill(ignored, 0.0)


def drawn(
    probs: Float[Tensor, "B n"], numbers: Float[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Find the places at which numbers from [0, 1) fall among the sums of probabilities.

    Args:
        probs: Probabilities, or weights that add up to something else.
        numbers: Random numbers, in double precision, which tells rare symbols apart.

    Returns:
        The places, and where within theirs the numbers fell: random numbers from [0, 1) again.

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
    """Draw words, with repetition, of a vocabulary sorted by falling frequency.

    Word ``w`` has the probability log((w + 2) / (w + 1)) / log(V + 1), about what Zipf's law says.
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
    $e^{s_t} + \frac{1}{n} \sum_{w_i \neq t} e^{s_{w_i}} / q_{w_i}$. Where a target is -100 it is 0.
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
