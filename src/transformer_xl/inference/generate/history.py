"""The last tokens of a text, for penalties and the detection of loops."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from transformer_xl.config import GenerateConfig

Tokens = Sequence[int] | np.ndarray
_KEPT = GenerateConfig.MAX_HISTORY + 1
"""The last token, which no memory contains yet, and those before it."""
_MAX_BREAKS = 16
"""Broken loops that are known; more than the length of a loop can be halved."""


def joined(*parts: Tokens, most: int) -> Int32[np.ndarray, " n"]:
    """Return the last tokens of several parts together."""
    return np.concatenate([np.asarray(part[-most:], np.int32) for part in parts])[-most:]


class History:
    """The last tokens of a text: those that penalties can see, and one more.

    A copy by :func:`copy.copy` shares the tokens so far; only one of the two can be appended to.

    Args:
        parts: The tokens so far, in parts; older ones than penalties can see are dropped.

    Attributes:
        size: How many tokens it was given.
        breaks: The sizes at which a token was excluded because the text looped, the last ones.
    """

    def __init__(self, *parts: Tokens) -> None:
        # Twice as many, so that the last ones are rarely moved to the front.
        self._tokens, self._end = np.empty(2 * _KEPT, np.int32), 0
        self.size = self._n_given = 0
        self.breaks: list[int] = []
        self.extend(*parts)

    def extend(self, *parts: Tokens) -> None:
        """Add tokens that were read."""
        known = joined(self.kept, *parts, most=_KEPT)
        n = sum(map(len, parts))
        self._tokens[: len(known)], self._end = known, len(known)
        self.size, self._n_given = self.size + n, self._n_given + n

    def append(self, token: int) -> None:
        """Add a token that was sampled; a copy that was made before is not changed."""
        if self._end == len(self._tokens):
            self._tokens = np.concatenate([self.kept, np.empty(_KEPT, np.int32)])
            self._end = _KEPT
        self._tokens[self._end] = token
        self._end, self.size = self._end + 1, self.size + 1

    def last(self, n: int = GenerateConfig.MAX_HISTORY) -> Int32[np.ndarray, " n"]:
        """Return the last ``n`` tokens, or all if there are fewer; a view."""
        return self._tokens[max(self._end - n, 0) : self._end]

    def sampled(self, n: int = GenerateConfig.MAX_HISTORY) -> Int32[np.ndarray, " n"]:
        """Return the last ``n`` tokens, but none that was read; a view."""
        return self.last(min(n, self.size - self._n_given))

    @property
    def kept(self) -> Int32[np.ndarray, " n"]:
        """All tokens that are kept; a view."""
        return self.last(_KEPT)

    def add_break(self) -> None:
        """Record that a token is excluded now; twice for the same size is once."""
        self.breaks = [*(x for x in self.breaks if x < self.size), self.size][-_MAX_BREAKS:]
