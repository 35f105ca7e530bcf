"""Writing texts, batched; one alone is a batch of one. Tokens are drawn by a :class:`Sampler`."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from transformer_xl.config import GenerateConfig, ModelConfig
from transformer_xl.config.checks import checked, no_type_check
from transformer_xl.model import AdaptiveSoftmax, Memory, Softmax, Stepper
from transformer_xl.model.arguments import as_tokens, require_model, whole
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import join
from transformer_xl.model.needs import require_capacity
from transformer_xl.model.reading import read
from transformer_xl.model.softmax import CalledSoftmax, drawn
from transformer_xl.model.wrapping import evaluating

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures beyond which single precision knows no difference, but for infinity and NaN."""


def random_numbers(seed: Any) -> torch.Generator:
    """Return the random numbers of a seed, or those that follow a state; None: others each time.

    Raises:
        ValueError: It is no integer of 64 bits, and no state either.
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    elif isinstance(seed, Tensor) and seed.ndim:
        try:
            generator.set_state(seed.cpu())
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"seed is no state of random numbers ({error}): hand in an integer, or the "
                "random_state of another text"
            ) from error
    else:
        # As torch takes them: without a sign.
        generator.manual_seed(seed_of(seed, 0) % 2**64)
    return generator


def seed_of(seed: SupportsIndex, n: int) -> int:
    """Return the seed of text number n of several that are drawn with one: ``seed + n``.

    Seeds have 64 bits, with a sign or without; the last one is followed by 0.

    Raises:
        ValueError: It is no integer of 64 bits.
    """
    seed = whole("seed", seed, -(2**63))
    if seed >= 2**64:
        raise ValueError(f"seed={seed} must be below 2**64")
    return (seed + n) % 2**64 if seed + n >= 2**64 else seed + n


class Sampler:
    """Draws a token from each of several distributions.

    Args:
        temperature: Below 1 safer, above 1 wilder; 0 takes the likeliest token.
        top_k: Draw from the ``top_k`` likeliest tokens only. None, or as many as there are: no cut.
        top_p: Draw from the fewest likeliest tokens that have this probability together. None, or
            1: no cut.
        vocab_size: How many tokens there are. None: not known, and more than ``top_k``.

    Raises:
        ValueError: A setting is no number or out of range.
    """

    @no_type_check
    def __init__(
        self,
        temperature: float = 1.0,
        top_k: SupportsIndex | None = None,
        top_p: float | None = None,
        vocab_size: int | None = None,
    ) -> None:
        # No setting is infinite, and more than this is as good.
        temperature = _HOTTEST if temperature == math.inf else temperature
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        found = checked(GenerateConfig, given)
        self.temperature: float = found["temperature"]
        # What cuts nothing is no cut: the same numbers then draw the same tokens, to the bit.
        k: int | None = found["top_k"]
        self.top_k = None if k and vocab_size and k >= vocab_size else k
        self.top_p: float | None = None if found["top_p"] == 1 else found["top_p"]

    @property
    def settings(self) -> dict[str, float | int | None]:
        """What it draws with, by name; None: no cut."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def __call__(
        self,
        softmax: Softmax | AdaptiveSoftmax | CalledSoftmax,
        hidden: Float[Tensor, "B D"],
        numbers: Float[Tensor, " B"],
    ) -> list[int]:
        """Draw a token for each stream, given a random number from [0, 1) for it."""
        if self.temperature == 0:
            return softmax.top_k(hidden, 1)[1][:, 0].tolist()
        if self.temperature == 1 and self.top_k is None and self.top_p is None:
            # Of an adaptive softmax, most often without its rarer clusters.
            return softmax.draw(hidden, numbers).tolist()
        tokens = None
        if self.top_k is not None:
            values, tokens = softmax.top_k(hidden, self.top_k)
        else:
            values = softmax.log_probs(hidden)
        # The likeliest becomes 0 first: so it stays finite, however small what divides it is.
        values = values - values.amax(-1, keepdim=True)
        probs = values.div_(min(max(self.temperature, _COLDEST), _HOTTEST)).softmax(-1)
        if self.top_p is not None:
            if tokens is None:
                probs, tokens = _with_probability(self.top_p, probs)
            # A token stays while those likelier than it do not reach top_p together; the first
            # one always, even where top_p is 0 in single precision.
            stays = probs.cumsum(-1) - probs < self.top_p
            stays[:, 0] = True
            probs = probs * stays
        places = drawn(probs, numbers)[0][:, None]
        return (places if tokens is None else tokens.gather(1, places))[:, 0].tolist()


def _with_probability(
    top_p: float, probs: Float[Tensor, "B V"]
) -> tuple[Float[Tensor, "B k"], Int[Tensor, "B k"]]:
    """Return as many of the likeliest tokens, falling, as have this probability in every row."""
    k, V = 64, probs.shape[-1]
    while True:
        # Few are nearly always enough, and to find them is quicker than to sort them all.
        likeliest, tokens = probs.topk(min(k, V))
        if k >= V or bool((likeliest.sum(-1) >= top_p).all()):
            return likeliest, tokens
        k *= 8


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
