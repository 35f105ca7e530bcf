"""In float16 the loss is scaled; a dynamic scale follows the overflows."""

import math

import pytest
import torch

from transformer_xl.config.distributed import World
from transformer_xl.data import prepare
from transformer_xl.train import Network, state, step
from transformer_xl.train.beginning import fit_to_corpus, new_state

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def begun(config, device=CPU):
    corpus = prepare(config.data)
    config = fit_to_corpus(config, corpus)
    found = new_state(config, corpus, device, World())
    return config, found, Network(found.model, config.train, found.world)


@pytest.mark.parametrize("scale", [None, 1.0, 64.0])
def test_the_gradient_is_that_of_the_loss_whatever_its_scale(toy_recipe, device, scale):
    settings = {"optimizer": "sgd", "lr": 1e-3, "accumulate": 2}
    half = {"precision": "float16", "loss_scale": scale}
    exactly = {"dropout": 0.0, "attn_dropout": 0.0}
    config, found, network = begun(toy_recipe(model=exactly, train=settings | half), device)
    assert found.loss_scale == (65_536 if scale is None else scale)
    train = settings | {"precision": "float32"}
    exact = begun(toy_recipe(model=exactly, train=train), device)
    norms = [step.train_step(*each).norm for each in ((config, found, network), exact)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}


def test_a_scale_reaches_the_backward_pass(toy_recipe):
    seen = []
    for scale in (1.0, 64.0):
        settings = {"precision": "float16", "loss_scale": scale}
        config, found, network = begun(toy_recipe(train=settings))
        layer = found.model.layers[-1].feed_forward.outer
        layer.register_full_backward_hook(lambda module, given, made: seen.append(made[0].norm()))
        step.train_step(config, found, network)
    one, scaled = torch.stack(seen).view(2, -1)
    torch.testing.assert_close(scaled, 64 * one, rtol=1e-2, atol=0.0)


def test_products_are_in_float16(toy_recipe):
    config, found, network = begun(toy_recipe(train={"precision": "float16"}))
    seen = []
    layer = found.model.layers[0].attention.o_proj
    layer.register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    step.train_step(config, found, network)
    assert {*seen} == {torch.float16}


def test_a_dynamic_scale_is_halved_by_an_overflow_and_doubled_after_a_while(
    toy_recipe, device, monkeypatch
):
    monkeypatch.setattr(state, "INITIAL_LOSS_SCALE", 8.0)
    monkeypatch.setattr(state, "GROWS_AFTER", 3)
    config, found, network = begun(toy_recipe(train={"precision": "float16"}), device)
    found.loss_scale = 2.0**100
    update = step.train_step(config, found, network)
    assert update.is_skipped
    assert not math.isfinite(update.norm)
    assert (found.loss_scale, found.skipped, found.n_finite) == (2.0**99, 1, 0)
    found.loss_scale = 8.0
    scales = []
    for _ in range(7):
        assert not step.train_step(config, found, network).is_skipped
        scales.append(found.loss_scale)
    assert scales == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 32.0]


def test_a_static_scale_stays(toy_recipe):
    train = {"precision": "float16", "loss_scale": 1e30, "max_skips": 3}
    config, found, network = begun(toy_recipe(train=train))
    for _ in range(3):
        assert step.train_step(config, found, network).is_skipped
    assert found.loss_scale == 1e30
    with pytest.raises(RuntimeError, match=r"train\.max_skips=3"):
        step.train_step(config, found, network)


def test_overflows_of_a_dynamic_scale_do_not_end_a_run(toy_recipe):
    settings = {"precision": "float16", "max_skips": 0}
    config, found, network = begun(toy_recipe(train=settings))
    found.loss_scale = 2.0**100
    for _ in range(3):
        assert step.train_step(config, found, network).is_skipped
    assert (found.loss_scale, found.skipped, found.skipped_in_a_row) == (2.0**97, 3, 0)
    # With a scale below 1, it is the loss that is not finite.
    found.loss_scale = 0.75
    with torch.no_grad():
        next(found.model.parameters()).fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"train\.max_skips=0"):
        step.train_step(config, found, network)
