"""What tests of training share: runs that are stopped, and a clock that goes as it is told."""

import itertools
from types import SimpleNamespace

import pytest

from transformer_xl.train import loop


@pytest.fixture
def unfinished(monkeypatch):
    """Leave out what comes after the last step."""
    monkeypatch.setattr(loop, "finish", lambda *about: {})


@pytest.fixture
def at_step(monkeypatch):
    """Do something right after the update of a step, before anything is logged or saved."""

    before = loop.train_step

    def hook(step, action):
        def train_step(config, state, network):
            found = before(config, state, network)
            return (action(state) or found) if state.step == step else found

        monkeypatch.setattr(loop, "train_step", train_step)

    return hook


@pytest.fixture
def clock(monkeypatch):
    """Set how many seconds each step takes."""

    def set_pace(seconds):
        ticks = itertools.count(step=seconds)
        monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))

    return set_pace
