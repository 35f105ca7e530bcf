"""Vocabularies of the old implementations: reading them, and writing one for the old tokenizer.

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

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from transformer_xl.data.imported import SPACE, ImportedVocab, Join, LineEnds, Rules
from transformer_xl.data.vocab import EOS, UNK, Vocab, byte_characters
from transformer_xl.interop.convert.closed_unpickler import printable
from transformer_xl.interop.convert.cutting import Added, VocabOptions, imported_vocab
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
_MAX_LINE = 10_000


def find_vocab(folder: Path) -> Path | None:
    """Return the file of an old vocabulary in a folder."""
    return next((folder / name for name in _NAMES if (folder / name).is_file()), None)


def read_vocab(
    path: Path | str,
    *,
    size: int | None = None,
    dataset: str | None = None,
    line_ends: bool | None = None,
    unknown: str | None = None,
    moses: bool | None = None,
) -> Vocab:
    """Read the vocabulary of an old implementation.

    Args:
        path: The file, whose format is detected from its content, or a folder with one.
        size: The vocabulary size of the model. Tokens beyond it, which were added to Hugging Face's
            tokenizer, are ignored.
        dataset: The authors' name of the data set. None: as the file says, else inferred from the
            symbols.
        line_ends: Whether a line break is the symbol that ends a line. None: as in the authors'
            data set; not for Hugging Face's tokenizer, which reads it as a space (`encode_lines`
            inserts the symbols in any case).
        unknown: The symbol for words that are not in the vocabulary, for vocabularies whose program
            raises an error.
        moses: Whether text is split by the Moses rules, else by spaces. None: for Hugging Face.

    Raises:
        FileNotFoundError: There is no such file.
        DataError or CheckpointError: The file is damaged.
        ValueError: The file has no vocabulary, or one that cannot be represented.
    """
    path = Path(path)
    if path.is_dir():
        found = find_vocab(path)
        if found is None:
            raise FileNotFoundError(f"{path} holds no vocabulary: none of {', '.join(_NAMES)}")
        path = found
    with path.open("rb") as file:
        head = file.read(len(_TORCH))
    options = VocabOptions(size, dataset, line_ends, unknown, moses)
    if head.startswith((_ZIP, _TORCH)):
        return _from_object(read_pickled(path), path, options)
    if head.startswith(_PICKLE) or path.suffix == ".pkl":
        if path.stem == "cache":
            options = options.with_dataset(
                _settings_beside(path, "corpus-info.json").get("dataset")
            )
        is_python2 = head[1:2] <= b"\x02" or head[:1] != _PICKLE
        return _from_object(read_pickled(path), path, options, is_python2=is_python2)
    return _from_text(path, options)


def vocab_from_object(content: object, *, where: Path | str, **options: Any) -> Vocab:
    """Build a vocabulary from an object inside a file, such as NVIDIA's checkpoint."""
    return _from_object(content, Path(where), VocabOptions(**options))


def _from_object(
    content: object, path: Path, options: VocabOptions, *, is_python2: bool = False
) -> Vocab:
    state = attributes(content)
    if "vocab" in state and "idx2sym" not in state:
        # A corpus, or NVIDIA's checkpoint.
        options = options.with_dataset(state.get("dataset"))
        content = state["vocab"]
        state = attributes(content)
    kind = content.kind if isinstance(content, Instance) else ""
    symbols = _symbols(state, kind, path, is_python2)
    unk_idx = state.get("unk_idx")
    if unk_idx is not None and (type(unk_idx) is not int or not 0 <= unk_idx < len(symbols)):
        raise ValueError(f"{path}: unk_idx is not the number of one of {len(symbols):,} symbols")
    unk = None if unk_idx is None else symbols[unk_idx]
    if not kind or "tokenization_transfo_xl" in kind:
        return _huggingface(symbols, unk, state, path, options)
    return _authors(symbols, unk, state, path, options)


def _symbols(state: Mapping[Any, Any], kind: str, path: Path, is_python2: bool) -> list[str]:
    symbols, numbered = state.get("idx2sym"), state.get("sym2idx")
    if symbols is None and numbered is None:
        named = f" of {kind[:80]}" if kind else ""
        raise ValueError(
            f"{path} holds no vocabulary that can be read: its object{named} has no idx2sym, "
            "the list of words"
        )
    if numbered is not None:
        if not isinstance(numbered, dict) or set(map(type, numbered.values())) - {int}:
            raise ValueError(f"{path}: sym2idx must give the numbers of the symbols")
        if symbols is None:
            symbols = sorted(numbered, key=numbered.__getitem__)
    if not isinstance(symbols, list) or set(map(type, symbols)) - {str}:
        raise ValueError(f"{path}: idx2sym must be a list of words")
    if numbered is not None:
        wrong = [symbol for i, symbol in enumerate(symbols) if numbered.get(symbol) != i]
        if wrong or len(numbered) != len(symbols):
            example = f": another number has {wrong[0][:80]!r}" if wrong else ""
            raise ValueError(
                f"{path}: idx2sym has {len(symbols):,} symbols, and the {len(numbered):,} of "
                f"sym2idx are not numbered 0, 1, 2, ... in that order{example}"
            )
    if is_python2:
        # Words of Python 2 are UTF-8 bytes, which were decoded as Latin-1.
        with suppress(UnicodeError):
            symbols = [symbol.encode("latin-1").decode("utf-8") for symbol in symbols]
    return _checked(symbols, path)


def _checked(symbols: list[str], path: Path) -> list[str]:
    if not symbols:
        raise ValueError(f"{path}: the vocabulary is empty")
    if len(symbols) > _MAX_SYMBOLS:
        raise ValueError(
            f"{path} is not a vocabulary: it has {len(symbols):,} symbols, and the largest that is "
            f"read has {_MAX_SYMBOLS:,}"
        )
    if len(set(symbols)) < len(symbols):
        twin, count = Counter(symbols).most_common(1)[0]
        raise ValueError(f"{path}: the symbol {twin[:80]!r} occurs {count} times")
    for symbol in symbols:
        if any("\ud800" <= c <= "\udfff" for c in symbol):
            raise ValueError(f"{path}: the symbol {symbol[:80]!r} is not valid text")
    return symbols


def _from_text(path: Path, options: VocabOptions) -> Vocab:
    n_bytes = path.stat().st_size
    if n_bytes > _MAX_TEXT_BYTES:
        raise ValueError(
            f"{path} is not a vocabulary: it has {n_bytes:,} bytes, and a list of words up to "
            f"{_MAX_TEXT_BYTES:,}"
        )
    # A repeated word keeps its first index.
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
        raise CheckpointError(f"{path} is not a vocabulary: it is not UTF-8 ({error})") from error
    symbols = _checked(list(words), path)
    unk = next((name for name in ("<UNK>", UNK) if name in symbols), None)
    if unk is None:
        raise ValueError(
            f"{path} is not a vocabulary of an old tokenizer: it lacks <unk> and <UNK>"
        )
    if options.dataset is None and path.name != "1b_word_vocab.txt":
        return _huggingface(symbols, unk, {}, path, options)
    # The authors' setting for this data set.
    return _authors(symbols, unk, {"lower_case": False}, path, options)


def _authors(
    symbols: list[str],
    unk: str | None,
    state: Mapping[object, object],
    path: Path,
    options: VocabOptions,
) -> Vocab:
    dataset = options.dataset or _recognize(symbols)
    if dataset is not None and dataset not in _DATASETS:
        raise ValueError(f"dataset={dataset[:20]!r} is unknown; choose one of {_DATASETS}")
    join = _characters_or_words(state.get("delimiter"), path)
    eos = next((x for x in (EOS, _LM1B_EOS) if x in symbols), None)
    # Lines are stripped, and without a symbol for line ends joined to one line.
    dropped = rf"\A[{SPACE}]+|(?<![{SPACE}])(?=[{SPACE}]*(?:[\r\n]|\z))[{SPACE}]++"
    if join == "chars":
        rules = Rules(join="chars", eos=eos, unk=unk)
    elif dataset == "enwik8" and _BYTES.issuperset(symbols):
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
        line_ends: LineEnds = "none"
        if dataset == "lm1b" and _LM1B_EOS in symbols:
            eos, line_ends = _LM1B_EOS, "around"
        elif eos is not None and dataset not in ("enwik8", "text8"):
            line_ends = "after"
        join = "moses" if options.moses else "words"
        rules = Rules(join=join, eos=eos, unk=unk, line_ends=line_ends)
    lower_case = rules.join != "bytes" and _flag(state.get("lower_case"), "lower_case", path)
    return imported_vocab(symbols, rules, path, options, lower_case=lower_case, dropped=dropped)


def _recognize(symbols: Sequence[str]) -> str | None:
    if _BYTES.issuperset(symbols):
        return "enwik8"
    if _LETTERS.issuperset(symbols):
        return "text8"
    return "lm1b" if _LM1B_EOS in symbols and EOS not in symbols else None


def _huggingface(
    symbols: Sequence[str],
    unk: str | None,
    state: Mapping[object, object],
    path: Path,
    options: VocabOptions,
) -> ImportedVocab:
    """Build a vocabulary from the state of TransfoXLTokenizer and the settings in its folder."""
    settings = _settings_beside(path, "tokenizer_config.json")
    special_tokens = settings | _settings_beside(path, "special_tokens_map.json")
    eos, unknown, additional = _special(special_tokens, path)
    language = settings.get("language", "en")
    if language != "en":
        raise ValueError(f"{path}: language is {str(language)[:20]!r}; only 'en' can be read")
    # The settings file takes precedence over the pickle; older releases have only the pickle.
    source = settings if settings else state
    join = _characters_or_words(source.get("delimiter"), path)
    if join == "words" and options.moses is not False:
        join = "moses"
    special = (eos, unknown, *additional)
    added = _added(symbols, special, settings, path, options.size)
    known = {*symbols, *(x.content for x in added)}
    apart = [
        content
        for content, number, _ in added
        if (number >= len(symbols) if content in additional else content not in (eos, unknown))
    ]
    protected = settings.get("never_split")
    protected = special if protected is None else protected
    for word in protected if isinstance(protected, list | tuple) else [None]:
        if not isinstance(word, str) or not (word in known or re.fullmatch(r"<\w+>", word)):
            raise ValueError(
                f"{path}: never_split has {printable(word)}; only a list of words like '<name>' "
                "can be kept whole"
            )
    name = "clean_up_tokenization_spaces"
    cleans = _flag(settings.get(name, True), name, path)
    rules = Rules(
        join=join,
        eos=next((x for x in (eos, EOS) if x in known), None),
        unk=unk or next((name for name in (UNK, "<UNK>") if name in symbols), None),
        apart=tuple(apart) if join == "moses" else (),
        clean_up=cleans and join == "moses",
    )
    return imported_vocab(
        symbols,
        rules,
        path,
        options,
        lower_case=_flag(source.get("lower_case"), "lower_case", path),
        dropped=rf"\A[{SPACE}]+|(?<![{SPACE}])[{SPACE}]++\z" if join == "chars" else "",
        added=added,
        protected=protected,
    )


def _special(settings: dict[str, Any], path: Path) -> tuple[str, str, list[str]]:
    """Return <eos>, <unk> and the additional special tokens; defaults are the old tokenizer's."""
    additional = settings.get("additional_special_tokens", ["<formula>"])
    if not isinstance(additional, list):
        raise ValueError(f"{path}: additional_special_tokens must be a list of words")
    words = []
    for token in (settings.get("eos_token", EOS), settings.get("unk_token", UNK), *additional):
        word = token.get("content") if isinstance(token, dict) else token
        if not isinstance(word, str) or not word:
            raise ValueError(f"{path}: a special token in its settings file is not a word")
        words.append(word)
    return words[0], words[1], words[2:]


def _added(
    symbols: Sequence[str],
    words: Sequence[str],
    settings: dict[str, Any],
    path: Path,
    size: int | None,
) -> list[Added]:
    """Return the tokens that are matched before the text is split, with their indices."""
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    found = {x: Added(x, numbers[x], {"special": True}) for x in words if x in numbers}
    for content, number in _settings_beside(path, "added_tokens.json").items():
        found[content] = Added(content, number, {"special": content in words})
    decoder = settings.get("added_tokens_decoder", {})
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not re.fullmatch("[0-9]{1,9}", number):
            raise ValueError(f"{path}: added_tokens_decoder is damaged at {number[:20]}")
        names = ("special", "lstrip", "rstrip", "single_word")
        found[content] = Added(content, int(number), {x: bool(token.get(x)) for x in names})
    added = sorted(found.values(), key=lambda x: x.number if type(x.number) is int else -1)
    end = len(symbols)
    for token in added:
        expected = numbers.get(token.content, end)
        if not token.content or type(token.number) is not int or token.number != expected:
            raise ValueError(
                f"{path}: the added token {token.content[:80]!r} has the number "
                f"{str(token.number)[:20]}, which must be {expected}"
            )
        end += token.content not in numbers
    return [x for x in added if size is None or x.number < max(size, len(symbols))]


def _settings_beside(path: Path, name: str) -> dict[str, Any]:
    """Read a settings file in the folder of another file; empty if it does not exist."""
    place = path.with_name(name)
    return read_json(place) if place.is_file() else {}


def _characters_or_words(delimiter: object, path: Path) -> Join:
    """Return whether the symbols of an old vocabulary are characters or words."""
    if delimiter is None:
        return "words"
    if delimiter == "":
        return "chars"
    raise ValueError(
        f"{path}: text is split at the delimiter {printable(delimiter)}; only None (spaces) and "
        "'' (characters) can be read"
    )


def _flag(value: object, name: str, path: Path) -> bool:
    """Read a boolean setting; None is false."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{path}: {name} must be true or false")
    return bool(value)


def is_moses(vocab: Vocab) -> bool:
    """Whether a vocabulary splits text by the Moses rules, as ``TransfoXLTokenizer`` does."""
    return isinstance(vocab, ImportedVocab) and vocab.rules.join == "moses"


def write_hf_vocab(vocab: Vocab, folder: Path) -> None:
    """Write a word vocabulary for ``TransfoXLTokenizer`` of transformers up to 4.37."""
    rules = vocab.rules if isinstance(vocab, ImportedVocab) else None
    if vocab.kind != "words" and (rules is None or rules.join not in ("words", "moses")):
        raise ValueError(
            f"the vocabulary is of {vocab.kind}: Hugging Face's TransfoXLTokenizer knows only words"
        )
    definition = json.loads(vocab.definition)
    ids: dict[str, int] = definition["model"]["vocab"]
    symbols = sorted(ids, key=ids.__getitem__)
    eos = EOS if vocab.eos_id is None else vocab.symbols[vocab.eos_id]
    unk = None if vocab.unk_id is None else vocab.symbols[vocab.unk_id]
    added = {x["content"]: x for x in definition["added_tokens"]}
    additional = [x for x in added if x not in (eos, unk)]
    lower_case = '"Lowercase"' in json.dumps(definition["normalizer"])
    tokens = {"eos_token": eos, "unk_token": unk or UNK, "additional_special_tokens": additional}
    about = {
        "tokenizer_class": "TransfoXLTokenizer",
        "language": "en",
        "delimiter": None,
        "lower_case": lower_case,
        "special": [],
        "min_freq": 0,
        "max_size": None,
        "clean_up_tokenization_spaces": rules.clean_up if rules else True,
        **tokens,
    }
    if added:
        about["added_tokens_decoder"] = {
            str(x["id"]): {name: value for name, value in x.items() if name != "id"}
            for x in added.values()
        }
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    state: dict[str, Any] = {"sym2idx": numbers, "counter": {}, "idx2sym": symbols}
    shared = ("special", "min_freq", "max_size", "lower_case", "delimiter")
    state |= {name: about[name] for name in shared} | {"vocab_file": None}
    state |= {} if unk is None else {"unk_idx": vocab.unk_id}
    state |= {} if vocab.eos_id is None else {"eos_idx": vocab.eos_id}
    torch.save(state, folder / "vocab.bin")
    is_plain = all(symbol.split() == [symbol] for symbol in symbols)
    if is_plain and unk in ("<unk>", "<UNK>"):
        (folder / "vocab.txt").write_text("\n".join(symbols) + "\n", encoding="utf-8", newline="")
    beyond = {x: token["id"] for x, token in added.items() if x not in ids}
    files = {"tokenizer_config.json": about, "special_tokens_map.json": tokens}
    files |= {"added_tokens.json": beyond} if beyond else {}
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
