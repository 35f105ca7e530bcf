"""The figures of the architecture are counted by their rules."""

import ast
import json
from importlib import import_module
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return import_module("architecture")


def test_calls_of_a_model_are_found_and_others_are_not(program):
    tree = ast.parse(
        "model(x)\nself.model.read(x)\nexact.forward(x)\nself._model(x)\n"
        "model.keep(x)\nread(model, x)\nother(x)\nfile.read()\nmodel.head(x)\n"
    )
    assert program.calls_of_models(tree) == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_figures_of_this_revision_are_printed_and_written(
    program, tmp_path, monkeypatch, capsys
):
    written = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["architecture.py", "--json", str(written)])
    program.main()
    (found,) = json.loads(written.read_text()).values()
    assert found["lines"] > sum(found["core"].values()) > 0
    # No two files import each other, and the reader is the only loop over given tokens.
    assert (found["circles"], found["calls"]) == ([], [])
    assert found["docstrings"] == pytest.approx(0.18, abs=0.1)
    assert f"| {found['lines']:,} |" in capsys.readouterr().out
