"""Prompts, read batched and in chunks.

:func:`transformer_xl.generate` reads a prompt in segments, within which a token sees more
than the memory holds. Here a segment is read in smaller chunks, and the memory is truncated only at
the end of a segment: the results are the same, up to rounding, and the steps of other texts are
not delayed for long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.apps.serve.texts import Text
from transformer_xl.inference.generate import PROMPT_SEGMENT, text_start
from transformer_xl.model import LanguageModel, Lengths, Memory, join, read

_CHUNKS_PER_BATCH = 8
"""A batch of chunks has at most as many tokens, with padding, as so many full chunks."""


@dataclass(eq=False)
class Reading:
    """A prompt that is being read, for one text or several that share it."""

    texts: list[Text]
    mems: Memory
    place: int = 0
    hidden: Float[Tensor, "1 D"] | None = None
    """Of the last token that was read."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens to read."""
        return self.texts[0].to_read

    @property
    def is_done(self) -> bool:
        """Whether all is read."""
        return self.place == len(self.ids)


class PromptReader:
    """Reads prompts, at most ``piece`` tokens of each at once."""

    def __init__(self, model: LanguageModel, piece: int) -> None:
        self._model, self._mem_len = model, model.config.mem_len
        # Everything read enters the memory, so no extended context is read again.
        self._lengths = Lengths.of(model.config, segment_len=PROMPT_SEGMENT, ext_len=0)
        self._start = text_start(model, self._lengths)
        self._is_kept = self._start.has_keys
        # Where results depend on the bounds of segments, a segment is read as a whole.
        can_cut = self._is_kept and not model.depends_on_segments
        self._piece = min(piece, PROMPT_SEGMENT) if can_cut else PROMPT_SEGMENT

    def reading(self, texts: list[Text]) -> Reading:
        """Return the reading of the prompt that texts have in common, before its first token."""
        mems = texts[0].mems
        start = self._start if mems is None else self._model.keep(mems)
        return Reading(texts, start.seen())

    def read(self, readings: Sequence[Reading]) -> None:
        """Read a chunk of the first prompt, batched with chunks of others."""
        group = [readings[0]]
        longest = self._length(readings[0])
        for reading in readings[1:] if self._is_kept else ():
            wider = max(longest, self._length(reading))
            if wider * (len(group) + 1) <= _CHUNKS_PER_BATCH * self._piece:
                group.append(reading)
                longest = wider
        tokens = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, reading in enumerate(group):
            chunk = reading.ids[reading.place : reading.place + self._length(reading)]
            # Padded on the right: no token sees the tokens after it.
            tokens[row, : len(chunk)] = torch.tensor(chunk, dtype=torch.int64)
        before = group[0].mems if len(group) == 1 else join([each.mems for each in group])
        # The memory is truncated only at the end of a segment.
        mem_len = len(before) + longest if self._is_kept else self._mem_len
        (piece,) = read(self._model, tokens, self._lengths._replace(mem_len=mem_len), before)
        for row, reading in enumerate(group):
            length = self._length(reading)
            reading.place += length
            reading.hidden = piece.hidden[row, length - 1 : length]
            if self._is_kept:
                stop = len(before) + length
                first = self._first(reading, length, stop)
                reading.mems = piece.mems.between(first, stop).select([row])
            else:
                reading.mems = piece.mems

    def _length(self, reading: Reading) -> int:
        """Return the length of the next chunk, which ends at most at the end of a segment."""
        left = len(reading.ids) - reading.place
        return min(left, self._piece, PROMPT_SEGMENT - reading.place % PROMPT_SEGMENT)

    def _first(self, reading: Reading, length: int, stop: int) -> int:
        """Return the first position that is remembered after a chunk, which ends at ``stop``."""
        first = stop - length - len(reading.mems)
        ids = reading.ids[reading.place - length : reading.place]
        if (reset_at := self._model.config.reset_at) in ids:
            first = stop - 1 - ids[::-1].index(reset_at)
        if reading.is_done or reading.place % PROMPT_SEGMENT == 0:
            first = max(first, stop - self._mem_len)
        return first
