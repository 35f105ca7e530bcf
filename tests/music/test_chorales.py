"""The program that writes the text of the model of chorales."""

import json
import runpy
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "scripts" / "pretrained" / "chorales.py"


@pytest.fixture(autouse=True)
def _beside(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))


@pytest.mark.slow
def test_the_text_is_read_as_a_corpus_and_what_is_held_out_is_as_it_was(
    tmp_path, monkeypatch, capsys
):
    from transformer_xl import DataConfig, prepare

    song = [[72, 67, 64, 48], [74, 67, -1, 47]]
    parts = {"train": [song * 2, song * 3], "valid": [song], "test": [song * 4]}
    (tmp_path / "Jsb16thSeparated.json").write_text(json.dumps(parts))
    out = tmp_path / "chorales.json"
    words = ["chorales.py", str(out), "--path", str(tmp_path), "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(PROGRAM), run_name="__main__")
    written = json.loads(out.read_text())
    assert (written["valid"], written["test"]) == (parts["valid"], parts["test"])
    assert sorted(written["train"]) == sorted(parts["train"] * 2)
    corpus = prepare(DataConfig(path=str(out), vocab="integers"))
    assert corpus.n_tokens("train") == 2 * (4 * 4 + 1 + 4 * 6 + 1)
    before = out.read_bytes()
    monkeypatch.setattr(sys, "argv", [*words, "--seed", "5"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert "chorales.json exists; --force overwrites it" in capsys.readouterr().err
    assert out.read_bytes() == before
    monkeypatch.setattr(sys, "argv", [*words, "--seed", "5", "--force"])
    runpy.run_path(str(PROGRAM), run_name="__main__")
    assert out.read_bytes() != before
