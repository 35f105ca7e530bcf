"""Sessions: a text that is read and generated in turns, with a state of constant size.

States can be saved to files.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from transformer_xl.config import pick_device
from transformer_xl.data import Vocab, load_vocab
from transformer_xl.errors import DataError, InputError
from transformer_xl.inference.generate.batch import GenerationBatch, random_numbers
from transformer_xl.inference.generate.history import History
from transformer_xl.inference.generate.prompts import prompt_lengths
from transformer_xl.inference.generate.sampler import Sampler
from transformer_xl.inference.generate.sampling import Sampling
from transformer_xl.inference.generate.state import (
    State,
    load_state,
    save_state,
)
from transformer_xl.inference.generate.text_writer import TextWriter
from transformer_xl.model import (
    LanguageModel,
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


class Mark(NamedTuple):
    """A snapshot of a session, to rewind to."""

    model: LanguageModel
    state: ReaderState
    random: Tensor
    """The state of the random number generator."""
    history: Int32[np.ndarray, " n"]
    """The last tokens, for penalties and for decoding."""


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

    Example:
        >>> session = Session.open("shakespeare", seed=1)
        >>> scores = session.write("ROMEO: ", scored=True)
        >>> len(scores), len("".join(session.generate(20)))
        (7, 20)
    """

    def __init__(
        self,
        model: LanguageModel,
        vocab: Vocab,
        *,
        mem_len: int | None = None,
        seed: int | None = None,
        preface: bool = True,
    ) -> None:
        config = require_model(model).config
        if not isinstance(vocab, Vocab) or len(vocab) != config.vocab_size:
            raise InputError(
                f"vocab={shown(vocab)} is no vocabulary of {config.vocab_size} symbols, as the "
                "model has: load_vocab(folder) reads the one beside a model"
            )
        lengths = prompt_lengths(model, mem_len)
        self.model, self.vocab, self.mem_len = model, vocab, lengths.mem_len
        self._chosen, self._weights = mem_len, ""
        # A model that cannot limit what a token sees of its segment reads one token at a time.
        one = lengths._replace(segment_len=1)
        windowed = lengths.windowed(model.config)
        self._reader = Reader(model, windowed if model.limits_attention else one)
        self._random: Tensor = random_numbers(seed).get_state()
        self._history = History()
        # The current generation, and whether it is ahead of the reader.
        self._writing: GenerationBatch | None = None
        self._is_ahead = False
        if preface and model.preface:
            # The last token that is read does not enter the memory: one more, which is forgotten.
            self._reader.read([*model.preface, 0], scored=False)
            self._reader.state = self._reader.state._replace(last_token=None)

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        mem_len: int | None = None,
        weights: Weights = "float32",
        seed: int | None = None,
        preface: bool = True,
    ) -> "Session":
        """Start a session with a model that :func:`from_pretrained` loads."""
        # Before loading, as a training may replace the file later.
        checksum = ModelFolder.find(folder).weights.checksum
        model, vocab = from_pretrained(folder, pick_device(), weights)
        session = cls(model, vocab, mem_len=mem_len, seed=seed, preface=preface)
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
    ) -> "Session":
        """Resume a session from a file of :meth:`save` or ``txl generate --state``.

        The other arguments are those of :meth:`open`. With the same ``mem_len``, ``weights``,
        machine and number of threads, it continues with exactly the same tokens.
        """
        session = cls.open(folder, mem_len=mem_len, weights=weights, preface=False)
        state = load_state(Path(path), session._weights, session.model)
        is_cut = session.model.remembers_positions
        mems = state.mems.last(session.mem_len) if is_cut else state.mems
        session._reader.state = ReaderState(mems, state.last_token)
        read = () if state.read is None else state.read.numpy()
        session._history = History(read, [state.last_token])
        if state.random is not None:
            session._random = state.random
        return session

    def save(self, path: Path | str) -> None:
        """Write the state to a file of constant size, atomically.

        Raises:
            OSError: The file cannot be written; an existing one is intact.
            ValueError: Nothing was read yet, or the model was not loaded by :meth:`open`.
        """
        mems, last_token, _ = self._read_state()
        if not self._weights:
            raise InputError(
                "the state belongs to a weights file, and this model comes from no folder: "
                "model.save_pretrained(folder, vocab), then Session.open(folder)"
            )
        if last_token is None:
            raise InputError("nothing was read yet that could be saved: write() something first")
        read = torch.from_numpy(self._history.kept[:-1])
        positions = self.mem_len if self.model.remembers_positions else 1
        state = State(mems, last_token, self._random, read=read)
        save_state(Path(path), state, self._weights, positions=positions)

    @property
    def nbytes(self) -> int:
        """Maximum size of the state in bytes, whatever the length of the text.

        That is a full memory, of 2 x n_layer x mem_len x n_head x d_head values in the precision of
        the weights (with absolute positions: n_layer x mem_len x d_model; with
        ``input_recurrence``, mem_len x d_model more, in float32), the last 4,096 tokens, 16,384
        bytes, and the state of the random number generator, 5,056 bytes. A recurrent model has one
        state of each layer in place of the memory, whatever ``mem_len`` (an LSTM: n_layer x 2 x
        d_model values). A file also has a header of less than 1,000 bytes.
        """
        return State.largest(self.model, self.mem_len)

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
        state, history = self._read_state(), self._history
        self._writing = None
        try:
            scores = self._reader.read(tokens, scored=scored)
            self._history = History(history.kept, tokens)
        except BaseException:
            # The reader goes on segment by segment.
            self._reader.state, self._history = state, history
            raise
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
        if not len(self._history.kept):
            if (start := self.vocab.start_id) is None:
                raise InputError(
                    "nothing was read yet, and no token of the vocabulary begins a text: write() "
                    "something first"
                )
            # An empty text begins with the token that an empty prompt stands for.
            self.write([start])
        # Before an earlier call is ended, as the stop strings may be wrong.
        writer = TextWriter(self.vocab, stop, before=self._history.kept)
        return writer.pieces(self._drawn(length, sampler, seed), goes_on=True)

    def _drawn(self, length: int | None, sampler: Sampler, seed: int | None) -> Iterator[int]:
        """Begin a generation, which ends an earlier one; return its tokens."""
        is_ahead, writing, known = self._is_ahead, self._writing, self._history.kept
        batch = self._writing = GenerationBatch(
            self.model,
            [known[-1:]],
            length,
            writing.decoder() if is_ahead and writing else self._reader.state.mems,
            sampler,
            [self._random if seed is None else seed],
            # As the text was read.
            self._reader.lengths,
            known[:-1],
        )

        def tokens() -> Iterator[int]:
            while self._writing is batch:
                if not (step := next(batch, None)):
                    return
                self._random, self._history = batch.random_state(0), batch.history(0)
                self._is_ahead = True
                yield step[0]
            raise RuntimeError("the session went on in another way: call generate() again")

        return tokens()

    def fork(self) -> "Session":
        """Return an independent copy of the session.

        It costs at most a copy of the memory. Both sample the same tokens unless given a seed.
        """
        other = Session(self.model, self.vocab, mem_len=self._chosen, seed=0, preface=False)
        other._weights = self._weights
        other.rewind(self.mark())
        return other

    def mark(self) -> Mark:
        """Return a snapshot of the session, for :meth:`rewind`."""
        return Mark(self.model, self._read_state(), self._random, self._history.kept.copy())

    def rewind(self, mark: Mark) -> None:
        """Restore a snapshot.

        Raises:
            ValueError: The snapshot belongs to another model.
        """
        if not isinstance(mark, Mark) or mark.model is not self.model:
            raise InputError(
                "the mark is none that mark() returned, or belongs to a session with another model"
            )
        self._writing, self._is_ahead = None, False
        self._reader.state, self._random = mark.state, mark.random
        self._history = History(mark.history)

    def _read_state(self) -> ReaderState:
        """Return the state of the reader, after taking over what was generated."""
        if self._is_ahead and self._writing is not None:
            last_token = int(self._history.kept[-1])
            self._reader.state = ReaderState(self._writing.mems, last_token)
            self._is_ahead = False
        return self._reader.state
