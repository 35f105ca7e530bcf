"""Anomalies in a log of one's own: what docs/tasks/logs.md says, done."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "logs.md"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_lines_on_top_are_the_odd_ones(txl, tmp_path, monkeypatch):
    page = PAGE.read_text("utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (commands,) = re.findall(r"```\n(txl train anomalies .*?)```", page, re.DOTALL)
    train, score, _ = (line.split()[1:] for line in commands.splitlines())
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", program], check=True)
    assert txl(*train, "--quiet").code == 0
    ended = txl(*score)
    assert ended.err == ""
    found = [json.loads(line) for line in ended.out.splitlines()]
    usual = Path("clean.log").read_text("utf-8").splitlines()
    # By what stands in place of numbers, an odd line is like none of the clean log.
    forms = {form(line) for line in usual}
    assert len(found) == 10
    assert sum(form(line["text"]) not in forms for line in found) >= 9
    # What was trained on is told.
    Path("few.log").write_text("\n".join(usual[:20]) + "\n")
    Path("few.log").replace("clean.log")
    assert "was trained on clean.log" in txl("score", score[1], "clean.log", "--by", "line").err


def form(line):
    """A line without its numbers and names, but with how long the numbers are."""
    text = re.sub(r"\b(alice|bob|carol)\b", "NAME", line[len("Nov 28 00:00:00 ") :])
    text = re.sub(r"job [0-9a-f]{8}", "job ID", text)
    text = re.sub(r"(?<=in )\d{1,3}(?= ms)", "MS", text)
    text = re.sub(r" (200|201) \d+ 0\.\d{3}$", r" \1 SIZE TIME", text)
    text = re.sub(r"10\.0\.\d+\.\d+", "ADDRESS", text)
    return re.sub(r"(?<=[\[/])\d+|(?<=port )\d{5}", "N", text)
