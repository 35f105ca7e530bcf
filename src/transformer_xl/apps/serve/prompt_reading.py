"""Prompts, read side by side and in pieces, as one reading of each would be.

:func:`transformer_xl.generate` reads a prompt in segments, within which a token sees more
than the memory holds. Here a segment is read in smaller pieces, with a memory that is cut at the
segment's end alone: the results are the same, up to rounding, and others need not wait long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.apps.serve.seeing import most_seen, shares
from transformer_xl.apps.serve.texts import Scored, Text
from transformer_xl.inference.generate.batch import PROMPT_SEGMENT
from transformer_xl.model import LanguageModel, Memory
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import join
from transformer_xl.model.reading import read, read_all

_LEAST = -9999.0
_TOKENS_AT_ONCE = 8
"""Pieces side by side hold at most as many tokens as so many whole pieces."""


@dataclass(eq=False)
class Reading:
    """A prompt that is being read, for one text or several that begin with it."""

    texts: list[Text]
    mems: Memory
    place: int = 0
    hidden: Float[Tensor, "1 D"] | None = None
    """Of the last token that was read."""
    scored: list[Scored] = field(default_factory=list)
    attended: tuple[tuple[int, float], ...] | None = None
    """What the first token to be drawn is predicted from."""

    @property
    def ids(self) -> tuple[int, ...]:
        """What is to be read."""
        return self.texts[0].to_read

    @property
    def is_done(self) -> bool:
        """Whether all is read."""
        return self.place == len(self.ids)

    @property
    def attention(self) -> int:
        """How many places are asked for."""
        return max(text.attention for text in self.texts)


class PromptReader:
    """Reads prompts.

    Args:
        model: The model, in evaluation mode.
        mem_len: Remembered positions.
        piece: Most tokens of a prompt at once.
    """

    def __init__(self, model: LanguageModel, mem_len: int, piece: int) -> None:
        self._model, self._mem_len = model, mem_len
        # What is read is remembered; nothing is read again.
        self._lengths = Lengths.of(model.config, segment_len=PROMPT_SEGMENT, ext_len=0)
        start = model.keep(model.start_memory(1, mem_len))
        self._start, self._is_kept = start, start.has_keys
        # Where a segment's bounds show in the results, it is read as a whole.
        can_cut = self._is_kept and not model.depends_on_segments
        self._piece = min(piece, PROMPT_SEGMENT) if can_cut else PROMPT_SEGMENT

    def begin(self, texts: list[Text]) -> Reading:
        """Begin to read the prompt of texts that have it in common."""
        return Reading(texts, self.prepared(texts[0].mems))

    def prepared(self, mems: Memory | None) -> Memory:
        """Return a memory as it is read here; None: as at the start of a text."""
        return (self._start if mems is None else self._model.keep(mems)).seen()

    def read(self, readings: Sequence[Reading]) -> None:
        """Read a piece of the first of some prompts, and of others beside it."""
        group = [readings[0]]
        longest = self._length(readings[0])
        if self._is_kept:
            for reading in readings[1:]:
                wider = max(longest, self._length(reading))
                if wider * (len(group) + 1) <= _TOKENS_AT_ONCE * self._piece:
                    group.append(reading)
                    longest = wider
        self._read_beside(group, longest)

    def _length(self, reading: Reading) -> int:
        """Return how many tokens the next piece has: up to the end of a segment."""
        left = len(reading.ids) - reading.place
        return min(left, self._piece, PROMPT_SEGMENT - reading.place % PROMPT_SEGMENT)

    def _read_beside(self, group: Sequence[Reading], longest: int) -> None:
        lengths = [self._length(reading) for reading in group]
        tokens = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, (reading, length) in enumerate(zip(group, lengths, strict=True)):
            piece = reading.ids[reading.place : reading.place + length]
            # On the right: no token sees what follows it.
            tokens[row, :length] = torch.tensor(piece, dtype=torch.int64)
        before = group[0].mems if len(group) == 1 else join([each.mems for each in group])
        # Nothing is cut before the end of a segment.
        room = len(before) + longest if self._is_kept else self._mem_len
        (read_piece,) = read(self._model, tokens, self._lengths._replace(mem_len=room), before)
        hidden, after = read_piece.hidden, read_piece.mems
        for row, (reading, length) in enumerate(zip(group, lengths, strict=True)):
            self._score(reading, hidden[row, :length])
            reading.place += length
            reading.hidden = hidden[row : row + 1, length - 1]
            if self._is_kept:
                stop = len(after) - longest + length
                first = self._first_seen(reading, length, stop)
                self._look(reading, after, row, first, stop)
                is_end = reading.is_done or reading.place % PROMPT_SEGMENT == 0
                first = max(first, stop - self._mem_len) if is_end else first
                reading.mems = _row(after, row, first, stop)
            else:
                if reading.is_done and reading.attention and reading.texts[0].max_tokens:
                    # Read once more but for the last token, which is looked at alone.
                    self._look_again(reading, before, tokens[0, :length])
                reading.mems = after

    def _first_seen(self, reading: Reading, length: int, stop: int) -> int:
        """Return the oldest place that is seen after a piece, which ends at ``stop``."""
        ids = reading.ids[reading.place - length : reading.place]
        if (reset_at := self._model.config.reset_at) in ids:
            return stop - 1 - ids[::-1].index(reset_at)
        return stop - length - len(reading.mems)

    def _look(self, reading: Reading, after: Memory, row: int, first: int, stop: int) -> None:
        if reading.is_done and reading.attention and reading.texts[0].max_tokens:
            past = _row(after, row, first, stop - 1)
            seen = shares(self._model, [reading.ids[-1]], past)
            reading.attended = most_seen(seen[0], reading.attention)

    def _look_again(self, reading: Reading, before: Memory, tokens: Tensor) -> None:
        lengths = self._lengths._replace(mem_len=len(before) + len(tokens))
        past = read_all(self._model, tokens[None, :-1], lengths, before)
        seen = shares(self._model, [int(tokens[-1])], past)
        reading.attended = most_seen(seen[0], reading.attention)

    def _score(self, reading: Reading, hidden: Float[Tensor, "T D"]) -> None:
        """Score the tokens of the prompt that a piece predicts."""
        first = reading.texts[0]
        if not first.scores_prompt:
            return
        following = first.prompt[reading.place + 1 : reading.place + 1 + len(hidden)]
        if following:
            found = scored(self._model, hidden[: len(following)], following, first.logprobs or 0)
            reading.scored += found


def scored(
    model: LanguageModel, hidden: Float[Tensor, "n D"], tokens: Sequence[int], most: int
) -> list[Scored]:
    """Score tokens by the hidden states that predict them."""
    # JSON has no word for the logarithm of zero.
    log_probs = model.head.log_probs(hidden).clamp(min=_LEAST)
    values, likeliest = log_probs.topk(min(most, log_probs.shape[-1]))
    own = log_probs[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
    return [
        Scored(token, log_prob, tuple(zip(row, near, strict=True)))
        for token, log_prob, row, near in zip(
            tokens, own, likeliest.tolist(), values.tolist(), strict=True
        )
    ]


def _row(memory: Memory, row: int, first: int, stop: int) -> Memory:
    """Copy some positions of one stream."""
    return Memory(memory.store.between(first, stop)).select([row])
