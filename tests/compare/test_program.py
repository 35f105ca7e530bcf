"""The program of the comparison: what its file of runs and its page keep of earlier calls."""

import json
from dataclasses import fields, replace
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


def test_runs_made_elsewhere_are_merged(program, tmp_path, made):
    call(program, tmp_path, "--models", "txl", "--rates", "1")
    elsewhere = tmp_path / "elsewhere.json"
    words = ["--out", str(tmp_path / "other"), "--json", str(elsewhere)]
    call(program, tmp_path, "--models", "txl", "gpt", *words)
    n = len(made)
    program.main(["toy", "--merge", str(elsewhere)])
    merged = json.loads((tmp_path / "comparison_toy.json").read_text())
    other = json.loads(elsewhere.read_text())
    assert {x["digest"] for x in other["runs"]} < {x["digest"] for x in merged["runs"]}
    assert {*other["planned"]} <= {*merged["planned"]}
    long = [x for x in merged["runs"] if x["phase"] == "run" and x["digest"] in merged["planned"]]
    # What was trained here without a search had another rate than the best.
    assert sorted((x["model"], x["factor"]) for x in long) == [("gpt", 2.0), ("txl", 2.0)]
    program.main(["toy", "--merge", str(elsewhere)])
    assert json.loads((tmp_path / "comparison_toy.json").read_text()) == merged
    assert len(made) == n
    with pytest.raises(ValueError, match=r"--merge .*nowhere\.json: there is no such file"):
        program.main(["toy", "--merge", str(tmp_path / "nowhere.json")])


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


@pytest.mark.parametrize("changed", ["minutes", "precision"])
def test_merged_runs_have_one_time_and_a_seed_one_run(program, tmp_path, made, changed, capsys):
    here = call(program, tmp_path, "--models", "txl", "--rates", "1")
    elsewhere = tmp_path / "elsewhere.json"
    words = {"minutes": ["--minutes", "5"], "precision": ["--precision", "bfloat16"]}[changed]
    words += ["--out", str(tmp_path / "other"), "--json", str(elsewhere)]
    call(program, tmp_path, "--models", "txl", "--rates", "1", *words)
    if changed == "minutes":
        other = json.loads(elsewhere.read_text())
        for run in other["runs"]:
            run["model"] = "gpt"
        elsewhere.write_text(json.dumps(other))
        with pytest.raises(ValueError, match=r"the same time and threads, not txl 20 minutes"):
            program.main(["toy", "--merge", str(elsewhere)])
        assert json.loads((tmp_path / "comparison_toy.json").read_text()) == here
        return
    program.main(["toy", "--merge", str(elsewhere)])
    merged = json.loads((tmp_path / "comparison_toy.json").read_text())
    long = [x for x in merged["runs"] if x["phase"] == "run" and x["digest"] in merged["planned"]]
    assert long == [x for x in here["runs"] if x["phase"] == "run"]
    assert "txl, seed 1: there is another run, which stays" in capsys.readouterr().out


def test_a_larger_network_has_heads_of_the_same_width_where_it_has_heads(program):
    for kind in contestants():
        (recipe,) = load_contestants([kind]).values()
        model, larger = recipe.model, program.resized(recipe, *program.SIZES["larger"]).model
        assert larger.d_model == 2 * model.d_model, kind
        if "n_head" in {x.name for x in fields(model)}:
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


@pytest.mark.slow
def test_measuring_anew_trains_nothing_and_keeps_the_rest(
    program, tmp_path, made, monkeypatch, capsys
):
    before = call(program, tmp_path, "--models", "txl", "gpt")
    n = len(made)
    (best,) = (x.folder for x in made if (x.model, x.phase) == ("txl", "run"))
    (best / "model" / "best").mkdir(parents=True)
    measured = {"writing": [{"tokens": 10, "ms_per_token": 1.0}]}
    monkeypatch.setattr(compare, "_measure", lambda task, found: {**found, **measured})
    after = call(program, tmp_path, "--models", "txl", "gpt", "--measure")
    said = capsys.readouterr().out
    assert len(made) == n
    assert after["planned"] == before["planned"]
    (written,) = (x for x in after["runs"] if "writing" in x["found"])
    assert (written["model"], written["phase"]) == ("txl", "run")
    assert written["found"]["writing"] == measured["writing"]
    # FLOPs are counted anew of all but the one whose measurement is replaced here.
    for was, now in zip(before["runs"], after["runs"], strict=True):
        found = dict(now["found"])
        if (now["phase"], now["model"]) in {("search", "txl"), ("search", "gpt"), ("run", "gpt")}:
            assert (
                found["training"]["mflop_per_token"] != was["found"]["training"]["mflop_per_token"]
            )
            found["training"] = was["found"]["training"]
        found.pop("writing", None)
        assert {**now, "found": found} == was
    assert "txl/seed_1" in said
    assert "not measured, as" in said


def test_nothing_to_measure_is_said(program, tmp_path, capsys):
    before = call(program, tmp_path, "--models", "txl")
    after = call(program, tmp_path, "--models", "txl", "--minutes", "5", "--measure")
    assert "nothing to measure: no detailed run of this plan has ended" in capsys.readouterr().out
    assert (after["planned"], after["runs"]) == (before["planned"], before["runs"])


@pytest.mark.slow
def test_runs_of_another_processor_are_gone_on_with(program, tmp_path, made, monkeypatch):
    monkeypatch.setattr(program, "CORPORA", program.CORPORA | {"other": ("toy", "Another text")})
    first = call(program, tmp_path, "--models", "txl", "gpt", "--precision", "float32")
    digests = {run["digest"] for run in first["runs"]}
    n = len(made)
    with pytest.raises(ValueError, match="paces=other: it has none of lstm"):
        call(program, tmp_path, "--models", "txl", "lstm", "--paces", "other")
    seconds = {"txl": 1.0, "lstm": 2.0}
    paces = [run for run in first["runs"] if run["phase"] == "pace"]
    given = {"circumstances": [], "planned": ["planned"], "baselines": []}
    given["runs"] = [
        paces[0] | {"model": name, "digest": digest, "found": {"seconds": [x], "ceiling_gflops": 7}}
        for digest, each in (("planned", seconds), ("of another plan", {"lstm": 9.0}))
        for name, x in each.items()
    ]
    (tmp_path / "comparison_other.json").write_text(json.dumps(given))
    # Where auto is float32, these are the same runs.
    last = call(program, tmp_path, "--models", "txl", "gpt", "lstm", "--paces", "other")
    assert {task.model for task in made[n:]} == {"lstm"}
    assert digests <= {run["digest"] for run in last["runs"]}
    found = {run["model"]: run["found"] for run in last["runs"] if run["phase"] == "pace"}
    # That of txl was measured twice: 0.5 s here, 1 s there.
    assert found["lstm"] == {"seconds": [1.0], "ceiling_gflops": 100.0}
    assert made[-1].config.train.steps == round(20 * 60 / 1.0)
    reduced = call(program, tmp_path, "--models", "txl", "--precision", "bfloat16")
    txl = {run["digest"] for run in first["runs"] if run["model"] == "txl"}
    assert not txl & {*reduced["planned"]}
    assert {task.config.train.precision for task in made[-5:]} == {"bfloat16"}
