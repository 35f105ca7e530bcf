"""Prompts, read batched and in chunks, with the results of reading each at once.

:func:`transformer_xl.generate` reads a prompt in segments, within which a token sees more
than the memory holds. Here a segment is read in smaller chunks, and the memory is truncated only at
the end of a segment: the results are the same, up to rounding, and the steps of other texts are
not delayed for long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.apps.serve.texts import Scored, Text
from transformer_xl.inference.generate.batch import PROMPT_SEGMENT
from transformer_xl.model import LanguageModel, Memory
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import join
from transformer_xl.model.reading import read, read_all

_MIN_LOG_PROB = -9999.0
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
    scored: list[Scored] = field(default_factory=list)
    attended: tuple[tuple[int, float], ...] | None = None
    """The attention with which the first new token is predicted."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens to read."""
        return self.texts[0].to_read

    @property
    def is_done(self) -> bool:
        """Whether all is read."""
        return self.place == len(self.ids)

    @property
    def attention(self) -> int:
        """How many positions of the largest attention the texts request."""
        return max(text.attention for text in self.texts)

    @property
    def is_looked_at(self) -> bool:
        """Whether the attention of the first new token is to be computed."""
        return bool(self.is_done and self.attention and self.texts[0].max_tokens)


class PromptReader:
    """Reads prompts, at most ``piece`` tokens of each at once."""

    def __init__(self, model: LanguageModel, mem_len: int, piece: int) -> None:
        self._model, self._mem_len = model, mem_len
        # Everything read enters the memory, so no extended context is read again.
        self._lengths = Lengths.of(model.config, segment_len=PROMPT_SEGMENT, ext_len=0)
        start = model.keep(model.start_memory(1, mem_len))
        self._start, self._is_kept = start, start.has_keys
        # Where results depend on the bounds of segments, a segment is read as a whole.
        can_cut = self._is_kept and not model.depends_on_segments
        self._piece = min(piece, PROMPT_SEGMENT) if can_cut else PROMPT_SEGMENT

    def begin(self, texts: list[Text]) -> Reading:
        """Begin to read the prompt that the texts share."""
        return Reading(texts, self.prepared(texts[0].mems))

    def prepared(self, mems: Memory | None) -> Memory:
        """Return a memory in the form that is read here; None: that of the start of a text."""
        return (self._start if mems is None else self._model.keep(mems)).seen()

    def read(self, readings: Sequence[Reading]) -> None:
        """Read a chunk of the first prompt, batched with chunks of others."""
        group = [readings[0]]
        longest = self._length(readings[0])
        if self._is_kept:
            for reading in readings[1:]:
                wider = max(longest, self._length(reading))
                if wider * (len(group) + 1) <= _CHUNKS_PER_BATCH * self._piece:
                    group.append(reading)
                    longest = wider
        self._read_batch(group, longest)

    def _length(self, reading: Reading) -> int:
        """Return the length of the next chunk, which ends at most at the end of a segment."""
        left = len(reading.ids) - reading.place
        return min(left, self._piece, PROMPT_SEGMENT - reading.place % PROMPT_SEGMENT)

    def _read_batch(self, group: Sequence[Reading], longest: int) -> None:
        lengths = [self._length(reading) for reading in group]
        tokens = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, (reading, length) in enumerate(zip(group, lengths, strict=True)):
            piece = reading.ids[reading.place : reading.place + length]
            # Padded on the right: no token sees the tokens after it.
            tokens[row, :length] = torch.tensor(piece, dtype=torch.int64)
        before = group[0].mems if len(group) == 1 else join([each.mems for each in group])
        # The memory is truncated only at the end of a segment.
        mem_len = len(before) + longest if self._is_kept else self._mem_len
        (read_piece,) = read(self._model, tokens, self._lengths._replace(mem_len=mem_len), before)
        hidden, after = read_piece.hidden, read_piece.mems
        for row, (reading, length) in enumerate(zip(group, lengths, strict=True)):
            self._score(reading, hidden[row, :length])
            reading.place += length
            reading.hidden = hidden[row : row + 1, length - 1]
            if self._is_kept:
                stop = len(after) - longest + length
                first = self._first_seen(reading, length, stop)
                if reading.is_looked_at:
                    self._set_attention(reading, _row(after, row, first, stop - 1))
                is_end = reading.is_done or reading.place % PROMPT_SEGMENT == 0
                first = max(first, stop - self._mem_len) if is_end else first
                reading.mems = _row(after, row, first, stop)
            else:
                if reading.is_looked_at:
                    # Read again up to the last token, whose attention is computed alone.
                    whole = self._lengths._replace(mem_len=len(before) + length)
                    self._set_attention(
                        reading, read_all(self._model, tokens[:1, : length - 1], whole, before)
                    )
                reading.mems = after

    def _first_seen(self, reading: Reading, length: int, stop: int) -> int:
        """Return the oldest position that is visible after a chunk that ends at ``stop``."""
        ids = reading.ids[reading.place - length : reading.place]
        if (reset_at := self._model.config.reset_at) in ids:
            return stop - 1 - ids[::-1].index(reset_at)
        return stop - length - len(reading.mems)

    def _set_attention(self, reading: Reading, past: Memory) -> None:
        seen = shares(self._model, [reading.ids[-1]], past)
        reading.attended = most_seen(seen[0], reading.attention)

    def _score(self, reading: Reading, hidden: Float[Tensor, "T D"]) -> None:
        """Score the tokens of the prompt that a chunk predicts."""
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
    # JSON has no infinity.
    log_probs = model.head.log_probs(hidden).clamp(min=_MIN_LOG_PROB)
    values, likeliest = log_probs.topk(min(most, log_probs.shape[-1]))
    own = log_probs[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
    return [
        Scored(token, log_prob, tuple(zip(row, near, strict=True)))
        for token, log_prob, row, near in zip(
            tokens, own, likeliest.tolist(), values.tolist(), strict=True
        )
    ]


def shares(model: LanguageModel, tokens: Sequence[int], mems: Memory) -> Float[Tensor, "B S"]:
    """Return, for the token of each stream, its shares of attention, oldest position first.

    They are the mean over heads and layers and add up to one; the last is the token's own.
    """
    newest = torch.tensor(tokens, device=model.device)[:, None]
    weights = torch.stack(model.attention_weights(newest, mems)).float()
    return weights[..., -1, :].mean((0, 2)).cpu()


def most_seen(seen: Float[Tensor, " S"], most: int) -> tuple[tuple[int, float], ...]:
    """Return distances (0: the newest position) and shares of the largest ones, descending."""
    values, places = seen.topk(min(most, len(seen)))
    last = len(seen) - 1
    found = zip(places.tolist(), values.tolist(), strict=True)
    return tuple((last - place, share) for place, share in found if share > 0)


def _row(memory: Memory, row: int, first: int, stop: int) -> Memory:
    """Copy some positions of one stream."""
    return Memory(memory.store.between(first, stop)).select([row])
