"""The memory as ``past_key_values``."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from transformer_xl.nn import KeptMemory, Memory

# Enough to tell a text that was read from one that goes on.
_TAIL = 16


class TransformerXLCache(Cache):
    """What a model remembers of the texts of a batch: one of our memories.

    A call of the model returns a new one and leaves the one that it was given as it is, so that
    several continuations can begin with the same memory.

    Attributes:
        mems: The memory, as :class:`~transformer_xl.TransformerXL` takes and returns it.
        seen: How many columns of tokens it has read, padding included.
        tail: The last tokens that were read; None where vectors were.
    """

    is_compileable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_croppable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_initialized = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(
        self, mems: Memory | KeptMemory, seen: int = 0, tail: Tensor | None = None
    ) -> None:
        super().__init__(layers=[])
        self.mems, self.seen, self.tail = mems, seen, tail

    def after(
        self, mems: Memory | KeptMemory, columns: int, tokens: Tensor | None
    ) -> "TransformerXLCache":
        """Return the cache after more columns were read."""
        tail = None
        if tokens is not None and (self.tail is not None or not self.seen):
            before = [] if self.tail is None else [self.tail]
            tail = torch.cat([*before, tokens[:, -_TAIL:]], 1)[:, -_TAIL:]
        return TransformerXLCache(mems, self.seen + columns, tail)

    def is_beginning_of(self, tokens: Tensor) -> bool:
        """Whether these tokens begin with the ones that were read; not only the ones to come."""
        if tokens.shape[1] < self.seen:
            return False
        if self.tail is None:
            return tokens.shape[1] > self.seen
        own = tokens[:, self.seen - self.tail.shape[1] : self.seen].to(self.tail.device)
        times = len(self.tail) // max(len(own), 1)
        return torch.equal(own.repeat_interleave(times, 0), self.tail)

    def __len__(self) -> int:
        states = self.mems.states if isinstance(self.mems, Memory) else self.mems.keys
        return len(states)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.batch_size} texts, {self.seen} tokens read)"

    @property
    def batch_size(self) -> int:
        """How many texts it remembers."""
        return self.mems.batch_size

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many columns of tokens were read, padding included."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: texts may be of any length."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many columns a mask has to cover, and that it begins with the first."""
        return self.seen + query_length, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the texts with these numbers, in this order; repetition is allowed."""
        self.mems = self.mems.select(indices)
        if self.tail is not None:
            self.tail = self.tail[indices.to(self.tail.device)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the texts into another order, as beams ask for."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each text."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def repeated(self, repeats: int) -> "TransformerXLCache":
        """Return another cache with each text repeated."""
        cache = TransformerXLCache(self.mems, self.seen, self.tail)
        cache.batch_repeat_interleave(repeats)
        return cache

    def reset(self) -> None:
        """Forget everything."""
        self.mems = self.mems.reset(torch.arange(self.batch_size))
        self.seen, self.tail = 0, None

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: what has left the memory cannot be brought back."""
        raise NotImplementedError(
            "a memory cannot be rolled back to an earlier token: keep the cache of that time"
        )


def own_cache(cache: Any) -> TransformerXLCache | None:
    """Return what came as ``past_key_values``, if it is ours.

    Raises:
        TypeError: It is a cache of another kind.
    """
    if cache is None or isinstance(cache, TransformerXLCache):
        return cache
    raise TypeError(
        f"past_key_values is a {type(cache).__name__}, a Transformer-XL takes what its last call "
        "returned as past_key_values (a TransformerXLCache), or None to begin"
    )
