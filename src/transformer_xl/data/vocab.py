r"""Vocabularies: tokenization of text, and the IDs of tokens.

Each is a ``tokenizer.json`` of Hugging Face ``tokenizers`` and a small ``vocab.json`` that names
its kind:

* ``bytes``: the 256 bytes, each its own ID. Encodes any text and any file; lossless.
* ``chars``: the characters of the training text, sorted. Lossless.
* ``words``: separated by whitespace, most frequent first; ``<eos>`` ends each line.
* ``bpe``: byte-pair encoding learned from the training text. Encodes any text; lossless.
* ``integers``: integers between blanks, in order; ``<eos>`` ends each line.
* ``brought``: an external tokenizer, used unchanged (`BroughtVocab`).
* ``imported``: the vocabulary of an old program, with its rules (`imported`).

There is an ``<unk>`` only if the text needs one. Dimension key: V tokens in the vocabulary.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice, repeat
from operator import index
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Int32
from tokenizers import AddedToken, Tokenizer

from transformer_xl.config import FORMAT_VERSION, replace_file
from transformer_xl.data.decoding import EOS, StreamDecoder, not_a_symbol
from transformer_xl.data.normalizing import Normalizer
from transformer_xl.errors import DataError, InputError

VocabKind = Literal["bytes", "chars", "words", "bpe", "integers", "brought", "imported"]

VOCAB_FILE = "vocab.json"
UNK = "<unk>"
UNDECODED = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as ``surrogateescape`` decodes them."""
_HALF = re.compile("[\ud800-\udfff]")
MISSING = -1
"""In place of the ID of an unknown symbol."""
_LISTED = 5

_READS_ANY = "use a model trained with --data.vocab bytes (or bpe), which reads any text"
_NEEDED_NONE = (
    f"it has no <unk>, because its training text needed none: remove them, or {_READS_ANY}"
)
_REMEDIES = {
    "chars": _NEEDED_NONE,
    "words": _NEEDED_NONE,
    "integers": "it has the integers of its training text, or those below its size: remove the "
    "others, or train on a text that has them or with a larger --data.vocab_size",
    "imported": f"it has no <unk>: remove them, or {_READS_ANY}",
}
"""Reason and remedy for unknown symbols, by kind; other kinds encode any text."""


class Vocab:
    """Converts text to token IDs and back.

    Attributes:
        kind: The kind of tokenization.
        eos_id: ID of the token that ends a line; None if a line break is an ordinary token.
        unk_id: ID of the token for unknown symbols; None if there is none.
        start_id: ID of the token that an empty prompt stands for: the one that ends a line, as a
            text begins after a line end; None if no single token does.
        token_bytes: Number of UTF-8 bytes of each token; None if tokens do not restore the text
            (words). ``<unk>`` counts 0, so that it never lowers the bits per byte.
        tokenizer: The ``tokenizers`` object, which is not to be changed.
        hash: SHA-256 of the definition; equal hashes mean equal IDs.

    Example:
        >>> from transformer_xl import load_vocab
        >>> vocab = load_vocab("shakespeare")
        >>> vocab.kind, len(vocab), vocab.decode(vocab.encode("thee"))
        ('chars', 65, 'thee')
    """

    EOS: ClassVar[str] = EOS
    UNK: ClassVar[str] = UNK

    def __init__(self, kind: VocabKind, definition: str) -> None:
        """Read the text of a ``tokenizer.json``."""
        self.kind: VocabKind = kind
        self.definition = definition
        self.hash = definition_hash(kind, definition.encode())
        try:
            self.tokenizer = Tokenizer.from_str(definition)
        except BaseException as error:
            if not is_tokenizer_error(error):
                raise
            raise DataError(f"it is not a tokenizer: {error}") from error
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self._ids = self.tokenizer.get_vocab()
        self.symbols = sorted(self._ids, key=self._ids.__getitem__)
        if sorted(self._ids.values()) != list(range(len(self.symbols))):
            raise DataError("the numbers of a vocabulary must be 0, 1, 2, ... without a gap")
        self.eos_id = self._ids.get(EOS) if kind in ("words", "integers") else None
        self.unk_id = self._ids.get(UNK) if kind in ("chars", "words") else None
        self._skips_undecoded = kind in ("bpe", "brought", "imported")
        self._bytes = self._symbol_bytes()
        self.token_bytes: Int32[np.ndarray, " V"] | None = None
        if self._bytes is not None:
            self.token_bytes = np.array([len(symbol) for symbol in self._bytes], dtype=np.int32)
            if self.unk_id is not None:
                self.token_bytes[self.unk_id] = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind!r}, size={len(self)}, {self.hash[:12]})"

    def __len__(self) -> int:
        return len(self.symbols)

    @cached_property
    def start_id(self) -> int | None:
        """The ID of the token that an empty prompt stands for."""
        if self.eos_id is not None:
            return self.eos_id
        ids = [] if self.unknown("\n") else self.encode("\n")
        return ids[0] if len(ids) == 1 else None

    def _symbol_bytes(self) -> list[bytes] | None:
        if self.kind in ("words", "integers"):
            return None
        if self.kind == "chars":
            # No character begins with this byte: it is written as U+FFFD.
            return [b"\xff" if symbol == UNK else symbol.encode() for symbol in self.symbols]
        return self._byte_level()

    def _byte_level(self) -> list[bytes]:
        """Return the bytes of byte-level tokens; tokens that were added have none."""
        added = {x.content for x in self.tokenizer.get_added_tokens_decoder().values()}
        return bytes_written("" if x in added else x for x in self.symbols)

    def extended(self, symbols: Iterable[str]) -> "Vocab":
        """Return the vocabulary with further symbols at its end, which no text is encoded as.

        Raises:
            InputError: A symbol is empty or has a blank in it.
        """
        symbols = list(symbols)
        if bad := [x for x in symbols if not x or any(map(str.isspace, x))]:
            raise InputError(f"{bad[0]!r}: a symbol that is added has a name without blanks")
        tokenizer = Tokenizer.from_str(self.definition)
        tokenizer.add_special_tokens(
            [AddedToken(x, special=True, normalized=False) for x in symbols]
        )
        return self._with_definition(tokenizer.to_str())

    def _with_definition(self, definition: str) -> "Vocab":
        """Return a vocabulary of the same kind and rules, by another ``tokenizer.json``."""
        return Vocab(self.kind, definition)

    def number_of(self, symbol: str) -> int:
        """Return the ID of a token, given as listed or as a text that is encoded as it.

        Raises:
            InputError: The vocabulary has no such token.
        """
        if symbol in self._ids:
            return self._ids[symbol]
        try:
            found = self._lookup(symbol).tolist()
        except UnicodeError:
            # A half of a surrogate pair.
            found = []
        if len(found) != 1 or found[0] in (self.unk_id, MISSING):
            raise InputError(f"{symbol!r} is not a symbol of the vocabulary of {len(self):,}")
        return found[0]

    def encode(self, text: str) -> list[int]:
        """Encode a text as token IDs.

        Raises:
            InputError: The vocabulary cannot encode part of the text.
        """
        return self._known(self._lookup(text), text).tolist()

    def encode_lines(self, text: str, *, prepared: bool = False) -> list[int]:
        """Encode the text of a file; if there is an ``<eos>``, it ends each line.

        Differs from `encode` only for some imported vocabularies. A ``prepared`` text is split at
        spaces alone, as the published corpora are.
        """
        return self.encode_array(text, prepared=prepared).tolist()

    def encode_array(self, text: str, *, prepared: bool = False) -> np.ndarray:
        """Encode the text of a file as `encode_lines` does, as an array."""
        return self._known(self._lookup_lines(text, prepared=prepared), text)

    def encode_known(self, text: str) -> tuple[list[int], Counter[str]]:
        """Encode a text as `encode_lines` does, skipping and counting unknown symbols.

        With an ``<unk>`` they are encoded as it. Bytes that are not UTF-8 (surrogates) are treated
        alike, but ``bpe``, ``brought`` and ``imported`` always skip them.
        """
        clean = UNDECODED.sub("", text) if self._skips_undecoded else text
        ids = self._lookup_lines(clean)
        known = ids[ids != MISSING].tolist()
        is_whole = len(clean) == len(text) and len(known) == len(ids) and self.unk_id not in known
        return known, Counter() if is_whole else self.unknown(text)

    def _known(self, ids: np.ndarray, text: str) -> np.ndarray:
        """Return the IDs of a text.

        Raises:
            InputError: An ID is :data:`MISSING`.
        """
        if (ids == MISSING).any():
            raise self.unknown_error(self.unknown(text), self.first_unknown_line(text))
        return ids

    def _lookup(self, text: str) -> np.ndarray:
        """Return the IDs of a text; of symbols without one, that of ``<unk>`` or `MISSING`."""
        if self.kind == "bytes":
            # Undecodable bytes arrive as surrogates and are restored.
            try:
                data = text.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError as error:
                raise _surrogate_error(error.start, text) from error
            return np.frombuffer(data, dtype=np.uint8).astype(np.int64)
        if self.kind == "chars":
            points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
            ids = self._ids_by_code_point
            return ids[np.minimum(points, len(ids) - 1)]
        if self.kind in ("words", "integers"):
            missing = MISSING if self.unk_id is None else self.unk_id
            ids = map(self._ids.get, symbols_in(self.kind, text), repeat(missing))
            return np.fromiter(ids, dtype=np.int64)
        return np.array(self._token_ids(text), dtype=np.int64)

    def _lookup_lines(self, text: str, *, prepared: bool = False) -> np.ndarray:
        return self._lookup(text)

    @cached_property
    def _ids_by_code_point(self) -> np.ndarray:
        """The ID of each character by its code point, of shape (largest code point + 2,).

        Characters without an ID have that of ``<unk>``, else :data:`MISSING`. So has the last
        entry, which is for all code points beyond the largest of the vocabulary.
        """
        ids = {ord(x): token for x, token in self._ids.items() if x != UNK and len(x) == 1}
        missing = MISSING if self.unk_id is None else self.unk_id
        table = np.full(max(ids, default=0) + 2, missing, dtype=np.int64)
        table[list(ids)] = list(ids.values())
        return table

    def _token_ids(self, text: str, **how: bool) -> list[int]:
        """Return the IDs that ``tokenizers`` encodes a text as, with its options ``how``.

        Raises:
            InputError: The text has half of a surrogate pair, or the tokenizer failed.
        """
        try:
            # Without offsets, which takes less time, and without holding the interpreter lock.
            return self.tokenizer.encode_batch_fast([text], **how)[0].ids
        except BaseException as error:
            self.require_unicode(text)
            if not is_tokenizer_error(error):
                raise
            raise InputError(f"the tokenizer failed on this text: {error}") from error

    @staticmethod
    def require_unicode(text: str) -> None:
        """Require that a text has no half of a surrogate pair, which is no character.

        Raises:
            InputError: It has one.
        """
        if half := _HALF.search(text):
            raise _surrogate_error(half.start(), text)

    def unknown(self, text: str) -> Counter[str]:
        """Count the unknown symbols of a text, in the order of their first occurrence.

        `encode` encodes them as ``<unk>``, or raises an error.
        """
        if self.kind == "bytes":
            return Counter()
        if self.kind in ("bpe", "brought"):
            return Counter(UNDECODED.findall(text))
        return Counter(x for x in symbols_in(self.kind, text) if x not in self._ids)

    def first_unknown_line(self, text: str) -> int:
        """Return the line, from 1, of the first unknown symbol."""
        lines = enumerate(text.split("\n"), 1)
        return next((number for number, line in lines if self.unknown(line)), 1)

    def unknown_error(self, unknown: Counter[str], line: int) -> InputError:
        """Return the error for unknown symbols.

        Args:
            unknown: The number of each unknown symbol.
            line: The line of the first one, from 1.
        """
        what = self.describe_unknown(unknown, line)
        return InputError(f"not in the {self._about_symbols()}: {what}; {_REMEDIES[self.kind]}")

    @staticmethod
    def describe_unknown(unknown: Counter[str], line: int) -> str:
        """Describe unknown symbols: the first few, their number, and the line of the first."""
        symbols = (
            f"the byte 0x{ord(x) - 0xDC00:02x}" if UNDECODED.fullmatch(x) else repr(x)
            for x in unknown
        )
        names = ", ".join(islice(symbols, _LISTED))
        more = len(unknown) - _LISTED
        others = f" and {more:,} more" if more > 0 else ""
        return f"{names}{others} ({unknown.total():,} in all, the first in line {line:,})"

    def unknown_warning(self, text: str, ids: Sequence[int]) -> str | None:
        """Describe what is encoded as ``<unk>`` in a text; None: nothing."""
        if self.unk_id is None or self.unk_id not in ids or not (unknown := self.unknown(text)):
            return None
        what = self.describe_unknown(unknown, self.first_unknown_line(text))
        return f"not in the vocabulary: {what}; read as <unk>"

    def count_by_treatment(self, unknown: Counter[str]) -> Counter[str]:
        """Return how many unknown symbols :meth:`encode_known` reads as ``<unk>`` or leaves out.

        Args:
            unknown: The number of each unknown symbol.

        Returns:
            The numbers that are not 0, by ``read as <unk>`` and ``left out``.
        """
        n_left_out = unknown.total()
        if self.unk_id is not None:
            undecoded = (n for x, n in unknown.items() if UNDECODED.fullmatch(x))
            n_left_out = sum(undecoded) if self._skips_undecoded else 0
        # Unary plus keeps positive counts only.
        return +Counter({"read as <unk>": unknown.total() - n_left_out, "left out": n_left_out})

    def normalized(self, prompt: str) -> tuple[str, Counter[str]]:
        """Return a prompt as the text is that a model was trained on, and what was changed.

        A vocabulary of characters with a CR is one of raw text: then the prompt stays as it is.
        """
        normalizer = Normalizer("the prompt")
        if self.kind == "chars" and not self.unknown("\r"):
            return prompt, normalizer.changes
        return normalizer.of_text(prompt), +normalizer.changes

    def _about_symbols(self) -> str:
        return f"vocabulary of {len(self):,} {self.kind}"

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Decode token IDs to text. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            InputError: An ID is not an integer or not in the vocabulary.
        """
        decoder = self.stream_decoder()
        pieces = [decoder.push(token) for token in _as_list(ids)]
        return "".join(pieces) + decoder.flush()

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """Decode token IDs to the original bytes.

        Raises:
            InputError: The tokens do not determine the text (words, or an ``<unk>``), or an ID is
                not in the vocabulary.
        """
        if self._bytes is None:
            raise InputError("words do not restore the text: whitespace between them is not kept")
        numbers = _as_list(ids)
        if self.unk_id is not None and self.unk_id in numbers:
            raise InputError("the text holds characters outside the vocabulary, written as <unk>")
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(self):
            raise not_a_symbol(next(x for x in numbers if not 0 <= x < len(self)), len(self))
        return b"".join([self._bytes[token] for token in numbers])

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder that takes one token at a time, starting at the beginning of a line."""
        return StreamDecoder(self.symbols, self._bytes)

    def _about(self) -> dict[str, object]:
        """Return further entries of ``vocab.json``."""
        return {}

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``vocab.json`` to a folder, atomically.

        ``vocab.json`` is written last: if it exists, the vocabulary is complete.

        Raises:
            OSError: A file cannot be written.
        """
        about = {"format_version": FORMAT_VERSION, "kind": self.kind, "size": len(self)}
        about |= {"hash": self.hash, **self._about()}
        replace_file(folder / "tokenizer.json", self.definition.encode())
        replace_file(folder / VOCAB_FILE, (json.dumps(about, indent=2) + "\n").encode())


def _as_list(ids: Iterable[int] | np.ndarray) -> list[int]:
    """Return integers as a list; faster for arrays and tensors than iterating."""
    as_list = getattr(ids, "tolist", None)
    return list(map(index, ids if as_list is None else as_list()))


def _surrogate_error(place: int, text: str) -> InputError:
    """Return the error for half of a surrogate pair in a text.

    Args:
        place: Its index in the text.
        text: The text.
    """
    return InputError(
        f"character {place:,} is {text[place]!r}, half of a surrogate pair, not text: remove it, "
        "or decode the text again"
    )


def is_tokenizer_error(error: BaseException) -> bool:
    """Return whether what a call of ``tokenizers`` raised is about the text or the definition.

    The library has no class for its errors: it raises plain exceptions, and for a panic of Rust, as
    where a pattern exceeds its backtracking limit, a BaseException. A TypeError is a wrong call and
    a MemoryError is not the fault of the text; KeyboardInterrupt and the like are not errors.

    Args:
        error: What was raised.
    """
    if isinstance(error, (TypeError, MemoryError)):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def definition_hash(kind: VocabKind, definition: bytes, rules: object = None) -> str:
    """Return the hash of a vocabulary: of its kind, its tokenizer, and its rules, if any."""
    head = kind if rules is None else f"{kind}\n{json.dumps(rules, sort_keys=True)}"
    return hashlib.sha256(f"{head}\n".encode() + definition).hexdigest()


def symbols_in(kind: VocabKind, text: str) -> Iterable[str]:
    """Split a text into characters, or into words with an ``<eos>`` for each line end."""
    return text if kind == "chars" else text.replace("\n", f" {EOS} ").split()


def bytes_written(symbols: Iterable[str]) -> list[bytes]:
    """Return the bytes of tokens that are written with `byte_characters`."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    return [bytes(byte_of[character] for character in symbol) for symbol in symbols]


def byte_characters() -> list[str]:
    """Return the character with which ``tokenizers`` writes each byte."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
