"""Sessions: a text that is read and generated in turns, with a state of constant size.

States can be saved to files.
"""

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from transformer_xl.config import pick_device
from transformer_xl.data import Vocab, load_vocab
from transformer_xl.errors import DataError, InputError
from transformer_xl.inference.generate.batch import GenerationBatch
from transformer_xl.inference.generate.history import joined
from transformer_xl.inference.generate.prompts import prompt_lengths, text_start
from transformer_xl.inference.generate.random_numbers import random_numbers
from transformer_xl.inference.generate.sampler import Sampler
from transformer_xl.inference.generate.sampling import Sampling
from transformer_xl.inference.generate.state import State, rewindable_after
from transformer_xl.inference.generate.text_writer import TextWriter
from transformer_xl.model import (
    LanguageModel,
    Lengths,
    Memory,
    ModelFolder,
    Reader,
    ReaderState,
    Weights,
    as_tokens,
    compact,
    load_model,
    require_model,
    require_token_inputs,
    shown,
    whole,
)
from transformer_xl.model import Text as Tokens

Text = str | Tokens
"""A text, or its tokens."""


def from_pretrained(
    name: Path | str, device: torch.device | None = None, weights: Weights = "float32"
) -> tuple[LanguageModel, Vocab]:
    """Load a model with its vocabulary onto a device, by default the CPU.

    Args:
        name: A model folder, a run folder, of which the best model is loaded, or the name of a
            shipped model, such as ``python-code``.
        device: Device of the model.
        weights: Precision of the weights: ``float32``, ``bfloat16`` or ``int8``.

    Raises:
        FileNotFoundError: There is no such model, or the folder holds none.
        OSError: A file cannot be read.
        RuntimeError: A file is damaged.
        ValueError: The settings are invalid, or the vocabulary has another size than the model's.

    Example:
        >>> model, vocab = from_pretrained("shakespeare")
        >>> model.config.n_layer, model.config.vocab_size == len(vocab)
        (3, True)
    """
    place = ModelFolder.find(name)
    require_token_inputs(place.read_config())
    folder = place.path
    # Both take long for a large model.
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(load_vocab, folder)
        model, vocab = load_model(folder), loading.result()
    if len(vocab) != model.config.vocab_size:
        raise DataError(
            f"the vocabulary in {folder} has {len(vocab)} symbols and the model "
            f"{model.config.vocab_size}: they do not belong together"
        )
    return compact(model.to(device or torch.device("cpu")), weights), vocab


REWINDABLE = 256
"""Tokens by which a session can be rewound, by default."""


class Session:
    """A text of unbounded length, read and generated in turns.

    Its state has a constant size (``nbytes``), and can be saved, resumed in another process, forked
    and rewound. Every layer attends to at most ``mem_len`` positions, with ``key_offset`` one
    fewer, and the token itself (as with ``attn_len`` in :func:`~transformer_xl.evaluate`), so
    results do not depend on how the text was split, up to rounding. Exceptions are absolute
    positions, enhanced recurrence and, with ``mem_len`` 0, input recurrence, where results depend
    on the segmentation.

    Args:
        model: The model, with fixed weights; its mode is restored after each call.
        vocab: Its vocabulary.
        mem_len: Memory length. None: as configured.
        seed: Random seed. None: a different one each time.
        preface: Whether the text begins after the preface of the model, if it has one.
        rewindable: How many tokens can be taken back at least, once as many were read.

    Example:
        >>> session = Session.open("shakespeare", seed=1)
        >>> scores = session.write("ROMEO: ", scored=True)
        >>> len(scores), len("".join(session.generate(20)))
        (7, 20)
        >>> session.rewind(20)
        >>> session.state.n_tokens
        7
    """

    def __init__(
        self,
        model: LanguageModel,
        vocab: Vocab,
        *,
        mem_len: int | None = None,
        seed: int | None = None,
        preface: bool = True,
        rewindable: int = REWINDABLE,
    ) -> None:
        config = require_model(model).config
        if not isinstance(vocab, Vocab) or len(vocab) != config.vocab_size:
            raise InputError(
                f"vocab={shown(vocab)} is no vocabulary of {config.vocab_size} symbols, as the "
                "model has: load_vocab(folder) reads the one beside a model"
            )
        self._lengths = prompt_lengths(model, mem_len, rewindable)
        self.model, self.vocab = model, vocab
        self.mem_len = Lengths.of(model.config, mem_len=mem_len).mem_len
        model.require_capacity(self.mem_len)
        self._weights, self._random = "", random_numbers(seed).get_state()
        # The memory of an empty text; None: the text has a state.
        self._begin = text_start(model, self._lengths, preface=preface)
        self._state: State | None = None
        # The current generation, if it is ahead of the state.
        self._writing: GenerationBatch | None = None
        self._is_ahead = False

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        mem_len: int | None = None,
        weights: Weights = "float32",
        seed: int | None = None,
        preface: bool = True,
        rewindable: int = REWINDABLE,
    ) -> "Session":
        """Start a session with a model that :func:`from_pretrained` loads."""
        # Before loading, as a training may replace the file later.
        checksum = ModelFolder.find(folder).weights.checksum
        model, vocab = from_pretrained(folder, pick_device(), weights)
        session = cls(
            *(model, vocab), mem_len=mem_len, seed=seed, preface=preface, rewindable=rewindable
        )
        session._weights = checksum
        return session

    @classmethod
    def load(
        cls,
        folder: Path | str,
        path: Path | str,
        *,
        mem_len: int | None = None,
        weights: Weights = "float32",
        rewindable: int = REWINDABLE,
    ) -> "Session":
        """Resume a session from a file of :meth:`save` or ``txl generate --state``.

        The other arguments are those of :meth:`open`. With the same ``mem_len``, ``weights``,
        machine and number of threads, it continues with exactly the same tokens.
        """
        session = cls.open(
            folder, mem_len=mem_len, weights=weights, preface=False, rewindable=rewindable
        )
        session.state = State.load(Path(path), session._weights, session.model)
        return session

    def save(self, path: Path | str, *, int8: bool = False) -> None:
        """Write the state to a file of constant size, atomically.

        Args:
            path: The file.
            int8: As for :meth:`State.save`.

        Raises:
            OSError: The file cannot be written; an existing one is intact.
            ValueError: Nothing was read yet, or the model was not loaded by :meth:`open`.
        """
        state = self.state
        if not self._weights:
            raise InputError(
                "the state belongs to a weights file, and this model comes from no folder: "
                "model.save_pretrained(folder, vocab), then Session.open(folder)"
            )
        positions = self._lengths.mem_len if self.model.remembers_positions else 1
        state.save(Path(path), self._weights, positions=positions, int8=int8)

    @property
    def nbytes(self) -> int:
        """Maximum size of the state in bytes, whatever the length of the text.

        That is a full memory, of 2 x n_layer x M x n_head x d_head values in the precision of the
        weights, M = mem_len + rewindable (with absolute positions: n_layer x mem_len x d_model;
        with ``input_recurrence``, M x d_model more, in float32), the last 4,096 tokens, 16,384
        bytes, and the state of the random number generator, 5,056 bytes. A recurrent model has one
        state of each layer in place of the memory, whatever ``mem_len`` (an LSTM: n_layer x 2 x
        d_model values). A file also has a header of less than 1,000 bytes.
        """
        return State.largest(self.model, self._lengths.mem_len)

    @property
    def state(self) -> State:
        """The state of the text, which does not change when the session goes on.

        Setting it takes the session back to it, or to another text of its model.

        Raises:
            ValueError: Nothing was read yet; or, when it is set, it does not fit the model.
        """
        if self._is_ahead and self._writing is not None:
            self._state, self._is_ahead = self._writing.state(), False
        if self._state is None:
            raise InputError("nothing was read yet, so there is no state: write() something first")
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        if not isinstance(state, State):
            raise InputError(f"state={shown(state)} is none that a session or a text returned")
        if isinstance(state.source, Memory):
            self.model.require_memory(state.source, 1)
        elif not state.source.is_for(self.model, self._lengths):
            # Of a session with other lengths, or of another model.
            self.model.require_memory(state.mems, 1)
        self._writing, self._is_ahead, self._state = None, False, state
        if state.random is not None:
            self._random = state.random

    def write(self, text: Text, *, scored: bool = False) -> list[float | None]:
        """Read a text into the memory.

        Each call tokenizes its text separately, so texts should end at the end of a word or line.

        Args:
            text: The text, or its tokens.
            scored: Return the log-probability of each token, in nats; None for the first token of
                the session. False: return an empty list.
        """
        ids = self.vocab.encode(text) if isinstance(text, str) else text
        tokens = as_tokens(ids, self.model.config).tolist()
        if not tokens:
            return []
        if self._state is None and not self._is_ahead:
            mems, last, known, n = self._begin, None, (), 0
            # To the beginning of the text; its first token takes no position yet.
            rewindable, n_read = len(mems), len(tokens) - 1
        else:
            state = self.state
            mems, last, known, n = state.mems, state.last_token, state.tokens, state.n_tokens
            rewindable, n_read = state.rewindable, len(tokens)
        reader = Reader(self.model, self._lengths, ReaderState(mems, last))
        scores = reader.read(tokens, scored=scored)
        state = State(
            source=reader.state.mems,
            tokens=joined(known, tokens, most=State.MOST_TOKENS),
            random=self._random,
            rewindable=rewindable_after(rewindable, len(mems), n_read, self._lengths, self.model),
            n_tokens=n + len(tokens),
        )
        self._writing, self._state = None, state
        return scores

    def score(self, text: Text) -> list[float | None]:
        """Return the log-probability of each token of a continuation, without reading it."""
        return self.fork().write(text, scored=True)

    def generate(
        self,
        length: int | None = None,
        sampling: Sampling | None = None,
        *,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Iterator[str]:
        """Continue the text; stream it in pieces.

        All sampled tokens become part of the session, including those of a stop string. A character
        of several tokens is returned where it is complete, which may be by the next call.

        Args:
            length: Number of tokens to generate. None: without end.
            sampling: How a token is drawn. None: from the distribution of the model. Penalties see
                what was read and generated before, too. Loops are those of the tokens of this call.
            seed: Random seed. None: continue the random numbers of the session.
            stop: End before this string, or before the first of several.

        Raises:
            ValueError: A setting is out of range, or nothing was read yet and no token of the
                vocabulary begins a text.
            RuntimeError: From the iterator: the session went on in another way after this call.
        """
        length = whole("length", length)
        sampler = Sampler(sampling, self.model.config.vocab_size)
        if self._state is None and not self._is_ahead:
            if (start := self.vocab.start_id) is None:
                raise InputError(
                    "nothing was read yet, and no token of the vocabulary begins a text: write() "
                    "something first"
                )
            # An empty text begins with the token that an empty prompt stands for.
            self.write([start])
        # Before an earlier call is ended, as the stop strings may be wrong.
        writer = TextWriter(self.vocab, stop, before=self.state.tokens)
        return writer.pieces(self._drawn(length, sampler, seed), goes_on=True)

    def _drawn(self, length: int | None, sampler: Sampler, seed: int | None) -> Iterator[int]:
        """Begin a generation, which ends an earlier one; return its tokens."""
        state = self.state
        batch = self._writing = GenerationBatch(
            self.model,
            [[state.last_token]],
            length,
            None,
            sampler,
            [self._random if seed is None else seed],
            self._lengths,
            state,
        )

        def tokens() -> Iterator[int]:
            while self._writing is batch:
                if not (step := next(batch, None)):
                    return
                self._random, self._is_ahead = batch.random_state(0), True
                yield step[0]
            raise RuntimeError("the session went on in another way: call generate() again")

        return tokens()

    def fork(self) -> "Session":
        """Return an independent copy of the session.

        Both share what they have read until they go on. Both sample the same tokens unless given a
        seed.
        """
        other = copy.copy(self)
        if self._is_ahead or self._state is not None:
            other.state = self.state
        return other

    def rewind(self, n: int) -> None:
        """Take back the last ``n`` tokens; the random numbers go on.

        Raises:
            ValueError: That is more than ``state.rewindable``.
        """
        random = self._random
        self.state = self.state.rewind(n)
        self._random = random
