"""Generation of several texts as a batch; a single text is a batch of one."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, SupportsIndex

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from transformer_xl.data import Vocab
from transformer_xl.errors import InputError
from transformer_xl.inference.generate.history import History
from transformer_xl.inference.generate.prompts import Prompts, prompt_lengths
from transformer_xl.inference.generate.random_numbers import random_numbers, seed_of
from transformer_xl.inference.generate.sampler import Sampler
from transformer_xl.inference.generate.sampling import Sampling
from transformer_xl.inference.generate.state import State, rewindable_after
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


class _Progress(NamedTuple):
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
        mems: The memory to start with. None: start of a text.
        sampler: The sampler.
        seeds: Random seed of each text, as for :func:`random_numbers`.
        lengths: How much of the memory is kept and read.
        state: The state with which a single text goes on: its prompt begins with its last token.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Any],
        length: SupportsIndex | None,
        mems: Memory | None,
        sampler: Sampler,
        seeds: Sequence[SupportsIndex | Tensor | None],
        lengths: Lengths,
        state: State | None = None,
    ) -> None:
        self._length: int | None = whole("length", length)
        decoder, known = None, ()
        if state is not None:
            known = state.tokens[:-1]
            decoder = state.decoder(model, lengths) if len(prompts[0]) == 1 else None
            mems = state.mems if decoder is None else None
        self._prompts = Prompts(model, prompts, mems, lengths, self._length)
        self._model, self._sampler, self._modules = model, sampler, [*model.modules()]
        self._start, tokens = state, self._prompts.tokens
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

    def random_state(self, text: int) -> UInt8[Tensor, " bytes"]:
        """Return the state of the random number generator of a text, before its next token."""
        return self._now.random[text]

    def state(self) -> State:
        """Return the state of the only text, of which a prompt is read, all but its last token."""
        now, start, lengths = self._now, self._start, self._prompts.lengths
        history, decoder = now.histories[0], self.decoder()
        source = self._prompts.before_last() if decoder is None else decoder.fork()
        n_known = 0 if start is None else start.n_tokens
        n_new = history.size - (0 if start is None else len(start.tokens))
        # Behind the last token of the state it goes on from, or of nothing.
        before, length = (start.rewindable, start.n_positions) if start else self._prompts.at_start
        n_read = n_new if start else n_new - 1
        rewindable = rewindable_after(before, length, n_read, lengths, self._model)
        return State(
            source=source,
            tokens=history.kept,
            random=now.random[0],
            rewindable=rewindable,
            n_tokens=n_known + n_new,
        )

    def _goes_on(self, text: int) -> bool:
        is_full = self._now.n_drawn == self._length
        return not is_full and text not in self._now.ended

    def end(self, text: int) -> None:
        """Stop a text before the next step."""
        self._now = self._now._replace(ended=self._now.ended | {text})

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
        self._now = after._replace(
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
        return hidden, now._replace(decoder=decoder, state=state)


class Generation(Iterator[int]):
    """An iterator over the sampled tokens of one text, with its state.

    ``generate(model, state=generation.state)`` continues the text.
    """

    def __init__(self, batch: GenerationBatch) -> None:
        self._batch = batch

    def __next__(self) -> int:
        return next(self._batch)[0]

    def decode(self, vocab: Vocab, stop: str | Sequence[str] = ()) -> str:
        """Return the text, as :meth:`GenerationBatch.decode` does; `TextWriter` streams it."""
        return self._batch.decode(vocab, stop)[0]

    @property
    def state(self) -> State:
        """The state after the tokens so far, which later ones do not change."""
        return self._batch.state()


def generate(
    model: LanguageModel,
    ids: Sequence[int] | Int[Tensor, " length"] = (),
    sampling: Sampling | None = None,
    *,
    length: int | None = None,
    state: State | None = None,
    mems: Memory | None = None,
    seed: int | UInt8[Tensor, " bytes"] | None = None,
    mem_len: int | None = None,
    rewindable: int = 0,
) -> Generation:
    """Continue a prompt, or a text with its state, token by token.

    Time and memory per token are constant. Settings of a recipe are not used: the defaults sample
    from the distribution of the model. `txl generate` and `txl serve` generate the same text for
    the same settings and seed.

    Args:
        model: The model. It reads in evaluation mode; its mode is restored after each token.
        ids: The prompt in tokens; at least one without ``state``.
        sampling: How a token is drawn. None: from the distribution of the model.
        length: Number of tokens to generate. None: without end.
        state: The state of the text that goes on; the prompt is read behind it, and the random
            numbers go on without ``seed``. None: a new text.
        mems: The memory to start with, of one stream, in place of a state. None: start of a text.
        seed: Random seed, or a state of random numbers. None: a different one each time.
        mem_len: Memory length. None: as configured.
        rewindable: By how many tokens the state can be rewound later, at least, once as many were
            read; as many positions are kept beyond ``mem_len``. Models whose results depend on the
            segmentation cannot be rewound.

    Returns:
        An iterator over the new tokens, with the text's state in its ``state``; its
        ``decode(vocab)`` returns them as text.

    Raises:
        ValueError: The prompt is empty or has a token outside the vocabulary, a setting is of a
            wrong type or out of range, or memory or state do not fit the model.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> greedy = Sampling(temperature=0)
        >>> text = generate(model, vocab.encode("ROMEO:"), greedy, length=10)
        >>> tokens = list(text) + list(generate(model, state=text.state, sampling=greedy, length=5))
        >>> tokens == list(generate(model, vocab.encode("ROMEO:"), greedy, length=15))
        True
    """
    if isinstance(mems, Memory) and mems.batch_size != 1:
        raise InputError(f"mems holds {mems.batch_size} streams; select one: mems.select([0])")
    vocab_size = require_model(model).config.vocab_size
    sampler, lengths = Sampler(sampling, vocab_size), prompt_lengths(model, mem_len, rewindable)
    if state is not None:
        if not isinstance(state, State) or mems is not None:
            raise InputError(
                f"state={shown(state)} must be the state of a text, and mems is for a text "
                "without: give generation.state, session.state or State.load(...) alone"
            )
        ids = [state.last_token, *as_tokens(ids, model.config, "the prompt").tolist()]
        seed = state.random if seed is None else seed
    return Generation(GenerationBatch(model, [ids], length, mems, sampler, [seed], lengths, state))


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
