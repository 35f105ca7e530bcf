"""A comparison of toy models whose runs cost nothing."""

from dataclasses import replace
from functools import cache

import pytest

from transformer_xl.config import ModelConfig
from transformer_xl.studies import compare, standings
from transformer_xl.studies.pace import stages_of

LOSSES = {"txl": 2.0, "gpt": 2.2, "lstm": 2.4}


def found(nll, *, tokens=1000, mflop=2.0, seconds=60.0, **more):
    """What is measured of a run."""
    bits = nll / 0.6931471805599453
    losses = {"nll": nll, "bits_per_token": bits, "bits_per_byte": bits, "mem_len": 8}
    training = {"steps": 5, "tokens": tokens, "seconds": seconds, "parameters": 9000}
    training |= {"inside": 8000, "dtype": "float32", "mflop_per_token": mflop}
    machine = {"processor": "a processor", "threads": 1, "torch": "2.0"}
    split = {"split": "test"}
    return {
        "training": training,
        "valid": losses,
        "test": losses | split,
        "with_counts": losses | {"nll": nll / 2, "bits_per_byte": bits / 2},
        "machine": machine,
        **more,
    }


@pytest.fixture(name="found")
def _found():
    return found


@pytest.fixture
def models(toy_recipe):
    recipe = toy_recipe(train={"schedule": "constant_cooldown", "lr": 0.01})
    small = {"d_model": recipe.model.d_model, "n_layer": 1, "vocab_size": recipe.model.vocab_size}
    heads = {"n_head": recipe.model.n_head, "d_inner": recipe.model.d_inner, "dropout": 0.0}
    return {
        "txl": recipe,
        "gpt": replace(recipe, model=ModelConfig(kind="gpt", mem_len=8, **small, **heads)),
        "lstm": replace(recipe, model=ModelConfig(kind="lstm", mem_len=0, dropout=0.0, **small)),
    }


@pytest.fixture
def made(monkeypatch):
    """Let runs be made at once; return the tasks that were carried out.

    The loss falls with the factor of the learning rate up to 2, and with the time.
    """
    made = []

    def measured(config, folder, *, n_tokens=None):
        task = tasks[folder]
        made.append(task)
        minutes, run = task.run.minutes, task.run
        loss = LOSSES[run.model] + abs(run.factor - 2) / 10 + run.seed / 100 + 1 / minutes
        return found(loss, tokens=round(1000 * minutes))

    def paces(configs, seconds):
        return {name: [0.5] * len(stages_of(config)) for name, config in configs.items()}

    tasks, make = {}, compare.Comparison._make

    def noted(comparison, left):
        tasks.update({task.folder: task for task in left})
        make(comparison, left)

    # Each look at a plan makes and names all its recipes anew; the tests of standings draw.
    for name in ("plan_training", "_changed"):
        monkeypatch.setattr(compare, name, cache(getattr(compare, name)))
    monkeypatch.setattr(standings, "write_atomically", lambda path, save: path.write_text("<svg/>"))
    monkeypatch.setattr(compare.Comparison, "_make", noted)
    monkeypatch.setattr(compare, "measured", measured)
    monkeypatch.setattr(compare, "paces", paces)
    return made
