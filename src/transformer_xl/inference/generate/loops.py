"""Loops: a text that repeats one sequence of tokens."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from transformer_xl.inference.generate.history import History

_COUNT_AFTER_BREAK = 2
_MOST_COMPARED = 256
"""Tokens that are compared for all lengths at once; the rest for each that is left."""


class LoopRule(NamedTuple):
    """What counts as a loop: one sequence of tokens, repeated at the end of a text.

    The last repetition may be incomplete. Only exact repetitions are found, of at most
    ``max_period`` tokens; a counter that goes on, for example, is none.
    """

    min_length: int
    """How many tokens all repetitions have together, at least."""
    min_count: int = 4
    """How often it stands there, at least."""
    max_period: int = 256
    """Length of the longest sequence."""

    def period(self, tokens: Int32[np.ndarray, " n"]) -> int:
        """Return the length of the shortest sequence that a text repeats at its end; 0: none."""
        most = min(self.max_period, len(tokens) // self.min_count)
        if most < 1 or len(tokens) < self.min_length:
            return 0
        (periods,) = np.nonzero(tokens[-2 : -most - 2 : -1] == tokens[-1])
        periods += 1
        # Every sequence repeats so many tokens at least: compared at once for all lengths.
        n = max(self.min_length - self.min_length // self.min_count, self.min_count - 1)
        n = min(n, _MOST_COMPARED)
        if len(periods) > 1:
            before = np.lib.stride_tricks.sliding_window_view(tokens[-most - n : -1], n)
            is_equal = (before[len(before) - periods] == tokens[-n:]).all(1)
            periods = periods[is_equal]
        return next((p for p in periods.tolist() if self._repeats(tokens, p)), 0)

    def _repeats(self, tokens: Int32[np.ndarray, " n"], period: int) -> bool:
        end = tokens[-max(self.min_length, self.min_count * period) :]
        return np.array_equal(end[period:], end[:-period])

    def after_breaks(self, history: History) -> "LoopRule":
        """Return the rule for a text whose loops were broken: shorter ones count as loops.

        Otherwise, a model that goes on with the loop would write ``min_length`` tokens of it
        again. With each broken loop, the length is halved, until the text has ``min_length`` tokens
        without one.
        """
        at, n = history.size, 0
        for size in reversed(history.breaks):
            if size == history.size:
                continue
            if at - size >= self.min_length:
                break
            at, n = size, n + 1
        if not n:
            return self
        return LoopRule(max(self.min_length >> n, 1), _COUNT_AFTER_BREAK, self.max_period)
