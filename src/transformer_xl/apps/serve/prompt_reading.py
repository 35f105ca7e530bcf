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

from transformer_xl.apps.serve.texts import Scored, Shares, Text
from transformer_xl.inference.generate import PROMPT_SEGMENT, text_start
from transformer_xl.model import LanguageModel, Lengths, Memory, join, read, read_all

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
    attended: Shares | None = None
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
        """How many positions of the first new token's attention are asked for."""
        return max(text.attention if text.max_tokens else 0 for text in self.texts)


class PromptReader:
    """Reads prompts, at most ``piece`` tokens of each at once."""

    def __init__(self, model: LanguageModel, piece: int) -> None:
        self._model, self._mem_len = model, model.config.mem_len
        # Everything read enters the memory, so no extended context is read again.
        self._lengths = Lengths.of(model.config, segment_len=PROMPT_SEGMENT, ext_len=0)
        self._start = text_start(model, self._lengths)
        self._empty = model.keep(model.start_memory(1, self._mem_len))
        self._is_kept = self._start.has_keys
        # Where results depend on the bounds of segments, a segment is read as a whole.
        can_cut = self._is_kept and not model.depends_on_segments
        self._piece = min(piece, PROMPT_SEGMENT) if can_cut else PROMPT_SEGMENT

    def prepared(self, mems: Memory) -> Memory:
        """Return a memory in the form that is read here."""
        return self._model.keep(mems).seen()

    def start_of(self, text: Text) -> Memory:
        """Return the memory with which a text starts."""
        if text.mems is not None:
            return self.prepared(text.mems)
        return (self._start if text.has_preface else self._empty).seen()

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
            hidden = piece.hidden[row, :length]
            self._score(reading, hidden)
            reading.place += length
            reading.hidden = hidden[-1:]
            if self._is_kept:
                self._keep(reading, piece.mems, row, length, len(before) + length)
                continue
            if reading.is_done and reading.attention:
                # Read again up to the last token, whose attention is computed alone.
                whole = self._lengths._replace(mem_len=len(before) + length)
                past = read_all(self._model, tokens[:1, : length - 1], whole, before)
                self._set_attention(reading, past)
            reading.mems = piece.mems

    def _length(self, reading: Reading) -> int:
        """Return the length of the next chunk, which ends at most at the end of a segment."""
        left = len(reading.ids) - reading.place
        return min(left, self._piece, PROMPT_SEGMENT - reading.place % PROMPT_SEGMENT)

    def _keep(self, reading: Reading, after: Memory, row: int, length: int, stop: int) -> None:
        """Set the memory of a prompt after a chunk, whose last position is before ``stop``."""
        first = stop - length - len(reading.mems)
        ids = reading.ids[reading.place - length : reading.place]
        if (reset_at := self._model.config.reset_at) in ids:
            first = stop - 1 - ids[::-1].index(reset_at)
        if reading.is_done and reading.attention:
            self._set_attention(reading, _row(after, row, first, stop - 1))
        if reading.is_done or reading.place % PROMPT_SEGMENT == 0:
            first = max(first, stop - self._mem_len)
        reading.mems = _row(after, row, first, stop)

    def _set_attention(self, reading: Reading, past: Memory) -> None:
        seen = shares(self._model, reading.ids[-1], past)
        reading.attended = most_seen(seen, reading.attention)

    def _score(self, reading: Reading, hidden: Float[Tensor, "T D"]) -> None:
        """Score the tokens of the prompt that a chunk predicts."""
        first = reading.texts[0]
        following = first.prompt[reading.place + 1 : reading.place + 1 + len(hidden)]
        if first.scores_prompt and following:
            hidden = hidden[: len(following)]
            reading.scored += scored(self._model, hidden, following, first.logprobs or 0)


def scored(
    model: LanguageModel, hidden: Float[Tensor, "n D"], tokens: Sequence[int], most: int
) -> list[Scored]:
    """Score tokens by the hidden states that predict them."""
    # JSON has no infinity.
    log_probs = model.head.log_probs(hidden).clamp(min=_MIN_LOG_PROB)
    values, likeliest = log_probs.topk(min(most, log_probs.shape[-1]))
    chosen = log_probs[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
    near = zip(likeliest.tolist(), values.tolist(), strict=True)
    return [
        Scored(token, log_prob, tuple(zip(*top, strict=True)))
        for token, log_prob, top in zip(tokens, chosen, near, strict=True)
    ]


def shares(model: LanguageModel, token: int, mems: Memory) -> Float[Tensor, " S"]:
    """Return the shares of attention of a token, oldest position first.

    They are the mean over heads and layers and add up to one; the last is the token's own.
    """
    newest = torch.tensor([[token]], device=model.device)
    weights = torch.stack(model.attention_weights(newest, mems)).float()
    return weights[..., -1, :].mean((0, 2))[0].cpu()


def most_seen(seen: Float[Tensor, " S"], most: int) -> Shares:
    """Return distances (0: the newest position) and shares of the largest ones, descending."""
    values, places = seen.topk(min(most, len(seen)))
    last = len(seen) - 1
    pairs = zip(places.tolist(), values.tolist(), strict=True)
    return tuple((last - place, share) for place, share in pairs if share > 0)


def _row(memory: Memory, row: int, first: int, stop: int) -> Memory:
    """Copy some positions of one stream."""
    return memory.between(first, stop).select([row])
