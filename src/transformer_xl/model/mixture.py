"""The output layer for real values: a mixture of normal distributions."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.ops import linear

LEAST_SCALE = 1e-4
"""Smallest standard deviation of a component. Without a bound, a component that meets one value
exactly makes the likelihood infinite (Bishop, 1994)."""
_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)


class Mixture(NamedTuple):
    r"""Mixtures of K normal distributions: $p(y) = \sum_k \pi_k N(y; \mu_k, \sigma_k^2)$."""

    log_weights: Float[Tensor, "*batch K"]
    """The logarithms of the weights, which sum to 1."""
    means: Float[Tensor, "*batch K"]
    """Means of the components."""
    scales: Float[Tensor, "*batch K"]
    """Their standard deviations, at least :data:`LEAST_SCALE`."""

    def log_prob(self, values: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the logarithm of the density of each value, in nats."""
        z = (values.to(self.means)[..., None] - self.means) / self.scales
        log_normal = -0.5 * z.square() - self.scales.log() - _LOG_SQRT_2_PI
        return (self.log_weights + log_normal).logsumexp(-1)

    def sample(self, generator: Generator | None = None) -> Float[Tensor, "*batch"]:
        """Draw a value from each mixture."""
        weights = self.log_weights.exp().flatten(0, -2)
        drawn = torch.multinomial(weights, 1, generator=generator)
        k = drawn.view(*self.means.shape[:-1], 1)
        means, scales = (x.gather(-1, k)[..., 0] for x in (self.means, self.scales))
        noise = torch.randn(
            means.shape, generator=generator, device=means.device, dtype=means.dtype
        )
        return means + scales * noise


class MixtureHead(nn.Linear):
    """Mixture density network (Bishop, 1994): the parameters of a mixture, given hidden states.

    Logits of the weights, means and standard deviations are linear functions of the hidden state;
    the latter through softplus, which is smooth, positive, and grows too slowly to overflow.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, 3 * config.n_mixtures)

    def reset_parameters(self) -> None:
        """Do nothing: the model initializes its weights."""

    def forward(self, input: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch parameters"]:
        """Return the parameters before they are constrained."""
        return linear(input, self.weight, self.bias)

    def mixture(self, hidden: Float[Tensor, "*batch D"]) -> Mixture:
        """Return the distribution of the next value, in float32 at least."""
        # Densities need more precision than float16 or bfloat16 have, under autocast too.
        with torch.autocast(hidden.device.type, enabled=False):
            raw = self(hidden.to(self.weight.dtype))
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        logits, means, scales = raw.chunk(3, -1)
        return Mixture(logits.log_softmax(-1), means, F.softplus(scales) + LEAST_SCALE)

    def nll(
        self, hidden: Float[Tensor, "*batch D"], targets: Float[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Return -log p of the density at each target, in nats; 0 for a target of NaN."""
        ignored = targets.isnan()
        # Replaced before the density is computed, as NaN would enter the gradient.
        nll = -self.mixture(hidden).log_prob(targets.masked_fill(ignored, 0.0))
        return nll.masked_fill(ignored, 0.0)
