"""Experiments: variants depart from a recipe as they say; tables say what was measured."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from shutil import rmtree

import pytest

from transformer_xl.config.recipes import differences, load_recipe, recipe_names

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted((PROGRAMS / "experiments").glob("*.toml"))

TINY = """
about = "A try."
recipe = "shakespeare-char-cpu"
[set]
model = { n_layer = 1, d_model = 16, d_inner = 16, mem_len = 8 }
data = { name = "" }
eval = { mem_lens = [] }
generate = { prompt = "the", length = 2 }
[set.train]
segment_len = 8
batch_size = 2
stages = []
eval_every = 0
save_every = 0
precision = "float32"
[[variant]]
name = "first"
about = "as it is"
[[variant]]
name = "cosine"
about = "a cosine"
train = { schedule = "cosine", cooldown_fraction = 0.3 }
"""


@pytest.fixture
def experiments(monkeypatch):
    # The programs begin in their own folder.
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return import_module("experiments")


def runs(*losses):
    return [{"seed": i, "valid_nll": x, "steps": 100 * i} for i, x in enumerate(losses, 1)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_experiment_file_makes_recipes(experiments, path):
    experiment = experiments.read_experiment(path)
    first, *others = experiment["variant"]
    base = experiments.recipe_of(experiment, first, {}, path.name)
    assert experiment["recipe"] in recipe_names()
    for variant in others:
        found = experiments.recipe_of(experiment, variant, {}, path.name)
        assert differences(base, found), f"{variant['name']} is {first['name']} once more"


def test_settings_of_a_variant_go_over_those_of_all_and_the_command_line_over_both(experiments):
    experiment = {
        "recipe": "demo",
        "set": {"train": {"lr": 1.0, "seed": 5, "beta1": 0.5}},
        "variant": [{"name": "a", "train": {"lr": 2.0, "seed": 6}}],
    }
    more = experiments.given(["train.lr=3", "data.path=a/b", "eval.mem_lens=[1, 2]"])
    found = experiments.recipe_of(experiment, experiment["variant"][0], more, "x").train
    assert (found.lr, found.seed, found.beta1) == (3.0, 6, 0.5)
    assert found.minutes is None
    assert more["data"] == {"path": "a/b"}
    assert more["eval"] == {"mem_lens": [1, 2]}
    assert found.muon_lr == load_recipe("demo").train.muon_lr


def test_what_is_no_experiment_is_refused(experiments, tmp_path):
    for text, message in (
        ("recipe = 'demo'", "has a recipe, a list of"),
        ("recipe = 'demo'\nvariants = []\n[[variant]]\nname = 'a'", "not variants"),
        ("recipe = 'demo'\n[[variant]]\nname = 'a'\n[[variant]]\nname = 'a'", "a name of its own"),
        ("recipe = 'demo'\n[[variant]]\nabout = 'a'", "a name of its own"),
        ("recipe = 'demo'\n[[variant]]\nname = 'a'\nrecipee = 'demo'", "not recipee"),
        ("recipe = 'demo'\n[[variant]]\nname = 'a'\n[variant.trian]\nlr = 1", "not trian"),
    ):
        path = tmp_path / "a.toml"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            experiments.read_experiment(path)


def test_means_spreads_and_differences(experiments):
    first, other = runs(1.0, 2.0, 3.0), runs(4.0, 4.0, 7.0)
    found = experiments.summary("b", other, first)
    assert found["mean"] == 5
    assert found["spread"] == pytest.approx(3**0.5)
    assert found["difference"] == 3
    # Variances 1 and 3.
    assert found["effect_size"] == pytest.approx(3 / 2**0.5)
    single = experiments.summary("b", other[:1], first[:1])
    assert single["difference"] == 3
    assert not {"spread", "effect_size"} & single.keys()
    assert "mean" not in experiments.summary("b", [{"seed": 1, "failed": "the loss is nan"}], first)


def test_a_table_shows_the_best_in_bold_and_what_failed(experiments):
    failed = [{"seed": 2, "failed": "the loss is nan"}]
    variants = [
        experiments.summary("a", runs(2.0, 2.5), runs(2.0, 2.5)) | {"about": "as it is"},
        experiments.summary("b", [*runs(1.0), *failed], runs(2.0, 2.5)) | {"about": "changed"},
        experiments.summary("c", failed, runs(2.0, 2.5)) | {"about": "broken"},
    ]
    _, _, *rows = experiments.table({"variants": variants}).splitlines()
    assert rows == [
        "| a | as it is | 2 | 150 | 2.2500 ± 0.3536 | - | - |",
        "| b | changed | 1 (1 failed) | 100 | **1.0000** | -1.2500 | - |",
        "| c | broken | 0 (1 failed) | - | - | - | - |",
    ]


def test_the_page_is_what_the_program_makes_of_the_recorded_results(experiments):
    assert experiments.PAGE.read_text("utf-8") == experiments.page(experiments.recorded())


def _experiment(experiments, path, configs, minutes=1.0, note=None):
    experiment = {"recipe": "demo", "variant": [{"name": name} for name in configs]}
    return experiments.Experiment(path, experiment, configs, minutes, note)


def test_a_pace_is_measured_once_and_others_beside_it(experiments, tmp_path, monkeypatch):
    measured, path = [], tmp_path / "found.json"
    configs = dict.fromkeys("abc", load_recipe("demo"))

    def paces(configs):
        measured.append([*configs])
        # The machine is slower each time.
        return {name: [float(len(measured))] for name in configs}, 100.0

    monkeypatch.setattr(experiments, "paces", paces)
    monkeypatch.setattr(experiments, "prepare_process", lambda: None)

    def known(*names):
        experiment = _experiment(experiments, path, configs)
        experiment._steps(names[0], names)
        return experiment.paces

    assert known("a", "b") == known("a") == {"a": [1.0], "b": [1.0]}
    assert measured == [["a", "b"]]
    # What is known stays, and what is new is measured beside it.
    assert known("a", "b", "c") == {"a": [1.0], "b": [1.0], "c": [1.0]}
    assert measured[1:] == [["a", "b", "c"]]
    # Runs of an earlier version have no pace.
    text = json.loads(path.read_text())
    del text["variants"][0]["seconds_per_step"]
    text["variants"] = [text["variants"][0] | {"runs": runs(1.0)}]
    path.write_text(json.dumps(text))
    with pytest.raises(ValueError, match="has runs of a, but not its pace"):
        _experiment(experiments, path, configs)._steps("b", ("a", "b"))


def test_what_a_file_has_is_kept(experiments, tmp_path, monkeypatch):
    path, demo = tmp_path / "found.json", load_recipe("demo")
    configs, made, fails = dict.fromkeys("abc", demo), [], {"c"}

    def train(config, folder):
        made.append((folder.parent.name, config.train.seed))
        if folder.parent.name in fails:
            return {"failed": "the loss is nan"}
        return {"steps": config.train.steps, "valid_nll": float(config.train.seed)}

    monkeypatch.setattr(experiments, "_trained", train)
    monkeypatch.setattr(experiments, "prepare_process", lambda: None)
    monkeypatch.setattr(experiments, "paces", lambda known: ({x: [0.5] for x in known}, 1.0))

    def call(names, seeds, note=None):
        made.clear()
        _experiment(experiments, path, configs, note=note).run(names, seeds, tmp_path)
        result = json.loads(path.read_text())
        found = {x["name"]: [run["seed"] for run in x["runs"]] for x in result["variants"]}
        return found, result, [*made]

    found, result, trained = call("abc", [2], "A note.")
    assert trained == [("a", 2), ("b", 2), ("c", 2)]
    assert result["note"] == "A note."
    failed = result["variants"][2]
    # Other seeds and variants stay, failed ones too, as does the note.
    found, result, trained = call("ab", [1, 2])
    assert trained == [("a", 1), ("b", 1)]
    assert found == {"a": [1, 2], "b": [1, 2], "c": [2]}
    assert result["variants"][2] == failed
    assert (result["seeds"], result["note"]) == ([1, 2], "A note.")
    before = path.read_bytes()
    assert call("ab", [1, 2])[2] == []
    assert path.read_bytes() == before
    # A note is written even if no run is missing.
    assert call("ab", [1, 2], "Another note.")[1]["note"] == "Another note."
    # A failed run is made again.
    fails.clear()
    found, result, trained = call("ac", [2])
    assert trained == [("c", 2)]
    assert found == {"a": [1, 2], "b": [1, 2], "c": [2]}
    assert {run["steps"] for x in result["variants"] for run in x["runs"]} == {120}


def test_a_file_whose_runs_would_be_lost_is_refused(experiments, tmp_path):
    path, demo = tmp_path / "found.json", load_recipe("demo")
    experiment = _experiment(experiments, path, {"a": demo, "b": demo})
    experiment.runs = {name: [{"seed": 1, "steps": 9, "valid_nll": 1.0}] for name in "ab"}
    experiment.write()
    same = replace(demo, data=replace(demo.data, cache_dir="elsewhere"))
    assert _experiment(experiments, path, {"a": same, "b": same, "c": demo}).finished("b")
    other = replace(demo, train=replace(demo.train, lr=2 * demo.train.lr))
    for configs, minutes, message in (
        ({"a": demo, "b": demo}, 2.0, r"has runs of 1 minute, not 2: give --json another"),
        ({"a": demo, "b": other}, 1.0, "has runs of b that were made with other settings"),
        ({"a": demo}, 1.0, "has the variant b, which the experiment lacks"),
    ):
        with pytest.raises(ValueError, match=message):
            _experiment(experiments, path, configs, minutes)


@pytest.mark.slow
def test_an_experiment_is_run_recorded_and_not_run_again(tmp_path, toy_text):
    program, found = _program(tmp_path, toy_text)

    def call(*seeds):
        done = subprocess.run(
            [*program, "--minutes", "0.01", "--seeds", *seeds],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        made = [line for line in done.stderr.splitlines() if ", seed " in line]
        return json.loads(found.read_text()), made, done.stdout

    result, made, table = call("1")
    assert made == ["first, seed 1", "cosine, seed 1"]
    for variant in result["variants"]:
        (run,) = variant["runs"]
        assert run["steps"] > 0
        assert run["valid_nll"] > 0
    assert result["circumstances"][-1]["torch"]
    assert "| cosine | a cosine | 1 |" in table
    # Without the folders of the runs, what the file has is not made again, and its steps hold.
    rmtree(tmp_path / "out")
    again, made, _ = call("0", "1")
    assert made == ["first, seed 0", "cosine, seed 0"]
    assert again["seeds"] == [0, 1]
    for variant, before in zip(again["variants"], result["variants"], strict=True):
        new, old = variant["runs"]
        assert [old] == before["runs"]
        assert new["steps"] == old["steps"]
        assert new["valid_nll"] != old["valid_nll"]
    done = subprocess.run([*program, "--minutes", "0.02"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "has runs of 0.01 minutes, not 0.02: give --json another file" in done.stderr
    assert json.loads(found.read_text()) == again


def _program(tmp_path, text):
    """Return the command of a tiny experiment, and its file of results."""
    path, found = tmp_path / "tiny.toml", tmp_path / "found.json"
    path.write_text(TINY)
    program = [sys.executable, str(PROGRAMS / "experiments.py"), str(path)]
    program += ["--out", str(tmp_path / "out"), "--json", str(found)]
    return [*program, "--set", f"data.path={text}"], found


def test_a_misspelled_variant_is_refused(tmp_path, toy_text):
    program, _ = _program(tmp_path, toy_text)
    done = subprocess.run([*program, "--only", "cosin"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "--only cosin: the variants are first, cosine" in done.stderr
