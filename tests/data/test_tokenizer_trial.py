"""A hostile tokenizer is refused, or made harmless, in bounded time; it never ends the process."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from transformer_xl.config.child_limits import command_of, environment
from transformer_xl.data import load_vocab, tokenizer_trial
from transformer_xl.data.tokenizer_trial import tried, without_padding
from transformer_xl.data.vocab_files import BroughtVocab, bring

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


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial may take one second of the processor, instead of three."""
    program = "from transformer_xl.data import tokenizer_trial as trial; trial._SECONDS = 1; "
    monkeypatch.setattr(
        tokenizer_trial, "COMMAND", command_of(f"{program}trial.try_standard_input()")
    )
    monkeypatch.setattr(tokenizer_trial, "_SECONDS", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("one_second")
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (made(normalizer={"type": "Sequence", "normalizers": [_GROW] * 1000}), "1,00[12] rules"),
        (made(normalizer={"type": "Sequence", "normalizers": [_GROW] * 40}), r"1\.1e\+12 times"),
        (
            made(normalizer={"type": "Sequence", "normalizers": [_DOUBLE] * 40}),
            "exceeded|fail",
        ),
        (made(pre_tokenizer=split("(a+)+$")), "PanicException|exceeded"),
        (made(added_tokens=[{"id": 9, "content": "x" * 10_001}]), "10,001 characters"),
        (made(added_tokens=[{"id": 9, "content": "x"}] * 100_001), "100,001 added tokens"),
        (nested(100), "recursion limit"),
        (nested(100_000), "nested too deeply"),
        (b'{"version": "1.0"}', "failed"),
        (b"{\xff}", "utf-8"),
        (b"\x0a\xff\xff\xff\xff\x7f", "failed"),
        (b"", "pieces"),
    ],
    ids=lambda x: "" if isinstance(x, bytes) else x,
)
def test_it_is_refused_in_bounded_time(data: bytes, reason: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=reason):
        tried(data)
    # The trial is limited to 1 s of the processor and 10 s of the clock.
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("change", [{"padding": _PADDING}, {"truncation": _TRUNCATION}], ids=str)
def test_padding_and_truncation_are_switched_off(change: dict[str, Any]) -> None:
    vocab = BroughtVocab(tried(made(**change)))
    assert vocab.encode("a b c") == BroughtVocab(tried(made())).encode("a b c")
    # What is kept is the file as it was.
    assert json.loads(vocab.definition)[next(iter(change))] == change[next(iter(change))]


def test_padding_whose_name_is_written_with_escapes_is_switched_off() -> None:
    data = made(padding=_PADDING | {"strategy": {"Fixed": 1_000}})
    hidden = data.replace(b'"padding"', rb'"\u0070adding"')
    assert len(BroughtVocab(tried(hidden)).encode("a b c")) == 5


@pytest.mark.slow
@pytest.mark.usefixtures("one_second")
def test_rules_that_make_each_other_grow_are_refused() -> None:
    rules = [
        {"type": "Replace", "pattern": {"String": "q"}, "content": "r" * 1_000},
        {"type": "Replace", "pattern": {"String": "r"}, "content": "s" * 1_000},
    ]
    with pytest.raises(ValueError, match=r"exceeded|failed"):
        tried(made(normalizer={"type": "Sequence", "normalizers": rules}))


def test_no_module_is_imported_from_the_current_folder(tmp_path, monkeypatch) -> None:
    for name in ("tokenizers", "json", "resource"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer_trial, "_SAFE", {})
    tried(made())
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of processes")
def test_a_system_that_refuses_limits_tries_without_them(monkeypatch) -> None:
    # As macOS refuses the one of memory.
    program = "import resource\n\ndef refuse(*about):\n    raise ValueError('not allowed')\n\n"
    program += f"resource.setrlimit = refuse\n{tokenizer_trial.COMMAND[-1]}"
    monkeypatch.setattr(tokenizer_trial, "COMMAND", [*tokenizer_trial.COMMAND[:-1], program])
    monkeypatch.setattr(tokenizer_trial, "_SAFE", {})
    assert tried(made()) == made().decode()


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of processes")
def test_a_lower_limit_of_the_caller_is_kept(monkeypatch) -> None:
    n_bytes = tokenizer_trial._limit(0) // 2
    program = f"import resource\nresource.setrlimit(resource.RLIMIT_AS, ({n_bytes}, {n_bytes}))\n"
    program += tokenizer_trial.COMMAND[-1]
    monkeypatch.setattr(tokenizer_trial, "COMMAND", [*tokenizer_trial.COMMAND[:-1], program])
    monkeypatch.setattr(tokenizer_trial, "_SAFE", {})
    assert tried(made()) == made().decode()


def test_a_token_called_padding_is_kept() -> None:
    ids = {"[UNK]": 0, "padding": 7}
    text = made(model={"type": "WordLevel", "vocab": ids, "unk_token": "[UNK]"}).decode()
    assert without_padding(text) == text


def test_a_file_that_passed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made()
    assert tried(data) == data.decode()
    monkeypatch.setattr(tokenizer_trial.subprocess, "run", None)
    assert tried(data) == data.decode()
    with pytest.raises(TypeError):
        tried(made(version="1.0 "))


def test_a_sentencepiece_model_that_passed_is_not_tried_again(monkeypatch) -> None:
    # Three pieces: <unk>, which has the kind 2, and two of text.
    pieces = [b"\x0a\x05<unk>\x18\x02", b"\x0a\x03\xe2\x96\x81", b"\x0a\x01a"]
    data = b"".join(b"\x0a" + bytes([len(piece)]) + piece for piece in pieces)
    definition = tried(data)
    assert json.loads(definition)["model"]["vocab"][2][0] == "a"
    monkeypatch.setattr(tokenizer_trial.subprocess, "run", None)
    assert tried(data) == definition


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
        BroughtVocab(tried(json.dumps(values).encode())).encode("a b c")


def test_a_model_folder_with_a_hostile_tokenizer_is_refused(tmp_path) -> None:
    data = made(normalizer={"type": "Sequence", "normalizers": [_GROW] * 40})
    (tmp_path / "tokenizer.json").write_bytes(data)
    about = {"format_version": 1, "kind": "brought", "hash": tokenizer_hash(data)}
    (tmp_path / "vocab.json").write_text(json.dumps(about))
    with pytest.raises(RuntimeError, match=r"json is damaged .its trial failed: its Replace"):
        load_vocab(tmp_path)
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(ValueError, match="its Replace rules"):
        bring(tmp_path)


def tokenizer_hash(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(b"brought\n" + data).hexdigest()


def test_a_panic_on_a_text_is_an_error() -> None:
    vocab = BroughtVocab(made(pre_tokenizer=split(r"(x+x+)+y|[\s\S]")).decode())
    with pytest.raises(ValueError, match="the tokenizer failed on this text"):
        vocab.encode("x" * 5_000)


def test_the_child_process_does_not_import_torch() -> None:
    program = "import transformer_xl.data.tokenizer_trial, sys; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout.strip() == "False"


def test_a_child_process_gets_no_keys_and_passwords(monkeypatch):
    """It tries hostile files, and the variables of a server can hold secrets."""
    for name in ("TXL_API_KEY", "TXL_SESSIONS", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    script = "import os, transformer_xl.data.tokenizer_trial; print(dict(os.environ))"
    found = subprocess.check_output(command_of(script), env=environment(EXTRA="given"), text=True)
    assert "secret" not in found
    assert "'EXTRA': 'given'" in found
