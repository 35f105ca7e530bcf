"""The log loses nothing and resumes exactly; the display works with and without a terminal."""

import json
import math
import sys
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest

from transformer_xl.train import metrics
from transformer_xl.train.metrics import MetricsLog, Progress, read_metrics


def write_run(folder, steps, resumed_at=0):
    with MetricsLog(folder, resumed_at) as log:
        for step in steps:
            log.log("train", step, bits_per_token=1 / step, lr=1e-3)
    return folder / "metrics.jsonl"


def test_a_record_is_in_the_file_when_log_returns_and_read_back(tmp_path):
    folder = tmp_path / "new" / "run"
    with MetricsLog(folder, 0) as log:
        log.log("train", 3, bits_per_token=2.5, lr=np.float32(0.5), tokens=7)
        assert read_metrics(folder / "metrics.jsonl") == [
            {"kind": "train", "step": 3, "bits_per_token": 2.5, "lr": 0.5, "tokens": 7}
        ]


def test_numbers_that_are_not_finite_stay_json_and_come_back(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        log.log("train", 1, bits_per_token=math.nan, ppl=math.inf, low=-math.inf)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse)["bits_per_token"] == "NaN"
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record["bits_per_token"])
    assert (record["ppl"], record["low"]) == (math.inf, -math.inf)


def test_a_file_torn_at_any_byte_reads_as_its_whole_records(tmp_path):
    path = write_run(tmp_path, range(1, 5))
    content, records = path.read_bytes(), read_metrics(path)
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        whole = content[: size + 1].count(b"\n")
        assert read_metrics(path) == records[:whole]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = write_run(tmp_path, [1, 2, 3])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{oops", lines[2]]))
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl.*oops.*delete this line"):
        read_metrics(path)


def test_resuming_at_any_step_gives_the_file_of_a_run_that_never_stopped(tmp_path):
    expected = write_run(tmp_path / "whole", range(1, 10)).read_bytes()
    for resumed_at in range(10):
        folder = tmp_path / str(resumed_at)
        path = write_run(folder, range(1, 8))
        path.write_bytes(path.read_bytes() + b'{"kind": "train", "st')
        write_run(folder, range(min(resumed_at, 7) + 1, 10), resumed_at)
        assert path.read_bytes() == expected


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(metrics, "monotonic", lambda: clock.now)
    return clock


class Terminal(StringIO):
    def isatty(self):
        return True


def use_terminal(monkeypatch, columns=80):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    return terminal


def test_without_a_terminal_a_line_comes_every_ten_seconds_and_at_the_end(capsys, clock):
    with Progress(100) as progress:
        for step in range(1, 41):
            clock.now += 1
            progress.update(step, 2.0, 12345.6)
    out, err = capsys.readouterr()
    steps = [line.split()[1] for line in err.splitlines()]
    assert out == ""
    assert steps == ["1/100", "11/100", "21/100", "31/100"]
    assert err.splitlines()[0] == (
        "training  1/100  2.000 bits/token  12,346 tokens/s  0:01:39 left"
    )


def test_the_time_left_of_a_resumed_run_counts_its_own_steps_only(capsys, clock):
    with Progress(1000) as progress:
        progress.expect(1000, 900)
        clock.now += 20
        progress.update(910, math.nan, 1.0)
    assert "910/1,000  nan bits/token  1 tokens/s  0:03:00 left" in capsys.readouterr().err


def test_where_stderr_is_closed_nothing_is_shown(monkeypatch, capsys):
    # As Python sets it for a program that is started with 2>&-.
    monkeypatch.setattr(sys, "stderr", None)
    with Progress(10) as progress:
        progress.update(10, 2.0, 100.0)
        progress.say("a line")
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar_and_lines_above_it(monkeypatch, capsys):
    terminal = use_terminal(monkeypatch)
    with Progress(100, description="tuning") as progress:
        progress.update(50, 1.25, 1000.0)
        progress.say("saved [x]")
        print("{}")  # noqa: T201
        progress.update(100, 1.125, 2000.0)
    shown = terminal.getvalue()
    for part in ("tuning", "50/100", "1.250 bits/token", "1,000 tokens/s", "left", "saved [x]"):
        assert part in shown
    assert shown.index("saved [x]") < shown.index("1.125 bits/token")
    assert shown.endswith("\x1b[?25h")
    assert capsys.readouterr().out == "{}\n"


def read_slowly(clock, seconds):
    """Let a model read ten segments of which each takes so long."""
    import torch

    class Model(torch.nn.Module):
        def forward(self, tokens, mems, targets):
            clock.now += seconds

    model, tokens = Model(), torch.zeros(2, 5)
    with Progress.reading(model, 100, "evaluating"):
        for _ in range(11):
            model(tokens, None, tokens)
    assert not model._forward_hooks


def test_a_long_reading_says_how_far_it_is_and_a_short_one_nothing(capsys, clock):
    read_slowly(clock, 0.5)
    assert capsys.readouterr().err == ""
    read_slowly(clock, 4)
    assert capsys.readouterr().err.splitlines() == [
        "evaluating  30/100  2 tokens/s  0:00:28 left",
        "evaluating  60/100  2 tokens/s  0:00:16 left",
        "evaluating  90/100  2 tokens/s  0:00:04 left",
    ]
