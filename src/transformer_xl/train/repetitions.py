"""Repetition noise: spans of the input are replaced by repetitions of the tokens before them."""

from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

LONGEST_PERIOD, _MOST_REPEATS = 32, 4


def with_repetitions(
    tokens: Int[Tensor, "B T"],
    share: float,
    numbers: np.random.Generator,
    before: Int[Tensor, "B before"] | None = None,
) -> Int[Tensor, "B T"]:
    """Replace spans of each stream by repetitions of the tokens before them.

    A span repeats the k tokens before it one to four times. k is random, from 1 to 32, with a
    probability of about 1 / k. Training on such a span lets the model read what it would read if it
    had generated a repetition (Xu et al., DITTO, 2022), and the loss is that of the true next
    tokens.

    Spans begin in the segment and end with it, so its first tokens are replaced less often, and a
    repetition across a boundary of segments has its first tokens in ``before``. These are the
    tokens of the text, although the memory may hold repetitions in their place.

    Args:
        tokens: The tokens of a segment.
        share: Expected share of the tokens that are replaced.
        numbers: Random numbers.
        before: The tokens of the streams before the segment. None: none.
    """
    B, T = tokens.shape
    n = 0 if before is None else before.shape[1]
    if n + T < 2:
        return tokens
    # Spans overlap: a Poisson process with this mean covers the share.
    n_spans = numbers.poisson(-np.log1p(-share) * T / _mean_span(T, n), size=B)
    if not n_spans.any():
        return tokens
    changed = tokens.clone() if before is None else torch.cat([before, tokens], dim=1)
    for row in np.repeat(np.arange(B), n_spans):
        period = min(int((LONGEST_PERIOD + 1) ** numbers.random()), n + T - 1)
        start = int(numbers.integers(max(period, n), n + T))
        end = min(start + period * int(numbers.integers(1, _MOST_REPEATS + 1)), n + T)
        pattern = changed[row, start - period : start]
        changed[row, start:end] = pattern[torch.arange(end - start) % period]
    return changed[:, n:].contiguous()


@lru_cache(maxsize=1024)
def _mean_span(T: int, n: int) -> float:
    """Return the mean length of a span that ends with the segment, after ``n`` known tokens."""
    mean = 0.0
    for k in range(1, LONGEST_PERIOD + 1):
        period = min(k, n + T - 1)
        most = T - np.arange(max(period - n, 0), T)
        lengths = [np.minimum(period * m, most).mean() for m in range(1, _MOST_REPEATS + 1)]
        mean += np.log1p(1 / k) / np.log(LONGEST_PERIOD + 1) * float(np.mean(lengths))
    return mean
