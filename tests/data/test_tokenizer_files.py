"""A damaged tokenizer is refused; padding and truncation are switched off."""

import hashlib
import json
from typing import Any

import pytest
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
        (b'{"version": "1.0"}', "not a tokenizer"),
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
