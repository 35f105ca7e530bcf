"""Generation of several texts as a batch; a single text is a batch of one."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import SupportsIndex

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, UInt8
from torch import Tensor

from transformer_xl.data import Vocab
from transformer_xl.errors import InputError
from transformer_xl.inference.generate.history import History
from transformer_xl.inference.generate.prompts import Prompts, prompt_lengths
from transformer_xl.inference.generate.sampler import Sampler
from transformer_xl.inference.generate.sampling import Sampling
from transformer_xl.inference.generate.text_writer import TextWriter
from transformer_xl.model import (
    Decoder,
    LanguageModel,
    Lengths,
    Memory,
    as_tokens,
    evaluating,
    require_model,
    shown,
    whole,
)


def random_numbers(seed: SupportsIndex | Tensor | None, n: int = 0) -> torch.Generator:
    """Return the generator of text ``n`` of a batch.

    Its seed is ``seed + n``, or nondeterministic if that is None; or it has a saved state.

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
            raise InputError(
                f"seed is no state of random numbers ({error}): hand in an integer, or the "
                "random_state of another text"
            ) from error
    else:
        # torch takes unsigned seeds.
        generator.manual_seed(seed_of(seed, n) % 2**64)
    return generator


def seed_of(seed: SupportsIndex, n: int) -> int:
    """Return the seed of text ``n`` of a batch: ``seed + n``.

    Seeds are signed or unsigned 64-bit integers; the largest one wraps around to 0.
    """
    number = whole("seed", seed, -(2**63))
    if number >= 2**64:
        raise InputError(f"seed={number} must be below 2**64")
    return (number + n) % 2**64 if number + n >= 2**64 else number + n


@dataclass(frozen=True)
class _Progress:
    """What a step of a batch changes.

    It is replaced as a whole, so that an interrupt leaves a consistent state.
    """

    texts: Sequence[int]
    """Indices of the texts in the batch: its rows."""
    unread: Sequence[Sequence[int]]
    """The tokens of each row that are not in the memory yet."""
    histories: Mapping[int, History]
    """The last tokens of each text, also of those that have ended."""
    random: Sequence[Tensor]
    """The state of the random number generator of each text."""
    decoder: Decoder | None = None
    """What reads the next tokens. None: the prompts are read first."""
    state: object = None
    """The state of the decoder after the last step that was completed."""
    n_drawn: int = 0
    """Tokens drawn for each text that goes on."""
    ended: AbstractSet[int] = frozenset()
    """Indices of the texts that were ended before their length."""


class GenerationBatch(Iterator[dict[int, int]]):
    """An iterator that samples a token for each of several texts, with their memory.

    Each step yields the tokens by the index of their text. Every text gets the tokens that it would
    get alone, up to rounding. A text that has ended is removed from the batch. :meth:`decode`
    returns the texts instead.

    Args:
        model: The model.
        prompts: The prompts in tokens.
        length: Number of tokens to generate for each. None: without end.
        mems: The memory to start with, or a decoder, which goes on. None: start of a text.
        sampler: The sampler.
        seeds: Random seed of each text, as for :func:`random_numbers`.
        lengths: How much of the memory is kept and read.
        before: The last tokens in the memory, for penalties and for decoding.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[object],
        length: SupportsIndex | None,
        mems: Memory | Decoder | None,
        sampler: Sampler,
        seeds: Sequence[SupportsIndex | Tensor | None],
        lengths: Lengths,
        before: object = (),
    ) -> None:
        self._length: int | None = whole("length", length)
        decoder = mems if isinstance(mems, Decoder) else None
        start = None if isinstance(mems, Decoder) else mems
        self._prompts = Prompts(model, prompts, start, lengths, self._length)
        self._model, self._sampler, self._modules = model, sampler, [*model.modules()]
        known = as_tokens(before, model.config, "the history").tolist()
        tokens = self._prompts.tokens
        self._now = _Progress(
            range(len(tokens)),
            tokens,
            {text: History(known, unread) for text, unread in enumerate(tokens)},
            [random_numbers(seed).get_state() for seed in seeds],
            decoder,
            None if decoder is None else decoder.state,
        )

    @property
    def texts(self) -> list[int]:
        """Indices of the texts in the batch."""
        return [*self._now.texts]

    @property
    def mems(self) -> Memory:
        """A copy of the memory, with one stream per text in ``texts``.

        After the first step, it has read all tokens of a text but the last.
        """
        decoder = self.decoder()
        return self._prompts.mems if decoder is None else decoder.memory()

    def decoder(self) -> Decoder | None:
        """Return the decoder, once a token was read; a caller that advances it ends this object."""
        if (decoder := self._now.decoder) is not None:
            # A step that was interrupted may have left another state.
            decoder.state = self._now.state
        return decoder

    @property
    def last_tokens(self) -> list[int]:
        """The last token of each text in ``texts``."""
        return [ids[-1] for ids in self._now.unread]

    def random_state(self, text: int) -> UInt8[Tensor, " bytes"]:
        """Return the state of the random number generator of a text, before its next token."""
        return self._now.random[text]

    def history(self, text: int) -> History:
        """Return the last tokens of a text."""
        return self._now.histories[text]

    def _goes_on(self, text: int) -> bool:
        is_full = self._now.n_drawn == self._length
        return not is_full and text not in self._now.ended

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
            raise InputError(
                f"vocab={shown(vocab)} is no vocabulary: give the one that from_pretrained "
                "returned with the model, or load_vocab(folder); decode draws the tokens itself"
            )
        now = self._now
        writers = {
            text: TextWriter(vocab, stop, unread, now.histories[text].kept[: -len(unread)])
            for text, unread in zip(now.texts, now.unread, strict=True)
            if self._goes_on(text)
        }
        if writers and not stop and self._length is None:
            raise InputError("length=None draws without end: set length, or give a stop string")
        decoded = [""] * len(now.random)
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
        rows = [row for row, text in enumerate(now.texts) if self._goes_on(text)]
        if not rows:
            raise StopIteration
        texts = [now.texts[row] for row in rows]
        hidden, after = self._read(rows)
        # On the CPU, so that a seed gives the same numbers on every device.
        numbers, random = [], [*now.random]
        for text in texts:
            generator = random_numbers(random[text])
            numbers.append(torch.rand((), dtype=torch.float64, generator=generator))
            random[text] = generator.get_state()
        histories = {text: copy.copy(now.histories[text]) for text in texts}
        tokens = self._sampler(
            self._model.head, hidden, torch.stack(numbers), [*histories.values()]
        )
        drawn = dict(zip(texts, tokens, strict=True))
        for text, token in drawn.items():
            histories[text].append(token)
        self._now = replace(
            after,
            texts=texts,
            unread=[(token,) for token in tokens],
            histories={**now.histories, **histories},
            random=random,
            n_drawn=now.n_drawn + 1,
        )
        return drawn

    def _read(self, rows: Sequence[int]) -> tuple[Float[Tensor, "B D"], _Progress]:
        """Read the unread tokens of some rows; the others are left out.

        Returns:
            The output of the layers after the last token of each; and the progress with the
            decoder of these rows.
        """
        now = self._now
        with evaluating(self._modules):
            decoder = self.decoder()
            if decoder is None:
                hidden, mems = self._prompts.read(rows)
                decoder = Decoder.of(self._model, self._prompts.lengths, mems)
                state = decoder.state
            else:
                if len(rows) != decoder.batch_size:
                    decoder = decoder.select(rows)
                hidden, state = decoder.read(torch.tensor([now.unread[row][0] for row in rows]))
        return hidden, replace(now, decoder=decoder, state=state)


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

    def decode(self, vocab: Vocab, stop: str | Sequence[str] = ()) -> str:
        """Return the text, as :meth:`GenerationBatch.decode` does; `TextWriter` streams it."""
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
        return self._batch.history(0).kept[:-1].copy()

    @property
    def random_state(self) -> UInt8[Tensor, " bytes"]:
        """State of the random number generator before the next token."""
        return self._batch.random_state(0)


def generate(
    model: LanguageModel,
    ids: Sequence[int] | Int[Tensor, " length"],
    sampling: Sampling | None = None,
    *,
    length: int | None = None,
    mems: Memory | None = None,
    seed: int | UInt8[Tensor, " bytes"] | None = None,
    mem_len: int | None = None,
    history: Sequence[int] | Int[np.ndarray, " n"] | Int[Tensor, " n"] = (),
) -> Generation:
    """Continue a prompt, token by token.

    Time and memory per token are constant. Settings of a recipe are not used: the defaults sample
    from the distribution of the model. `txl generate` and `txl serve` generate the same text for
    the same settings and seed.

    Args:
        model: The model. It reads in evaluation mode; its mode is restored after each token.
        ids: The prompt in tokens, at least one.
        sampling: How a token is drawn. None: from the distribution of the model.
        length: Number of tokens to generate. None: without end.
        mems: The memory to start with, of one stream. None: start of a text.
        seed: Random seed, or the ``random_state`` of a generation to continue. None: a different
            one each time.
        mem_len: Memory length. None: as configured.
        history: The last tokens in ``mems``, which penalties see, too, and which complete a
            character that they begin.

    Returns:
        An iterator over the new tokens, with the memory in its ``mems``; its ``decode(vocab)``
        returns them as text.

    Raises:
        ValueError: The prompt is empty or has a token outside the vocabulary, a setting is of a
            wrong type or out of range, or the memory does not fit the model.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> greedy = Sampling(temperature=0)
        >>> generation = generate(model, vocab.encode("ROMEO:"), greedy, length=10)
        >>> len(list(generation)), len(generation.mems) > 0
        (10, True)
    """
    if isinstance(mems, Memory) and mems.batch_size != 1:
        raise InputError(f"mems holds {mems.batch_size} streams; select one: mems.select([0])")
    vocab_size = require_model(model).config.vocab_size
    sampler, lengths = Sampler(sampling, vocab_size), prompt_lengths(model, mem_len)
    return Generation(
        GenerationBatch(model, [ids], length, mems, sampler, [seed], lengths, history)
    )


def generate_batch(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | Int[Tensor, " length"]],
    sampling: Sampling | None = None,
    *,
    length: int | None = None,
    mems: Memory | None = None,
    seed: SupportsIndex | Sequence[int] | None = None,
    mem_len: int | None = None,
) -> GenerationBatch:
    """Continue several prompts as a batch, each as :func:`generate` does, up to rounding.

    Args:
        model: As for :func:`generate`.
        prompts: The prompts in tokens, of any lengths; identical prompts are read once.
        sampling: As for :func:`generate`. Penalties see the prompt and what was generated.
        length: Number of tokens to generate for each. None: without end.
        mems: The memory to start with: of one stream, for all, or of one stream for each prompt.
            None: start of a text.
        seed: Text n is sampled with ``seed + n``; a list has the seed of each. None: a different
            one each time.
        mem_len: As for :func:`generate`.

    Returns:
        An iterator over the new tokens of each step, by the index of their text; ``end`` stops a
        text early, and ``decode(vocab)`` returns all of them as text.

    Raises:
        ValueError: There is no prompt, one is empty or has a token outside the vocabulary, a
            setting is of a wrong type or out of range, or the memory does not fit the model.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> prompts = [vocab.encode("ROMEO:"), vocab.encode("JULIET:")]
        >>> len(generate_batch(model, prompts, length=5, seed=1).decode(vocab))
        2
    """
    vocab_size = require_model(model).config.vocab_size
    sampler = Sampler(sampling, vocab_size)
    if seed is None or isinstance(seed, Sequence):
        seeds = [None] * len(prompts) if seed is None else seed
    else:
        seeds = [seed_of(seed, n) for n in range(len(prompts))]
    if len(seeds) != len(prompts):
        raise InputError(f"{len(seeds)} seeds for {len(prompts)} prompts: give one for each")
    lengths = prompt_lengths(model, mem_len)
    return GenerationBatch(model, prompts, length, mems, sampler, seeds, lengths)
