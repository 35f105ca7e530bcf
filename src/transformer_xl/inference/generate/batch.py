"""Texts that are written side by side; one alone is a batch of one."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.inference.generate.sampler import Sampler
from transformer_xl.model import Memory, Stepper
from transformer_xl.model.arguments import as_tokens, require_model, whole
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import join
from transformer_xl.model.needs import require_capacity
from transformer_xl.model.reading import read
from transformer_xl.model.wrapping import evaluating

PROMPT_SEGMENT = 512
"""Tokens of a prompt that are read at once."""


class GenerationBatch(Iterator[dict[int, int]]):
    """Tokens drawn for several texts side by side, and the memories behind them.

    Iterating draws a token for each text that goes on and returns them by the text's number. Each
    text gets, up to rounding, the tokens that it would get alone. A text that has ended leaves
    the batch, and costs nothing from then on.

    Attributes:
        texts: The numbers of the texts in the batch.
        generators: Where the random numbers of each text come from, by its number.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Any],
        length: Any,
        mems: Any,
        sampler: Sampler,
        generators: Sequence[torch.Generator],
        mem_len: Any,
    ) -> None:
        config = require_model(model).config
        # What the texts go on from; once they are written by a stepper, with its state.
        self._at: Memory | Stepper
        self._state: Any = None
        length = whole("length", length)
        # What is read is remembered; nothing is read again. Reading a prompt in pieces bounds the
        # memory that it takes, whatever its length.
        self._lengths = Lengths.of(config, segment_len=PROMPT_SEGMENT, mem_len=mem_len, ext_len=0)
        self._model, self._sampler = model, sampler
        self.generators = list(generators)
        ids = [_checked_prompt(prompt, config) for prompt in prompts]
        self._left = [length] * len(ids)
        remembered = self._lengths.mem_len
        require_capacity(model, remembered, remedy="remember fewer positions")
        if mems is None:
            mems = model.start_memory(1, remembered)
        if isinstance(mems, Stepper):
            self._state = mems.state
        else:
            model.require_memory(mems)
        if mems.batch_size not in (1, len(ids)):
            raise ValueError(
                f"mems holds {mems.batch_size} streams for {len(ids)} prompts: give one for all, "
                "or one for each"
            )
        self.texts = list(range(len(ids)))
        self._at = mems if isinstance(mems, Stepper) else model.keep(mems)
        self._unread, self._has_drawn = ids, False

    @property
    def mems(self) -> Memory:
        """The memories of the texts, in that order.

        Once a token was drawn they have read everything but the last token of each. They are
        copied: ask for them when they are needed.
        """
        if isinstance(self._at, Memory):
            return self._at
        return self.stepper().memory()

    def stepper(self) -> Stepper:
        """Return what writes the texts, to go on with: then nobody else may."""
        if isinstance(self._at, Memory):
            with evaluating(self._model):
                return Stepper.of(self._model, self._lengths, self._at)
        self._at.state = self._state
        return self._at

    @property
    def last_tokens(self) -> list[int]:
        """The last token of each, in that order."""
        return [ids[-1] for ids in self._unread]

    def end(self, text: int) -> None:
        """Let a text end where it is."""
        self._left[text] = 0

    @torch.no_grad()
    def __next__(self) -> dict[int, int]:
        going = [row for row, text in enumerate(self.texts) if self._left[text] != 0]
        if not going:
            raise StopIteration
        texts = [self.texts[row] for row in going]
        with evaluating(self._model):
            hidden, at, state = self._read(going)
        before = [self.generators[text].get_state() for text in texts]
        is_drawn = False
        try:
            # Drawn on the processor: the same seed gives the same numbers wherever the model is.
            numbers = [
                torch.rand((), dtype=torch.float64, generator=self.generators[text])
                for text in texts
            ]
            tokens = self._sampler(self._model.head, hidden, torch.stack(numbers))
            drawn, unread = dict(zip(texts, tokens, strict=True)), [(token,) for token in tokens]
            left = [
                n - 1 if n is not None and text in drawn else n for text, n in enumerate(self._left)
            ]
            # All at once: an interrupt before this line leaves all as it was.
            self._at, self._state, self.texts, self._unread, self._left = (
                at, state, texts, unread, left
            )  # fmt: skip
            self._has_drawn = is_drawn = True
        finally:
            if not is_drawn:
                for text, earlier in zip(texts, before, strict=True):
                    self.generators[text].set_state(earlier)
        return drawn

    def _read(self, rows: Sequence[int]) -> tuple[Float[Tensor, "B D"], Memory | Stepper, Any]:
        """Read what some texts have not read; return the hidden states, and what they go on from.

        That is a memory, or a stepper and the state that it comes to.
        """
        mems = self._at
        if isinstance(mems, Memory) and not self._has_drawn:
            return *self._read_prompts(rows, mems), None
        if isinstance(mems, Memory):
            stepper = Stepper.of(self._model, self._lengths, _selected(mems, rows))
        else:
            stepper = self.stepper()
            if [*rows] != [*range(stepper.batch_size)]:
                stepper = stepper.select(rows)
        hidden, state = stepper.read(torch.tensor([self._unread[row][0] for row in rows]))
        return hidden, stepper, state

    def _read_prompts(
        self, rows: Sequence[int], mems: Memory
    ) -> tuple[Float[Tensor, "B D"], Memory]:
        """Read prompts; those that begin alike once, and those of the same length batched."""
        # One memory for all, or one for each.
        streams = rows if mems.batch_size > 1 else [0] * len(rows)
        unread = [(self._unread[row], stream) for row, stream in zip(rows, streams, strict=True)]
        distinct = sorted(dict.fromkeys(unread), key=lambda each: len(each[0]))
        done = []
        for _, group in groupby(distinct, key=lambda each: len(each[0])):
            texts, own = zip(*group, strict=True)
            begun = _selected(mems, own)
            pieces = read(self._model, torch.tensor(texts), self._lengths, begun)
            piece = deque(pieces, maxlen=1).pop()
            done.append((piece.hidden[:, -1], piece.mems))
        place = {each: row for row, each in enumerate(distinct)}
        back = [place[each] for each in unread]
        hidden = torch.cat([last for last, _ in done])[back]
        mems = done[0][1] if len(done) == 1 else join([mems for _, mems in done])
        return hidden, _selected(mems, back)


class Generation(Iterator[int]):
    """Tokens drawn from a model, and the memory behind them.

    Iterating draws token after token. At any moment ``mems`` has read the prompt and all tokens
    drawn so far but the last, which is ``last_token``: ``generate(model, [g.last_token],
    mems=g.mems, seed=g.random_state)`` goes on where this one is.
    """

    def __init__(self, batch: GenerationBatch) -> None:
        self._batch = batch

    def __next__(self) -> int:
        return next(self._batch)[0]

    @property
    def mems(self) -> Memory:
        """The memory; before the first token is drawn, the one that was given.

        It is copied: ask for it when it is needed, not at each token.
        """
        return self._batch.mems

    def stepper(self) -> Stepper:
        """Return what writes the text, to go on with: then this may not."""
        return self._batch.stepper()

    @property
    def last_token(self) -> int:
        """The token that the memory has not read."""
        return self._batch.last_tokens[0]

    @property
    def random_state(self) -> UInt8[Tensor, " bytes"]:
        """Where the random numbers are of which the next token is drawn."""
        return self._batch.generators[0].get_state()


def _checked_prompt(ids: Any, config: ModelConfig) -> tuple[int, ...]:
    tokens = as_tokens(ids, config, "the prompt")
    if not len(tokens):
        raise ValueError("the prompt is empty: give at least one token to continue")
    return tuple(tokens.tolist())


def _selected(mems: Memory, rows: Sequence[int]) -> Memory:
    """Select streams, without a copy where these are all."""
    return mems if [*rows] == [*range(mems.batch_size)] else mems.select(rows)
