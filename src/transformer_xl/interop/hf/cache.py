"""The memory of a batch of texts as a cache of transformers.

It can be cropped, as far as positions reach that were kept, which assisted generation needs.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from transformer_xl.errors import InputError
from transformer_xl.model import Decoder, LanguageModel, Lengths, Memory, Segment

# Enough tokens to distinguish the whole text from its continuation.
_TAIL = 16
REWIND = 128
"""Positions beyond ``mem_len`` that a recording cache keeps, to be cropped by as many tokens."""


class TransformerXLCache(Cache):
    """The memory of a batch of texts, as a cache of transformers.

    A call of the model returns a new one and does not change its input, so that several
    continuations can start from the same memory. Within ``generate``, which does not share its
    cache, single tokens are read by a decoder that is passed from cache to cache.

    Attributes:
        seen: Number of columns of tokens that were read, including padding.
        tail: The last tokens that were read; None for vectors, and in traced programs.
        mem_len: Length of the memory; None: a single state, which cannot be cropped.
        is_stepped: Whether the next call may advance the decoder, which invalidates this cache.
        is_recording: Whether calls keep positions beyond ``mem_len`` for :meth:`crop`, as
            :meth:`activate_past_recording` asks. Each token then sees ``mem_len`` positions and
            itself, however many are read at once.
    """

    is_initialized = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(
        self,
        mems: Memory | Decoder,
        seen: int = 0,
        tail: Tensor | None = None,
        *,
        mem_len: int | None = None,
    ) -> None:
        super().__init__(layers=[])
        self._at, self.seen, self.tail, self.mem_len = mems, seen, tail, mem_len
        self.is_stepped = self.is_recording = False
        # How many of the newest columns hold no padding and no start of a document within the
        # texts, so that rows can be cropped alike.
        self._whole = 0
        # The memory of one text that has not begun, if it is not empty: zeros, or a preface.
        self._beginning: Memory | None = None

    @classmethod
    def start(
        cls, model: LanguageModel, batch_size: int, beginning: Memory | None = None
    ) -> "TransformerXLCache":
        """Return the cache of texts that have not begun, or that begin with another memory."""
        mem_len = model.config.mem_len if model.remembers_positions else None
        if beginning is not None:
            mems = beginning.select([0] * batch_size)
        else:
            mems = model.start_memory(batch_size)
            if model.config.start_memory != "empty":
                beginning = model.start_memory(1)
        cache = cls(mems, mem_len=mem_len)
        cache._beginning = beginning
        return cache

    @property
    def mems(self) -> Memory:
        """The memory, as in calls of :class:`~transformer_xl.TransformerXL`."""
        return self._at if isinstance(self._at, Memory) else self._at.memory()

    def lengths(self, model: LanguageModel, segment_len: int) -> Lengths:
        """Return the lengths with which the next tokens are read."""
        # Everything read enters the memory, so no extended context is read again.
        lengths = Lengths.of(model.config, segment_len=segment_len, ext_len=0)
        if not (self.is_recording and model.remembers_positions):
            return lengths
        return lengths.windowed()._replace(mem_len=lengths.mem_len + REWIND)

    def decoder(self, model: LanguageModel) -> Decoder:
        """Return the decoder that continues from this memory."""
        if isinstance(self._at, Decoder):
            return self._at
        return Decoder.of(model, self.lengths(model, 1), self._at)

    def after(
        self, mems: Memory | Decoder, segment: Segment, *, is_padded: bool = False
    ) -> "TransformerXLCache":
        """Return the cache after a segment was read."""
        tail, tokens = None, segment.tokens
        is_kept = (self.tail is not None or not self.seen) and not torch.compiler.is_compiling()
        if tokens is not None and is_kept:
            before = [] if self.tail is None else [self.tail]
            tail = torch.cat([*before, tokens[:, -_TAIL:]], 1)[:, -_TAIL:]
        T = segment.shape[1]
        cache = self._with(mems, self.seen + T, tail)
        # In traced programs nothing depends on values.
        starts = segment.starts is not None and (
            torch.compiler.is_compiling() or bool(segment.starts[:, int(not self.seen) :].any())
        )
        cache._whole = 0 if is_padded or starts else self._whole + T
        return cache

    def _with(self, mems: Memory | Decoder, seen: int, tail: Tensor | None) -> "TransformerXLCache":
        cache = TransformerXLCache(mems, seen, tail, mem_len=self.mem_len)
        cache.is_recording, cache._beginning = self.is_recording, self._beginning
        return cache

    def is_beginning_of(self, tokens: Tensor) -> bool:
        """Whether these tokens are the whole text, including those that were read already."""
        if tokens.shape[1] < self.seen:
            return False
        if self.tail is None:
            return tokens.shape[1] > self.seen
        newest = tokens[:, self.seen - self.tail.shape[1] : self.seen].to(self.tail.device)
        times = len(self.tail) // max(len(newest), 1)
        return torch.equal(newest.repeat_interleave(times, 0), self.tail)

    def __len__(self) -> int:
        return len(self.mems.by_name()[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.batch_size} texts, {self.seen} tokens read)"

    @property
    def batch_size(self) -> int:
        """Number of texts."""
        return self._at.batch_size

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of tokens that were read, including padding."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the length of texts is not limited."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of columns of a mask and its offset, 0."""
        return self.seen + query_length, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select texts by index; repetition is allowed."""
        mems = self._at
        self._at = mems.take(indices) if isinstance(mems, Decoder) else mems.select(indices)
        if self.tail is not None:
            self.tail = self.tail[indices.to(self.tail.device)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the texts for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each text."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def repeated(self, repeats: int) -> "TransformerXLCache":
        """Return another cache with each text repeated."""
        cache = self._with(self.mems, self.seen, self.tail)
        cache._whole = self._whole
        cache.batch_repeat_interleave(repeats)
        return cache

    def reset(self) -> None:
        """Forget everything."""
        if self._beginning is None:
            self._at = self.mems.reset(torch.arange(self.batch_size))
        else:
            self._at = self._beginning.select([0] * self.batch_size)
        self.seen, self.tail, self._whole = 0, None, 0

    @property
    def is_croppable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether there are positions to crop, instead of a single state."""
        return self.mem_len is not None

    def activate_past_recording(self) -> None:
        """Have the next calls keep positions beyond ``mem_len``, to which :meth:`crop` returns."""
        self.is_recording = True

    def stop_recording(self) -> None:
        """Drop the positions beyond ``mem_len``; the next calls keep none."""
        if self.is_recording and self.mem_len is not None:
            self._at = self.mems.last(self.mem_len)
        self.is_recording = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens.

        Args:
            tokens_to_remove: How many, with a minus sign, as transformers counts them; 0: none.

        Raises:
            InputError: The number is positive or larger than the text; the memory is a single
                state; the memory before these tokens is no longer complete; or a row is padded
                or a document starts within them, or a row is padded before them on the right.
        """
        n = -tokens_to_remove
        if n == 0:
            return
        if not 0 < n <= self.seen:
            raise InputError(
                f"tokens_to_remove={tokens_to_remove} must be 0 or the negative number of the "
                f"newest tokens to forget, of {self.seen} that were read"
            )
        mems = self.mems
        if self.mem_len is None:
            raise InputError(
                "the memory is a single state, from which no token can be removed: keep the cache "
                "of that time, which later calls do not change"
            )
        if n > self._whole:
            raise InputError(
                f"tokens_to_remove={tokens_to_remove}: of the newest columns only {self._whole} "
                "are known to be without padding and starts of documents; keep the cache of that "
                "time instead"
            )
        needed = self.seen - n
        if self._beginning is not None:
            # All positions with which a text began were needed from the start.
            needed += len(self._beginning)
        if mems.forgotten is not None:
            # Of a text with masked positions, all that it sees is there.
            needed = needed if bool((mems.forgotten == 0).any()) else 0
        if len(mems) - n < min(needed, self.mem_len):
            raise InputError(
                f"tokens_to_remove={tokens_to_remove}: the positions before them have left the "
                f"memory (mem_len={self.mem_len}); keep the cache of that time, or call "
                f"activate_past_recording() before reading, which keeps {REWIND} more"
            )
        stop = len(mems) - n
        hidden = None if mems.forgotten is None else mems.forgotten.clamp(max=stop)
        self._at, self.seen = mems.between(0, stop).masking(hidden), self.seen - n
        self._whole -= n
        if self.tail is not None:
            self.tail = self.tail[:, : max(self.tail.shape[1] - n, 0)]


def own_cache(cache: Any) -> TransformerXLCache | None:
    """Return ``past_key_values`` if it is our cache, or None.

    Raises:
        TypeError: It is a cache of another kind.
    """
    if cache is None or isinstance(cache, TransformerXLCache):
        return cache
    raise TypeError(
        f"past_key_values is a {type(cache).__name__}, a Transformer-XL takes what its last call "
        "returned as past_key_values (a TransformerXLCache), or None to begin; in place of prefix "
        "tuning, which makes a cache of its own, use prompt tuning or LoRA"
    )
