import json
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from transformer_xl.config import Config
from transformer_xl.config.recipes import recipe_names

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "benchmarks"
TABLES = sorted((PROGRAMS / "reproduction").glob("*.toml"))


@pytest.fixture
def reproduction(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return import_module("reproduction")


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return import_module("record")


def test_the_page_is_what_the_committed_files_make(reproduction: ModuleType) -> None:
    pages = reproduction.pages()
    for path, text in pages.items():
        found = (ROOT / path).read_text("utf-8") if (ROOT / path).is_file() else None
        assert found == text, f"{path} is old: run python benchmarks/reproduction.py"
    drawn = {path.name for path in pages if path.suffix == ".svg"}
    there = {path.name for path in (ROOT / reproduction.CURVES).glob("*.svg")}
    assert there <= drawn, f"{there - drawn} belong to no result"


def test_every_table_names_recipes_that_exist() -> None:
    for path in TABLES:
        table = tomllib.loads(path.read_text("utf-8"))
        for row in table.get("rows", ()):
            assert row.get("recipe", "demo") in recipe_names(), path
            assert {"paper", "recipe", "result"} & row.keys(), path
            if "result" in row:
                assert (PROGRAMS / "results" / "runs" / f"{row['result']}.json").is_file(), path
            assert row.keys() <= {
                *("model", "parameters", "paper", "authors", "others", "recipe", "result", "length")
            }


def _result(ppl: float = 30.5, **changes: Any) -> dict[str, Any]:
    return {
        "format_version": 1,
        "kind": "run",
        "command": "txl train paper-wt103-base --out base",
        "machine": {"processor": "Abacus", "threads": 2},
        "parameters": 151_107_538,
        "steps": 1000,
        "minutes": 12.3,
        "results": {"test": {"split": "test", "ppl": ppl, "bpc": 4.93}},
        "curve": {"train": [[10, 9.0], [1000, 5.0]], "valid": [[1000, 5.2]]},
        **changes,
    }


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder of results: `results(name={...})`."""

    def make(**files: dict[str, Any]) -> Path:
        for name, content in files.items():
            (tmp_path / f"{name.replace('_', '-')}.json").write_text(json.dumps(content))
        return tmp_path

    return make


def test_a_run_fills_its_row(reproduction: ModuleType, results: Callable[..., Path]) -> None:
    nothing = reproduction.pages(results=results())
    pages = reproduction.pages(results=results(paper_wt103_base=_result(note="Half as long.")))
    page = pages[reproduction.PAGE]
    (row,) = [line for line in page.splitlines() if "| Transformer-XL Standard |" in line]
    for part in ("24.0", "**30.50**", "12 min, Abacus, 2 threads", "--out base`", "151 M"):
        assert part in row
    assert "not run" not in row
    before = nothing[reproduction.PAGE]
    assert page.count("not run") == before.count("not run") - 1
    assert "![Bits per token of paper-wt103-base" in page
    assert "1,000 steps, 151,107,538 parameters.\nHalf as long." in page
    assert "<circle" in pages[reproduction.CURVES / "paper-wt103-base.svg"]


def test_the_other_kinds_have_their_tables(
    reproduction: ModuleType, results: Callable[..., Path]
) -> None:
    head = {"format_version": 1, "machine": {"gpu": "a GPU"}, "command": "txl it"}
    gains = {"length": 96, "is_bound": True, "gains": [], "falls": []}
    spread = {"mean": 2.5, "std": 0.01}
    row = {"row": "recurrence-ours-full", "segment_len": 32, "seeds": [1, 2]}
    row |= {"unit": "bits per token", "init": spread, "best": spread, "attn_len": 48}
    row |= {"paper": [27.02, 26.77, 500]}
    row |= {"curve": [{"attn_len": 48, "nll": 1.7}, {"attn_len": 96, "nll": 1.8}]}
    speeds = [{"attn_len": 800, "slowdown": 401.2}]
    pages = reproduction.pages(
        results=results(
            lengths={
                **head,
                "kind": "recl",
                "contexts": [8, 96],
                "models": [{"name": "xl", "nll": [3.0, 2.0], "recl": {"0.5": gains}}],
                "true_length": 64,
            },
            rows={**head, "kind": "ablation", "table": 6, "rows": [row], "minutes": 3.0},
            speeds={
                **head,
                "kind": "evaluation_speed",
                "rows": speeds,
                "n_layer": 12,
                "d_model": 512,
                "dtype": "float32",
            },
            stray=_result(),
        )
    )
    page = pages[reproduction.PAGE]
    assert "| xl | ≥ 96 | 2.000 |" in page
    assert "The true length of this text is 64." in page
    ours = "| yes | ours | full | 32 | 2.5000 ± 0.0100 | 2.5000 ± 0.0100 | 48 | 27.02 | 26.77 |"
    assert ours in page
    assert "| attention length 800 | 363 | **401** |" in page
    assert "| attention length 3,800 | 1,874 | not run |" in page
    assert "Recorded, but in no table above: `stray`." in page
    for name in ("lengths", "rows"):
        assert f"(images/runs/{name}.svg)" in page
        assert "<polyline" in pages[reproduction.CURVES / f"{name}.svg"]


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_recorded_without_paths(
    record: ModuleType,
    reproduction: ModuleType,
    toy_recipe: Callable[..., Config],
    tmp_path: Path,
) -> None:
    from transformer_xl.train import train

    config = toy_recipe(generate={"prompt": "the "}, train={"steps": 6})
    folder = tmp_path / "run"
    with pytest.raises(SystemExit, match="is neither a run folder"):
        record.recorded(tmp_path)
    results = train(config, folder, quiet=True)
    environment = json.loads((folder / "environment.json").read_text())
    command = f"{tmp_path}/bin/txl train {tmp_path}/toy.toml --out runs/toy"
    (folder / "environment.json").write_text(json.dumps(environment | {"command": command}))

    found = record.recorded(folder)
    assert str(tmp_path) not in json.dumps(found)
    assert found["command"] == "txl train toy.toml --out runs/toy"
    assert found["recipe"]["data"]["path"] == "toy.txt"
    assert found["recipe"]["train"]["steps"] == found["steps"] == 6
    assert found["results"]["test"]["nll"] == results["test"]["nll"]
    from transformer_xl.model import load_model

    assert found["parameters"] == sum(p.numel() for p in load_model(folder).parameters())
    assert found["minutes"] < 1
    assert [step for step, _ in found["curve"]["valid"]] == [4, 6]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "demo.json").write_text(json.dumps(found))
    page = reproduction.pages(results=tmp_path / "results")[reproduction.PAGE]
    assert f"**{results['test']['bits_per_token']:.4f}**" in page
    (folder / "results.json").unlink()
    with pytest.raises(SystemExit, match="is not finished"):
        record.recorded(folder)
