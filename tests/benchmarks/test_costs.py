"""A step makes no more calls, operators and copies than the committed figures say."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return import_module("costs")


@pytest.mark.slow
def test_no_count_exceeds_the_committed_one_by_ten_percent() -> None:
    # In a process of its own, as the program changes how products are computed.
    ended = subprocess.run(
        [sys.executable, PROGRAMS / "costs.py"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_an_operator_more_is_counted(program: ModuleType) -> None:
    x = torch.ones(100, 100)
    once, twice = program.count(lambda: x @ x), program.count(lambda: x @ x @ x)
    assert (once["operators"], twice["operators"]) == (1, 2)
    assert twice["megabytes"] == 2 * once["megabytes"] == 2 * round(3 * 40_000 / 1e6, 3)
    assert program.count(lambda: x.view(-1))["operators"] == 0


def test_an_increase_above_ten_percent_is_reported(program: ModuleType) -> None:
    committed = {"training": {"operators": 100, "calls": 10}}
    assert not program.increases({"training": {"operators": 110, "calls": 10}}, committed)
    found = program.increases({"training": {"operators": 111, "calls": 10}}, committed)
    assert found == {"training operators": "111 instead of 100"}
