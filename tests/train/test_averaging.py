"""Averaged weights are the mean of the weights; they are shown, and training goes on without."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_xl.config import TrainConfig
from transformer_xl.model import TransformerXL
from transformer_xl.train import loop, train
from transformer_xl.train.optim import average_start, new_average

pytestmark = pytest.mark.usefixtures("one_thread", "unfinished")


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def seen(monkeypatch):
    """The weights after each step."""
    found, before = [], loop.train_step

    def train_step(config, state, network):
        result = before(config, state, network)
        found.append(weights(state.model))
        return result

    monkeypatch.setattr(loop, "train_step", train_step)
    return found


RARELY = {"eval_every": 0, "save_every": 0}


def kept(folder, name="last"):
    return weights(TransformerXL.from_pretrained(folder / "model" / name))


@pytest.mark.parametrize(("start", "first"), [(0.5, 6), (0.0, 0), (None, 8)])
def test_the_tail_is_the_mean_of_the_last_weights(tmp_path, toy_recipe, seen, start, first):
    settings = {"average": "tail", "average_start": start, **RARELY}
    if start is None:
        settings["cooldown_fraction"] = 1 / 3
    train(toy_recipe(train=settings), tmp_path, quiet=True)
    assert len(seen) == 12
    torch.testing.assert_close(kept(tmp_path), torch.stack(seen[first:]).mean(0))


def test_the_moving_average_forgets_as_it_says(tmp_path, toy_recipe, seen):
    settings = {"average": "ema", "average_decay": 0.8, **RARELY}
    train(toy_recipe(train=settings), tmp_path, quiet=True)
    expected = seen[0]
    for each in seen[1:]:
        expected = 0.8 * expected + 0.2 * each
    torch.testing.assert_close(kept(tmp_path), expected)


@pytest.mark.slow
def test_what_is_trained_does_not_depend_on_what_is_averaged(tmp_path, toy_recipe, seen):
    for average in ("none", "tail", "ema"):
        settings = {"average": average, **RARELY}
        train(toy_recipe(train=settings), tmp_path / average, quiet=True)
    plain, tail, ema = seen[:12], seen[12:24], seen[24:]
    assert all(map(torch.equal, plain, tail))
    assert all(map(torch.equal, plain, ema))
    assert torch.equal(kept(tmp_path / "none"), seen[11])
    assert not torch.equal(kept(tmp_path / "tail"), seen[11])


def test_before_it_begins_the_weights_themselves_are_evaluated(
    tmp_path, toy_recipe, seen, monkeypatch
):
    shown, before = [], loop._validate

    def validate(config, corpus, model):
        shown.append(weights(model))
        return before(config, corpus, model)

    monkeypatch.setattr(loop, "_validate", validate)
    train(toy_recipe(train={"average": "tail", "average_start": 0.5}), tmp_path, quiet=True)
    assert torch.equal(shown[0], seen[3])
    torch.testing.assert_close(shown[1], torch.stack(seen[6:8]).mean(0))


@pytest.mark.parametrize("average", ["ema", "tail"])
def test_nothing_is_copied_to_the_device(tiny_config, average):
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if "copy" in str(operation):
                copies.append(operation)
            return operation(*args, **(kwargs or {}))

    # The device that computes nothing stands for one that is waited for.
    model = TransformerXL(tiny_config).to("meta")
    found = new_average(model, TrainConfig(average=average))
    assert found is not None
    with Copies():
        for _ in range(4):
            found.update_parameters(model)
    assert not copies
    assert found.n_averaged == 4


def test_where_averaging_begins():
    assert average_start(TrainConfig(average="ema")) == 0
    assert average_start(TrainConfig(average="tail", cooldown_fraction=0.25)) == 0.75
    assert average_start(TrainConfig(average="ema", average_start=0.4)) == 0.4
