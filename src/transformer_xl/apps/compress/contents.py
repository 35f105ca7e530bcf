"""Compression of bytes to an archive, and decompression."""

import copy
import hashlib
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from jaxtyping import Int32

from transformer_xl.apps.compress import arithmetic
from transformer_xl.apps.compress.coding import Bits, Progress, Rounds, decode, encode
from transformer_xl.apps.compress.header import ArchiveError, Coding, Header, Learning, pack, unpack
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
    size: int
    """Bytes of the text."""
    seconds: float
    model_bits: float
    """Cost of the text by the model: the sum of -log2 p. 0 if the text is stored."""
    coded_bits: float
    """The same, with log2 V for each symbol that is coded without the model."""
    plain_tokens: int
    """Symbols that are coded without the model."""
    streams: int
    """0 if the text is stored."""

    def report(self) -> dict[str, float | int | None]:
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
        }


def compress(
    data: bytes,
    model: LanguageModel | None = None,
    vocab: Vocab | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Compressed:
    """Compress a text, or any bytes that the vocabulary can represent.

    Data that does not shrink is stored uncompressed. Without a model a small untrained one learns.

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
    payload, coding, bits = data, None, Bits(coded=8.0 * len(data))
    if len(tokens):
        learning = learning_of(settings, model)
        model = fresh_model(settings.seed) if model is None else model
        planned = plan(model, _hash(vocab), len(tokens), settings, learning)
        with _rounds(model, planned, progress) as rounds:
            coded, found = encode(tokens, rounds)
        if len(coded) < len(data):
            payload, coding, bits = coded, planned, found
    return _archive(data, payload, coding, bits, started)


def store(data: bytes) -> Compressed:
    """Put data into an archive as they are."""
    return _archive(data, data, None, Bits(coded=8.0 * len(data)), time.perf_counter())


def _archive(
    data: bytes, payload: bytes, coding: Coding | None, bits: Bits, started: float
) -> Compressed:
    header = Header(
        size=len(data),
        digest=_digest(data),
        payload_crc=zlib.crc32(payload),
        made_by=made_here(),
        coding=coding,
    )
    return Compressed(
        content=pack(header, payload),
        size=len(data),
        seconds=time.perf_counter() - started,
        model_bits=bits.model,
        coded_bits=bits.coded,
        plain_tokens=bits.plain_tokens,
        streams=coding.streams if coding else 0,
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
    far as it is decoded.

    Raises:
        ArchiveError: The file is damaged or has another version, was compressed on a machine whose
            arithmetic differs, or takes more RAM than the limit.
        RuntimeError: The library for arithmetic coding is missing.
        ValueError: The model is not the one that compressed the file.
    """
    header, data = unpack(content)
    if (coding := header.coding) is not None:
        arithmetic.check_installed()
        model, vocab = _model_of(coding, model, vocab), _text_vocab(vocab)
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
        raise _numbers_differ(header)
    return data


def needs_model(content: bytes) -> bool:
    """Whether a model must be given to decompress a file.

    Raises:
        ArchiveError: It is not an archive, has another version, or is damaged.
    """
    coding = unpack(content)[0].coding
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


def made_here() -> str:
    """Return the versions and the processor, on which the rounding of sums depends."""
    processor = torch.backends.cpu.get_cpu_capability()
    return f"{version('transformer-xl')}, torch {torch.__version__}, {processor}"


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


def _model_of(coding: Coding, model: LanguageModel | None, vocab: Vocab | None) -> LanguageModel:
    """Return the model that coded a text, or raise an error."""
    learning = coding.learning
    if learning is not None and learning.fresh:
        require(model is None, "it was compressed without a model: give none")
        model = fresh_model(learning.seed)
        if fingerprint(model, _FRESH_VOCAB) != coding.model:
            raise ArchiveError(
                f"this version of torch ({torch.__version__}) initializes other weights than the "
                "one that compressed it: decompress it with that version"
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
    remedy = "decompress it on a machine of that kind, with those versions"
    if header.coding is not None and header.coding.learning is not None:
        remedy = (
            "a model that learns (--learn) is reproducible only on the same kind of processor with "
            f"the same PyTorch: {remedy}"
        )
    return ArchiveError(
        "this machine computes different probabilities from those used for coding: it cannot be "
        f"decompressed here, and nothing was written; it was made by {header.made_by}, and this is "
        f"{made_here()}; {remedy}"
    )


def _hash(vocab: Vocab | None) -> str:
    return _FRESH_VOCAB if vocab is None else vocab.hash


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
