"""A step: its parts make the whole, its penalties, resets of the memory, scales of the loss."""

import math
from dataclasses import replace

import pytest
import torch

from transformer_xl.config import TrainConfig
from transformer_xl.config.distributed import World
from transformer_xl.model import Memory, Output
from transformer_xl.train import state
from transformer_xl.train.checkpoint.checkpoints import Checkpoints
from transformer_xl.train.step import activation_penalty

pytestmark = pytest.mark.usefixtures("one_thread")
EXACT = {"dropout": 0.0, "attn_dropout": 0.0}
PENALTIES = {"activation_reg": 3.0, "temporal_activation_reg": 2.0}


@pytest.mark.parametrize(("parts", "settings"), [(2, {}), (4, PENALTIES)], ids=str)
def test_accumulated_parts_make_the_update_of_the_whole(updated, parts, settings):
    whole = updated(accumulate=1, **settings)
    torch.testing.assert_close(updated(accumulate=parts, **settings), whole)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(updated(accumulate=parts, **settings, lr=0.011), whole)


@pytest.mark.parametrize("ext_len", [0, 3])
def test_half_a_loss_is_that_of_the_second_half_and_learns_from_it_alone(
    begun, toy_recipe, ext_len
):
    def weights(wrong):
        training = begun(toy_recipe(model={**EXACT, "ext_len": ext_len}, train={"loss": "half"}))
        segments, model = training.state.segments, training.state.model
        tokens, targets = segments.next_segment()
        targets[:, wrong] = 0
        expected = model(tokens, targets=targets, context=ext_len).nll[:, 4:].mean()
        segments.next_segment = lambda: (tokens, targets)
        torch.testing.assert_close(training.step().loss, expected.detach())
        return [*model.parameters()]

    assert all(map(torch.equal, weights([]), weights(range(4))))
    assert not all(map(torch.equal, weights([]), weights([4])))


def test_the_penalties_are_ar_and_tar():
    hidden, raw = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    out = Output(hidden=hidden, raw_hidden=raw, mems=Memory([torch.zeros(2, 0, 3)]))
    config = TrainConfig(activation_reg=2.0, temporal_activation_reg=0.5)
    squares = sum(float(x) ** 2 for x in hidden[:, 2:].flatten()) / (2 * 3 * 3)
    steps = raw[:, 3:] - raw[:, 2:4]
    changes = sum(float(x) ** 2 for x in steps.flatten()) / (2 * 2 * 3)
    penalty = activation_penalty(config, out, 3)
    assert float(penalty) == pytest.approx(2.0 * squares + 0.5 * changes, rel=1e-5)
    # A single position has no neighbour.
    assert activation_penalty(replace(config, activation_reg=0.0), out, 1) == 0.0
    assert activation_penalty(TrainConfig(), out, 3) == 0.0


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_moves_the_weights_and_is_not_in_the_loss_that_is_reported(updated, name):
    plain, _, plain_losses = updated(clip_norm=0.0)
    weights, _, losses = updated(clip_norm=0.0, **{name: PENALTIES[name]})
    assert losses[0] == plain_losses[0]
    assert not all(map(torch.equal, plain, weights))


def test_a_step_after_a_reset_is_that_of_a_model_without_memory(begun, updated, toy_recipe):
    training = begun(toy_recipe(model=EXACT, train={"accumulate": 1, "reset_memory": 1 - 1e-12}))
    model, segments = training.state.model, training.state.segments
    for _ in range(3):
        segment = segments.next_segment()
        with torch.no_grad():
            expected = model(segment[0], targets=segment[1]).nll.mean()
        segments.next_segment = lambda segment=segment: segment
        torch.testing.assert_close(training.step().loss, expected)
        del segments.next_segment


def test_resets_are_a_function_of_seed_and_step(updated):
    def losses(**settings):
        return updated(4, **{"accumulate": 1, **settings})[2]

    changed = losses(reset_memory=0.5)
    assert not torch.equal(changed, losses())
    assert torch.equal(changed, losses(reset_memory=0.5))
    torch.testing.assert_close(losses(reset_memory=0.5, accumulate=2), changed)


LSTM = {"kind": "lstm", "n_head": 8, "d_inner": 2048}


@pytest.mark.parametrize(("model", "seed"), [({}, 0), ({}, 1), (LSTM, 2), (LSTM, 3)])
def test_a_checkpoint_has_the_masks_of_all_parts(begun, toy_recipe, tmp_path, model, seed):
    # Where only some parts have been reset, all are in the checkpoint.
    settings = {"accumulate": 2, "reset_memory": 0.3, "seed": seed}
    recipe = toy_recipe(model={**EXACT, **model}, train=settings)
    training, resumed = begun(recipe), begun(recipe)
    for _ in range(2):
        training.step()
    with Checkpoints(tmp_path, World()) as checkpoints:
        checkpoints.save(2, training.state.tensors(), training.state.about(), keep=1)
    resumed.state.load(*tmp_path.iterdir())
    assert [float(training.step().loss) for _ in range(2)] == [
        float(resumed.step().loss) for _ in range(2)
    ]


def test_the_gradient_is_that_of_the_loss_whatever_its_scale(begun, toy_recipe, device):
    sgd = {"optimizer": "sgd", "lr": 1e-3}
    half = {"precision": "float16"}
    training = begun(toy_recipe(model=EXACT, train=sgd | half), device)
    exact = begun(toy_recipe(model=EXACT, train={**sgd, "precision": "float32"}), device)
    assert training.state.loss_scale == 65_536
    assert training.step().norm == pytest.approx(exact.step().norm, rel=1e-2)
    assert {p.dtype for p in training.state.model.parameters()} == {torch.float32}


def test_a_dynamic_scale_is_halved_by_an_overflow_and_doubled_after_a_while(
    begun, toy_recipe, device, monkeypatch
):
    monkeypatch.setattr(state, "GROWS_AFTER", 3)
    training = begun(toy_recipe(train={"precision": "float16", "max_skips": 0}), device)
    run = training.state
    run.loss_scale = 2.0**100
    for n in (1, 2, 3):
        update = training.step()
        assert update.is_skipped
        assert not math.isfinite(update.norm)
        assert (run.loss_scale, run.skipped, run.n_finite) == (2.0 ** (100 - n), n, 0)
    assert run.skipped_in_a_row == 0, "overflows of a dynamic scale end no run"
    run.loss_scale, scales = 8.0, []
    for _ in range(7):
        assert not training.step().is_skipped
        scales.append(run.loss_scale)
    assert scales == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 32.0]
    # With a scale below 1, it is the loss that is not finite.
    run.loss_scale = 0.75
    with torch.no_grad():
        next(run.model.parameters()).fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"train\.max_skips=0"):
        training.step()


AVERAGES = {
    "tail from 0": {"average": "tail", "average_start": 0.0},
    "tail from a half": {"average": "tail", "average_start": 0.5},
    "tail from the cooldown": {"average": "tail", "cooldown_fraction": 1 / 3},
    "ema": {"average": "ema", "average_decay": 0.8},
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_are_those_of_the_weights_and_change_no_training(begun, toy_recipe, name):
    plain = begun(toy_recipe())
    for _ in range(12):
        plain.step()
    training, weights = begun(toy_recipe(train=AVERAGES[name])), []
    for _ in range(12):
        # Before it begins, the weights themselves are evaluated and kept.
        is_averaged = training.state.shown is not training.state.model
        assert is_averaged == bool(training.state.average.n_averaged)
        training.step()
        weights.append([x.detach().clone() for x in training.state.model.parameters()])
    assert all(map(torch.equal, weights[-1], plain.state.model.parameters()))
    average = weights[0]
    if name == "ema":
        for each in weights[1:]:
            average = [0.8 * x + 0.2 * y for x, y in zip(average, each, strict=True)]
    else:
        first = {"tail from 0": 0, "tail from a half": 6, "tail from the cooldown": 8}[name]
        average = [torch.stack(x).mean(0) for x in zip(*weights[first:], strict=True)]
    torch.testing.assert_close([*training.state.shown.parameters()], average)
