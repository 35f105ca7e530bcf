r"""An n-gram cache: what followed the same tokens before, in the text read so far.

A cache of what was read goes back to Kuhn and De Mori (1990); counting after contexts of several
lengths, of which a longer one has the last word, to prediction by partial matching (PPM; Cleary and
Witten, 1984). Here the model stands where PPM has its shortest context. Its probability $p$ of the
token $w$ is mixed with the counts $c$ in the text so far, from the shortest context $h$ to the
longest one that has occurred before:

$$p \leftarrow (1 - \lambda)\, p + \lambda\, \frac{c(hw)}{c(h)}$$

The weight $\lambda$ depends on the length of the context, on its count, and on how many different
tokens have followed it. It is learned from the text itself by online expectation maximization: it
moves towards the probability that the token came from the counts, $\lambda\, c(hw) / (c(h)\, p)$
with the $p$ on the left. Nothing is trained or stored beforehand.
"""

import math
from array import array

import numpy as np
from jaxtyping import Float, Int

CONTEXT_LENGTHS = (2, 4, 7, 12, 24)
"""Lengths of the contexts that are counted, in tokens."""
FIRST_WEIGHT = 0.3
_FIRST_EXAMPLES, _MOST_EXAMPLES = 20, 512
"""A weight moves by 1 / examples: as if it had seen the first number at its beginning, and never
more than the second."""
_LEAST_WEIGHT = 1 / 4096
"""Weights are at least this, and at most one minus it."""
_LEAST_PROBABILITY = 1e-300

Followers = dict[int, int]
"""Counts of the tokens that followed a context."""


class NGramCache:
    """Mixes the probabilities of a model with what followed the same tokens before.

    It takes up to 1 kB of memory for each token that it has read.

    Example:
        >>> cache = NGramCache()
        >>> p = [cache.read(token, 0.1) for token in [1, 2, 3, 4] * 4]
        >>> p[5], round(p[6], 2), p[-1] > 0.7  # before p[6], two tokens occur again
        (0.1, 0.37, True)
    """

    def __init__(self) -> None:
        self._recent = array("q")
        # A context that occurred once has the token alone: most long ones do.
        self._followers: tuple[dict[bytes, int | Followers], ...]
        self._followers = tuple({} for _ in CONTEXT_LENGTHS)
        # By length, count and number of different tokens: a weight, and its examples.
        self._weights: dict[tuple[int, int, int], tuple[float, int]] = {}

    def read(self, token: int, p: float) -> float:
        """Return the probability of the next token given that of the model, and count the token."""
        p = max(p, _LEAST_PROBABILITY)
        for length, context, followers in zip(
            CONTEXT_LENGTHS, self._contexts(), self._followers, strict=False
        ):
            followed = followers.get(context)
            if followed is None:
                break
            if isinstance(followed, int):
                count, total, n_different = int(followed == token), 1, 1
            else:
                count, total = followed.get(token, 0), followed[_TOTAL]
                n_different = len(followed) - 1
            # Larger counts share their weights by powers of two.
            size = total if total < 4 else 2 + total.bit_length()
            kind = length, size, min(n_different, 4)
            weight, examples = self._weights.get(kind, (FIRST_WEIGHT, _FIRST_EXAMPLES))
            from_counts = weight * count / total
            p = (1 - weight) * p + from_counts
            weight += (from_counts / p - weight) / examples
            weight = min(max(weight, _LEAST_WEIGHT), 1 - _LEAST_WEIGHT)
            self._weights[kind] = weight, min(examples + 1, _MOST_EXAMPLES)
        self.count(token)
        return p

    def count(self, token: int) -> None:
        """Count the next token, without a probability of it."""
        for context, followers in zip(self._contexts(), self._followers, strict=False):
            followed = followers.get(context)
            if followed is None:
                followers[context] = token
            elif isinstance(followed, int):
                counts = {_TOTAL: 2, followed: 1}
                counts[token] = counts.get(token, 0) + 1
                followers[context] = counts
            else:
                followed[_TOTAL] += 1
                followed[token] = followed.get(token, 0) + 1
        self._recent.append(token)
        del self._recent[: -CONTEXT_LENGTHS[-1]]

    def _contexts(self) -> list[bytes]:
        """Return the contexts of the next token, of all lengths that the text has."""
        n = len(self._recent)
        return [self._recent[n - k :].tobytes() for k in CONTEXT_LENGTHS if k <= n]


_TOTAL = -1
"""The key of a context's own count among those of tokens."""


def cached_nll(
    text: Int[np.ndarray, " length"], nll: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """Return -log p with a cache that reads a text from its beginning, in nats.

    Args:
        text: The tokens.
        nll: -log p of the model for each token but the first; NaN: the token is read, not scored.
            The text may go on after the last one.
    """
    cache = NGramCache()
    first, *others = text.tolist()
    cache.count(first)
    mixed = nll.astype(np.float64)
    for i, (token, x) in enumerate(zip(others, mixed.tolist(), strict=False)):
        if math.isnan(x):
            cache.count(token)
        else:
            mixed[i] = -math.log(cache.read(token, math.exp(-x)))
    return mixed
