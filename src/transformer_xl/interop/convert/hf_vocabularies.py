"""Vocabularies of Hugging Face's TransfoXLTokenizer, with the settings beside them."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from transformer_xl.data.imported import SPACE, ImportedVocab, Join, Rules
from transformer_xl.data.vocab import EOS, UNK, Vocab
from transformer_xl.interop.convert.cutting import Added, Wishes, imported_vocab
from transformer_xl.interop.convert.inert import read_json

_UNKNOWN_NAMES = (UNK, "<UNK>")


def huggingface_vocab(
    symbols: Sequence[str],
    unk: str | None,
    state: Mapping[object, object],
    path: Path,
    wishes: Wishes,
) -> ImportedVocab:
    """Make a vocabulary of what TransfoXLTokenizer kept.

    Args:
        symbols: The symbols, in the order of their numbers.
        unk: The symbol for unknown words, where the file names it.
        state: The attributes of the tokenizer, as far as they were kept.
        path: The file; settings lie beside it.
        wishes: What the caller wants.

    Raises:
        UnreadableFile: The settings are damaged.
        ValueError: The settings contradict the vocabulary, or cannot be ours.
    """
    settings = settings_beside(path, "tokenizer_config.json")
    special = _special(settings | settings_beside(path, "special_tokens_map.json"), path)
    language = settings.get("language", "en")
    if language != "en":
        raise ValueError(f"{path}: language is {str(language)[:20]!r}; only 'en' can be read")
    # A file of settings wins over the pickle; before there was one, the pickle did.
    source = settings if settings else state
    join = characters_or_words(source.get("delimiter"), path)
    if join == "words" and wishes.moses is not False:
        join = "moses"
    added = _added(symbols, special, settings, path, wishes.size)
    known = {*symbols, *(x.content for x in added)}
    apart = [x.content for x in added if _stands_apart(x, special, len(symbols))]
    name = "clean_up_tokenization_spaces"
    cleans = flag(settings.get(name, True), name, path)
    rules = Rules(
        join=join,
        eos=next((x for x in (special["eos_token"], EOS) if x in known), None),
        unk=unk or next((name for name in _UNKNOWN_NAMES if name in symbols), None),
        apart=tuple(apart) if join == "moses" else (),
        clean_up=cleans and join == "moses",
    )
    return imported_vocab(
        symbols,
        rules,
        path,
        wishes,
        lower_case=flag(source.get("lower_case"), "lower_case", path),
        dropped=rf"\A[{SPACE}]+|(?<![{SPACE}])[{SPACE}]++\z" if join == "chars" else "",
        added=added,
        protected=_protected(settings.get("never_split"), special, known, path),
    )


def _protected(listed: object, special: dict[str, Any], known: set[str], path: Path) -> list[str]:
    if listed is None:
        return [special["eos_token"], special["unk_token"], *special["additional"]]
    if not isinstance(listed, list) or not all(isinstance(x, str) for x in listed):
        raise ValueError(f"{path}: never_split beside it must be a list of words")
    for word in listed:
        if word not in known and not re.fullmatch(r"<\w+>", word):
            raise ValueError(
                f"{path}: never_split beside it has {word[:80]!r}; only words like '<name>' can "
                "be kept whole"
            )
    return listed


def _stands_apart(token: Added, special: dict[str, Any], n_symbols: int) -> bool:
    if token.content in special["additional"]:
        return token.number >= n_symbols
    return token.content not in (special["eos_token"], special["unk_token"])


def _special(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the special tokens, by default those of the old tokenizer."""

    def text(token: object) -> str:
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str) or not token:
            raise ValueError(f"{path}: a special token beside it is no word")
        return token

    additional = settings.get("additional_special_tokens", ["<formula>"])
    if not isinstance(additional, list):
        raise ValueError(f"{path}: additional_special_tokens beside it must be a list of words")
    return {
        "eos_token": text(settings.get("eos_token", EOS)),
        "unk_token": text(settings.get("unk_token", UNK)),
        "additional": [text(token) for token in additional],
    }


def _added(
    symbols: Sequence[str],
    special: dict[str, Any],
    settings: dict[str, Any],
    path: Path,
    size: int | None,
) -> list[Added]:
    """Return the tokens that are found before the text is cut, with their numbers."""
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    words = (special["eos_token"], special["unk_token"], *special["additional"])
    found = {x: Added(x, numbers[x], {"special": True}) for x in words if x in numbers}
    for content, number in settings_beside(path, "added_tokens.json").items():
        found[content] = Added(content, number, {"special": content in words})
    decoder = settings.get("added_tokens_decoder", {})
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not re.fullmatch("[0-9]{1,9}", number):
            raise ValueError(f"{path}: added_tokens_decoder beside it is damaged at {number[:20]}")
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


def settings_beside(path: Path, name: str) -> dict[str, Any]:
    """Read a file of settings in the folder of another; none when there is no such file.

    Raises:
        UnreadableFile: The file is damaged.
    """
    place = path.with_name(name)
    return read_json(place) if place.is_file() else {}


def characters_or_words(delimiter: object, path: Path) -> Join:
    """Tell what an old vocabulary cut text into.

    Raises:
        ValueError: ``delimiter`` is none of the two that were used.
    """
    if delimiter is None:
        return "words"
    if delimiter == "":
        return "chars"
    raise ValueError(
        f"{path}: words are cut at the delimiter {str(delimiter)[:20]!r}; only None (spaces) and "
        "'' (characters) can be read"
    )


def flag(value: object, name: str, path: Path) -> bool:
    """Read a setting that is true or false; None is false.

    Raises:
        ValueError: It is something else.
    """
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{path}: {name} must be true or false")
    return bool(value)


def write_hf_vocab(vocab: Vocab, folder: Path) -> None:
    """Write a vocabulary of words for ``TransfoXLTokenizer`` of transformers up to 4.37.

    Raises:
        ValueError: Its symbols are no words, which is all that tokenizer knows.
    """
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
    state = {
        "sym2idx": {symbol: number for number, symbol in enumerate(symbols)},
        "counter": {},
        "idx2sym": symbols,
        "special": [],
        "min_freq": 0,
        "max_size": None,
        "lower_case": lower_case,
        "delimiter": None,
        "vocab_file": None,
        **({} if unk is None else {"unk_idx": vocab.unk_id}),
        **({} if vocab.eos_id is None else {"eos_idx": vocab.eos_id}),
    }
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
