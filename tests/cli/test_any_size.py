"""Every command that loads a model takes --any_size, which lifts the limit on loading."""

import os

from transformer_xl.cli import commands
from transformer_xl.cli.given import LoadsModels
from transformer_xl.model import limits, pretrained


def test_all_commands_that_load_a_model_have_the_flag():
    # These read settings alone.
    others = {"recipes", "prepare", "models", "convert"}
    assert {x for x, kind in commands().items() if not issubclass(kind, LoadsModels)} == others


def test_doctor_examines_nothing_beyond_the_limit_and_says_so(txl, trained, monkeypatch):
    folder = trained / "model" / "best"
    monkeypatch.setattr(limits, "_TENSOR_BYTES", 1 << 60)
    monkeypatch.setattr(pretrained, "build_model", None)
    ended = txl("doctor", folder, "--json")
    (message,) = ended.json.values()
    assert ended.code == 1
    assert message.startswith("not examined whether its weights fit: ")
    assert "--any_size loads it all the same" in message
    monkeypatch.undo()
    monkeypatch.setattr(limits, "_TENSOR_BYTES", 1 << 60)
    assert txl("doctor", folder, "--any_size").code == 0
    # The flag holds for one command.
    assert "TXL_ANY_SIZE" not in os.environ
