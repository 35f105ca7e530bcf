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
    FRESH_LR,
    TRAINED_LR,
    Learner,
    Predictor,
    fingerprint,
    fresh_model,
    reproducible,
)
from transformer_xl.config.checks import require
from transformer_xl.config.device import describe_machine
from transformer_xl.data import Vocab
from transformer_xl.data.vocab import describe_unknown
from transformer_xl.model import LanguageModel

_FRESH_VOCAB = "bytes"


class UnrestorableError(ValueError):
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
    settings = Settings() if settings is None else settings
    if model is None:
        require(settings.learn, "without a model an untrained one must learn: set settings.learn")
        require(vocab is None, "a vocabulary without a model: give both or neither")
    else:
        require(
            settings.seed == 0,
            f"seed={settings.seed} with a model: only an untrained model has random weights; leave "
            "it out",
        )
        _check_pair(model, vocab)
    tokens = to_tokens(data, vocab)
    if len(tokens):
        learning = learning_of(settings, model)
        model = fresh_model(settings.seed) if model is None else model
        planned = plan(model, _hash(vocab), len(tokens), settings, learning)
        with _rounds(model, planned, progress) as rounds:
            coded, found = encode(tokens, rounds)
        if len(coded) < len(data):
            return _archive(data, coded, planned, found, started)
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
    header, data = unpack(content)
    coding = header.model_coding
    if coding is None:
        data = xz.unpack(data, header.size, ram) if header.coding == XZ else data
    else:
        arithmetic.check_installed()
        model, vocab = _model_of(header, coding, model, vocab), _text_vocab(vocab)
        check_possible(header, coding, len(data), model.config, vocab is None, ram)
        try:
            with _rounds(model, coding, progress) as rounds:
                tokens = decode(data, rounds)
        except MemoryError as error:
            raise RuntimeError(
                f"there is not enough memory for {coding.n_tokens:,} symbols"
            ) from error
        except arithmetic.OtherNumbersError as error:
            raise _numbers_differ(header) from error
        is_text = vocab is not None
        data = vocab.decode_bytes(tokens.tolist()) if is_text else tokens.astype(np.uint8).tobytes()
    if len(data) != header.size or _digest(data) != header.digest:
        if coding is None:
            raise ArchiveError("it is damaged: its content does not match its checksum")
        raise _numbers_differ(header)
    return data


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


def learning_of(settings: Settings, model: LanguageModel | None) -> Learning | None:
    """Return how a model learns, or an untrained one; None: it does not."""
    if not settings.learn:
        return None
    default = FRESH_LR if model is None else TRAINED_LR
    return Learning(
        fresh=model is None,
        seed=settings.seed,
        lr=default if settings.lr is None else settings.lr,
        threads=torch.get_num_threads(),
        device="cuda" if model is not None and model.device.type == "cuda" else "cpu",
    )


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
        require(model is None, "it was compressed without a model: give none")
        model = fresh_model(learning.seed)
        if fingerprint(model, _FRESH_VOCAB) != coding.model:
            raise ArchiveError(
                "an untrained model starts from other weights here than where it was compressed, "
                f"and nothing was written: {_differences(header)}"
            )
        return model
    if model is None:
        raise ValueError("it was compressed with a model: give the same one")
    _check_pair(model, vocab)
    require(
        fingerprint(model, _hash(vocab)) == coding.model,
        "it was compressed with another model: give the same one, with exactly the same weights",
    )
    if learning is None:
        return model
    require(
        learning.device == "cpu" or torch.cuda.is_available(),
        "it was compressed with a model that learned on a GPU: decompress it on a machine that "
        "has one",
    )
    is_there = model.device.type == learning.device
    # A module is moved in place, and this one is the caller's.
    return model if is_there else copy.deepcopy(model).to(learning.device)


def _check_pair(model: LanguageModel, vocab: Vocab | None) -> None:
    V, symbols = model.config.vocab_size, 256 if vocab is None else len(vocab)
    require(
        symbols == V,
        f"the model has {V:,} symbols and the vocabulary {symbols:,}: give its own vocabulary",
    )


def _text_vocab(vocab: Vocab | None) -> Vocab | None:
    """Return a vocabulary, or None if its symbols are bytes."""
    return None if vocab is None or vocab.kind == "bytes" else vocab


def _numbers_differ(header: Header) -> ArchiveError:
    learns = header.model_coding is not None and header.model_coding.learning is not None
    why = (
        "a model that learns (--learn) is reproducible only on the same kind of processor with the "
        "same PyTorch; "
    )
    return ArchiveError(
        "this machine computes different probabilities from those used for coding: it cannot be "
        f"decompressed here, and nothing was written: {why if learns else ''}"
        f"{_differences(header)}"
    )


def _differences(header: Header) -> str:
    """Say what was different where an archive was made, and what to do."""
    coding = header.model_coding
    here = made_here(coding.learning if coding else None).split(", ")
    # Archives of older versions end with the instructions.
    pairs = [*zip(header.made_by.split(", "), here, strict=False)]
    different = [pair for pair in pairs if pair[0] != pair[1]]
    if not different:
        return (
            f"it was made by {header.made_by}, as it is here, so that the processor or its "
            "settings differ: decompress it on the machine that made it"
        )
    there, own = (", ".join(each) for each in zip(*different, strict=True))
    instructions = pairs[2][0] if len(pairs) > 2 and pairs[2] in different else ""
    start = (
        "; for the instructions, where the processor has them, set the environment variable "
        f"ATEN_CPU_CAPABILITY={instructions.lower()}"
    )
    return (
        f"it was made by {header.made_by}, of which differ: {there} (here {own}); decompress it "
        f"on a machine of that kind, with those versions{start if instructions else ''}"
    )


def _hash(vocab: Vocab | None) -> str:
    return _FRESH_VOCAB if vocab is None else vocab.hash


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
