"""AR and TAR: by their formulas, on what is predicted, and the same in parts as in one piece."""

from dataclasses import replace

import pytest
import torch

from transformer_xl.config import TrainConfig
from transformer_xl.config.distributed import World
from transformer_xl.data import prepare
from transformer_xl.model import Memory, Output
from transformer_xl.train import Network, loop
from transformer_xl.train.beginning import fit_to_corpus, new_state
from transformer_xl.train.step import activation_penalty

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def test_the_formulas():
    hidden, raw = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    out = Output(hidden=hidden, raw_hidden=raw, mems=Memory([torch.zeros(2, 0, 3)]))
    config = TrainConfig(activation_reg=2.0, temporal_activation_reg=0.5)
    squares = sum(float(x) ** 2 for x in hidden[:, 2:].flatten()) / (2 * 3 * 3)
    steps = raw[:, 3:] - raw[:, 2:4]
    changes = sum(float(x) ** 2 for x in steps.flatten()) / (2 * 2 * 3)
    found = activation_penalty(config, out, 3)
    assert float(found) == pytest.approx(2.0 * squares + 0.5 * changes, rel=1e-5)
    # A single position has no neighbour.
    assert activation_penalty(replace(config, activation_reg=0.0), out, 1) == 0.0
    assert activation_penalty(TrainConfig(), out, 3) == 0.0


def updated(recipe, parts, steps=3, **settings):
    """Weights and losses after some updates made in a number of parts."""
    # With an eps this large, the direction of an update does not hang on the rounding of a
    # gradient that is all but zero.
    config = recipe(
        model={"dropout": 0.0, "attn_dropout": 0.0},
        train={"eps": 1e-3, "accumulate": parts, "clip_norm": 0.0, **settings},
    )
    corpus = prepare(config.data)
    config = fit_to_corpus(config, corpus)
    state = new_state(config, corpus, CPU, World())
    losses = [
        loop.train_step(config, state, Network(state.model, config.train, state.world)).loss
        for _ in range(steps)
    ]
    return [*state.model.parameters()], torch.stack(losses)


BOTH = {"activation_reg": 3.0, "temporal_activation_reg": 2.0}


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_parts_make_the_update_of_the_whole(toy_recipe, parts):
    whole = updated(toy_recipe, 1, **BOTH)
    torch.testing.assert_close(updated(toy_recipe, parts, **BOTH), whole)


@pytest.mark.parametrize("name", BOTH)
def test_each_moves_the_weights_and_neither_is_in_the_loss_that_is_reported(toy_recipe, name):
    plain, plain_losses = updated(toy_recipe, 1)
    found, losses = updated(toy_recipe, 1, **{name: BOTH[name]})
    assert losses[0] == plain_losses[0]
    assert not all(map(torch.equal, plain, found))
