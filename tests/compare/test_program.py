"""The program of the comparison: what its file of runs and its page keep of earlier calls."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from transformer_xl.studies import compare
from transformer_xl.studies.compare import contestants, load_contestants

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Any, made: Any) -> ModuleType:
    """The program, with a corpus ``toy``, toy contestants, and files of its own."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    program = import_module("comparison")
    (tmp_path / "docs" / "images").mkdir(parents=True)
    page = tmp_path / "docs" / "page.md"
    page.write_text(f"above\n\n{program.BEGIN}\nold\n{program.END}\n\nbelow\n")
    monkeypatch.setattr(program, "PAGE", page)
    translated = tmp_path / "docs" / "translated.md"
    translated.write_text(page.read_text())
    monkeypatch.setattr(program, "TRANSLATED", translated)
    monkeypatch.setattr(program, "RESULTS", tmp_path)
    monkeypatch.setattr(program, "MODELS", tuple(models))
    monkeypatch.setattr(program, "CORPORA", {"toy": ("toy", "A text of toys")})
    monkeypatch.setattr(program, "load_recipe", lambda _: models["txl"])
    monkeypatch.setattr(program, "load_contestants", lambda names: {x: models[x] for x in names})
    # What is measured has one thread.
    monkeypatch.setattr(compare, "threads_of", lambda jobs: 1)
    monkeypatch.setattr(program, "threads_of", lambda jobs: 1)
    return program


def call(program: ModuleType, tmp_path: Path, *words: str) -> dict[str, Any]:
    """Make a call; return what the file of the runs has then."""
    words = ("toy", "--out", str(tmp_path / "runs"), "--no-baselines", "--seeds", "1", *words)
    program.main([*words])
    return json.loads((tmp_path / "comparison_toy.json").read_text())


@pytest.mark.slow
def test_a_call_with_fewer_contestants_keeps_the_others(program, tmp_path, made):
    pytest.importorskip("matplotlib")
    first = call(program, tmp_path, "--models", "txl", "gpt")
    n = len(made)
    last = call(program, tmp_path, "--models", "lstm")
    assert {task.model for task in made[n:]} == {"lstm"}
    assert [*first["planned"]] == last["planned"][: len(first["planned"])]
    assert len(last["planned"]) == 3 * (1 + len(compare.FACTORS) + 1)
    program.main(["--docs"])
    text = program.PAGE.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    for name in ("txl", "gpt", "lstm"):
        assert f"\n| {name} |" in text
        assert f"\n| {name} |" in program.TRANSLATED.read_text()
    assert "| 模型 |" in program.TRANSLATED.read_text()
    assert "Not run" not in text


def test_the_plan_of_a_contestant_is_that_of_the_last_call_that_names_it(program, tmp_path):
    first = call(program, tmp_path, "--models", "txl", "gpt")
    last = call(program, tmp_path, "--models", "gpt", "--rates", "1")
    of = {run["digest"]: (run["model"], run["phase"]) for run in last["runs"]}
    assert [x for x in first["planned"] if of[x][0] == "txl"] == last["planned"][:6]
    assert [of[x] for x in last["planned"][6:]] == [("gpt", "pace"), ("gpt", "run")]
    # The others are in the file, and would not be made again.
    assert len(last["runs"]) == len(first["runs"]) + 1


def test_seeds_of_earlier_calls_stay_beside_those_of_a_later_one(program, tmp_path, made):
    call(program, tmp_path, "--models", "txl", "--seeds", "1", "2")
    n = len(made)
    last = call(program, tmp_path, "--models", "txl", "--seeds", "1", "3")
    assert [(x.phase, x.seed) for x in made[n:]] == [("run", 3)]
    long = [x for x in last["runs"] if x["phase"] == "run" and x["digest"] in last["planned"]]
    assert sorted(x["seed"] for x in long) == [1, 2, 3]
    # Not with another learning rate.
    other = call(program, tmp_path, "--models", "txl", "--rates", "1")
    long = [x for x in other["runs"] if x["phase"] == "run" and x["digest"] in other["planned"]]
    assert [(x["seed"], x["factor"]) for x in long] == [(1, 1.0)]


def test_seeds_of_another_network_do_not_stand_beside_those_of_a_later_call(
    program, tmp_path, made, monkeypatch
):
    call(program, tmp_path, "--models", "txl", "--seeds", "1", "2")
    deeper = program.load_contestants(["txl"])["txl"]
    deeper = replace(deeper, model=replace(deeper.model, n_layer=deeper.model.n_layer + 1))
    monkeypatch.setattr(program, "load_contestants", lambda names: {"txl": deeper})
    carry_out = compare._carry_out

    def larger(task):
        found = carry_out(task)
        return found | {"training": found["training"] | {"parameters": 20_000}}

    monkeypatch.setattr(compare, "_carry_out", larger)
    last = call(program, tmp_path, "--models", "txl")
    long = [x for x in last["runs"] if x["phase"] == "run" and x["digest"] in last["planned"]]
    assert [x["seed"] for x in long] == [1]


def test_seeds_stay_while_a_longer_search_has_not_ended(program, tmp_path, made, monkeypatch):
    call(program, tmp_path, "--models", "txl", "--seeds", "1", "2")
    carry_out = compare._carry_out

    def killed(task):
        if task.factor == 8.0:
            raise OSError("the disk is full")
        return carry_out(task)

    monkeypatch.setattr(compare, "_carry_out", killed)
    last = call(program, tmp_path, "--models", "txl", "--rates", "0.5", "1", "2", "4", "8")
    long = [x for x in last["runs"] if x["phase"] == "run" and x["digest"] in last["planned"]]
    assert [x["seed"] for x in long] == [2]


def test_two_calls_keep_the_runs_of_each_other(program, tmp_path, made, monkeypatch):
    carry_out, calls = compare._carry_out, []

    def also(task):
        if not calls:
            calls.append(task)
            call(program, tmp_path, "--models", "lstm", "--out", str(tmp_path / "elsewhere"))
        return carry_out(task)

    monkeypatch.setattr(compare, "_carry_out", also)
    both = call(program, tmp_path, "--models", "txl")
    planned = {x["model"] for x in both["runs"] if x["digest"] in both["planned"]}
    assert planned == {"txl", "lstm"}


def test_a_larger_network_has_heads_of_the_same_width_where_it_has_heads(program):
    for kind in contestants():
        (recipe,) = load_contestants([kind]).values()
        model, larger = recipe.model, program.resized(recipe, *program.SIZES["larger"]).model
        assert larger.d_model == 2 * model.d_model, kind
        if "n_head" not in {x.name for x in model.unused()}:
            assert larger.n_head == 2 * model.n_head, kind


@pytest.mark.slow
def test_runs_of_another_time_do_not_stand_in_the_same_tables(program, tmp_path, made):
    first = call(program, tmp_path, "--models", "txl", "gpt")
    n = len(made)
    with pytest.raises(ValueError, match=r"txl in .* was trained for 20 minutes with 1 threads"):
        call(program, tmp_path, "--models", "gpt", "--minutes", "5")
    assert len(made) == n
    both = call(program, tmp_path, "--models", "txl", "gpt", "--minutes", "5")
    assert not {run["digest"] for run in first["runs"] if run["phase"] == "run"} & {
        *both["planned"]
    }


def test_the_page_has_the_command_with_its_threads(program, tmp_path):
    pytest.importorskip("matplotlib")
    known = call(program, tmp_path, "--models", "txl", "--minutes", "5")
    known["circumstances"][0]["threads"] = 3
    (tmp_path / "comparison_toy.json").write_text(json.dumps(known))
    command = "OMP_NUM_THREADS=3 python benchmarks/comparison.py toy --minutes 5 --jobs 3"
    assert f"Command: `{command}`; runs:" in program.section("toy")
    assert "Not run: gpt, lstm." in program.section("toy")
