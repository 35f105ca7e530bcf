"""What the comparison of two revisions calls a difference."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return import_module("same_results")


def test_the_last_digit_of_a_loss_is_a_difference(program: ModuleType) -> None:
    here, there = {"training": {"losses": [1.0, 2.0]}}, {"training": {"losses": [1.0, 2.0 + 1e-15]}}
    assert not list(program.differences(here, here))
    assert [each[:2] for each in program.differences(here, there)] == [
        ("different", "training/losses/1")
    ]


def test_lists_of_other_lengths_differ(program: ModuleType) -> None:
    assert list(program.differences({"tokens": [1]}, {"tokens": [1, 1]}))


def test_times_are_not_compared_and_names_are_listed(program: ModuleType) -> None:
    here = {"nll": 1.0, "seconds": 1.0, "evaluation/file": 1}
    there = {"seconds": 2.0, "bpc": 1.0, "evaluation/file": 2}
    found = {name: kind for kind, name, _, _ in program.differences(here, there)}
    assert found == {"nll": "only here", "bpc": "only there", "evaluation/file": "different"}


def test_only_the_exported_step_may_differ_by_rounding(program: ModuleType) -> None:
    near = {"outputs": [1.00001]}, {"outputs": [1.00002]}
    assert not list(program.differences({"onnx": near[0]}, {"onnx": near[1]}))
    assert list(program.differences({"evaluation": near[0]}, {"evaluation": near[1]}))
