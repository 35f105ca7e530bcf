"""Texts that were read before: a prompt that begins as one of them is read from where they part."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from transformer_xl.inference.generate import State


class Found(NamedTuple):
    """What is known of a prompt."""

    state: State | None = None
    """The state after its longest beginning from which it can go on."""
    n_known: int = 0
    """How many of its first tokens a text began with, whether its state can be rewound to there or
    not."""


class Prefixes:
    """The states of the last texts that began anew, used by the engine's thread alone.

    Args:
        most_bytes: Bytes of all states at most; the ones that were not used for longest are
            forgotten. 0: none is kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most, self._bytes = most_bytes, 0
        self._states: OrderedDict[bytes, tuple[Int32[np.ndarray, " n"], State]] = OrderedDict()

    @property
    def is_used(self) -> bool:
        """Whether states are kept."""
        return self._most > 0

    def add(self, tokens: Sequence[int], state: State) -> None:
        """Keep the state of a text with these tokens, the last of which is not in its memory."""
        read = np.array(tokens, np.int32)
        self._forget(key := read.tobytes())
        self._states[key] = read, state
        self._bytes += state.nbytes
        while self._bytes > self._most:
            self._forget(next(iter(self._states)))

    def find(self, prompt: Sequence[int]) -> Found:
        """Return what is known of a prompt."""
        asked, best, n_known = np.array(prompt, np.int32), (0, b""), 0
        for key, (read, state) in self._states.items():
            shorter = min(len(read), len(asked))
            (differing,) = np.nonzero(read[:shorter] != asked[:shorter])
            n = int(differing[0]) if len(differing) else shorter
            n_known = max(n_known, n)
            if n and len(read) - n <= state.rewindable:
                best = max(best, (n, key))
        n, key = best
        if not n:
            return Found(None, n_known)
        self._states.move_to_end(key)
        read, state = self._states[key]
        return Found(state.rewind(len(read) - n), n_known)

    def _forget(self, key: bytes) -> None:
        if (known := self._states.pop(key, None)) is not None:
            self._bytes -= known[1].nbytes
