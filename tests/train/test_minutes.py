"""A run with a time limit: where its end and its stages fall."""

import re
from types import SimpleNamespace

import pytest

from transformer_xl.train import Interrupted, loop, metrics, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "unfinished")]


def limited(**settings):
    """Settings of a run with a time limit, in which little but the steps takes place."""
    rarely = {"log_every": 1, "eval_every": 0, "save_every": 0}
    cooldown = {"schedule": "constant_cooldown", "cooldown_fraction": 0.5}
    return {"steps": 1000, "minutes": 1.0, **cooldown, **rarely, **settings}


def test_the_end_is_fixed_when_the_cooldown_begins_and_stays(
    tmp_path, toy_recipe, clock, interrupted_at, measured
):
    config = toy_recipe(train=limited(minutes=20 / 60))
    clock(1)
    interrupted_at(13)
    with pytest.raises(Interrupted):
        train(config, tmp_path, quiet=True)
    # Half of the time was over after 10 steps, so 10 are left, however fast the rest may be.
    clock(0.001)
    train(config, tmp_path, quiet=True)
    rates = [r["lr"] for r in measured(tmp_path, "train")]
    assert rates == pytest.approx([0.01] * 10 + [0.001 * left for left in range(10, 0, -1)])


@pytest.fixture
def seconds_at(monkeypatch):
    """Let the step that begins at a time take so many seconds; return what the time is."""
    now, before = [0.0], loop.train_step

    def set_pace(pace):
        def train_step(config, state, network):
            now[0] += pace(now[0])
            return before(config, state, network)

        monkeypatch.setattr(loop, "train_step", train_step)
        monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        return now

    return set_pace


@pytest.mark.parametrize("steps", [1000, 60])
def test_a_machine_that_slows_down_ends_a_tenth_late_at_most_and_cools_down(
    tmp_path, toy_recipe, seconds_at, capsys, measured, steps
):
    now = seconds_at(lambda time: 1 if time < 30 else 2)
    train(toy_recipe(train=limited(steps=steps)), tmp_path)
    assert 60 < now[0] <= 66
    rates = [r["lr"] for r in measured(tmp_path, "train")]
    falls = [a - b for a, b in zip(rates[30:], [*rates[31:], 0.0], strict=True)]
    # One line down to where the time was over, and a steeper one from there to nothing.
    cut = next(n for n, fall in enumerate(falls) if fall > 1.5 * falls[0])
    assert falls[:cut] == pytest.approx([0.01 / 30] * cut)
    assert falls[cut:] == pytest.approx([falls[cut]] * len(falls[cut:]))
    said = capsys.readouterr().err
    assert said.count("train.minutes=1 are over and the steps take longer than before") == 1


def test_a_run_shows_no_more_time_left_than_its_limit_leaves(
    tmp_path, toy_recipe, seconds_at, capsys, monkeypatch
):
    # As a first step that compiles, whose time says nothing of the next ones.
    now = seconds_at(lambda time: 10 if time < 10 else 1)
    monkeypatch.setattr(metrics, "monotonic", lambda: now[0])
    monkeypatch.setattr(metrics, "_LINE_SECONDS", 0)
    train(toy_recipe(train=limited(steps=100_000, minutes=36 / 60)), tmp_path)
    left = re.findall(r"(\d+):(\d\d):(\d\d) left", capsys.readouterr().err)
    assert len(left) > 10
    assert max(3600 * int(h) + 60 * int(m) + int(s) for h, m, s in left) <= 36


@pytest.fixture
def staged(toy_recipe):
    """Twenty seconds: from the fifth on longer segments, from the tenth the cooldown."""
    return toy_recipe(train=limited(minutes=20 / 60, stages=((0.0, 4, 4), (0.25, 8, 8))))


def test_stages_share_the_time_and_the_last_ones_speed_decides_the_end(
    tmp_path, staged, monkeypatch, measured
):
    now, lengths, before = [0.0], [], loop.train_step

    def train_step(config, state, network):
        update = before(config, state, network)
        lengths.append(state.segments.length)
        # Segments of 4 take a second, segments of 8 two.
        now[0] += lengths[-1] / 4
        return update

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    train(staged, tmp_path, quiet=True)
    # After five seconds the second stage, in the eleventh the cooldown: time for four more steps.
    assert lengths == [4] * 5 + [8] * (3 + 4)
    assert now[0] == pytest.approx(20, abs=2)
    rates = [r["lr"] for r in measured(tmp_path, "train")]
    assert rates == pytest.approx([0.01] * 8 + [0.0025 * left for left in (4, 3, 2, 1)])


@pytest.mark.parametrize("warmup_steps", [5, 50])
def test_a_time_limit_within_the_warmup_is_said(
    tmp_path, toy_recipe, seconds_at, capsys, warmup_steps
):
    seconds_at(lambda time: 1)
    settings = limited(minutes=1 / 3, warmup_steps=warmup_steps)
    train(toy_recipe(train=settings), tmp_path)
    said = "begins after 10 of train.warmup_steps=50, and the learning rate has not reached its"
    assert (said in capsys.readouterr().err) == (warmup_steps == 50)
