"""Every command that loads a model takes --any_size, which lifts the limit on loading."""

import os

import pytest

from transformer_xl.cli import commands
from transformer_xl.cli.given import LoadsModels
from transformer_xl.model import limits, loading

SMALL = ("--train.steps", "2", "--train.warmup_steps", "0", "--eval.max_steps", "2", "--quiet")


def test_all_commands_that_load_a_model_have_the_flag():
    # These read settings alone.
    others = {"recipes", "prepare", "models", "convert"}
    assert {x for x, kind in commands().items() if not issubclass(kind, LoadsModels)} == others


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("train", "{model}", "--out", "{out}", "--data.path", "{text}", *SMALL),
        ("compress", "{text}", "{out}", "--model", "{model}"),
    ],
    ids=["train", "compress"],
)
def test_the_limit_on_loading_is_lifted(txl, trained, toy_toml, tmp_path, monkeypatch, words):
    (tmp_path / "text").write_text("the cat saw a dog.\nthe dog ran to sea.\n" * 30)
    places = {"model": trained / "model" / "best", "out": tmp_path / "out"}
    places |= {"text": tmp_path / "text", "recipe": toy_toml}
    words = [word.format(**places) for word in words]
    monkeypatch.setattr(limits, "_TENSOR_BYTES", 1 << 60)
    ended = txl(*words)
    assert ended.code == 2
    assert "--any_size loads it all the same" in ended.err
    ended = txl(*words, "--any_size")
    assert ended.code == 0, ended.err
    # The flag holds for one command.
    assert "TXL_ANY_SIZE" not in os.environ


def test_doctor_examines_nothing_beyond_the_limit_and_says_so(txl, trained, monkeypatch):
    folder = trained / "model" / "best"
    monkeypatch.setattr(limits, "_TENSOR_BYTES", 1 << 60)
    monkeypatch.setattr(loading, "build_model", None)
    ended = txl("doctor", folder, "--json")
    (message,) = ended.json.values()
    assert ended.code == 1
    assert message.startswith("not examined whether its weights fit: ")
    assert "--any_size loads it all the same" in message
    monkeypatch.undo()
    monkeypatch.setattr(limits, "_TENSOR_BYTES", 1 << 60)
    assert txl("doctor", folder, "--any_size").code == 0
