"""Loading vocabularies: our own, and external tokenizers, which are used unchanged."""

import copy
import json
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from tokenizers import Tokenizer, decoders

from transformer_xl.config import (
    FORMAT_VERSION,
    DataConfig,
    locate,
    locate_here,
    read_small_file,
)
from transformer_xl.data.decoding import StreamDecoder
from transformer_xl.data.imported import ImportedVocab, Rules
from transformer_xl.data.vocab import (
    VOCAB_FILE,
    Vocab,
    VocabKind,
    definition_hash,
)
from transformer_xl.errors import DataError

_LARGEST = 128 << 20
"""Largest file of a tokenizer in bytes."""
_MOST_RULES = 256
_LONGEST = 10_000
_MOST_GROWTH = 100
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")


class _About(msgspec.Struct):
    """The contents of ``vocab.json``."""

    format_version: int
    kind: VocabKind
    hash: str
    rules: dict[str, object] | None = None


def load_vocab(name: Path | str) -> Vocab:
    """Load the vocabulary of a model, or of a corpus folder.

    Args:
        name: A model folder, run folder or corpus folder, or the name of a shipped model.

    Raises:
        FileNotFoundError: There is no such folder or model, or it has no vocabulary.
        DataError: The files are damaged or from a newer version.

    Example:
        >>> vocab = load_vocab("shakespeare")
        >>> vocab.decode(vocab.encode("ROMEO:"))
        'ROMEO:'
    """
    folder = locate(name).path
    within = (folder, folder / "model" / "best", folder / "model" / "last")
    folder = next((x for x in within if (x / VOCAB_FILE).is_file()), folder)
    for name in (VOCAB_FILE, "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} holds no vocabulary: {name} is missing; give a folder that has one, or "
                f"for a converted model write it again with `txl convert {folder} NEW --vocab FILE`"
            )
    path = folder / VOCAB_FILE
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); restore it from a copy") from error
    require_format(path, content)
    try:
        about = msgspec.convert(content, _About)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} is damaged ({error}); restore it from a copy") from error
    path = folder / "tokenizer.json"
    definition, rules = path.read_bytes(), about.rules if about.kind == "imported" else None
    if definition_hash(about.kind, definition, rules) != about.hash:
        raise DataError(
            f"{path} is damaged or was edited: it does not match the hash in vocab.json; "
            "restore it from a copy"
        )
    try:
        text = definition_of(definition)
        if rules is not None:
            return ImportedVocab(text, msgspec.convert(rules, Rules))
        return BroughtVocab(text) if about.kind == "brought" else Vocab(about.kind, text)
    except Exception as error:  # tokenizers has no class of its own.
        raise DataError(f"{path} is damaged ({error}); restore it from a copy") from error


def require_format(path: Path, content: object) -> None:
    """Require that the content of a JSON file is not of a newer version.

    Raises:
        DataError: It is.
    """
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DataError(
            f"{path} has format {version!r}, this version reads up to {FORMAT_VERSION}: "
            "update transformer_xl"
        )


def is_vocabulary(path: Path) -> bool:
    """Return whether a folder has a vocabulary of this package, intact or not."""
    try:
        about = json.loads((path / VOCAB_FILE).read_text(encoding="utf-8"))
    except OSError:
        return False
    except (ValueError, RecursionError):
        return True
    # Beside an external tokenizer, a file of this name maps tokens to IDs.
    return isinstance(about, dict) and isinstance(about.get("kind"), str)


def tokenizer_path(tokenizer: str) -> Path:
    """Return the file or folder of ``data.tokenizer``, which may be the name of a shipped model."""
    located = locate_here(tokenizer)
    path = Path(tokenizer) if located is None else located.path
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"data.tokenizer={tokenizer!r}: there is no file {file}. A run keeps its "
            "vocabulary: to continue or evaluate one, give --data.tokenizer RUN/model/last"
        )
    return path if is_vocabulary(path) else file


def divided_as(config: DataConfig) -> VocabKind:
    """Return the kind by whose rules a text is divided."""
    if config.tokenizer is None:
        assert config.vocab != "features"
        return "bytes" if config.vocab == "authors-bytes" else config.vocab
    vocab = bring(config.tokenizer)
    if not isinstance(vocab, ImportedVocab):
        return vocab.kind
    # Words of imported vocabularies end with their line; a text of characters may be one line.
    kinds: dict[str, VocabKind] = {"bytes": "bytes", "chars": "imported"}
    return kinds.get(vocab.rules.join, "words")


def bring(tokenizer: str) -> Vocab:
    """Load the tokenizer of ``data.tokenizer``.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: The file is not a tokenizer, or is damaged.
    """
    path = tokenizer_path(tokenizer)
    if path.is_dir():
        return load_vocab(path)
    try:
        return BroughtVocab(definition_of(read_small_file(path, _LARGEST)))
    except Exception as error:  # tokenizers has no class of its own.
        raise DataError(
            f"data.tokenizer={str(path)!r} is not a tokenizer.json that can be used: {error}. "
            "transformers writes one of other tokenizers, also of a .model of SentencePiece: "
            'AutoTokenizer.from_pretrained("FOLDER").save_pretrained("NEW")'
        ) from error


def definition_of(data: bytes) -> str:
    """Return the text of a ``tokenizer.json``.

    Raises:
        DataError: It is no JSON, or has too many rules, or rules that make a text much longer,
            which could take all memory.
    """
    n_rules, longest, growth = 0, 0, 1.0

    def count(node: dict[str, object]) -> dict[str, object]:
        nonlocal n_rules, longest, growth
        n_rules += "type" in node
        content, pattern = node.get("content"), node.get("pattern")
        if isinstance(content, str):
            longest = max(longest, len(content))
            # Of texts alone: how often a regular expression matches cannot be computed.
            if isinstance(pattern, dict) and isinstance(text := pattern.get("String"), str):
                growth *= max(1, len(content) / max(1, len(text)))
        return node

    try:
        json.loads(data, object_hook=count)
    except RecursionError:
        raise DataError("its rules are nested too deeply") from None
    for what, value, most in (
        ("rules", n_rules, _MOST_RULES),
        ("characters in a text of its rules", longest, _LONGEST),
        ("times the text after its Replace rules", growth, _MOST_GROWTH),
    ):
        if value > most:
            raise DataError(f"it has {value:,.15g} {what}, above the limit of {most:,}")
    return data.decode()


class BroughtVocab(Vocab):
    """An external tokenizer.

    If it treats the beginning of a text specially or a line end as a blank, as SentencePiece does,
    each line is encoded as a text, and its end-of-text token ends the line.

    Attributes:
        encodes_lines: Whether it does so.
    """

    def __init__(self, definition: str) -> None:
        """Read the text of a ``tokenizer.json``."""
        super().__init__("brought", definition)
        self.eos_id = next((self._ids[x] for x in _ENDS if x in self._ids), None)
        # Whether beginnings are treated specially, or a line end like a blank.
        two_lines = self._cut("a\na")
        starts_anew = two_lines != [*self._cut("a"), *self._cut("\na")]
        self.encodes_lines = starts_anew or two_lines == self._cut("a a")
        if self.encodes_lines and self.eos_id is None:
            raise DataError(
                "the tokenizer treats line ends as blanks and has no end-of-text token (one of "
                f"{', '.join(_ENDS)}): lines could not be told apart"
            )

    def _symbol_bytes(self) -> list[bytes] | None:
        if not isinstance(self.tokenizer.decoder, decoders.ByteLevel):
            return None
        return super()._symbol_bytes()

    def _with_definition(self, definition: str) -> Vocab:
        return BroughtVocab(definition)

    def _cut(self, text: str) -> list[int]:
        return self._token_ids(text, add_special_tokens=False)

    def _lookup(self, text: str) -> np.ndarray:
        ids = list[int]()
        if self.encodes_lines:
            # After the last line end, a line is incomplete.
            *lines, text = text.split("\n")
            ids = [token for line in lines for token in (*self._cut(line), self.eos_id)]
        return np.array(ids + (self._cut(text) if text else []), dtype=np.int64)

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder that takes one token at a time, starting at the beginning of a line."""
        if self._bytes is not None:
            return super().stream_decoder()
        return _Decoder(self.tokenizer, self.symbols, self.eos_id if self.encodes_lines else None)


class _Decoder(StreamDecoder):
    """Decodes tokens with the decoder of the external tokenizer."""

    def __init__(self, tokenizer: Tokenizer, symbols: list[str], line_end: int | None) -> None:
        super().__init__(symbols, None)
        self._tokenizer, self._line_end = tokenizer, line_end
        self._begin()

    def _begin(self) -> None:
        self._stream = decoders.DecodeStream(skip_special_tokens=True)
        # Tokens after those whose text was returned.
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Decode one token; return the text that it completes."""
        if token == self._line_end:
            return self.flush() + "\n"
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception as error:  # tokenizers has no class of its own.
            if not str(error).startswith("Invalid prefix"):
                raise
            # Bytes that are no character made the character before them invalid, too, but that one
            # was returned.
            self._stream = decoders.DecodeStream(self._pending, skip_special_tokens=True)
            text = self._stream.step(self._tokenizer, token)
        self._pending = [] if text else [*self._pending, token]
        return text or ""

    def flush(self) -> str:
        """End the text; the bytes of an incomplete character become U+FFFD."""
        text = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        self._begin()
        return text

    def fork(self) -> "_Decoder":
        """See :meth:`StreamDecoder.fork`."""
        other = cast("_Decoder", super().fork())
        other._stream = copy.copy(self._stream)
        return other
