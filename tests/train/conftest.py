"""What tests of training share: states before the first step, runs that are stopped, a clock."""

import itertools
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from transformer_xl.config.distributed import World
from transformer_xl.data import prepare
from transformer_xl.inference.evaluate import evaluate
from transformer_xl.train import loop
from transformer_xl.train.beginning import fit_to_corpus, new_state
from transformer_xl.train.metrics import read_metrics
from transformer_xl.train.runner import Network
from transformer_xl.train.step import train_step


@pytest.fixture
def begun():
    """Make the state of a training before its first step, and ``step()``, which makes one."""

    def begin(recipe, device="cpu"):
        corpus = prepare(recipe.data)
        config = fit_to_corpus(recipe, corpus)
        state = new_state(config, corpus, torch.device(device), World())
        network = Network(state.model, config.train, state.world)
        parts = {"config": config, "state": state, "network": network}
        return SimpleNamespace(**parts, step=lambda: train_step(*parts.values()))

    return begin


@pytest.fixture
def updated(begun, toy_recipe):
    """Make some updates without dropout; return the weights, the memory and the losses."""

    def update(steps=3, model=None, **settings):
        exact = {"dropout": 0.0, "attn_dropout": 0.0, **(model or {})}
        # With an eps this large, the direction of an update does not hang on the rounding of a
        # gradient that is all but zero.
        training = begun(toy_recipe(model=exact, train={"eps": 1e-3, **settings}))
        losses = torch.stack([training.step().loss for _ in range(steps)])
        memory = torch.cat([torch.stack(mems.states) for mems in training.state.mems], dim=1)
        return [*training.state.model.parameters()], memory, losses

    return update


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
            update = before(config, state, network)
            return (action(state) or update) if state.step == step else update

        monkeypatch.setattr(loop, "train_step", train_step)

    return hook


@pytest.fixture
def interrupted_at(at_step):
    """Interrupt the next training after a step."""
    return lambda step: at_step(step, lambda state: signal.raise_signal(signal.SIGINT))


@pytest.fixture
def measured():
    """Read the log of a run, but for how long the steps took; of one kind, if it is named."""

    def read(folder, kind=None):
        records = read_metrics(folder / "metrics.jsonl")
        records = [record for record in records if kind in (None, record["kind"])]
        return [{k: x for k, x in r.items() if k != "tokens_per_second"} for r in records]

    return read


@pytest.fixture
def clock(monkeypatch):
    """Set how many seconds each step takes."""

    def set_pace(seconds):
        ticks = itertools.count(step=seconds)
        monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))

    return set_pace


@pytest.fixture
def validated(monkeypatch):
    """Set the losses of the validations to come; return the weights that they are of."""

    def set_losses(*losses):
        weights, left = [], iter(losses)

        def validate(config, corpus, model):
            weights.append(model.content_bias.detach().clone())
            return replace(evaluate(model, corpus.split("valid")[:20]), nll=next(left))

        monkeypatch.setattr(loop, "_validate", validate)
        return weights

    return set_losses
