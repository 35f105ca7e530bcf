"""What a table of trials says, and that each trial is a valid recipe."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from transformer_xl.config import load_recipe

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return import_module("trials")


def test_a_trial_changes_what_it_says_and_nothing_else(trials: ModuleType) -> None:
    recipe = load_recipe(trials.RECIPE)
    notes: list[str] = []
    for name, sections in [x for group in trials.TRIALS.values() for x in group.items()]:
        trial = recipe.changed(sections, notes.append)
        assert (trial == recipe) == (not sections), name
    assert not notes


def test_a_row_says_whether_the_seeds_differ(trials: ModuleType) -> None:
    losses = {
        trials.RECIPE: [1.20, 1.21, 1.22],
        "lower": [1.10, 1.11, 1.12],
        "higher": [1.30, 1.31, 1.33],
        "alike": [1.19, 1.21, 1.24],
        "once": [1.0],
    }
    rows = {row["trial"]: row for row in trials.rows_of(losses)}
    # Welch's t of two groups with the same variance v and size n: difference / sqrt(2 v / n).
    assert rows["lower"]["p"] == pytest.approx(0.00025, rel=0.05)
    assert rows["lower"]["difference"] == pytest.approx(-0.1)
    assert {name: trials.verdict(row) for name, row in rows.items()} == {
        trials.RECIPE: "",
        "lower": "better",
        "higher": "worse",
        "alike": "within the spread",
        "once": "",
    }
    lines = trials.table({"a": [*rows.values()], "b": [rows["higher"]]}).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        *("once", "lower", trials.RECIPE, "alike", "higher"),
    ]
