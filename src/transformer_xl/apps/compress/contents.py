"""Compression of bytes to an archive, and decompression."""

import copy
import hashlib
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int32

from transformer_xl.apps.compress import arithmetic, xz
from transformer_xl.apps.compress.coding import Bits, Progress, Rounds, decode, encode
from transformer_xl.apps.compress.header import (
    XZ,
    ArchiveError,
    Coding,
    Header,
    Learning,
    pack,
    unpack,
)
from transformer_xl.apps.compress.planning import RAM, Settings, check_possible, plan
from transformer_xl.apps.compress.predicting import (
    Learner,
    Predictor,
    fingerprint,
    fresh_model,
    reproducible,
)
from transformer_xl.config import describe_machine
from transformer_xl.data import Vocab, describe_unknown
from transformer_xl.errors import DataError, InputError
from transformer_xl.model import LanguageModel

_FRESH_VOCAB = "bytes"


class UnrestorableError(DataError):
    """The vocabulary of the model cannot represent a text exactly.

    Attributes:
        reason: The message without the remedy.
    """

    def __init__(self, reason: str, remedy: str = "a model of bytes compresses any file") -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """An archive and its figures."""

    content: bytes
    method: Literal["model", "xz", "stored"]
    """How the text is coded; stored: as it is."""
    size: int
    """Bytes of the text."""
    seconds: float
    model_bits: float
    """Cost of the text by the model: the sum of -log2 p. 0 without a model."""
    coded_bits: float
    """The same, with log2 V for each symbol that is coded without the model."""
    plain_tokens: int
    """Symbols that are coded without the model."""
    streams: int
    """0 without a model."""
    model: str | None = None
    """The shipped model that was chosen and used."""

    def report(self) -> dict[str, float | int | str | None]:
        """Return the figures; None for those that an empty text does not have."""
        size, n = self.size, len(self.content)
        return {
            "bytes": size,
            "compressed_bytes": n,
            "ratio": size / n if size else None,
            "bits_per_byte": 8 * n / size if size else None,
            "model_bits_per_byte": self.model_bits / size if self.streams else None,
            "overhead_percent": 100 * (8 * n / self.coded_bits - 1) if self.streams else None,
            "plain_tokens": self.plain_tokens,
            "streams": self.streams,
            "seconds": self.seconds,
            "bytes_per_second": size / self.seconds if self.seconds else None,
            "method": self.method,
            **({} if self.model is None else {"model": self.model}),
        }


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
        RuntimeError: The library for arithmetic coding is missing; the model's numbers are not
            finite.
        ValueError: The vocabulary cannot represent the bytes, or settings are invalid.
    """
    arithmetic.check_installed()
    started = time.perf_counter()
    settings = settings or Settings()
    if model is None and vocab is not None:
        raise InputError("a vocabulary without a model: give both or neither")
    if model is None and not settings.learn:
        raise InputError("without a model an untrained one must learn: set settings.learn")
    if model is not None and settings.seed:
        raise InputError(
            f"seed={settings.seed} with a model: only an untrained model has random weights; leave "
            "it out"
        )
    _check_pair(model, vocab)
    tokens = to_tokens(data, vocab)
    if len(tokens):
        coder = fresh_model(settings.seed) if model is None else model
        planned = plan(coder, _hash(vocab), len(tokens), settings, fresh=model is None)
        with _rounds(coder, planned, progress) as rounds:
            code, bits = encode(tokens, rounds)
        if len(code) < len(data):
            return _archive(data, code, planned, bits, started)
    return store(data, settings.ram, started)


def store(data: bytes, ram: float = RAM, started: float | None = None) -> Compressed:
    """Put data into an archive without a model: with xz, or as they are if that is not smaller.

    Args:
        data: The data.
        ram: Limit of RAM in gigabytes.
        started: When compressing them began, by `time.perf_counter`. None: now.
    """
    started = time.perf_counter() if started is None else started
    packed = xz.pack(data, ram)
    bits = Bits(coded=8.0 * len(data))
    if len(packed) < len(data):
        return _archive(data, packed, XZ, bits, started)
    return _archive(data, data, None, bits, started)


def _archive(
    data: bytes, payload: bytes, coding: Coding | Literal["xz"] | None, bits: Bits, started: float
) -> Compressed:
    of_model = coding if isinstance(coding, Coding) else None
    learning = of_model.learning if of_model else None
    header = Header(
        size=len(data),
        digest=_digest(data),
        payload_crc=zlib.crc32(payload),
        # The same everywhere.
        made_by=version("transformer-xl") if coding == XZ else made_here(learning),
        coding=coding,
    )
    return Compressed(
        content=pack(header, payload),
        method="model" if of_model else "stored" if coding is None else XZ,
        size=len(data),
        seconds=time.perf_counter() - started,
        model_bits=bits.model,
        coded_bits=bits.coded,
        plain_tokens=bits.plain_tokens,
        streams=of_model.streams if of_model else 0,
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
        RuntimeError: The library for arithmetic coding is missing.
        ValueError: The model is not the one that compressed the file.
    """
    header, payload = unpack(content)
    coding = header.model_coding
    if coding is not None:
        data = _decoded(header, coding, payload, model, vocab, progress, ram)
    else:
        data = xz.unpack(payload, header.size, ram) if header.coding == XZ else payload
    if len(data) != header.size or _digest(data) != header.digest:
        if coding is None:
            raise ArchiveError("it is damaged: its content does not match its checksum")
        raise _numbers_differ(header)
    return data


def _decoded(
    header: Header,
    coding: Coding,
    payload: bytes,
    model: LanguageModel | None,
    vocab: Vocab | None,
    progress: Progress | None,
    ram: float,
) -> bytes:
    arithmetic.check_installed()
    model, vocab = _model_of(header, coding, model, vocab), _text_vocab(vocab)
    check_possible(header, coding, len(payload), model.config, vocab is None, ram)
    try:
        with _rounds(model, coding, progress) as rounds:
            tokens = decode(payload, rounds)
    except MemoryError as error:
        raise RuntimeError(f"there is not enough memory for {coding.n_tokens:,} symbols") from error
    except arithmetic.OtherNumbersError as error:
        raise _numbers_differ(header) from error
    if vocab is None:
        return tokens.astype(np.uint8).tobytes()
    return vocab.decode_bytes(tokens.tolist())


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
    vocab = _text_vocab(vocab)
    if vocab is None:
        return np.frombuffer(data, np.uint8).astype(np.int32)
    name = f"the model's vocabulary ({vocab.kind})"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnrestorableError(
            f"byte {error.start:,} is not UTF-8, and {name} is for text"
        ) from None
    try:
        ids = vocab.encode(text)
        if vocab.decode_bytes(ids) == data:
            return np.asarray(ids, dtype=np.int32)
        problem = " exactly"
    except ValueError as error:
        # If a symbol is missing, not the error itself: its remedy does not apply here.
        unknown = vocab.unknown(text)
        what = describe_unknown(unknown, vocab.first_unknown_line(text))
        problem = f": it has no symbol for {what}" if unknown else f": {error}"
    raise UnrestorableError(f"{name} cannot represent this file{problem}")


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
        learner = Learner(model, coding, learning.lr) if learning else None
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
        if model is not None:
            raise InputError("it was compressed without a model: give none")
        model = fresh_model(learning.seed)
        if fingerprint(model, _FRESH_VOCAB) != coding.model:
            raise _numbers_differ(header)
        return model
    if model is None:
        raise InputError("it was compressed with a model: give the same one")
    _check_pair(model, vocab)
    if fingerprint(model, _hash(vocab)) != coding.model:
        raise InputError(
            "it was compressed with another model: give the same one, with exactly the same weights"
        )
    if learning is None or model.device.type == learning.device:
        return model
    if learning.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "it was compressed with a model that learned on a GPU: decompress it on a machine that "
            "has one"
        )
    # A module is moved in place, and this one is the caller's.
    return copy.deepcopy(model).to(learning.device)


def _check_pair(model: LanguageModel | None, vocab: Vocab | None) -> None:
    V, symbols = 256 if model is None else model.config.vocab_size, len(vocab or range(256))
    if symbols != V:
        raise InputError(
            f"the model has {V:,} symbols and the vocabulary {symbols:,}: give its own vocabulary"
        )


def _text_vocab(vocab: Vocab | None) -> Vocab | None:
    """Return a vocabulary, or None if its symbols are bytes."""
    return None if vocab is None or vocab.kind == "bytes" else vocab


def _numbers_differ(header: Header) -> ArchiveError:
    """Return the error that names where an archive was made, what this machine is, and a remedy."""
    learning = header.model_coding and header.model_coding.learning
    why = (
        "a model that learns (--learn) is reproducible only on the same kind of processor with the "
        "same PyTorch; "
    )
    # Archives of older versions end with the instructions.
    instructions = [*header.made_by.split(", "), "", ""][2].lower()
    return ArchiveError(
        "this machine computes different probabilities from those used for coding: it cannot be "
        f"decompressed here, and nothing was written: {why if learning else ''}it was made by "
        f"{header.made_by}, and this is {made_here(learning)}: decompress it on a machine of that "
        "kind, with those versions; where the processor has the instructions, the environment "
        f"variable ATEN_CPU_CAPABILITY={instructions} selects them"
    )


def _hash(vocab: Vocab | None) -> str:
    return _FRESH_VOCAB if vocab is None else vocab.hash


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
