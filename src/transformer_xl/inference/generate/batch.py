"""Batched generation; a single text is a batch of one."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import numpy as np
import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

from transformer_xl.config.knn import KnnConfig
from transformer_xl.data import Vocab
from transformer_xl.inference.generate.history import History
from transformer_xl.inference.generate.prompts import Prompts
from transformer_xl.inference.generate.sampler import Sampler
from transformer_xl.inference.generate.text_writer import TextWriter
from transformer_xl.inference.knn import KnnSoftmax, Past, remembered
from transformer_xl.model import Decoder, Memory
from transformer_xl.model.arguments import as_tokens, require_model, shown, whole
from transformer_xl.model.calling import evaluating_all


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


@dataclass(frozen=True)
class _Progress:
    """What a step of a batch changes, apart from histories and random numbers.

    It is replaced as a whole, so that an interrupt leaves a consistent state.
    """

    texts: Sequence[int]
    """Indices of the texts in the batch: its rows."""
    unread: Sequence[Sequence[int]]
    """The tokens of each row that are not in the memory yet."""
    pasts: Sequence[Past | None]
    """The past of each row, for kNN-LM."""
    reader: Prompts | Decoder
    """The prompts; after the first step, a decoder."""
    state: Any = None
    """The state of the decoder after the last step that was completed."""
    n_drawn: int = 0
    """Tokens drawn for each text that goes on."""
    ended: AbstractSet[int] = frozenset()
    """Indices of the texts that were ended before their length."""
    looping: AbstractSet[int] = frozenset()
    """Those of them that were ended because they looped."""


class GenerationBatch(Iterator[dict[int, int]]):
    """An iterator that samples a token for each of several texts, with their memory.

    Each step yields the tokens by the index of their text. Every text gets the tokens that it would
    get alone, up to rounding. A text that has ended is removed from the batch. :meth:`decode`
    returns the texts instead.

    Attributes:
        generators: The random number generator of each text.

    Args:
        model: The model.
        prompts: The prompts in tokens.
        length: Number of tokens to generate for each. None: without end.
        mems: The memory to start with, or a decoder.
        sampler: The sampler.
        generators: The random number generator of each text.
        mem_len: Memory length. None: as configured.
        before: The last tokens in the memory, for penalties and for decoding.
        knn: Settings of kNN-LM. None: the distribution of the model alone.
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
        before: Any = (),
        knn: KnnConfig | None = None,
    ) -> None:
        config = require_model(model).config
        self._length: int | None = whole("length", length)
        start = None if isinstance(mems, Decoder) else mems
        begun = Prompts(model, prompts, start, mem_len, knn, length=self._length)
        self._lengths, self._model, self._sampler = begun.lengths, model, sampler
        self._modules = [*model.modules()]
        self.generators = list(generators)
        n = len(begun.tokens)
        known = as_tokens(before, config, "the history").tolist()
        self._histories = [History(known, unread) for unread in begun.tokens]
        self._now = _Progress(range(n), begun.tokens, begun.new_pasts(n), begun)
        if isinstance(mems, Decoder):
            self._now = replace(self._now, reader=mems, state=mems.state)

    @property
    def texts(self) -> list[int]:
        """Indices of the texts in the batch."""
        return [*self._now.texts]

    @property
    def looping(self) -> set[int]:
        """Indices of the texts that were ended because they looped (``on_loop="end"``)."""
        return {*self._now.looping}

    @property
    def mems(self) -> Memory:
        """A copy of the memory, with one stream per text in ``texts``.

        After the first step, it has read all tokens of a text but the last.
        """
        reader = self._reader()
        return reader.mems if isinstance(reader, Prompts) else reader.memory()

    def decoder(self) -> Decoder:
        """Return the decoder; a caller that advances it must not use this object any more."""
        if isinstance(reader := self._reader(), Decoder):
            return reader
        with evaluating_all(self._modules):
            return Decoder.of(self._model, self._lengths, reader.mems)

    def _reader(self) -> Prompts | Decoder:
        """Return what reads the next tokens: the prompts, or the decoder in its state."""
        reader = self._now.reader
        if isinstance(reader, Decoder):
            reader.state = self._now.state
        return reader

    @property
    def last_tokens(self) -> list[int]:
        """The last token of each text in ``texts``."""
        return [ids[-1] for ids in self._now.unread]

    def history(self, text: int) -> Int32[np.ndarray, " n"]:
        """Return the tokens of a text before its last one, the last 4,096 of them at most."""
        return self._histories[text].kept[:-1].copy()

    def _remaining(self, text: int) -> int | None:
        """Return how many tokens of a text are still to be sampled; None: without end."""
        if text in self._now.ended:
            return 0
        return None if self._length is None else self._length - self._now.n_drawn

    def __repr__(self) -> str:
        """Show the state without computing anything."""
        remaining = [self._remaining(text) for text in self.texts]
        return (
            f"{type(self).__name__}(texts={self.texts}, drawn={self._now.n_drawn}, "
            f"remaining={remaining}, last_tokens={self.last_tokens})"
        )

    def end(self, text: int) -> None:
        """Stop a text before the next step."""
        self._now = replace(self._now, ended=self._now.ended | {text})

    def decode(self, vocab: Vocab, stop: str | Sequence[str] = ()) -> list[str]:
        """Generate all remaining tokens; return the text of each, without prompts.

        A text ends before the first of the ``stop`` strings, too. It is empty if it had ended
        before the call.

        Raises:
            ValueError: ``vocab`` is no vocabulary, a ``stop`` string is empty, or neither
                ``length`` nor ``stop`` is set.
        """
        if not isinstance(vocab, Vocab):
            raise ValueError(
                f"vocab={shown(vocab)} is no vocabulary: give the one that from_pretrained "
                "returned with the model, or load_vocab(folder); decode draws the tokens itself"
            )
        writers = {
            text: TextWriter(vocab, stop, unread, self._histories[text].kept[: -len(unread)])
            for text, unread in zip(self._now.texts, self._now.unread, strict=True)
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
        now = self._now
        going = [row for row, text in enumerate(now.texts) if self._remaining(text) != 0]
        if not going:
            raise StopIteration
        hidden, after = self._read(going)
        generators = [self.generators[text] for text in after.texts]
        histories = [self._histories[text] for text in after.texts]
        before = [generator.get_state() for generator in generators]
        sizes = [history.size for history in histories]
        try:
            # On the CPU, so that a seed gives the same numbers on every device.
            numbers = [torch.rand((), dtype=torch.float64, generator=each) for each in generators]
            known = [past for past in after.pasts if past is not None]
            head = KnnSoftmax(self._model.head, known) if known else self._model.head
            tokens = self._sampler(head, hidden, torch.stack(numbers), histories)
            pasts = remembered(after.pasts, hidden[:, None], torch.tensor(tokens)[:, None])
            for history, token in zip(histories, tokens, strict=True):
                history.append(token)
            looping = self._newly_looping(after.texts, histories)
            self._now = replace(
                after,
                unread=[(token,) for token in tokens],
                pasts=pasts,
                n_drawn=now.n_drawn + 1,
                ended=now.ended | looping,
                looping=now.looping | looping,
            )
        except BaseException:
            self._now = now
            for generator, earlier in zip(generators, before, strict=True):
                generator.set_state(earlier)
            for history, size in zip(histories, sizes, strict=True):
                history.cut(size)
            raise
        return dict(zip(after.texts, tokens, strict=True))

    def _read(self, going: Sequence[int]) -> tuple[Float[Tensor, "B D"], _Progress]:
        """Read the unread tokens of the rows that go on; the other rows are left out.

        Returns:
            The output of the layers after the last token of each; and what then holds, but for the
            tokens that are drawn next.
        """
        now, reader = self._now, self._reader()
        with evaluating_all(self._modules):
            if isinstance(reader, Prompts):
                hidden, mems, pasts = reader.read(going)
                decoder = Decoder.of(self._model, self._lengths, mems)
                state = decoder.state
            else:
                decoder = reader if len(going) == reader.batch_size else reader.select(going)
                hidden, state = decoder.read(torch.tensor([now.unread[row][0] for row in going]))
                pasts = [now.pasts[row] for row in going]
        texts = [now.texts[row] for row in going]
        return hidden, replace(now, texts=texts, pasts=pasts, reader=decoder, state=state)

    def _newly_looping(self, texts: Sequence[int], histories: Sequence[History]) -> set[int]:
        """Return the texts that end because they loop, and not because of their length."""
        if not self._sampler.ends_loops or self._now.n_drawn + 1 == self._length:
            return set()
        each = zip(texts, histories, strict=True)
        return {text for text, history in each if self._sampler.ends(history)}


class Generation(Iterator[int]):
    """An iterator over the sampled tokens of one text, with its memory.

    ``mems`` has read the prompt and all tokens so far but ``last_token``, so ``generate(model,
    [g.last_token], mems=g.mems, history=g.history, seed=g.random_state)`` continues the text;
    without penalties it needs no ``history``.
    """

    def __init__(self, batch: GenerationBatch) -> None:
        self._batch = batch

    def __next__(self) -> int:
        return next(self._batch)[0]

    def __repr__(self) -> str:
        """Show the state without computing anything; ``remaining`` None: without end."""
        batch = self._batch
        return (
            f"{type(self).__name__}(drawn={batch._now.n_drawn}, remaining={batch._remaining(0)}, "
            f"last_token={self.last_token})"
        )

    def decode(self, vocab: Vocab, stop: str | Sequence[str] = ()) -> str:
        """Return the text, as :meth:`GenerationBatch.decode` does; `text_pieces` streams it."""
        return self._batch.decode(vocab, stop)[0]

    @property
    def mems(self) -> Memory:
        """A copy of the memory; before the first token is sampled, the initial one."""
        return self._batch.mems

    @property
    def last_token(self) -> int:
        """The last token, which is not in the memory yet."""
        return self._batch.last_tokens[0]

    @property
    def history(self) -> Int32[np.ndarray, " n"]:
        """The tokens before ``last_token`` that penalties can see, 4,096 at most."""
        return self._batch.history(0)

    @property
    def is_looping(self) -> bool:
        """Whether the text was ended because it looped (``on_loop="end"``)."""
        return 0 in self._batch.looping

    @property
    def random_state(self) -> UInt8[Tensor, " bytes"]:
        """State of the random number generator before the next token."""
        return self._batch.generators[0].get_state()
