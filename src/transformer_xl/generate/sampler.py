"""Drawing tokens from distributions."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.config import GenerateConfig
from transformer_xl.config.checks import checked, no_type_check
from transformer_xl.nn import AdaptiveSoftmax, Softmax
from transformer_xl.nn.softmax import drawn

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures beyond which single precision knows no difference, but for infinity and NaN."""


def random_numbers(seed: int | Tensor | None) -> torch.Generator:
    """Return the random numbers of a seed, or those that follow a state; None: others each time."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    elif isinstance(seed, Tensor):
        generator.set_state(seed)
    else:
        generator.manual_seed(seed)
    return generator


class Sampler:
    """Draws a token from each of several distributions.

    Raises:
        ValueError: A setting is out of range.
    """

    @no_type_check
    def __init__(
        self, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
    ) -> None:
        # No setting is infinite, and more than this is as good.
        temperature = _HOTTEST if temperature == math.inf else temperature
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        found = checked(GenerateConfig, given)
        self.temperature: float = found["temperature"]
        self.top_k: int | None = found["top_k"]
        self.top_p: float | None = found["top_p"]

    def __call__(
        self,
        softmax: Softmax | AdaptiveSoftmax,
        hidden: Float[Tensor, "B D"],
        numbers: Float[Tensor, " B"],
    ) -> list[int]:
        """Draw a token for each stream, given a random number from [0, 1) for it."""
        if self.temperature == 0:
            return softmax.top_k(hidden, 1)[1][:, 0].tolist()
        if self.temperature == 1 and self.top_k is None and self.top_p is None:
            # Of an adaptive softmax, most often without its rarer clusters.
            return softmax.draw(hidden, numbers).tolist()
        tokens = None
        if self.top_k is not None:
            values, tokens = softmax.top_k(hidden, self.top_k)
        else:
            values = softmax.log_probs(hidden)
        # The likeliest becomes 0 first: so it stays finite, however small what divides it is.
        values = values - values.amax(-1, keepdim=True)
        probs = values.div_(min(max(self.temperature, _COLDEST), _HOTTEST)).softmax(-1)
        if self.top_p is not None:
            if tokens is None:
                probs, tokens = _with_probability(self.top_p, probs)
            # A token stays while those likelier than it do not reach top_p together; the first
            # one always, even where top_p is 0 in single precision.
            stays = probs.cumsum(-1) - probs < self.top_p
            stays[:, 0] = True
            probs = probs * stays
        places = drawn(probs, numbers)[0][:, None]
        return (places if tokens is None else tokens.gather(1, places))[:, 0].tolist()


def _with_probability(
    top_p: float, probs: Float[Tensor, "B V"]
) -> tuple[Float[Tensor, "B k"], Int[Tensor, "B k"]]:
    """Return as many of the likeliest tokens, falling, as have this probability in every row."""
    k, V = 64, probs.shape[-1]
    while True:
        # Few are nearly always enough, and to find them is quicker than to sort them all.
        likeliest, tokens = probs.topk(min(k, V))
        if k >= V or bool((likeliest.sum(-1) >= top_p).all()):
            return likeliest, tokens
        k *= 8
