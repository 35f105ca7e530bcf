"""A text that is read and written by turns, with a memory of a fixed number of bytes.

Its state can be kept in a file.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int, UInt8
from torch import Tensor

from transformer_xl.config import FORMAT_VERSION
from transformer_xl.config.device import pick_device
from transformer_xl.data import Vocab
from transformer_xl.inference.generate.batch import (
    Generation,
    GenerationBatch,
    Sampler,
    random_numbers,
)
from transformer_xl.inference.generate.folder import open_folder
from transformer_xl.inference.generate.text_writer import TextWriter, written
from transformer_xl.model import LanguageModel, Memory
from transformer_xl.model.arguments import Text as Tokens
from transformer_xl.model.arguments import require_model, shown, whole
from transformer_xl.model.compact import Weights
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.needs import full_memory, most_positions, require_mem_len
from transformer_xl.model.pretrained import (
    find_model_folder,
    verified_tensors,
    weights_checksum,
    weights_path,
    write_tensors,
)
from transformer_xl.model.reading import Place, Reader

_POSITIONED = ("states", "keys", "values")


class State(NamedTuple):
    """What a text goes on from."""

    mems: Memory
    """The memory, which has read all tokens but the last."""
    last_token: int
    """That token."""
    random: UInt8[Tensor, " bytes"] | None
    """The state of the random numbers; None where there are none, or in a file of old."""
    offset: int = 0
    """How many tokens of a segment that goes on the memory has read."""
    read: Int[Tensor, " n"] | None = None
    """The last tokens that the memory has read, for those who show them; None: not known."""


def save_state(path: Path, generation: Generation, weights: Path | str) -> None:
    """Write what is needed to go on with a text to a safetensors file, atomically.

    Args:
        path: The file.
        generation: What was written so far.
        weights: The weights file of the model, to which the memory belongs, or its checksum.
    """
    state = State(generation.mems, generation.last_token, generation.random_state)
    write_state(path, state, weights)


def write_state(path: Path, state: State, weights: Path | str, *, positions: int = 0) -> None:
    """Write a state to a safetensors file, atomically.

    Args:
        path: The file.
        state: What is written.
        weights: The weights file of the model, to which the memory belongs; or, where it may be
            replaced while the model is used, the SHA-256 that it had when the model was loaded.
        positions: Room for so many positions: files of the same room are of the same size,
            however much is remembered yet.
    """
    unused = max(positions - len(state.mems), 0)
    found = state.mems.state_dict() | {"random": state.random, "read": state.read}
    tensors = {name: x.contiguous() for name, x in found.items() if x is not None}
    # Numbers of one width: the header, too, has the same size at any time.
    about = {
        "format_version": str(FORMAT_VERSION),
        "last_token": f"{state.last_token:012}",
        "offset": f"{state.offset:012}",
        "unused": f"{unused:012}",
        "weights": weights_checksum(weights),
    }
    if unused:
        tensors |= {
            name: F.pad(x, (0, 0, unused, 0)) for name, x in tensors.items() if name in _POSITIONED
        }
    write_tensors(tensors, path, about)


def load_state(path: Path, weights: Path | str, model: LanguageModel | None = None) -> State:
    """Read what a text goes on from.

    Args:
        path: The file.
        weights: As for :func:`write_state`.
        model: The model that will read it: what does not fit is refused, and the memory comes
            where the model is, in its precision (it may have been written in another). None: as
            it is in the file.

    Raises:
        OSError: The file is not there, or a folder.
        RuntimeError: The file is damaged or of a newer version.
        ValueError: The memory belongs to another model.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file")
    tensors, about = verified_tensors(path)
    # Copied, because the last digits of products depend on where in memory a tensor begins, and in
    # the file that depends on the length of the header.
    tensors = {name: x.clone() for name, x in tensors.items()}
    try:
        version, belongs_to = int(about["format_version"]), about["weights"]
        last_token, offset = int(about["last_token"]), int(about.get("offset", 0))
        unused = int(about.get("unused", 0))
        if offset < 0 or unused < 0:
            raise ValueError(f"offset={offset}, unused={unused}")
        random = tensors.pop("random", None)
        if random is not None:
            torch.Generator().set_state(random)
        read = tensors.pop("read", None)
        memory = Memory.from_state_dict(
            {"forgotten": None}
            | {
                name: x[..., unused:, :] if name in _POSITIONED else x
                for name, x in tensors.items()
            }
        )
    except (KeyError, ValueError, IndexError, TypeError, RuntimeError) as error:
        raise RuntimeError(f"{path} is damaged or holds no memory: {error}") from error
    if version > FORMAT_VERSION:
        raise RuntimeError(
            f"{path} has format {version}; this version reads up to {FORMAT_VERSION}: "
            "update transformer_xl"
        )
    if belongs_to != weights_checksum(weights):
        this = weights if isinstance(weights, Path) else "this one"
        raise ValueError(f"the memory in {path} was made by another model than {this}")
    state = State(memory, last_token, random, offset, read)
    if model is None:
        return state
    if not _fits(state, model):
        raise RuntimeError(f"{path} is damaged: no text of this model goes on from it")
    return state._replace(mems=memory.to(model.device, model.dtype))


def _fits(state: State, model: LanguageModel) -> bool:
    """Whether a state is one of a model: who reads a wrong one fails with all beside it."""
    empty = model.start_memory(1, 1)
    expected = model.keep(empty) if state.mems.has_keys else empty
    tokens, forgotten = torch.tensor([state.last_token]), state.mems.forgotten
    if state.read is not None:
        tokens = torch.cat([tokens, state.read.flatten()])
    return (
        _shapes(state.mems) == _shapes(expected)
        and len({x.shape for x in state.mems.tensors}) == 1
        and all(x.is_floating_point() for x in state.mems.tensors)
        and bool(((tokens >= 0) & (tokens < model.config.vocab_size)).all())
        and (forgotten is None or (forgotten.shape == (1,) and not forgotten.is_floating_point()))
        and (forgotten is None or 0 <= int(forgotten) <= len(state.mems))
    )


def _shapes(mems: Memory) -> list[tuple[int, ...]]:
    # But for how much is remembered.
    return [(*x.shape[:-2], x.shape[-1]) for x in mems.tensors]


# Reading in pieces bounds the memory it takes, whatever the length of a text.
_SEGMENT = 512

Text = str | Tokens
"""A text, or its tokens."""


class Mark(NamedTuple):
    """A point of a session to come back to."""

    model: LanguageModel
    """The model that has read so far."""
    place: Place
    """What is remembered there."""
    random: Tensor
    """Where the random numbers were."""


class Session:
    """A text without end, read and written by turns.

    What is kept of it is a fixed number of bytes (``nbytes``), which can be saved, resumed in
    another process, forked, and gone back to. Each token is predicted from the ``mem_len``
    positions that each layer remembers and itself, neither more nor less: the numbers are the
    same, up to rounding, in whatever pieces the text came, read or written. In `evaluate` that
    is ``attn_len = mem_len + 1``. (Not so with absolute positions and with enhanced recurrence,
    where it also matters how much is read at once.)

    Args:
        model: The model; its weights stay as they are. It reads as in evaluation mode; its mode is
            restored afterwards.
        vocab: Its vocabulary.
        mem_len: Remembered positions. None: as the model is configured.
        seed: Seed of what is drawn. None: a different one each time.

    Raises:
        ValueError: ``mem_len`` is negative, or model and vocabulary do not belong together.

    Example:
        >>> session = Session.open("runs/demo")  # doctest: +SKIP
        >>> session.write("def main(")  # doctest: +SKIP
        >>> print("".join(session.generate(20)))  # doctest: +SKIP
    """

    def __init__(
        self,
        model: LanguageModel,
        vocab: Vocab,
        *,
        mem_len: int | None = None,
        seed: int | None = None,
    ) -> None:
        config = require_model(model).config
        if not isinstance(vocab, Vocab) or len(vocab) != config.vocab_size:
            raise ValueError(
                f"vocab={shown(vocab)} is no vocabulary of {config.vocab_size} symbols, as the "
                "model has: load_vocab(folder) reads the one beside a model"
            )
        require_mem_len(model, mem_len)
        self._chosen = mem_len
        lengths = Lengths.of(config, segment_len=_SEGMENT, mem_len=mem_len)
        self.model, self.vocab, self.mem_len = model, vocab, lengths.mem_len
        self._reader = Reader(model, lengths.windowed())
        self._random: Tensor = random_numbers(seed).get_state()
        # What writes the text, and whether it is ahead of the reader.
        self._writing: Generation | None = None
        self._is_ahead = False
        self._weights: str | None = None

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        mem_len: int | None = None,
        weights: Weights = "float32",
        seed: int | None = None,
    ) -> "Session":
        """Begin a text with the model of a folder, or the best of a run.

        Args:
            folder: A model folder or a run folder.
            mem_len: Remembered positions. None: as the model is configured.
            weights: Precision of the weights: ``float32``, ``bfloat16`` or ``int8``.
            seed: Seed of what is drawn. None: a different one each time.

        Raises:
            FileNotFoundError: There is no model.
            RuntimeError: A file is damaged.
            ValueError: Model and vocabulary do not belong together, or a setting is out of range.
        """
        # Before they are read: while the session goes on, a better model may take their place.
        checked = weights_checksum(weights_path(find_model_folder(folder)))
        model, vocab = open_folder(folder, pick_device(), weights)
        session = cls(model, vocab, mem_len=mem_len, seed=seed)
        session._weights = checked
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
        """Go on with a text from the file that :meth:`save` or ``txl generate --state`` wrote.

        The arguments are those of :meth:`open`. The tokens that follow are the same, bit for bit,
        as without the pause, if ``mem_len``, ``weights``, machine and number of threads are.

        Raises:
            FileNotFoundError: There is no model or no such file.
            RuntimeError: A file is damaged.
            ValueError: The file belongs to other weights.
        """
        session = cls.open(folder, mem_len=mem_len, weights=weights)
        weights_file = weights_path(find_model_folder(folder))
        state = load_state(Path(path), weights_file, session.model)
        mems = state.mems
        if session.model.remembers_positions:
            mems = mems.last(session.mem_len)
        session._reader.place = Place(mems, state.last_token)
        if state.random is not None:
            session._random = state.random
        return session

    def save(self, path: Path | str) -> None:
        """Write the state to a file, atomically; it has the same size at any time.

        Raises:
            OSError: The file cannot be written; what was there still is.
            ValueError: Nothing was read yet, or the model comes from no folder.
        """
        if self._weights is None:
            raise ValueError(
                "the state belongs to a weights file, and this model comes from no folder: "
                "model.save_pretrained(folder, vocab), then Session.open(folder)"
            )
        last_token = self._last_token("saved")
        state = State(self._place().mems, last_token, self._random)
        positions = most_positions(self.model, self.mem_len)
        write_state(Path(path), state, self._weights, positions=positions)

    @property
    def nbytes(self) -> int:
        """How many bytes the state has, however long the text is.

        The memory when it is full: 2 x n_layer x mem_len x n_head x d_head numbers in the
        precision of the weights; with absolute positions, n_layer x mem_len x d_model. And the
        random numbers: 5,056 bytes. A file has a header more, below a thousand.
        """
        return full_memory(self.model, self.mem_len) + self._random.nbytes

    def write(self, text: Text, *, scored: bool = False) -> list[float | None]:
        """Read a text into the memory.

        A text is cut into tokens by itself: end it where a word or a line ends.

        Args:
            text: The text, or its tokens.
            scored: Whether to return the log-probability of each token, in nats; None for the
                first token of all. If not, nothing is returned.

        Raises:
            ValueError: The vocabulary has no symbol for something in it.
        """
        tokens = self._tokens(text)
        self._place()
        self._writing = None
        return self._reader.read(tokens, scored=scored)

    def score(self, text: Text) -> list[float | None]:
        """Return the log-probability of each token of a text if it came next; it is not kept.

        Raises:
            ValueError: The vocabulary has no symbol for something in it.
        """
        return self.fork().write(text, scored=True)

    def generate(
        self,
        length: int | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Iterator[str]:
        """Write on; yield the text in pieces as it comes.

        What is drawn is read, too: a stop string and all that was drawn with it.

        Args:
            length: How many tokens to draw. None: without end.
            temperature: Below 1 safer, above 1 wilder; 0 takes the likeliest token.
            top_k: Draw from the ``top_k`` likeliest tokens only. None: from all.
            top_p: Draw from the fewest likeliest tokens that have this probability together. None,
                or 1: from all.
            seed: Seed of the draw. None: go on with the random numbers of the session.
            stop: End before this string, or before the first of several.

        Raises:
            ValueError: Nothing was read yet, or a setting is out of range.
            RuntimeError: While the text is written, the session went on in another way.
        """
        length = whole("length", length)
        sampler = Sampler(temperature, top_k, top_p, self.model.config.vocab_size)
        # Not by the first piece, but now.
        random_numbers(seed)
        last_token = self._last_token("continued")
        writer = TextWriter(self.vocab, stop, [last_token])
        return written(self._drawn(length, sampler, seed), writer)

    def _drawn(self, length: int | None, sampler: Sampler, seed: int | None) -> Iterator[int]:
        last_token, mems = self._last_token("continued"), self._reader.place.mems
        if self._writing is not None and self._is_ahead:
            mems = self._writing.stepper()
        batch = GenerationBatch(
            self.model,
            [[last_token]],
            length,
            mems,
            sampler,
            [random_numbers(self._random if seed is None else seed)],
            self.mem_len,
        )
        generation = self._writing = Generation(batch)
        while True:
            if self._writing is not generation:
                raise RuntimeError("the session went on in another way: call generate() again")
            token = next(generation, None)
            if token is None:
                return
            self._random, self._is_ahead = generation.random_state, True
            yield token

    def _place(self) -> Place:
        """Return where the session is; what was written meanwhile is copied from the stepper."""
        if self._writing is not None and self._is_ahead:
            self._reader.place = Place(self._writing.mems, self._writing.last_token)
            self._is_ahead = False
        return self._reader.place

    def fork(self) -> "Session":
        """Return another session that begins where this one is; neither changes the other.

        It costs at most a copy of the memory. Both would draw the same, until one is given a seed.
        """
        other = Session(self.model, self.vocab, mem_len=self._chosen, seed=0)
        other._weights = self._weights
        other.rewind(self.mark())
        return other

    def mark(self) -> Mark:
        """Return the point where the session is, to come back to it by :meth:`rewind`."""
        return Mark(self.model, self._place(), self._random)

    def rewind(self, mark: Mark) -> None:
        """Go back to a point; what came after it was never read.

        Raises:
            ValueError: The point is one of another model.
        """
        if not isinstance(mark, Mark) or mark.model is not self.model:
            raise ValueError(
                "the mark is none that mark() returned, or belongs to a session with another model"
            )
        self._writing, self._is_ahead = None, False
        self._reader.place, self._random = mark.place, mark.random

    def _tokens(self, text: Text) -> Tokens:
        return self.vocab.encode(text) if isinstance(text, str) else text

    def _last_token(self, what: str) -> int:
        if self._writing is not None and self._is_ahead:
            return self._writing.last_token
        if (last_token := self._reader.place.last_token) is None:
            raise ValueError(f"nothing was read yet that could be {what}: write() something first")
        return last_token
