"""A damaged tokenizer is refused; padding and truncation are switched off."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from transformer_xl.data import load_vocab
from transformer_xl.data.vocab_files import BroughtVocab, bring, definition_of

_GROW = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_DOUBLE = {"type": "Replace", "pattern": {"Regex": "a|z"}, "content": "zz"}
_PADDING = {
    "strategy": {"Fixed": 10**12},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "a",
}
_TRUNCATION = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}


def made(**changes: Any) -> bytes:
    """Return a small ``tokenizer.json`` with other parts."""
    ids = {x: n for n, x in enumerate(("[UNK]", "a", "b", "c", " ", "\n"))}
    tokenizer: Any = Tokenizer(models.WordLevel(vocab=ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return json.dumps(json.loads(tokenizer.to_str()) | changes).encode()


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def nested(depth: int) -> bytes:
    begin, end = b'{"type": "Sequence", "normalizers": [', b"]}"
    return b'{"normalizer": ' + begin * depth + end * depth + b"}"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (made(normalizer={"type": "Sequence", "normalizers": [_GROW] * 1000}), "1,003 rules"),
        (made(normalizer={"type": "Sequence", "normalizers": [_GROW] * 40}), "times the text"),
        (made(added_tokens=[{"id": 9, "content": "x" * 10_001}]), "10,001 characters"),
        (nested(100), "recursion limit"),
        (nested(100_000), "nested too deeply"),
        (b'{"version": "1.0"}', "no tokenizer"),
        (b"{\xff}", "utf-8"),
        (b"", "Expecting value"),
    ],
    ids=lambda x: "" if isinstance(x, bytes) else x,
)
def test_a_hostile_or_damaged_file_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        BroughtVocab(definition_of(data))


@pytest.mark.parametrize("change", [{"padding": _PADDING}, {"truncation": _TRUNCATION}], ids=str)
def test_padding_and_truncation_are_switched_off(change: dict[str, Any]) -> None:
    vocab = BroughtVocab(definition_of(made(**change)))
    assert vocab.encode("a b c") == BroughtVocab(definition_of(made())).encode("a b c")
    # What is kept is the file as it was.
    assert json.loads(vocab.definition)[next(iter(change))] == change[next(iter(change))]


_NUMBERS = (-1, 0, 1.5, 10**12, 2**63, -(2**70), 1e308)
_ODD = st.sampled_from(
    ("", "a", "\x00", "(a+)+$", "\ud800", "x" * 5_000, None, True, [], {}, [[]] * 50, *_NUMBERS)
)


def places_in(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a JSON value with each of its keys."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places_in(node[key])


@pytest.mark.slow
def test_with_odd_values_anywhere_it_is_refused_or_can_be_used(is_nightly: bool) -> None:
    n = 40 if is_nightly else 6
    settings(max_examples=n, deadline=20_000, derandomize=True, database=None)(
        given(st.data())(try_with_odd_values)
    )()


def try_with_odd_values(draw: st.DataObject) -> None:
    values = json.loads(made(padding=_PADDING, truncation=_TRUNCATION, normalizer=_GROW))
    for _ in range(draw.draw(st.integers(1, 3))):
        places = list(places_in(values))
        node, key = places[draw.draw(st.integers(0, len(places) - 1))]
        node[key] = draw.draw(_ODD)
    # Refused with a ValueError, or used, which an error of the library may end; never a crash.
    with suppress(ValueError):
        BroughtVocab(definition_of(json.dumps(values).encode())).encode("a b c")


def test_a_model_folder_with_a_hostile_tokenizer_is_refused(tmp_path) -> None:
    data = made(normalizer={"type": "Sequence", "normalizers": [_GROW] * 40})
    (tmp_path / "tokenizer.json").write_bytes(data)
    about = {"format_version": 1, "kind": "brought", "hash": tokenizer_hash(data)}
    (tmp_path / "vocab.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"json is damaged .it has .* times the text"):
        load_vocab(tmp_path)
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(ValueError, match="after its Replace rules"):
        bring(tmp_path)


def tokenizer_hash(data: bytes) -> str:
    return hashlib.sha256(b"brought\n" + data).hexdigest()


def test_a_panic_on_a_text_is_an_error() -> None:
    vocab = BroughtVocab(made(pre_tokenizer=split(r"(x+x+)+y|[\s\S]")).decode())
    with pytest.raises(ValueError, match="the tokenizer failed on this text"):
        vocab.encode("x" * 5_000)
