"""Streams that come and go in the rows of a stepper."""

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.model import LanguageModel, Memory, Stepper
from transformer_xl.model.lengths import Lengths


class Streams:
    """Streams that read a token each, batched.

    A row that a stream has left is computed on, without a past, until another takes it: to move
    the rows together for each that leaves would copy the memories of all. Only when most rows are
    free the batch becomes smaller, and larger when none is.

    Args:
        model: The model, in evaluation mode.
        mem_len: Remembered positions.
        most: Streams that there can be.
    """

    def __init__(self, model: LanguageModel, mem_len: int, most: int) -> None:
        self._model, self._most = model, most
        self._lengths = Lengths.of(model.config, segment_len=1, mem_len=mem_len, ext_len=0)
        self._stepper: Stepper | None = None
        self._is_free: list[bool] = []

    def __len__(self) -> int:
        return self._is_free.count(False)

    def add(self, memory: Memory) -> int:
        """Let a stream come, with a copy of a memory that sees all; return its row."""
        size = len(self._is_free)
        if self._stepper is None:
            self._stepper, self._is_free = Stepper.of(self._model, self._lengths, memory), [True]
        elif not any(self._is_free):
            more = min(size, self._most - size)
            self._stepper = self._stepper.select([*range(size), *[0] * more])
            self._is_free += [True] * more
        row = self._is_free.index(True)
        # Before a longer past comes: what is in the free rows is none.
        self._stepper.reset(self._free_rows())
        self._stepper.put(row, memory)
        self._is_free[row] = False
        return row

    def copy(self, row: int) -> Memory:
        """Return the memory of a stream, apart from the others."""
        assert self._stepper is not None
        return self._stepper.memory([row]).seen()

    def drop(self, row: int) -> None:
        """Let a stream go."""
        self._is_free[row] = True

    def settle(self) -> dict[int, int]:
        """Give up rows where most are free; return the new rows of those that moved."""
        n, size = len(self), len(self._is_free)
        # Not at one half already: a stream that comes and goes would move all each time.
        few = n * 2 <= size if size <= 4 else n * 8 < size * 3
        if not few or not n or self._stepper is None:
            return {}
        rows = [row for row, is_free in enumerate(self._is_free) if not is_free]
        free = max(n, size // 2) - n
        self._stepper = self._stepper.select(rows + [rows[0]] * free)
        self._is_free = [False] * n + [True] * free
        return {old: row for row, old in enumerate(rows)}

    def read(self, tokens: dict[int, int]) -> Float[Tensor, "B D"]:
        """Read a token of each stream, by its row; return the hidden states in that order."""
        assert self._stepper is not None
        self._stepper.reset(self._free_rows())
        given = torch.tensor([tokens.get(row, 0) for row in range(len(self._is_free))])
        return self._stepper(given)[list(tokens)]

    def _free_rows(self) -> list[int]:
        return [row for row, is_free in enumerate(self._is_free) if is_free]
