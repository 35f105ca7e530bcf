"""Vocabularies of the old implementations, read as ours, and ours written for the old tokenizer.

====================  =========================================================================
the authors           ``cache.pt`` (PyTorch) and ``cache.pkl`` (TensorFlow), which hold the whole
                      corpus; a pickled ``Vocab``; ``1b_word_vocab.txt``
NVIDIA                inside the checkpoint
Hugging Face          ``vocab.pkl``, ``vocab.bin``, ``vocab.txt``, and the settings beside them
====================  =========================================================================

The authors' data sets differ: ptb, wt2 and wt103 end each line with ``<eos>``, lm1b puts ``<S>``
around it. In enwik8 the symbols are the numbers of bytes and in text8 letters and ``_`` for the
space; neither has a symbol for a line break.

Up to 1,048,576 symbols are read, and lists of words up to 32 MB.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from transformer_xl.data.imported import SPACE, Rules
from transformer_xl.data.vocab import EOS, UNK, Vocab, byte_characters
from transformer_xl.interop.convert.cutting import Wishes, imported_vocab
from transformer_xl.interop.convert.hf_vocabularies import (
    characters_or_words,
    flag,
    huggingface_vocab,
    settings_beside,
    write_hf_vocab,
)
from transformer_xl.interop.convert.pickles import Instance, UnreadableFile
from transformer_xl.interop.convert.torch_files import read_pickle, read_torch

__all__ = ["find_vocab", "read_vocab", "vocab_from_object", "write_hf_vocab"]

_NAMES = (
    *("cache.pt", "vocab.pkl", "vocab.bin", "vocab.pt", "vocab.txt"),
    *("cache.pkl", "1b_word_vocab.txt"),
)
_DATASETS = ("ptb", "wt2", "wt103", "lm1b", "enwik8", "text8")
_LM1B_EOS = "<S>"
_ZIP, _TORCH, _PICKLE = b"PK\x03\x04", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9", b"\x80"
# The largest, lm1b, has 793,471 words; corpora lie in pickles, not in texts.
_MAX_TEXT_BYTES = 32 << 20
_MAX_SYMBOLS = 1 << 20
_MAX_LINE = 10_000


def find_vocab(folder: Path) -> Path | None:
    """Return the file of a folder that holds an old vocabulary."""
    return next((folder / name for name in _NAMES if (folder / name).is_file()), None)


def read_vocab(
    path: Path,
    *,
    size: int | None = None,
    dataset: str | None = None,
    line_ends: bool | None = None,
    unknown: str | None = None,
    moses: bool | None = None,
) -> Vocab:
    """Read the vocabulary of an old implementation.

    Args:
        path: The file, told by its content, or a folder with one.
        size: How many symbols the model knows. Tokens beyond, which Hugging Face's tokenizer
            had added, are left out.
        dataset: The authors' name of the data set; None takes what the file says, or what its
            symbols look like.
        line_ends: Whether a line break is the symbol that ends a line. None: as in the authors'
            data set; not for Hugging Face's tokenizer, which took it for a space (`encode_lines`
            puts the symbols there in any case).
        unknown: The symbol for words that the vocabulary lacks, where its program would have
            stopped.
        moses: Whether words are cut by the Moses rules, else by spaces. None: for Hugging Face.

    Raises:
        FileNotFoundError: There is no such file.
        UnreadableFile: The file is damaged. A RuntimeError.
        ValueError: The file holds no vocabulary, or one that cannot be ours.
    """
    if path.is_dir():
        found = find_vocab(path)
        if found is None:
            raise FileNotFoundError(f"{path} holds no vocabulary: none of {', '.join(_NAMES)}")
        path = found
    with path.open("rb") as file:
        head = file.read(len(_TORCH))
    wishes = Wishes(size, dataset, line_ends, unknown, moses)
    if head.startswith((_ZIP, _TORCH)):
        return _from_object(read_torch(path), path, wishes)
    if head.startswith(_PICKLE) or path.suffix == ".pkl":
        info = settings_beside(path, "corpus-info.json") if path.stem == "cache" else {}
        if wishes.dataset is None and isinstance(info.get("dataset"), str):
            wishes = wishes._replace(dataset=info["dataset"])
        return _from_object(
            read_pickle(path), path, wishes, is_python2=head[1:2] <= b"\x02" or head[:1] != _PICKLE
        )
    return _from_text(path, wishes)


def vocab_from_object(
    content: object,
    *,
    where: Path | str,
    size: int | None = None,
    dataset: str | None = None,
    line_ends: bool | None = None,
    unknown: str | None = None,
    moses: bool | None = None,
) -> Vocab:
    """Make a vocabulary of what a reader found inside a file, such as NVIDIA's checkpoint.

    Args:
        content: The vocabulary, or something that holds it.
        where: The file, for errors.
        size: As in `read_vocab`, like the others.
        dataset: The authors' name of the data set.
        line_ends: Whether a line break is the symbol that ends a line.
        unknown: The symbol for words that the vocabulary lacks.
        moses: Whether words are cut by the Moses rules.

    Raises:
        ValueError: This is no vocabulary, or one that cannot be ours.
    """
    wishes = Wishes(size, dataset, line_ends, unknown, moses)
    return _from_object(content, Path(where), wishes)


def _from_object(content: object, path: Path, wishes: Wishes, *, is_python2: bool = False) -> Vocab:
    state, kind = _attributes(content)
    if "vocab" in state and "idx2sym" not in state:
        # A corpus, or NVIDIA's checkpoint.
        if wishes.dataset is None and isinstance(state.get("dataset"), str):
            wishes = wishes._replace(dataset=cast(str, state["dataset"]))
        state, kind = _attributes(state["vocab"])
    if "idx2sym" not in state and "sym2idx" not in state:
        named = f" of {kind[:80]}" if kind else ""
        raise ValueError(
            f"{path} holds no vocabulary that can be read: its object{named} has no idx2sym, "
            "the list of words"
        )
    symbols = _symbols(state, path, is_python2)
    unk_idx = state.get("unk_idx")
    if unk_idx is not None and (type(unk_idx) is not int or not 0 <= unk_idx < len(symbols)):
        raise ValueError(f"{path}: unk_idx is not the number of one of {len(symbols):,} symbols")
    unk = None if unk_idx is None else symbols[cast(int, unk_idx)]
    if not kind or "tokenization_transfo_xl" in kind:
        return huggingface_vocab(symbols, unk, state, path, wishes)
    return _authors(symbols, unk, state, path, wishes)


def _attributes(content: object) -> tuple[Mapping[object, object], str]:
    """Return the attributes of an object and the name of its class; "" for a plain dictionary."""
    if isinstance(content, Instance):
        return (content.state if isinstance(content.state, dict) else {}), content.kind
    return (content if isinstance(content, dict) else {}), ""


def _symbols(state: Mapping[object, object], path: Path, is_python2: bool) -> list[str]:
    listed, numbered = state.get("idx2sym"), state.get("sym2idx")
    if not isinstance(numbered, dict | None):
        raise ValueError(f"{path}: sym2idx must give the numbers of the symbols")
    if numbered is not None and not all(type(number) is int for number in numbered.values()):
        raise ValueError(f"{path}: the values of sym2idx must be numbers")
    if listed is None and numbered is not None:
        listed = sorted(numbered, key=numbered.__getitem__)
        if [numbered[symbol] for symbol in listed] != list(range(len(listed))):
            raise ValueError(f"{path}: sym2idx must number its symbols 0, 1, 2, ... without a gap")
    if not isinstance(listed, list) or not all(type(symbol) is str for symbol in listed):
        raise ValueError(f"{path}: idx2sym must be a list of words")
    symbols = cast(list[str], listed)
    if numbered is not None:
        _check_numbers(symbols, numbered, path)
    return _checked(_from_latin1(symbols) if is_python2 else symbols, path)


def _check_numbers(symbols: list[str], numbered: dict[object, object], path: Path) -> None:
    wrong = [i for i, symbol in enumerate(symbols) if numbered.get(symbol) != i]
    if wrong or len(numbered) != len(symbols):
        example = f": number {wrong[0]} is {symbols[wrong[0]][:80]!r} only in idx2sym"
        raise ValueError(
            f"{path}: idx2sym has {len(symbols):,} symbols, sym2idx {len(numbered):,}, and they "
            f"do not agree{example if wrong else ''}"
        )


def _from_latin1(symbols: list[str]) -> list[str]:
    """Restore words that Python 2 kept as UTF-8 bytes and the reader took for Latin-1."""
    try:
        return [symbol.encode("latin-1").decode("utf-8") for symbol in symbols]
    except UnicodeError:
        return symbols  # Written by Python 3.


def _checked(symbols: list[str], path: Path) -> list[str]:
    if not symbols:
        raise ValueError(f"{path}: the vocabulary is empty")
    if len(symbols) > _MAX_SYMBOLS:
        raise ValueError(
            f"{path} is no vocabulary: it has {len(symbols):,} symbols, and the largest that is "
            f"read has {_MAX_SYMBOLS:,}"
        )
    seen: set[str] = set()
    for number, symbol in enumerate(symbols):
        if symbol in seen:
            raise ValueError(f"{path}: symbol {number} is {symbol[:80]!r}, as one before it")
        if any("\ud800" <= c <= "\udfff" for c in symbol):
            raise ValueError(f"{path}: symbol {number}, {symbol[:80]!r}, is no text")
        seen.add(symbol)
    return symbols


def _from_text(path: Path, wishes: Wishes) -> Vocab:
    n_bytes = path.stat().st_size
    if n_bytes > _MAX_TEXT_BYTES:
        raise ValueError(
            f"{path} is no vocabulary: it has {n_bytes:,} bytes, and a list of words up to "
            f"{_MAX_TEXT_BYTES:,}"
        )
    # A word that comes again keeps its first number.
    words: dict[str, None] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), ""), 1):
                word = line.split(None, 1)[:1]
                if not word or len(line) == _MAX_LINE:
                    about = "is too long" if word else "is empty"
                    raise ValueError(
                        f"{path}: line {number} {about}; a vocabulary has one word a line"
                    )
                words[word[0]] = None
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{path} is no vocabulary: it is no UTF-8 text ({error})") from error
    symbols = _checked(list(words), path)
    unk = next((name for name in ("<UNK>", UNK) if name in symbols), None)
    if unk is None:
        raise ValueError(f"{path} is no vocabulary of an old tokenizer: it lacks <unk> and <UNK>")
    if wishes.dataset is None and path.name != "1b_word_vocab.txt":
        return huggingface_vocab(symbols, unk, {}, path, wishes)
    # The authors' setting for this data set.
    return _authors(symbols, unk, {"lower_case": False}, path, wishes)


def _authors(
    symbols: list[str],
    unk: str | None,
    state: Mapping[object, object],
    path: Path,
    wishes: Wishes,
) -> Vocab:
    dataset = wishes.dataset or _recognize(symbols)
    if dataset is not None and dataset not in _DATASETS:
        raise ValueError(f"dataset={dataset[:20]!r} is unknown; choose one of {_DATASETS}")
    join = characters_or_words(state.get("delimiter"), path)
    eos = next((x for x in (EOS, _LM1B_EOS) if x in symbols), None)
    rules = Rules(join=join, eos=eos, unk=unk)
    # Lines were stripped, and what had no symbol for their end went into one long line.
    dropped = rf"\A[{SPACE}]+|(?<![{SPACE}])(?=[{SPACE}]*(?:[\r\n]|\z))[{SPACE}]++"
    if join == "chars":
        pass
    elif dataset == "enwik8" and _are_bytes(symbols):
        dropped = "" if "10" in symbols else r"\n"
        characters = byte_characters()
        symbols = [characters[int(symbol)] for symbol in symbols]
        rules = Rules(join="bytes")
    elif dataset == "text8" and all(len(symbol) == 1 for symbol in symbols):
        dropped = r"\n"
        symbols = [" " if symbol == "_" else symbol for symbol in symbols]
        rules = Rules(join="chars", unk=unk)
    else:
        dropped = ""
        rules = _word_rules(rules, dataset, symbols, wishes)
    lower_case = rules.join != "bytes" and flag(state.get("lower_case"), "lower_case", path)
    return imported_vocab(symbols, rules, path, wishes, lower_case=lower_case, dropped=dropped)


def _word_rules(rules: Rules, dataset: str | None, symbols: Sequence[str], wishes: Wishes) -> Rules:
    rules = replace(rules, join="moses" if wishes.moses else "words")
    if dataset == "lm1b" and _LM1B_EOS in symbols:
        return replace(rules, eos=_LM1B_EOS, line_ends="around")
    if rules.eos is None or dataset in ("enwik8", "text8"):
        return rules
    return replace(rules, line_ends="after")


def _recognize(symbols: Sequence[str]) -> str | None:
    if _are_bytes(symbols):
        return "enwik8"
    if set(symbols) <= set("abcdefghijklmnopqrstuvwxyz_"):
        return "text8"
    return "lm1b" if _LM1B_EOS in symbols and EOS not in symbols else None


def _are_bytes(symbols: Iterable[str]) -> bool:
    numbers = {str(byte) for byte in range(256)}
    return all(symbol in numbers for symbol in symbols)
