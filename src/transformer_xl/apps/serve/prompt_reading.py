"""Prompts, read batched and in chunks, so that the steps of other texts are not delayed for long.

Every token sees equally many positions, as with :func:`transformer_xl.generate`, so that results
are the same, up to rounding.
"""

from collections.abc import Sequence

import torch

from transformer_xl.apps.serve.prefixes import Prefixes
from transformer_xl.apps.serve.texts import Text
from transformer_xl.inference.generate import (
    PROMPT_SEGMENT,
    REWINDABLE,
    prompt_lengths,
    rewindable_after,
    text_start,
)
from transformer_xl.model import LanguageModel, Memory, read

_CHUNKS_PER_BATCH = 8
"""A batch of chunks has at most as many tokens, with padding, as so many full chunks."""


class PromptReader:
    """Reads the prompts of texts, at most ``piece`` tokens of each at once."""

    def __init__(self, model: LanguageModel, piece: int, prefixes: Prefixes) -> None:
        self._prefixes = prefixes
        self._model, self._lengths = model, prompt_lengths(model, None, REWINDABLE)
        self._start = text_start(model, self._lengths)
        self._is_kept = self._start.has_keys
        # Where results depend on the bounds of segments, a segment is read as a whole.
        can_cut = self._is_kept and not model.depends_on_segments
        self._piece = min(piece, PROMPT_SEGMENT) if can_cut else PROMPT_SEGMENT

    def begin(self, text: Text) -> None:
        """Set the memory before the first token of a prompt."""
        text.begun = text.start
        if text.start is None:
            text.begun, n_known = self._prefixes.find(text.prompt)
            if text.begun is not None:
                # All but the last token that both have.
                text.n_cached = text.begun.n_tokens - 1
            text.n_recomputed = max(n_known - 1 - text.n_cached, 0)
        mems = self._start if text.begun is None else self._model.keep(text.begun.mems)
        text.mems = mems.seen()

    def rewindable(self, text: Text) -> int:
        """Return by how many tokens the state of a text can be rewound at its end."""
        begun, n_begin = text.begun, len(self._start)
        known = (n_begin, n_begin) if begun is None else (begun.rewindable, begun.n_positions)
        # The last token is not in the memory.
        n = text.n_read + max(len(text.written) - 1, 0)
        return rewindable_after(*known, n, self._lengths, self._model)

    def read(self, texts: Sequence[Text]) -> None:
        """Read a chunk of the first prompt, batched with chunks of others."""
        group = [texts[0]]
        longest = self._length(texts[0])
        for text in texts[1:] if self._is_kept else ():
            wider = max(longest, self._length(text))
            if wider * (len(group) + 1) <= _CHUNKS_PER_BATCH * self._piece:
                group.append(text)
                longest = wider
        tokens = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, text in enumerate(group):
            chunk = text.to_read[text.n_read : text.n_read + self._length(text)]
            # Padded on the right: no token sees the tokens after it.
            tokens[row, : len(chunk)] = torch.tensor(chunk, dtype=torch.int64)
        memories = [text.mems for text in group if text.mems is not None]
        before = memories[0] if len(group) == 1 else Memory.cat(memories)
        # Of rows that end earlier, padding is at the end of the memory: it is cut below.
        mem_len = len(before) + longest if self._is_kept else self._lengths.mem_len
        (piece,) = read(self._model, tokens, self._lengths._replace(mem_len=mem_len), before)
        for row, (text, memory) in enumerate(zip(group, memories, strict=True)):
            length = self._length(text)
            text.n_read += length
            text.hidden = piece.hidden[row, length - 1 : length]
            text.mems = piece.mems
            if self._is_kept:
                stop = len(before) + length
                first = self._first(text, stop - length - len(memory), stop)
                text.mems = piece.mems.between(first, stop).select([row])

    def _length(self, text: Text) -> int:
        """Return the length of the next chunk."""
        return min(len(text.to_read) - text.n_read, self._piece)

    def _first(self, text: Text, first: int, stop: int) -> int:
        """Return the first position that is remembered of those from ``first`` to ``stop``."""
        ids = text.to_read[max(text.n_read - (stop - first), 0) : text.n_read]
        if (reset_at := self._model.config.reset_at) in ids:
            first = max(first, stop - 1 - ids[::-1].index(reset_at))
        return max(first, stop - self._lengths.mem_len)
