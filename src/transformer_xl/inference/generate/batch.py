"""Batched generation, and the :class:`Sampler` of tokens; a single text is a batch of one."""

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
from transformer_xl.data import Vocab
from transformer_xl.inference.generate.text_writer import TextWriter
from transformer_xl.model import AdaptiveSoftmax, Memory, Softmax, Stepper
from transformer_xl.model.arguments import as_tokens, require_model, whole
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.limits import require_capacity, require_mem_len
from transformer_xl.model.memory import join
from transformer_xl.model.reading import read
from transformer_xl.model.softmax import CalledSoftmax, drawn
from transformer_xl.model.wrapping import evaluating

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures are clamped to this range, outside of which float32 over- or underflows."""


def random_numbers(seed: Any) -> torch.Generator:
    """Return a generator with a seed or with a saved state; None: a nondeterministic seed.

    Raises:
        ValueError: The seed is neither a 64-bit integer nor a state.
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
        # torch takes unsigned seeds.
        generator.manual_seed(seed_of(seed, 0) % 2**64)
    return generator


def seed_of(seed: SupportsIndex, n: int) -> int:
    """Return the seed of text ``n`` of a batch: ``seed + n``.

    Seeds are signed or unsigned 64-bit integers; the largest one wraps around to 0.
    """
    seed = whole("seed", seed, -(2**63))
    if seed >= 2**64:
        raise ValueError(f"seed={seed} must be below 2**64")
    return (seed + n) % 2**64 if seed + n >= 2**64 else seed + n


class Sampler:
    """Samples a token from each of several distributions.

    The settings are those of :func:`~transformer_xl.generate`; a ``top_k`` of ``vocab_size`` or
    more filters nothing.

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
        # Settings must be finite, and this is equivalent.
        temperature = _HOTTEST if temperature == math.inf else temperature
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        found = checked(GenerateConfig, given)
        self.temperature: float = found["temperature"]
        # Normalized to None where nothing is filtered, so that the same tokens are sampled.
        k: int | None = found["top_k"]
        self.top_k = None if k and vocab_size and k >= vocab_size else k
        self.top_p: float | None = None if found["top_p"] == 1 else found["top_p"]

    @property
    def settings(self) -> dict[str, float | int | None]:
        """The settings by name; None: no filter."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def __call__(
        self,
        softmax: Softmax | AdaptiveSoftmax | CalledSoftmax,
        hidden: Float[Tensor, "B D"],
        numbers: Float[Tensor, " B"],
    ) -> list[int]:
        """Sample a token for each stream, given a uniform number from [0, 1) for it."""
        if self.temperature == 0:
            return softmax.top_k(hidden, 1)[1][:, 0].tolist()
        if self.temperature == 1 and self.top_k is None and self.top_p is None:
            # An adaptive softmax usually skips its rarer clusters.
            return softmax.draw(hidden, numbers).tolist()
        if self.top_k is None:
            values, tokens = softmax.log_probs(hidden), None
        else:
            values, tokens = softmax.top_k(hidden, self.top_k)
        # With a maximum of 0, small temperatures do not overflow.
        values = values - values.amax(-1, keepdim=True)
        probs = values.div_(min(max(self.temperature, _COLDEST), _HOTTEST)).softmax(-1)
        if self.top_p is not None:
            if tokens is None:
                probs, tokens = _with_probability(self.top_p, probs)
            # A token stays if the likelier ones sum to less than top_p; the first one always, even
            # if top_p rounds to 0 in float32.
            stays = probs.cumsum(-1) - probs < self.top_p
            stays[:, 0] = True
            probs = probs * stays
        places = drawn(probs, numbers)[0][:, None]
        return (places if tokens is None else tokens.gather(1, places))[:, 0].tolist()


def _with_probability(
    top_p: float, probs: Float[Tensor, "B V"]
) -> tuple[Float[Tensor, "B k"], Int[Tensor, "B k"]]:
    """Return the most likely tokens, in descending order, with this total probability or more."""
    k, V = 64, probs.shape[-1]
    while True:
        # A few are nearly always enough, and topk is faster than sorting the vocabulary.
        likeliest, tokens = probs.topk(min(k, V))
        if k >= V or bool((likeliest.sum(-1) >= top_p).all()):
            return likeliest, tokens
        k *= 8


PROMPT_SEGMENT = 512
"""Segment length for prompts, which bounds the memory use of long ones."""


class GenerationBatch(Iterator[dict[int, int]]):
    """An iterator that samples a token for each of several texts, with their memory.

    Each step yields the tokens by the index of their text. Every text gets the tokens that it would
    get alone, up to rounding. A text that has ended is removed from the batch. :meth:`decode`
    returns the texts instead.

    Attributes:
        texts: Indices of the texts in the batch.
        generators: The random number generator of each text.
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
        require_mem_len(model, mem_len)
        self._length: int | None = whole("length", length)
        # ext_len=0, as nothing is read again.
        self._lengths = Lengths.of(config, segment_len=PROMPT_SEGMENT, mem_len=mem_len, ext_len=0)
        self._model, self._sampler = model, sampler
        self.generators = list(generators)
        # The tokens of each text that are not in the memory yet.
        self._unread = [_checked_prompt(prompt, config) for prompt in prompts]
        n = len(self._unread)
        self.texts, self._is_ended, self._n_drawn = list(range(n)), [False] * n, 0
        require_capacity(model, self._lengths.mem_len, remedy="remember fewer positions")
        if mems is None:
            mems = model.start_memory(1, self._lengths.mem_len)
        if not isinstance(mems, Stepper):
            model.require_memory(mems)
            mems = model.keep(mems)
        if mems.batch_size not in (1, n):
            raise ValueError(
                f"mems holds {mems.batch_size} streams for {n} prompts: give one for all, or one "
                "for each"
            )
        # The memory before the prompts; after the first step, a stepper.
        self._at: Memory | Stepper = mems

    @property
    def mems(self) -> Memory:
        """A copy of the memory, with one stream per text in ``texts``.

        After the first step, it has read all tokens of a text but the last.
        """
        return self._at if isinstance(self._at, Memory) else self._at.memory()

    def stepper(self) -> Stepper:
        """Return the stepper; a caller that advances it must not use this object any more."""
        if isinstance(self._at, Stepper):
            return self._at
        with evaluating(self._model):
            return Stepper.of(self._model, self._lengths, self._at)

    @property
    def last_tokens(self) -> list[int]:
        """The last token of each text in ``texts``."""
        return [ids[-1] for ids in self._unread]

    def _remaining(self, text: int) -> int | None:
        """Return how many tokens of a text are still to be sampled; None: without end."""
        if self._is_ended[text]:
            return 0
        return None if self._length is None else self._length - self._n_drawn

    def __repr__(self) -> str:
        """Show the state without computing anything."""
        remaining = [self._remaining(text) for text in self.texts]
        return (
            f"{type(self).__name__}(texts={self.texts}, drawn={self._n_drawn}, "
            f"remaining={remaining}, last_tokens={self.last_tokens})"
        )

    def end(self, text: int) -> None:
        """Stop a text before the next step."""
        self._is_ended[text] = True

    def decode(self, vocab: Vocab, stop: str | Sequence[str] = ()) -> list[str]:
        """Generate all remaining tokens; return the text of each, without prompts.

        A text ends before the first of the ``stop`` strings, too. It is empty if it had ended
        before the call.

        Raises:
            ValueError: A ``stop`` string is empty, or neither ``length`` nor ``stop`` is set.
        """
        writers = {
            text: TextWriter(vocab, stop, unread)
            for text, unread in zip(self.texts, self._unread, strict=True)
            if self._remaining(text) != 0
        }
        if writers and not stop and self._length is None:
            raise ValueError("length=None draws without end: set length, or give a stop string")
        decoded = [""] * len(self.generators)
        for tokens in self:
            for text, token in tokens.items():
                decoded[text] += writers[text].push(token)
                if writers[text].has_stopped:
                    self.end(text)
        for text, writer in writers.items():
            decoded[text] += writer.flush()
        return decoded

    @torch.no_grad()
    def __next__(self) -> dict[int, int]:
        going = [row for row, text in enumerate(self.texts) if self._remaining(text) != 0]
        if not going:
            raise StopIteration
        with evaluating(self._model):
            if isinstance(self._at, Memory):
                hidden, mems = self._read_prompts(going, self._at)
                stepper = Stepper.of(self._model, self._lengths, mems)
                state = stepper.state
            else:
                is_whole = len(going) == self._at.batch_size
                stepper = self._at if is_whole else self._at.select(going)
                hidden, state = stepper.read(torch.tensor([self._unread[row][0] for row in going]))
        texts = [self.texts[row] for row in going]
        generators = [self.generators[text] for text in texts]
        before = [generator.get_state() for generator in generators]
        try:
            # On the CPU, so that a seed gives the same numbers on every device.
            numbers = [torch.rand((), dtype=torch.float64, generator=each) for each in generators]
            tokens = self._sampler(self._model.head, hidden, torch.stack(numbers))
            # In one assignment, so that an interrupt leaves a consistent state.
            stepper.state, self._at, self.texts, self._unread, self._n_drawn = (
                state, stepper, texts, [(token,) for token in tokens], self._n_drawn + 1
            )  # fmt: skip
        except BaseException:
            for generator, earlier in zip(generators, before, strict=True):
                generator.set_state(earlier)
            raise
        return dict(zip(texts, tokens, strict=True))

    def _read_prompts(
        self, rows: Sequence[int], mems: Memory
    ) -> tuple[Float[Tensor, "B D"], Memory]:
        """Read the prompts, without duplicates, those of the same length as a batch."""
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
    """An iterator over the sampled tokens of one text, with its memory.

    ``mems`` has read the prompt and all tokens so far but ``last_token``, so ``generate(model,
    [g.last_token], mems=g.mems, seed=g.random_state)`` continues the text.
    """

    def __init__(self, batch: GenerationBatch) -> None:
        self._batch = batch

    def __next__(self) -> int:
        return next(self._batch)[0]

    def __repr__(self) -> str:
        """Show the state without computing anything; ``remaining`` None: without end."""
        batch = self._batch
        return (
            f"{type(self).__name__}(drawn={batch._n_drawn}, remaining={batch._remaining(0)}, "
            f"last_token={self.last_token})"
        )

    def decode(self, vocab: Vocab, stop: str | Sequence[str] = ()) -> str:
        """Return the text, as :meth:`GenerationBatch.decode` does; `text_pieces` streams it."""
        return self._batch.decode(vocab, stop)[0]

    @property
    def mems(self) -> Memory:
        """A copy of the memory; before the first token is sampled, the initial one."""
        return self._batch.mems

    def stepper(self) -> Stepper:
        """See :meth:`GenerationBatch.stepper`."""
        return self._batch.stepper()

    @property
    def last_token(self) -> int:
        """The last token, which is not in the memory yet."""
        return self._batch.last_tokens[0]

    @property
    def random_state(self) -> UInt8[Tensor, " bytes"]:
        """State of the random number generator before the next token."""
        return self._batch.generators[0].get_state()


def _checked_prompt(ids: Any, config: ModelConfig) -> tuple[int, ...]:
    tokens = as_tokens(ids, config, "the prompt")
    if not len(tokens):
        raise ValueError("the prompt is empty: give at least one token to continue")
    return tuple(tokens.tolist())


def _selected(mems: Memory, rows: Sequence[int]) -> Memory:
    """Select streams, without a copy if all are selected."""
    return mems if [*rows] == [*range(mems.batch_size)] else mems.select(rows)
