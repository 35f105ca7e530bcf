"""Prompts of a batch: checked, and read into a memory."""

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.errors import InputError
from transformer_xl.model import (
    LanguageModel,
    Lengths,
    Memory,
    as_tokens,
    evaluating,
    read,
    read_all,
    shown,
    whole,
)

PROMPT_SEGMENT = 512
"""Segment length for prompts, which bounds the memory use of long ones."""


class Prompts:
    """The prompts of a batch, with the memory before them.

    Attributes:
        tokens: The tokens of each prompt.
        lengths: As the argument.

    Args:
        model: The model.
        prompts: The prompts in tokens.
        mems: The memory to start with. None: start of a text, after the preface of the model.
        lengths: The lengths with which they are read and continued, as of :func:`prompt_lengths`.
        length: Number of tokens to generate for each. None: any.

    Raises:
        ValueError: A prompt is empty or has a token outside the vocabulary, or the memory does not
            fit the model or the prompts.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[object],
        mems: Memory | None,
        lengths: Lengths,
        length: int | None,
    ) -> None:
        if isinstance(prompts, str) or not len(prompts):
            raise InputError(f"prompts={shown(prompts)}: give a list of prompts, one at least")
        self._model, self._start, self.lengths = model, mems, lengths
        tokens = [as_tokens(prompt, model.config, "the prompt").tolist() for prompt in prompts]
        if not all(tokens):
            raise InputError("the prompt is empty: give at least one token to continue")
        self.tokens = [(*each,) for each in tokens]
        longest = max(map(len, self.tokens)) + len(model.preface)
        n_tokens = None if mems is not None or length is None else longest + length
        model.require_capacity(lengths.mem_len, len(prompts), n_tokens)
        if mems is not None:
            model.require_memory(mems)
            if mems.batch_size not in (1, len(prompts)):
                raise InputError(
                    f"mems holds {mems.batch_size} streams for {len(prompts)} prompts: give one "
                    "for all, or one for each"
                )

    @cached_property
    def mems(self) -> Memory:
        """The memory before the prompts: of one stream, for all, or of one for each."""
        if self._start is None:
            return text_start(self._model, self.lengths)
        return self._model.keep(self._start)

    @property
    def at_start(self) -> tuple[int, int]:
        """By how many tokens the start can be rewound, and its number of positions."""
        n = len(self.mems)
        return (n if self._start is None else 0), n

    def before_last(self) -> Memory:
        """Return the memory of the only prompt, all but its last token."""
        ids, mems = self.tokens[0][:-1], self.mems
        if not ids:
            return mems
        with torch.no_grad(), evaluating(self._model):
            return read_all(self._model, torch.tensor([ids]), self.lengths, mems)

    def read(self, rows: Sequence[int]) -> tuple[Float[Tensor, "B D"], Memory]:
        """Read some prompts, without duplicates, those of the same length as a batch.

        The caller sets the mode of the model and disables gradients.

        Returns:
            For each of ``rows``, the output of the layers after its last token; and the memory,
            with a stream for each.
        """
        # One memory for all, or one for each.
        streams = rows if self.mems.batch_size > 1 else [0] * len(rows)
        unread = [(self.tokens[row], stream) for row, stream in zip(rows, streams, strict=True)]
        distinct = sorted(dict.fromkeys(unread), key=lambda each: len(each[0]))
        hidden, mems = [], []
        for _, group in groupby(distinct, key=lambda each: len(each[0])):
            texts, streams = zip(*group, strict=True)
            memory = selected(self.mems, streams)
            # One piece at a time, as a prompt may be long.
            pieces = read(self._model, torch.tensor(texts), self.lengths, memory)
            last = deque(pieces, maxlen=1).pop()
            hidden.append(last.hidden[:, -1])
            mems.append(last.mems)
        place = {each: row for row, each in enumerate(distinct)}
        back = [place[each] for each in unread]
        memory = mems[0] if len(mems) == 1 else Memory.cat(mems)
        return torch.cat(hidden)[back], selected(memory, back)


def prompt_lengths(
    model: LanguageModel, mem_len: SupportsIndex | None, rewindable: SupportsIndex = 0
) -> Lengths:
    """Return the lengths with which prompts are read and continued.

    Every token sees equally many positions, so that results do not depend on the segmentation.

    Args:
        model: The model.
        mem_len: Memory length. None: as configured.
        rewindable: How many positions are kept beyond those that a token sees; none of a model
            whose results depend on the segmentation.

    Raises:
        ValueError: A length is out of range, or has no effect in such a model.
    """
    model.require_mem_len(mem_len)
    # Nothing is read again.
    lengths = Lengths.of(model.config, segment_len=PROMPT_SEGMENT, mem_len=mem_len, ext_len=0)
    windowed, n = lengths.windowed(model.config), whole("rewindable", rewindable)
    if not n or not lengths.mem_len or not model.can_rewind:
        return windowed
    return windowed._replace(mem_len=lengths.mem_len + n)


@torch.no_grad()
def text_start(model: LanguageModel, lengths: Lengths, *, preface: bool = True) -> Memory:
    """Return the memory with which a generated text begins: that after the preface, if any."""
    mems = model.keep(model.start_memory(1, lengths.mem_len))
    if not (preface and model.preface):
        return mems
    with evaluating(model):
        return read_all(model, torch.tensor([model.preface]), lengths, mems)


def selected(mems: Memory, rows: Sequence[int]) -> Memory:
    """Select streams, without a copy if all are selected."""
    return mems if [*rows] == [*range(mems.batch_size)] else mems.select(rows)
