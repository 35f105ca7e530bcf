"""The memory as ``past_key_values``."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from transformer_xl.model import LanguageModel, Memory, Stepper
from transformer_xl.model.lengths import Lengths

# Enough to tell a text that was read from one that goes on.
_TAIL = 16


class TransformerXLCache(Cache):
    """What a model remembers of the texts of a batch: one of our memories.

    A call of the model returns a new one and leaves the one that it was given as it is, so that
    several continuations can begin with the same memory.

    Within ``generate``, where nobody else has it, single tokens are read by a stepper, which goes
    on from cache to cache.

    Attributes:
        seen: How many columns of tokens it has read, padding included.
        tail: The last tokens that were read; None where vectors were.
        is_stepped: Whether the next call may move the stepper on, so that this cache is of no use
            any more.
    """

    is_compileable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_croppable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_initialized = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, mems: Memory | Stepper, seen: int = 0, tail: Tensor | None = None) -> None:
        super().__init__(layers=[])
        self._at, self.seen, self.tail = mems, seen, tail
        self.is_stepped = False

    @property
    def mems(self) -> Memory:
        """The memory, as :class:`~transformer_xl.TransformerXL` takes and returns it."""
        return self._at if isinstance(self._at, Memory) else self._at.memory()

    def stepper(self, model: LanguageModel) -> Stepper:
        """Return what goes on from here by single tokens."""
        if isinstance(self._at, Stepper):
            return self._at
        return Stepper.of(model, Lengths.of(model.config, ext_len=0), self._at)

    def after(
        self, mems: Memory | Stepper, columns: int, tokens: Tensor | None
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
        return len(self.mems.store.tensors()[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.batch_size} texts, {self.seen} tokens read)"

    @property
    def batch_size(self) -> int:
        """How many texts it remembers."""
        return self._at.batch_size

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
        at = self._at
        self._at = at.take(indices) if isinstance(at, Stepper) else at.select(indices)
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
        self._at = self.mems.reset(torch.arange(self.batch_size))
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
