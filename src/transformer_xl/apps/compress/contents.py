"""Bytes to a file of fewer bytes, and back."""

import hashlib
import time
import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from jaxtyping import Int32

from transformer_xl.apps.compress import arithmetic
from transformer_xl.apps.compress.coding import Bits, Progress, decode, encode
from transformer_xl.apps.compress.header import ArchiveError, Coding, Header, Learning, pack, unpack
from transformer_xl.apps.compress.planning import RAM, Layout, Settings, check_possible, plan
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
    """The vocabulary of the model does not restore a text to the last byte."""


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """A compressed text and what it costs."""

    content: bytes
    """The file."""
    size: int
    """Bytes of the text."""
    seconds: float
    """What it took."""
    model_bits: float
    """What the text costs by the model: the sum of -log2 p. 0 where it is stored."""
    coded_bits: float
    """The same, but for rounds in which a part is better coded without the model."""
    plain_tokens: int
    """Symbols of these."""
    streams: int
    """Parts coded side by side; 0 where it is stored."""
    made_for: str | None = None
    """The versions and the processor with which alone it is restored, because the model learned;
    None: any."""

    def report(self) -> dict[str, float | int | None]:
        """Return the numbers that people compare; None where an empty text has none."""
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
    """Compress a text, or any bytes that the vocabulary can restore.

    What does not shrink is stored as it is.

    Args:
        data: The bytes.
        model: The model. None: a small fresh one, which learns.
        vocab: Its vocabulary.
        settings: How. None: the defaults.
        progress: Is told how far it has come.

    Raises:
        RuntimeError: The library for arithmetic coding is missing; the model's numbers are not
            finite.
        ValueError: The vocabulary does not restore the bytes; settings do not fit.
    """
    arithmetic.check_installed()
    started = time.perf_counter()
    settings = Settings() if settings is None else settings
    if model is None:
        require(settings.learn, "without a model there must be one that learns: settings.learn")
        require(vocab is None, "a vocabulary without a model: give both or neither")
    else:
        require(
            settings.seed == 0,
            f"seed={settings.seed} with a model: only the weights of a fresh one are drawn; leave "
            "it out",
        )
    _check_pair(model, vocab)
    tokens = to_tokens(data, vocab)
    payload, coding, total = data, None, Bits()
    if len(tokens):
        learning = None
        if settings.learn:
            default = FRESH_LR if model is None else TRAINED_LR
            learning = Learning(
                fresh=model is None,
                seed=settings.seed,
                lr=default if settings.lr is None else settings.lr,
                threads=torch.get_num_threads(),
                device="cuda" if model is not None and model.device.type == "cuda" else "cpu",
            )
        model = fresh_model(settings.seed) if model is None else model
        coding = plan(model, _hash(vocab), len(tokens), settings, learning)
        coded, total = _encode(tokens, model, coding, progress)
        if len(coded) < len(data):
            payload = coded
        else:
            coding = None
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
        model_bits=total.model if coding else 0.0,
        coded_bits=total.coded if coding else 8.0 * len(data),
        plain_tokens=total.plain_tokens if coding else 0,
        streams=coding.streams if coding else 0,
        made_for=header.made_by if coding and coding.learning else None,
    )


def decompress(
    content: bytes,
    model: LanguageModel | None = None,
    vocab: Vocab | None = None,
    progress: Progress | None = None,
    ram: float = RAM,
) -> bytes:
    """Restore the bytes that were compressed, all of them or none.

    Args:
        content: The file.
        model: The model with which it was made. None: where it was made without one.
        vocab: Its vocabulary.
        progress: Is told how far it has come.
        ram: Gigabytes of RAM that may be taken, beside the model and the text. The text itself
            takes room only as far as it is restored.

    Raises:
        ArchiveError: The file is damaged or of another version, or was made where sums come out
            otherwise; it takes more RAM than is allowed.
        RuntimeError: The library for arithmetic coding is missing.
        ValueError: The model is not the one that the file was made with.
    """
    header, payload = unpack(content)
    data = payload
    if header.coding is not None:
        arithmetic.check_installed()
        model = _model_of(header.coding, model, vocab)
        is_of_bytes = _of_text(vocab) is None
        check_possible(header, header.coding, len(payload), model.config, is_of_bytes, ram)
        tokens = _decode(header, header.coding, payload, model, progress)
        data = _to_bytes(tokens, vocab)
    if len(data) != header.size or _digest(data) != header.digest:
        raise _other_numbers(header)
    return data


def needs_model(content: bytes) -> bool:
    """Whether a model must be given to decompress a file.

    Raises:
        ArchiveError: It is no such file, of another version, or damaged.
    """
    coding = unpack(content)[0].coding
    return coding is not None and not (coding.learning and coding.learning.fresh)


def to_tokens(data: bytes, vocab: Vocab | None) -> Int32[np.ndarray, " n"]:
    """Cut bytes into symbols that restore them.

    Raises:
        UnrestorableError: The vocabulary has none.
    """
    vocab = _of_text(vocab)
    if vocab is None:
        return np.frombuffer(data, np.uint8).astype(np.int32)
    remedy = "a model of bytes compresses any file"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnrestorableError(
            f"byte {error.start:,} is no UTF-8, and the model's vocabulary ({vocab.kind}) is one "
            f"of text; {remedy}"
        ) from None
    try:
        ids = vocab.encode(text)
        restored = vocab.decode_bytes(ids)
    except ValueError as error:
        # Not the error itself where a symbol is missing: it has a remedy for other uses of a text.
        unknown = vocab.unknown(text)
        what = describe_unknown(unknown, vocab.first_unknown_line(text))
        reason = f"it has no symbol for {what}" if unknown else str(error)
        raise UnrestorableError(
            f"the model's vocabulary ({vocab.kind}) cannot restore this file: {reason}; {remedy}"
        ) from None
    if restored != data:
        raise UnrestorableError(
            f"the model's vocabulary ({vocab.kind}) does not restore this file exactly; {remedy}"
        )
    return np.asarray(ids, dtype=np.int32)


def made_here() -> str:
    """Return what decides how sums come out here."""
    processor = torch.backends.cpu.get_cpu_capability()
    return f"{version('transformer-xl')}, torch {torch.__version__}, {processor}"


def _encode(
    tokens: Int32[np.ndarray, " n"],
    model: LanguageModel,
    coding: Coding,
    progress: Progress | None,
) -> tuple[bytes, Bits]:
    layout = Layout(coding.n_tokens, coding.streams, coding.segment_len)
    with _repeatable(coding):
        return encode(tokens, layout, *_computing(model, layout, coding), progress)


def _decode(
    header: Header,
    coding: Coding,
    payload: bytes,
    model: LanguageModel,
    progress: Progress | None,
) -> Int32[np.ndarray, " n"]:
    layout = Layout(coding.n_tokens, coding.streams, coding.segment_len)
    try:
        with _repeatable(coding):
            return decode(payload, layout, *_computing(model, layout, coding), progress)
    except MemoryError as error:
        raise RuntimeError(f"there is no memory for {coding.n_tokens:,} symbols") from error
    except arithmetic.OtherNumbersError as error:
        raise _other_numbers(header) from error


def _repeatable(coding: Coding) -> AbstractContextManager[None]:
    """Only learning depends on the last digits."""
    return reproducible(coding.learning.threads) if coding.learning else nullcontext()


def _computing(
    model: LanguageModel, layout: Layout, coding: Coding
) -> tuple[Predictor, Learner | None]:
    learner = None
    if coding.learning is not None:
        learner = Learner(
            model,
            streams=layout.streams,
            mem_len=coding.mem_len,
            lr=coding.learning.lr,
            n_rounds=layout.n_rounds,
        )
    predictor = Predictor(
        model, layout.streams, coding.mem_len, exact_frequencies=coding.exact_frequencies
    )
    return predictor, learner


def _model_of(coding: Coding, model: LanguageModel | None, vocab: Vocab | None) -> LanguageModel:
    learning = coding.learning
    if learning is not None and learning.fresh:
        require(model is None, "it was made without a model: give none")
        model = fresh_model(learning.seed)
        if fingerprint(model, _FRESH_VOCAB) != coding.model:
            raise ArchiveError(
                f"this version of torch ({torch.__version__}) draws other weights than the one "
                "that made it; read it there"
            )
        return model
    if model is None:
        raise ValueError("it was made with a model: give the same one")
    _check_pair(model, vocab)
    if fingerprint(model, _hash(vocab)) != coding.model:
        raise ValueError(
            "it was made with another model: give the very one that it was made with, to the last "
            "digit of its weights"
        )
    if learning is None:
        return model
    if learning.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("it was made with a model that learned on a GPU, and there is none here")
    return model.to(learning.device)


def _check_pair(model: LanguageModel | None, vocab: Vocab | None) -> None:
    symbols = 256 if vocab is None else len(vocab)
    V = symbols if model is None else model.config.vocab_size
    require(
        symbols == V,
        f"the model has {V:,} symbols and the vocabulary {symbols:,}: give its own vocabulary",
    )


def _of_text(vocab: Vocab | None) -> Vocab | None:
    """Return a vocabulary of which a symbol is not a byte; None: it is."""
    return None if vocab is None or vocab.kind == "bytes" else vocab


def _to_bytes(tokens: Int32[np.ndarray, " n"], vocab: Vocab | None) -> bytes:
    vocab = _of_text(vocab)
    if vocab is None:
        return tokens.astype(np.uint8).tobytes()
    return vocab.decode_bytes(tokens.tolist())


def _other_numbers(header: Header) -> ArchiveError:
    coding, remedy = header.coding, "restore it on a machine of that kind, with those versions"
    if coding is not None and coding.learning is not None:
        remedy = (
            "a model that learns (--learn) repeats itself only on the same kind of processor with "
            f"the same PyTorch: {remedy}"
        )
    return ArchiveError(
        "this machine computes different probabilities from those used for coding: it cannot be "
        f"restored here, and nothing was; it was made by {header.made_by}, and this is "
        f"{made_here()}; {remedy}"
    )


def _hash(vocab: Vocab | None) -> str:
    return _FRESH_VOCAB if vocab is None else vocab.hash


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
