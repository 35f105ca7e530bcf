"""Compression of bytes to an archive, and decompression."""

import copy
import hashlib
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int32

from transformer_xl.apps.compress import arithmetic, transforms
from transformer_xl.apps.compress.coding import Progress, Rounds, decode, encode
from transformer_xl.apps.compress.header import (
    XZ,
    ArchiveError,
    Coding,
    Header,
    Learning,
    pack,
    unpack,
)
from transformer_xl.apps.compress.planning import GIGABYTE, RAM, Settings, check_possible, plan
from transformer_xl.apps.compress.predicting import (
    Learner,
    Predictor,
    fingerprint,
    fresh_model,
    reproducible,
)
from transformer_xl.config import describe_machine
from transformer_xl.data import Vocab
from transformer_xl.errors import DataError, InputError
from transformer_xl.model import LanguageModel

_FRESH_VOCAB = "bytes"
_MOST_XZ, _LEAST_XZ = 1 << 26, 1 << 12
"""Bounds of the dictionary of xz in bytes; the upper one is that of xz -9."""
_XZ_RAM = 12
"""RAM for compression with xz, as a multiple of the dictionary."""


class UnrestorableError(DataError):
    """The vocabulary of the model cannot represent a text exactly."""


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """An archive and its figures."""

    content: bytes
    method: Literal["model", "xz", "stored"]
    """How the text is coded; stored: as it is."""
    size: int
    """Bytes of the text."""
    model: str | None = None
    """The shipped model that was chosen and used."""

    def report(self) -> dict[str, object]:
        """Return the figures; without those that an empty text does not have."""
        n = len(self.content)
        report: dict[str, object] = {"bytes": self.size, "compressed_bytes": n}
        report |= {"bits_per_byte": 8 * n / self.size} if self.size else {}
        return report | {"method": self.method} | ({"model": self.model} if self.model else {})


def compress(
    data: bytes,
    model: LanguageModel | None = None,
    vocab: Vocab | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Compressed:
    """Compress a text, or any bytes that the vocabulary can represent.

    Data that the model does not shrink is stored (`store`). Without a model a small untrained one
    learns.

    Raises:
        RuntimeError: The library for arithmetic coding is missing.
        CheckpointError: The model's numbers are not finite.
        ValueError: The vocabulary cannot represent the bytes, or settings are invalid.
    """
    arithmetic.coder_library()
    settings = settings or Settings()
    if model is None and not settings.learn:
        raise InputError("without a model an untrained one must learn: set settings.learn")
    _check_pair(model, vocab)
    # An untrained model has read no text that the changed one could be nearer to.
    tokens, used = (to_tokens(data, None), 0) if model is None else _fewest_tokens(data, vocab)
    if len(tokens):
        coder = fresh_model() if model is None else model
        planned = plan(
            coder, _hash(vocab), len(tokens), settings, fresh=model is None, transforms=used
        )
        with _rounds(coder, planned, progress) as rounds:
            code = encode(tokens, rounds)
        if len(code) < len(data):
            return _archive(data, code, planned)
    return store(data, settings.ram)


def store(data: bytes, ram: float = RAM) -> Compressed:
    """Put data into an archive without a model: with xz, or as they are if that is not smaller.

    Args:
        data: The data.
        ram: Limit of RAM in gigabytes.
    """
    size = _LEAST_XZ
    # More than the data has no effect.
    while size < min(len(data), _MOST_XZ) and 2 * size * _XZ_RAM <= ram * GIGABYTE:
        size *= 2
    extreme = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_LZMA1, "preset": extreme, "dict_size": size}]
    # With its short header (the format .lzma): checksums are in the archive's own header.
    packed = lzma.compress(data, lzma.FORMAT_ALONE, filters=filters)
    if len(packed) < len(data):
        return _archive(data, packed, XZ)
    return _archive(data, data, None)


def _archive(data: bytes, payload: bytes, coding: Coding | Literal["xz"] | None) -> Compressed:
    header = Header(
        size=len(data),
        digest=_digest(data),
        payload_crc=zlib.crc32(payload),
        # Without a model, everything restores it.
        made_by=made_here(coding.learning) if isinstance(coding, Coding) else "",
        coding=coding,
    )
    return Compressed(
        content=pack(header, payload),
        method="model" if isinstance(coding, Coding) else coding or "stored",
        size=len(data),
    )


def decompress(
    content: bytes,
    model: LanguageModel | None = None,
    vocab: Vocab | None = None,
    progress: Progress | None = None,
    ram: float = RAM,
) -> bytes:
    """Decompress an archive completely, or raise an error.

    It takes at most ``ram`` gigabytes besides the model and the text, whose memory grows only as
    far as it is decoded. A text that is packed with xz must itself be within the limit.

    Raises:
        ArchiveError: The file is damaged or has another version, was compressed on a machine whose
            arithmetic differs, or takes more RAM than the limit.
        RuntimeError: The library for arithmetic coding is missing, or there is not enough memory.
        ValueError: The model is not the one that compressed the file.
    """
    header, data = unpack(content)
    coding, is_of_bytes = header.model_coding, vocab is None or vocab.kind == "bytes"
    try:
        if header.coding == XZ:
            data = _unpack_xz(data, header.size, ram)
        elif coding is not None:
            arithmetic.coder_library()
            model = _model_of(header, coding, model, vocab)
            check_possible(header, coding, len(data), model.config, is_of_bytes, ram)
            with _rounds(model, coding, progress) as rounds:
                tokens = decode(data, rounds)
            if vocab is None or is_of_bytes:
                data = tokens.astype(np.uint8).tobytes()
            else:
                data = vocab.decode_bytes(tokens.tolist())
            data = transforms.undone(data, coding.transforms)
    except MemoryError as error:
        raise RuntimeError(f"there is not enough memory for {header.size:,} bytes") from error
    except arithmetic.OtherNumbersError as error:
        raise _numbers_differ(header) from error
    if len(data) != header.size or _digest(data) != header.digest:
        if coding is None:
            raise ArchiveError("it is damaged: its content does not match its checksum")
        raise _numbers_differ(header)
    return data


def _unpack_xz(payload: bytes, size: int, ram: float) -> bytes:
    """Decompress data of a known size, which is at most the limit of RAM in gigabytes.

    A few bytes can stand for gigabytes, and the size is what the file says of itself: it is
    checked first, and nothing that is larger is made.

    Raises:
        ArchiveError: The payload is damaged, or the data or the dictionary exceed the limit.
    """
    if size > ram * GIGABYTE:
        raise ArchiveError(
            f"it unpacks to {size:,} bytes, and ram={ram:g} GB are allowed; allow more (--ram) if "
            "the file can be trusted"
        )
    decoder = lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=int(ram * GIGABYTE))
    try:
        return decoder.decompress(payload, size + 1)
    except lzma.LZMAError as error:
        raise ArchiveError(
            f"it cannot be unpacked with xz ({error}): restore it from a copy, or allow more RAM "
            "(--ram) if it is the limit"
        ) from error


def needs_model(content: bytes) -> bool:
    """Whether a model must be given to decompress a file.

    Raises:
        ArchiveError: It is not an archive, has another version, or is damaged.
    """
    coding = unpack(content)[0].model_coding
    return coding is not None and not (coding.learning and coding.learning.fresh)


def to_tokens(data: bytes, vocab: Vocab | None) -> Int32[np.ndarray, " n"]:
    """Tokenize bytes so that the symbols decode to exactly these bytes.

    Raises:
        UnrestorableError: The vocabulary cannot represent them.
    """
    if vocab is None or vocab.kind == "bytes":
        return np.frombuffer(data, np.uint8).astype(np.int32)
    text, problem = data.decode("utf-8", "surrogateescape"), " exactly"
    try:
        data.decode("utf-8")
        ids = vocab.encode(text)
        if vocab.decode_bytes(ids) == data:
            return np.asarray(ids, dtype=np.int32)
    except UnicodeDecodeError as error:
        problem = f": byte {error.start:,} is not UTF-8"
    except ValueError as error:
        # Where a symbol is missing, the remedy of the error itself does not apply here.
        unknown = vocab.unknown(text)
        what = vocab.describe_unknown(unknown, vocab.first_unknown_line(text))
        problem = f": it has no symbol for {what}" if unknown else f": {error}"
    raise UnrestorableError(
        f"the model's vocabulary ({vocab.kind}) cannot represent this file{problem}; a model of "
        "bytes compresses any file"
    )


def _fewest_tokens(data: bytes, vocab: Vocab | None) -> tuple[Int32[np.ndarray, " n"], int]:
    """Tokenize data after each transform that makes no more symbols than without.

    A model of bytes reads a tab as one symbol, and as many as four spaces.

    Returns:
        The symbols, and which transforms were applied, a bit for each.

    Raises:
        UnrestorableError: The vocabulary can represent neither.
    """
    text, used, tokens = data, 0, _tokens_or_none(data, vocab)
    for n in range(len(transforms.TRANSFORMS)):
        if (changed := transforms.changed(text, n)) is None:
            continue
        new = _tokens_or_none(changed, vocab)
        if tokens is None or (new is not None and len(new) <= len(tokens)):
            text, used, tokens = changed, used | 1 << n, new
    # An error names what the text itself has.
    return to_tokens(data, vocab) if tokens is None else tokens, used


def _tokens_or_none(data: bytes, vocab: Vocab | None) -> Int32[np.ndarray, " n"] | None:
    try:
        return to_tokens(data, vocab)
    except UnrestorableError:
        return None


def made_here(learning: Learning | None = None) -> str:
    """Return the versions and the instructions, on which the rounding of sums depends.

    Where a model learned, the processor or the GPU, too, by which libraries choose their sums.
    """
    machine = describe_machine()
    parts = [version("transformer-xl"), f"torch {torch.__version__}", machine["instructions"]]
    if learning is not None:
        name = machine["gpu"] if learning.device == "cuda" else machine["processor"]
        parts.append(str(name).replace(", ", " "))
    return ", ".join(parts)[:200]


@contextmanager
def _rounds(model: LanguageModel, coding: Coding, progress: Progress | None) -> Iterator[Rounds]:
    """Prepare the rounds of a text; if the model learns, compute deterministically."""
    learning = coding.learning
    with reproducible(learning.threads) if learning else nullcontext():
        learner = Learner(model, coding, learning) if learning else None
        is_rotary = model.config.kind == "gpt"
        exact = coding.exact_rotary if is_rotary else coding.exact_frequencies
        predictor = Predictor(model, coding.streams, coding.mem_len, exact_frequencies=exact)
        yield Rounds(coding, predictor, learner, progress)


def _model_of(
    header: Header, coding: Coding, model: LanguageModel | None, vocab: Vocab | None
) -> LanguageModel:
    """Return the model that coded a text, or raise an error."""
    learning = coding.learning
    if learning is not None and learning.fresh:
        model, vocab = fresh_model(learning.seed), None
    if model is None:
        raise InputError("it was compressed with a model: give the same one")
    _check_pair(model, vocab)
    if fingerprint(model, _hash(vocab)) != coding.model:
        if learning is not None and learning.fresh:
            raise _numbers_differ(header)
        raise InputError(
            "it was compressed with another model: give the same one, with exactly the same weights"
        )
    if learning is None or model.device.type == learning.device:
        return model
    if learning.device == "cuda" and not torch.cuda.is_available():
        raise InputError("its model learned on a GPU: decompress it on a machine that has one")
    # A module is moved in place, and this one is the caller's.
    return copy.deepcopy(model).to(learning.device)


def _check_pair(model: LanguageModel | None, vocab: Vocab | None) -> None:
    V, symbols = 256 if model is None else model.config.vocab_size, len(vocab or range(256))
    if symbols != V:
        raise InputError(
            f"the model has {V:,} symbols and the vocabulary {symbols:,}: give its own vocabulary"
        )


def _numbers_differ(header: Header) -> ArchiveError:
    """Return the error that names where an archive was made, what this machine is, and a remedy."""
    learning = header.model_coding and header.model_coding.learning
    # Archives of older versions end with the instructions.
    instructions = [*header.made_by.split(", "), "", ""][2].lower()
    return ArchiveError(
        "this machine computes different probabilities from those used for coding: it cannot be "
        f"decompressed here, and nothing was written: it was made by {header.made_by}, and this is "
        f"{made_here(learning)}: decompress it on a machine of that kind, with those versions; "
        "where the processor has the instructions, the environment variable "
        f"ATEN_CPU_CAPABILITY={instructions} selects them"
    )


def _hash(vocab: Vocab | None) -> str:
    return _FRESH_VOCAB if vocab is None else vocab.hash


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
