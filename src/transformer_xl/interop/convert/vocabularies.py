"""Vocabularies of the old implementations.

====================  =========================================================================
the authors           ``cache.pt`` (PyTorch) and ``cache.pkl`` (TensorFlow), which hold the whole
                      corpus; a pickled ``Vocab``; ``1b_word_vocab.txt``
NVIDIA                inside the checkpoint
Hugging Face          ``vocab.pkl``, ``vocab.bin``, ``vocab.txt``, and settings in the same folder
====================  =========================================================================

The authors' data sets differ: ptb, wt2 and wt103 end each line with ``<eos>``, lm1b puts ``<S>``
before and after it. In enwik8 the symbols are the values of bytes and in text8 letters and ``_``
for the space; neither has a symbol for a line break.

Up to 1,048,576 symbols are read, and lists of words up to 32 MB.
"""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from tokenizers import AddedToken

from transformer_xl.config import open_regular, read_small_file
from transformer_xl.data import ImportedVocab, Rules, Vocab
from transformer_xl.errors import DataError
from transformer_xl.interop.convert.cutting import imported_vocab
from transformer_xl.interop.convert.mapped_files import read_json
from transformer_xl.interop.convert.torch_files import Instance, attributes, read_pickled

_NAMES = (
    *("cache.pt", "vocab.pkl", "vocab.bin", "vocab.pt", "vocab.txt"),
    *("cache.pkl", "1b_word_vocab.txt"),
)
_DATASETS = ("ptb", "wt2", "wt103", "lm1b", "enwik8", "text8")
_LM1B_EOS = "<S>"
_BYTES, _LETTERS = set(map(str, range(256))), set("abcdefghijklmnopqrstuvwxyz_")
_ZIP, _TORCH, _PICKLE = b"PK\x03\x04", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9", b"\x80"
# The largest, lm1b, has 793,471 words; text files contain no corpora, unlike pickles.
_MAX_TEXT_BYTES = 32 << 20
_MAX_SYMBOLS = 1 << 20

_T = TypeVar("_T", bound=msgspec.Struct)
_Number = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]


class _State(msgspec.Struct):
    """What is used of a stored vocabulary."""

    idx2sym: list[str] | None = None
    sym2idx: dict[str, int] | None = None
    unk_idx: int | None = None
    delimiter: None = None
    lower_case: bool | None = None


class _Token(msgspec.Struct):
    """A token with rules for matching it."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _Settings(msgspec.Struct):
    """What is used of ``tokenizer_config.json`` and ``special_tokens_map.json``."""

    eos_token: str | _Token = Vocab.EOS
    unk_token: str | _Token = Vocab.UNK
    additional_special_tokens: list[str | _Token] = msgspec.field(
        default_factory=lambda: ["<formula>"]
    )
    added_tokens_decoder: dict[_Number, _Token] = {}
    added_tokens: dict[str, int] = {}
    never_split: list[str] | None = None
    language: Literal["en"] = "en"
    delimiter: None = None
    lower_case: bool | None = None
    clean_up_tokenization_spaces: bool | None = True

    @property
    def words(self) -> list[str]:
        """<eos>, <unk> and the additional special tokens."""
        tokens = (self.eos_token, self.unk_token, *self.additional_special_tokens)
        return [x if isinstance(x, str) else x.content for x in tokens]


def _converted(content: Mapping[Any, object], kind: type[_T], path: Path) -> _T:
    """Return the attributes or settings of an old program, of the right types."""
    names = (field.name for field in msgspec.structs.fields(kind))
    try:
        return msgspec.convert({name: content[name] for name in names if name in content}, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise DataError(f"{path} has a vocabulary that cannot be read: {error}") from error


def find_vocab(folder: Path) -> Path | None:
    """Return the file of an old vocabulary in a folder."""
    return next((folder / name for name in _NAMES if (folder / name).is_file()), None)


def read_vocab(path: Path | str, *, size: int | None = None) -> Vocab:
    """Read the vocabulary of an old implementation.

    Args:
        path: The file, whose format is detected from its content.
        size: The vocabulary size of the model. Tokens beyond it, which were added to Hugging Face's
            tokenizer, are ignored.

    Raises:
        FileNotFoundError: There is no such file.
        NotRegularError: It is a folder, a pipe or a device.
        DataError: The file has no vocabulary, or one that cannot be represented.
        CheckpointError: The file, or one beside it, is damaged.
    """
    path = Path(path)
    with open_regular(path) as file:
        head = file.read(len(_TORCH))
    if head.startswith((_ZIP, _TORCH)):
        return vocab_from_object(read_pickled(path), path, size=size)
    if not (head.startswith(_PICKLE) or path.suffix == ".pkl"):
        return _from_text(path, size)
    dataset = None
    if path.stem == "cache":
        dataset = _read_settings_beside(path, "corpus-info.json").get("dataset")
    is_python2 = head[1:2] <= b"\x02" or head[:1] != _PICKLE
    return vocab_from_object(
        read_pickled(path), path, size=size, dataset=dataset, is_python2=is_python2
    )


def vocab_from_object(
    content: object,
    path: Path,
    *,
    size: int | None = None,
    dataset: object = None,
    is_python2: bool = False,
) -> Vocab:
    """Build a vocabulary from the object in a file, such as NVIDIA's checkpoint.

    Args:
        content: A vocabulary, or what holds one under the name ``vocab``.
        path: The file.
        size: As in :func:`read_vocab`.
        dataset: The authors' name of the data set. None: as the object says, else inferred from
            the symbols.
        is_python2: Whether Python 2 wrote it.
    """
    state = attributes(content)
    if "vocab" in state and "idx2sym" not in state:
        # A corpus, or NVIDIA's checkpoint.
        dataset = state.get("dataset") if dataset is None else dataset
        content = state["vocab"]
        state = attributes(content)
    kind = content.kind if isinstance(content, Instance) else ""
    stored = _converted(state, _State, path)
    symbols = _symbols(stored, path, is_python2)
    if stored.unk_idx is not None and not 0 <= stored.unk_idx < len(symbols):
        raise DataError(f"{path}: unk_idx is not the number of one of {len(symbols):,} symbols")
    unk = None if stored.unk_idx is None else symbols[stored.unk_idx]
    if not kind or "tokenization_transfo_xl" in kind:
        return _huggingface(symbols, unk, stored, path, size)
    return _authors(symbols, unk, stored, path, dataset)


def _symbols(stored: _State, path: Path, is_python2: bool) -> list[str]:
    symbols, numbered = stored.idx2sym, stored.sym2idx
    if symbols is None:
        symbols = sorted(numbered or {}, key=(numbered or {}).__getitem__)
    if numbered is not None and numbered != {symbol: i for i, symbol in enumerate(symbols)}:
        raise DataError(
            f"{path}: idx2sym has {len(symbols):,} symbols, and the {len(numbered):,} of sym2idx "
            "are not numbered 0, 1, 2, ... in that order"
        )
    if is_python2:
        # Words of Python 2 are UTF-8 bytes, which were decoded as Latin-1.
        with suppress(UnicodeError):
            symbols = [symbol.encode("latin-1").decode("utf-8") for symbol in symbols]
    if not 0 < len(symbols) <= _MAX_SYMBOLS:
        raise DataError(
            f"{path} is not a vocabulary: it has {len(symbols):,} symbols, and the largest that is "
            f"read has {_MAX_SYMBOLS:,}"
        )
    for symbol, count in Counter(symbols).items():
        # Halves of surrogate pairs are replaced.
        if count > 1 or symbol.encode("utf-8", "replace").decode() != symbol:
            raise DataError(
                f"{path}: the symbol {symbol[:80]!r} occurs {count} times, or is not valid text"
            )
    return symbols


def _from_text(path: Path, size: int | None) -> Vocab:
    n_bytes = path.stat().st_size
    if n_bytes > _MAX_TEXT_BYTES:
        raise DataError(
            f"{path} is not a vocabulary: it has {n_bytes:,} bytes, and a list of words up to "
            f"{_MAX_TEXT_BYTES:,}"
        )
    try:
        text = read_small_file(path, _MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a vocabulary: it is not UTF-8 ({error})") from error
    # Lines end with \n, \r or both.
    lines = [line.split(None, 1) for line in io.StringIO(text, newline=None)]
    if not all(lines):
        raise DataError(f"{path}: a line is empty; a vocabulary has one word a line")
    # A repeated word keeps its first index.
    words = [*dict.fromkeys(line[0] for line in lines)]
    symbols = _symbols(_State(idx2sym=words), path, is_python2=False)
    unk = next((name for name in ("<UNK>", Vocab.UNK) if name in symbols), None)
    if unk is None:
        raise DataError(f"{path} is not a vocabulary of an old tokenizer: it lacks <unk> and <UNK>")
    if path.name != "1b_word_vocab.txt":
        return _huggingface(symbols, unk, _State(), path, size)
    # The authors' setting for this data set.
    return _authors(symbols, unk, _State(lower_case=False), path, None)


def _authors(
    symbols: list[str],
    unk: str | None,
    stored: _State,
    path: Path,
    dataset: object,
) -> Vocab:
    dataset = dataset if isinstance(dataset, str) else _recognize(symbols)
    if dataset is not None and dataset not in _DATASETS:
        raise DataError(
            f"{path}: dataset={dataset[:20]!r} is unknown; choose one of {', '.join(_DATASETS)}"
        )
    eos = next((x for x in (Vocab.EOS, _LM1B_EOS) if x in symbols), None)
    dropped = ""
    if dataset == "enwik8" and _BYTES.issuperset(symbols):
        return ImportedVocab.of_bytes([*map(int, symbols)])
    if dataset == "text8" and all(len(symbol) == 1 for symbol in symbols):
        dropped = r"\n"
        symbols = [" " if symbol == "_" else symbol for symbol in symbols]
        rules = Rules(join="chars", unk=unk)
    elif dataset == "lm1b" and _LM1B_EOS in symbols:
        rules = Rules(join="words", eos=_LM1B_EOS, unk=unk, line_ends="around")
    else:
        has_ends = eos is not None and dataset not in ("enwik8", "text8")
        rules = Rules(join="words", eos=eos, unk=unk, line_ends="after" if has_ends else "none")
    return imported_vocab(symbols, rules, lower_case=bool(stored.lower_case), dropped=dropped)


def _recognize(symbols: Sequence[str]) -> str | None:
    if _BYTES.issuperset(symbols):
        return "enwik8"
    if _LETTERS.issuperset(symbols):
        return "text8"
    return "lm1b" if _LM1B_EOS in symbols and Vocab.EOS not in symbols else None


def _huggingface(
    symbols: Sequence[str],
    unk: str | None,
    stored: _State,
    path: Path,
    size: int | None,
) -> ImportedVocab:
    """Build a vocabulary from the state of TransfoXLTokenizer and the settings in its folder."""
    about = _read_settings_beside(path, "tokenizer_config.json")
    special_tokens = _read_settings_beside(path, "special_tokens_map.json")
    numbered = {"added_tokens": _read_settings_beside(path, "added_tokens.json")}
    settings = _converted(about | special_tokens | numbered, _Settings, path)
    eos, unknown, *additional = settings.words
    # The settings file takes precedence over the pickle; older releases have only the pickle.
    source = settings if about else stored
    added = _added(symbols, settings, path, size)
    known = {*symbols, *(token.content for _, token in added)}
    apart = [
        x.content
        for number, x in added
        if (number >= len(symbols) if x.content in additional else x.content not in (eos, unknown))
    ]
    protected = settings.words if settings.never_split is None else settings.never_split
    if not {*protected} <= {*settings.words, *known}:
        raise DataError(f"{path}: never_split has words that are no symbols, which is not read")
    rules = Rules(
        join="moses",
        eos=next((x for x in (eos, Vocab.EOS) if x in known), None),
        unk=unk or next((name for name in (Vocab.UNK, "<UNK>") if name in symbols), None),
        apart=tuple(apart),
        clean_up=bool(settings.clean_up_tokenization_spaces),
    )
    return imported_vocab(
        symbols,
        rules,
        lower_case=bool(source.lower_case),
        added=[AddedToken(normalized=False, **msgspec.structs.asdict(x)) for _, x in added],
        protected=protected,
    )


def _added(
    symbols: Sequence[str], settings: _Settings, path: Path, size: int | None
) -> list[tuple[int, _Token]]:
    """Return the tokens that are matched before the text is split, with their indices."""
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    words = settings.words
    tokens = {x: (numbers[x], _Token(x, special=True)) for x in words if x in numbers}
    tokens |= {x: (n, _Token(x, special=x in words)) for x, n in settings.added_tokens.items()}
    tokens |= {x.content: (int(n), x) for n, x in settings.added_tokens_decoder.items()}
    added, end = sorted(tokens.values(), key=lambda x: x[0]), len(symbols)
    for number, token in added:
        expected = numbers.get(token.content, end)
        if not token.content or number != expected:
            raise DataError(
                f"{path}: the added token {token.content[:80]!r} has the number {number}, which "
                f"must be {expected}"
            )
        end += token.content not in numbers
    return [(n, x) for n, x in added if size is None or n < max(size, len(symbols))]


def _read_settings_beside(path: Path, name: str) -> dict[str, object]:
    """Read a settings file in the folder of another file; empty if it does not exist."""
    place = path.with_name(name)
    return read_json(place) if place.is_file() else {}
