"""Running a task: what is prepared again, what is refused, what is kept."""

import json
import os

import pytest
import torch

from transformer_xl.config.recipes import load_recipe
from transformer_xl.tasks import load_task, run
from transformer_xl.tasks.logs import task as logs_anomalies
from transformer_xl.tasks.run import prepare_data, run_task
from transformer_xl.tasks.task import Measured, Task, Trained


class Lengths(Task):
    """The text is the word in its file."""

    name = "lengths"
    title = "Lengths"
    metric = "length"
    models = {"one": ("demo",), "other": ("demo",)}  # noqa: RUF012
    reads = ("train.json",)
    measured = 1.0

    def prepare(self, source, folder):
        (folder / "train.txt").write_text(json.loads((source / "train.json").read_text())["text"])

    def measure(self, trained, folder, split):
        return Measured({"length": self.measured})


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "train.json").write_text('{"text": "one"}')
    return folder


@pytest.fixture
def untrained(monkeypatch):
    """Runs are empty folders."""
    model = torch.nn.Module()
    model.device = torch.device("cpu")
    config = load_recipe("demo")

    def trained(recipes, folder, out, *more):
        out.mkdir(exist_ok=True)
        return Trained(model, None, config, None)

    monkeypatch.setattr(run, "_trained", trained)
    monkeypatch.setattr(run, "load_recipe", lambda name: config)


def text(source, out, task=None):
    return (prepare_data(task or Lengths(), source, out, print) / "train.txt").read_text()


def test_changed_data_are_prepared_anew_until_a_run_may_have_read_them(source, tmp_path):
    out = tmp_path / "out"
    assert text(source, out) == "one"
    # Neither another time nor another file matters.
    os.utime(source / "train.json", (1, 1))
    (source / "notes.txt").write_text("mine")
    (out / "data" / "kept").touch()
    assert text(source, out) == "one"
    assert (out / "data" / "kept").exists()
    (source / "train.json").write_text('{"text": "two"}')
    assert text(source, out) == "two"
    (out / "one-1").mkdir()
    assert text(source, out) == "two"
    (source / "train.json").write_text('{"text": "three"}')
    with pytest.raises(
        ValueError, match=r"otherwise \(task lengths, .*one-1 may have read it: give"
    ):
        text(source, out)
    assert (out / "data" / "train.txt").read_text() == "two"


def test_data_by_another_way_to_their_folder_are_the_same(source, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    text(source, tmp_path / "out")
    (tmp_path / "out" / "one-1").mkdir()
    for other in (tmp_path / "link", source.relative_to(tmp_path)):
        assert text(other, tmp_path / "out") == "one"


def test_texts_of_an_earlier_version_are_written_anew(source, tmp_path):
    out = tmp_path / "out"
    text(source, out)
    about = {"task": "lengths", "source": str(source)}
    # Versions before had no more in it.
    (out / "data" / "about.json").write_text(json.dumps(about))
    (out / "data" / "left.txt").touch()
    text(source, out)
    assert not (out / "data" / "left.txt").exists()


@pytest.mark.parametrize("about", [None, "no JSON", "[]", '{"task": "lengths"}'])
def test_a_folder_of_something_else_is_left_alone(source, tmp_path, about):
    (tmp_path / "out" / "data").mkdir(parents=True)
    if about is not None:
        (tmp_path / "out" / "data" / "about.json").write_text(about)
    with pytest.raises(ValueError, match=r"about.json is not of txl task: give another --out"):
        text(source, tmp_path / "out")


def test_a_preparation_that_failed_is_tried_again(source, tmp_path):
    good = (source / "train.json").read_text()
    for wrong, error in (("{}", "KeyError: 'text'"), ("[]", "TypeError: list indices")):
        (source / "train.json").write_text(wrong)
        with pytest.raises(ValueError, match=error) as found:
            text(source, tmp_path / "out")
        assert f"{source} is not what task lengths reads (train.json;" in str(found.value)
    (source / "train.json").write_text(good)
    assert text(source, tmp_path / "out") == "one"


def test_an_error_of_a_program_that_makes_data_is_not_the_users(tmp_path):
    class Made(Lengths):
        makes_data = True

        def prepare(self, source, folder):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        prepare_data(Made(), None, tmp_path / "out", print)


def test_made_data_are_told_apart_by_their_settings(tmp_path, monkeypatch):
    out = tmp_path / "out"
    for n in (20, 30, 30):
        monkeypatch.setattr(logs_anomalies, "LOGS", {"train": (1, n, 0.0)})
        folder = prepare_data(load_task("logs"), None, out, print)
        assert len((folder / "train.txt").read_text().splitlines()) == n
    (out / "txl-1").mkdir()
    prepare_data(load_task("logs"), None, out, print)
    monkeypatch.setattr(logs_anomalies, "LOGS", {"train": (2, 30, 0.0)})
    with pytest.raises(ValueError, match=r"otherwise \(task logs, made\)"):
        prepare_data(load_task("logs"), None, out, print)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"seeds": (1, 2, 1)}, "seeds: 1 is there twice"),
        ({"models": ("a/x.toml", "b/x.toml")}, "models: x is there twice"),
        ({"models": ("one", "here/one.toml")}, "models: one is there twice"),
        ({"models": ("one",), "seeds": ()}, "there is no seed"),
    ],
)
def test_trainings_have_run_folders_of_their_own(source, tmp_path, given, error):
    with pytest.raises(ValueError, match=error):
        run_task(Lengths(), source, tmp_path / "out", **({"models": ("one",)} | given))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("untrained")
def test_results_of_an_earlier_call_are_not_lost(source, tmp_path):
    out = tmp_path / "out"

    def call(**given):
        return run_task(Lengths(), source, out, **({"models": ("one",)} | given))

    call(models=())
    call(seeds=(1, 2))
    before = (out / "results.json").read_bytes()
    for given, lost in (
        ({}, "seeds 2"),
        ({"models": ("other",), "seeds": (1, 2)}, "models one"),
        ({"models": ()}, "models one"),
        ({"seeds": (1, 2), "splits": ("valid",)}, "splits test"),
    ):
        with pytest.raises(ValueError, match=f"{lost}, which would be lost: name them, too"):
            call(**given)
    assert (out / "results.json").read_bytes() == before
    both = call(models=("other", "one"), seeds=(3, 2, 1))
    assert both == json.loads((out / "results.json").read_bytes())
    (out / "results.json").write_text("something else")
    with pytest.raises(ValueError, match=r"results\.json is not of txl task: give another --out"):
        call()


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_is_a_number(source, tmp_path, monkeypatch, value):
    monkeypatch.setattr(Lengths, "measured", value)
    with pytest.raises(ValueError, match=r"one, seed 1, valid: length is (nan|inf), no figure"):
        run_task(Lengths(), source, tmp_path / "out", models=("one",))
    assert not (tmp_path / "out" / "results.json").exists()
