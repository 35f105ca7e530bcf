"""The program that measures the demo says what is missing."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("demo")


def test_a_run_that_it_did_not_train_is_refused_before_anything_is_written(
    demo, tmp_path, monkeypatch, capsys
):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(demo, "run_txl", lambda *words: pytest.fail("something ran"))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--run", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 1
    assert "run has no printed.txt, as it was not trained by this" in capsys.readouterr().err


def test_a_log_without_a_training_is_refused(demo):
    with pytest.raises(ValueError, match=r"printed\.txt has no line of a training: delete the run"):
        demo.printed("the run is finished; report: runs/demo/report.html\n")
    log = "1,000 parameters on cpu\rtraining 1/2 x\rtraining 2/2 x\nmemory 0: 1.0 nats\n"
    expected = "```\n1,000 parameters on cpu\ntraining 1/2 x\n...\nmemory 0: 1.0 nats\n```"
    assert demo.printed(log) == expected


def test_what_a_command_says_is_passed_on(demo, capsys):
    assert demo.run_txl("--version").stdout.count(".") >= 2
    with pytest.raises(subprocess.CalledProcessError):
        demo.run_txl("eval", "missing")
    assert "missing does not exist" in capsys.readouterr().err
