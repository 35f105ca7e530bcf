"""The state of a run is read back, also as earlier versions wrote it."""

import pytest
import torch

from transformer_xl.config.distributed import World
from transformer_xl.data import prepare
from transformer_xl.train.beginning import fit_to_corpus, new_state

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def begun(config):
    corpus = prepare(config.data)
    config = fit_to_corpus(config, corpus)
    return config, new_state(config, corpus, CPU, World())


def test_progress_is_of_the_steps_or_of_the_minutes(toy_recipe):
    settings = {"steps": 100, "minutes": 1.0, "schedule": "constant_cooldown"}
    config, state = begun(toy_recipe(train=settings))
    state.step, state.seconds = 10, 30.0
    assert state.progress(config.train) == 0.5
    state.seconds = 3.0
    assert state.progress(config.train) == 0.1
    state.end_is_fixed, state.total_steps, state.seconds = True, 40, 50.0
    assert state.progress(config.train) == 0.25
