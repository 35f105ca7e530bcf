"""Drawing tokens from distributions."""

import math
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.config import GenerateConfig
from transformer_xl.config.checks import checked, no_type_check
from transformer_xl.model import AdaptiveSoftmax, Softmax
from transformer_xl.model.arguments import whole
from transformer_xl.model.softmax import CalledSoftmax, drawn

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures beyond which single precision knows no difference, but for infinity and NaN."""


def random_numbers(seed: Any) -> torch.Generator:
    """Return the random numbers of a seed, or those that follow a state; None: others each time.

    Raises:
        ValueError: It is no integer of 64 bits, and no state either.
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    elif isinstance(seed, Tensor) and seed.ndim:
        try:
            generator.set_state(seed.cpu())
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"seed is no state of random numbers ({error}): hand in an integer, or the "
                "random_state of another text"
            ) from error
    else:
        # As torch takes them: without a sign.
        generator.manual_seed(seed_of(seed, 0) % 2**64)
    return generator


def seed_of(seed: SupportsIndex, n: int) -> int:
    """Return the seed of text number n of several that are drawn with one: ``seed + n``.

    Seeds have 64 bits, with a sign or without; the last one is followed by 0.

    Raises:
        ValueError: It is no integer of 64 bits.
    """
    seed = whole("seed", seed, -(2**63))
    if seed >= 2**64:
        raise ValueError(f"seed={seed} must be below 2**64")
    return (seed + n) % 2**64 if seed + n >= 2**64 else seed + n


class Sampler:
    """Draws a token from each of several distributions.

    Args:
        temperature: Below 1 safer, above 1 wilder; 0 takes the likeliest token.
        top_k: Draw from the ``top_k`` likeliest tokens only. None, or as many as there are: no cut.
        top_p: Draw from the fewest likeliest tokens that have this probability together. None, or
            1: no cut.
        vocab_size: How many tokens there are. None: not known, and more than ``top_k``.

    Raises:
        ValueError: A setting is no number or out of range.
    """

    @no_type_check
    def __init__(
        self,
        temperature: float = 1.0,
        top_k: SupportsIndex | None = None,
        top_p: float | None = None,
        vocab_size: int | None = None,
    ) -> None:
        # No setting is infinite, and more than this is as good.
        temperature = _HOTTEST if temperature == math.inf else temperature
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        found = checked(GenerateConfig, given)
        self.temperature: float = found["temperature"]
        # What cuts nothing is no cut: the same numbers then draw the same tokens, to the bit.
        k: int | None = found["top_k"]
        self.top_k = None if k and vocab_size and k >= vocab_size else k
        self.top_p: float | None = None if found["top_p"] == 1 else found["top_p"]

    @property
    def settings(self) -> dict[str, float | int | None]:
        """What it draws with, by name; None: no cut."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def __call__(
        self,
        softmax: Softmax | AdaptiveSoftmax | CalledSoftmax,
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
