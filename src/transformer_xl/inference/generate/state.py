"""The state of a text: what a stream needs to be continued, in memory or in a file."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int, Int8, UInt8
from torch import Tensor

from transformer_xl.config import FORMAT_VERSION, GenerateConfig
from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.inference.generate.random_numbers import random_numbers
from transformer_xl.model import (
    Decoder,
    LanguageModel,
    Lengths,
    Memory,
    WeightsFiles,
    read_tensors,
    whole,
    write_tensors,
)

_POSITIONED = ("states", "keys", "values", "inputs")
_SCALES = "{}_scales"
"""Beside values in int8: the factors of each vector."""


@dataclass(frozen=True, eq=False, kw_only=True)
class State:
    """The state of one text, from which it can be continued: of constant size, and never changed.

    :func:`~transformer_xl.generate`, :class:`~transformer_xl.Session` and the server return it and
    go on from it. A text is forked by continuing its state more than once: what both have in common
    is stored once, until they write.

    Attributes:
        source: The memory of all tokens but the last; or a decoder that has read them.
        tokens: The last tokens, the last of which is not in the memory; at most 4,097.
        random: The state of the random number generator. None: nothing was sampled.
        rewindable: How many of the last tokens can be taken back.
        n_tokens: How many tokens the text has so far, those of a preface not counted.
        offset: How many tokens of an incomplete segment are in the memory.
        note: A text that a program keeps with it.

    Example:
        >>> from transformer_xl import from_pretrained, generate, shipped_path
        >>> model, vocab = from_pretrained("shakespeare")
        >>> text = generate(model, vocab.encode("ROMEO:"), length=20, seed=1, rewindable=8)
        >>> tokens = list(text)
        >>> weights = shipped_path("shakespeare") / "model.safetensors"
        >>> text.state.save(Path("romeo.safetensors"), weights)
        >>> state = State.load(Path("romeo.safetensors"), weights, model)
        >>> (state.n_tokens, state.rewindable, state.checksum == text.state.checksum)
        (26, 25, True)
        >>> earlier = state.rewind(5)
        >>> earlier.tokens[-15:].tolist() == tokens[:15]
        True
    """

    MOST_TOKENS: ClassVar[int] = GenerateConfig.MAX_HISTORY + 1

    source: Memory | Decoder
    tokens: Int[np.ndarray, " n"]
    random: UInt8[Tensor, " bytes"] | None = None
    rewindable: int = 0
    n_tokens: int = 0
    offset: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens, np.int32)[-self.MOST_TOKENS :]
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "n_tokens", max(self.n_tokens, len(tokens)))
        known = min(self.rewindable, len(tokens) - 1, self.n_positions)
        object.__setattr__(self, "rewindable", max(known, 0))

    @property
    def n_positions(self) -> int:
        """How many positions are in the memory."""
        source = self.source
        return len(source.seen()) if isinstance(source, Memory) else source.n_positions

    @cached_property
    def mems(self) -> Memory:
        """The memory of all tokens but the last, of one stream."""
        source = self.source
        return (source if isinstance(source, Memory) else source.memory()).seen()

    @property
    def last_token(self) -> int:
        """The last token, which is not in the memory yet."""
        return int(self.tokens[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, the last tokens and the state of the random numbers."""
        tensors = [*self.mems.tensors] if self.random is None else [*self.mems.tensors, self.random]
        return sum(x.nbytes for x in tensors) + self.tokens.nbytes

    @property
    def checksum(self) -> str:
        """SHA-256 of the memory, the last tokens and the random numbers."""
        digest = hashlib.sha256(self.tokens.tobytes())
        for x in self._tensors:
            digest.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.mems.tensors + (() if self.random is None else (self.random,))

    def rewind(self, n: int) -> "State":
        """Return the state before the last ``n`` tokens; the random numbers are not drawn again.

        Raises:
            InputError: That is more than ``rewindable``.
        """
        if whole("n", n) > self.rewindable:
            raise InputError(
                f"n={n} must be at most rewindable={self.rewindable}: of what a token before those "
                "sees, a part is forgotten; more is kept with generate(..., rewindable=n)"
            )
        if isinstance(self.source, Memory):
            source = self.source.without_last(n)
        else:
            source = self.source.fork()
            source.rewind(n)
        return replace(
            self,
            source=source,
            tokens=self.tokens[: len(self.tokens) - n],
            n_tokens=self.n_tokens - n,
            rewindable=self.rewindable - n,
        )

    def decoder(self, model: LanguageModel, lengths: Lengths) -> Decoder | None:
        """Return a decoder of a model that goes on, with these lengths; None: there is none yet."""
        source = self.source
        if isinstance(source, Decoder) and source.is_for(model, lengths):
            return source.fork()
        return None

    @staticmethod
    def largest(model: LanguageModel, mem_len: int) -> int:
        """Return the maximum bytes of a state: memory, last tokens, and random numbers."""
        random, n_tokens = random_numbers(0).get_state(), GenerateConfig.MAX_HISTORY
        return model.memory_bytes(mem_len) + n_tokens * np.dtype(np.int32).itemsize + random.nbytes

    def save(
        self, path: Path, weights: Path | str, *, positions: int = 0, int8: bool = False
    ) -> None:
        """Write the state to a safetensors file, atomically.

        Args:
            path: The file.
            weights: The weights file of the model, which :meth:`load` compares; or, if the file may
                have been replaced since, its SHA-256 at the time of loading.
            positions: Pad the memory to this length, so that all files have the same size, and the
                tokens in it to 4,096.
            int8: Write keys and values in 8 bits, with a factor for each vector.
        """
        mems, read = self.mems, torch.from_numpy(self.tokens[:-1].copy())
        unused, n_read = max(positions - len(mems), 0), len(read)
        if positions:
            read = F.pad(read, (self.MOST_TOKENS - 1 - n_read, 0))
        values = mems.state_dict() | {"random": self.random, "read": read}
        tensors = {name: x.contiguous() for name, x in values.items() if x is not None}
        for name in tensors.keys() & {*_POSITIONED}:
            if unused:
                tensors[name] = F.pad(tensors[name], (0, 0, unused, 0))
            if int8 and mems.has_keys and name != "inputs":
                tensors[name], tensors[_SCALES.format(name)] = _in_int8(tensors[name])
        numbers = {"last_token": self.last_token, "offset": self.offset, "unused": unused}
        numbers |= {"n_read": n_read, "n_tokens": self.n_tokens, "rewindable": self.rewindable}
        about = {
            "format_version": str(FORMAT_VERSION),
            # Zero-padded, so that the header has a constant size.
            **{name: f"{number:012}" for name, number in numbers.items()},
            "weights": _checksum_of(weights),
        }
        write_tensors(tensors, path, about | ({"note": self.note} if self.note else {}))

    @classmethod
    def load(
        cls,
        path: Path,
        weights: Path | str,
        model: LanguageModel | None = None,
        *,
        follow: bool = True,
    ) -> "State":
        """Load and verify a state.

        Args:
            path: The file.
            weights: As for :meth:`save`.
            model: The model that will use it: shapes are validated, and the memory is moved to its
                device and precision. None: the state is returned as stored.
            follow: Whether the file, or the folder that it is in, may be a symbolic link.

        Raises:
            OSError: The file does not exist, or is no regular file.
            RuntimeError: The file is damaged or of a newer version.
            ValueError: The state belongs to another model.
        """
        tensors, about = read_tensors(path, follow=follow)
        # Copied, because rounding in products depends on the alignment of tensors, and in the file
        # that depends on the length of the header.
        tensors = {name: x.clone() for name, x in tensors.items()}
        try:
            version, belongs_to = int(about["format_version"]), about["weights"]
            names = ("offset", "unused", "n_tokens", "rewindable")
            numbers = {name: int(about.get(name, 0)) for name in names}
            random = tensors.pop("random", None)
            read = tensors.pop("read", torch.zeros(0, dtype=torch.int32)).flatten()
            n_read = int(about.get("n_read", len(read)))
            if min(*numbers.values(), n_read) < 0 or n_read > len(read):
                raise ValueError(f"{numbers}, n_read={n_read}")
            last_token = torch.tensor([int(about["last_token"])])
            tokens = torch.cat([read[len(read) - n_read :], last_token])
            if random is not None:
                torch.Generator().set_state(random)
            unused = numbers.pop("unused")
            for name in tensors.keys() & {*_POSITIONED}:
                scales = tensors.pop(_SCALES.format(name), None)
                tensors[name] = tensors[name] if scales is None else tensors[name] * scales
                tensors[name] = tensors[name][..., unused:, :]
            mems = Memory.from_state_dict({"forgotten": None} | tensors)
            state = cls(
                source=mems,
                tokens=tokens.numpy(),
                random=random,
                note=about.get("note", ""),
                **numbers,
            )
        except (KeyError, ValueError, IndexError, TypeError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"{path} is damaged or holds no memory: {error}") from error
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format {version}; this version reads up to {FORMAT_VERSION}: "
                "update transformer_xl"
            )
        if belongs_to != _checksum_of(weights):
            this = weights if isinstance(weights, Path) else "this one"
            raise InputError(f"the memory in {path} was made by another model than {this}")
        if model is None:
            return state
        # A wrong one would fail a whole batch of the server.
        is_known = bool(((tokens >= 0) & (tokens < model.config.vocab_size)).all())
        if not (is_known and model.is_own(mems) and mems.batch_size == 1):
            raise CheckpointError(f"{path} is damaged: no text of this model goes on from it")
        return replace(state, source=mems.to(model.device, model.dtype))


def rewindable_after(
    before: int, length: int, n: int, lengths: Lengths, model: LanguageModel
) -> int:
    """Return by how many tokens a text can be rewound after it has read more.

    Args:
        before: By how many tokens it could before.
        length: How many positions were in its memory.
        n: How many tokens were read.
        lengths: The lengths; those that see fewer positions than are kept can be rewound.
        model: The model.
    """
    if not model.can_rewind:
        return 0
    is_cut = length + n > lengths.mem_len
    return min(before + n, lengths.n_spare(model.config)) if is_cut else before + n


def _in_int8(x: Tensor) -> tuple[Int8[Tensor, "*shape"], Tensor]:
    """Return vectors in 8 bits, and the factor of each."""
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales.clamp(min=1e-30)).round().to(torch.int8), scales


def _checksum_of(weights: Path | str) -> str:
    return weights if isinstance(weights, str) else WeightsFiles(weights).checksum
