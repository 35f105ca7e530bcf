import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from transformer_xl.cli import parse
from transformer_xl.cli.science import Recl, ReclConfig

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ("--recl.step", 4, "--recl.longest", 16, "--recl.tokens", 30)


@pytest.fixture(scope="module")
def lstm(tmp_path_factory: pytest.TempPathFactory, toy_recipe: Callable) -> Path:
    """The folder of a finished run of an LSTM, trained with the same command."""
    from transformer_xl.cli import main

    folder = tmp_path_factory.mktemp("lstm")
    recipe = toy_recipe(
        model={
            "kind": "lstm",
            "n_head": 8,
            "d_inner": 2048,
            "mem_len": 0,
            "attn_dropout": 0.0,
        },
        generate={"prompt": "the ", "length": 20},
    )
    (folder / "lstm.toml").write_text(recipe.to_toml())
    out = folder / "lstm"
    assert main(["train", str(folder / "lstm.toml"), "--out", str(out), "--quiet"]) == 0
    return out


@pytest.mark.slow
def test_an_lstm_trains_evaluates_and_writes(lstm: Path, txl: Callable) -> None:
    assert txl("eval", lstm, "--json").json["nll"] < 5
    cut = txl("eval", lstm, "--eval.segment_len", 3, "--json").json["nll"]
    assert cut == pytest.approx(txl("eval", lstm, "--json").json["nll"], rel=1e-5)
    assert len(txl("generate", lstm, "--length", 5, "--json").json["text"]) == 5


def test_recl_compares_models_of_all_kinds(trained: Path, lstm: Path, txl: Callable) -> None:
    ended = txl("recl", trained, lstm, *SMALL, "--json")
    assert ended.code == 0, ended.err
    found = ended.json
    assert found["contexts"] == [4, 8, 12, 16]
    assert [model["name"] for model in found["models"]] == ["toy", "lstm"]
    for model in found["models"]:
        assert set(model["recl"]) == {"0.1", "0.5", "1"}
        assert all(x["length"] in found["contexts"] for x in model["recl"].values())
        assert len(model["nll"]) == 4
    assert "| model | r = 0.1 | r = 0.5 | r = 1 |" in ended.err
    # Without --json the table is the result.
    table = txl("recl", trained, lstm, *SMALL).out
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| toy", "| lstm"]


def test_recl_reads_any_text(
    trained: Path, toy_text: Path, txl: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained / "model" / "best"
    ended = txl("recl", model, *SMALL, "--file", toy_text, "--json")
    assert ended.code == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(toy_text.read_bytes())))
    piped = txl("recl", model, *SMALL, "--file", "-", "--json")
    assert piped.json["models"] == ended.json["models"]


def test_models_that_cannot_be_compared_are_named(
    trained: Path, toy_recipe: Callable, txl: Callable, tmp_path: Path
) -> None:
    recipe = toy_recipe(train={"steps": 2}, data={"vocab": "bytes"}, generate={"prompt": "t"})
    (tmp_path / "bytes.toml").write_text(recipe.to_toml())
    other = tmp_path / "bytes"
    assert txl("train", tmp_path / "bytes.toml", "--out", other, "--quiet").code == 0
    ended = txl("recl", trained, other, *SMALL)
    assert ended.code == 2
    assert "have different vocabularies" in ended.err
    assert f"{trained} and {other}" in ended.err
    ended = txl("recl", trained, trained, *SMALL)
    assert "is given twice" in ended.err
    assert txl("recl").code == 2
    alone = tmp_path / "alone"
    copytree(trained / "model" / "best", alone)
    assert "give a text with --file" in txl("recl", alone, *SMALL).err
    assert "need a text of" in txl("recl", trained, "--recl.longest", 100_000).err


def test_settings_out_of_range_are_named() -> None:
    assert parse(["recl", "runs/a", "runs/b", "--recl.top", "0.5"]) == Recl(
        dirs=("runs/a", "runs/b"), recl=ReclConfig(top=(0.5,))
    )
    assert [*ReclConfig(step=5, longest=17).contexts] == [5, 10, 15]
    with pytest.raises(ValueError, match=r"recl\.step=0 must be above 0"):
        ReclConfig(step=0)
    with pytest.raises(ValueError, match=r"recl\.longest=100 must be at least two steps"):
        ReclConfig(longest=100)
    with pytest.raises(ValueError, match=r"recl\.top\[0\]=2 must be at most 1"):
        ReclConfig(top=(2,))


def test_ablate_makes_a_table_a_picture_and_runs(
    toy_toml: Path, txl: Callable, tmp_path: Path
) -> None:
    words = ("ablate", toy_toml, "--out", tmp_path / "out", "--steps", 2, "--attn_lens", 6)
    words += ("--tokens", 80, "--rows", "recurrence-ours-full", "none-ours-half", "--json")
    ended = txl(*words)
    assert ended.code == 0, ended.err
    rows = ended.json["rows"]
    assert [row["row"] for row in rows] == ["recurrence-ours-full", "none-ours-half"]
    out = tmp_path / "out"
    assert json.loads((out / "ablation.json").read_text())["rows"] == rows
    assert (out / "ablation.md").read_text() in ended.err
    assert txl("eval", out / "none-ours-half" / "seed_1", "--json").json["mem_len"] == 0
    again = txl(*words)
    assert again.json == ended.json
    assert again.err.count("was measured before") == 2
    assert "no ablations" in txl("ablate", toy_toml, "--out", out, "--table", 9).err
