"""Updates that would do harm are left out, counted and reported; loss spikes are reported."""

import math
import random

import pytest
import torch

from transformer_xl.train import step, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "unfinished")]


@pytest.fixture
def spoiled(monkeypatch):
    """Multiply the gradients of some steps by a number."""

    def at(steps, factor):
        before, done = step.get_total_norm, [0]

        def spoil(gradients):
            done[0] += 1
            if done[0] in steps:
                for gradient in gradients:
                    gradient.mul_(factor)
            return before(gradients)

        monkeypatch.setattr(step, "get_total_norm", spoil)

    return at


def everything(state):
    memory = [] if state.mems[0] is None else state.mems[0].states
    tensors = [*state.model.parameters(), *state.optimizer.tensors().values(), *memory]
    return [x.detach().clone() for x in tensors]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb", "sgd"])
def test_an_update_that_is_left_out_changes_nothing_but_the_place(
    begun, toy_recipe, spoiled, optimizer
):
    training = begun(toy_recipe(train={"optimizer": optimizer, "average": "ema"}))
    state = training.state
    spoiled([3], math.inf if optimizer == "muon" else math.nan)
    for _ in range(2):
        assert not training.step().is_skipped
    before, offset = everything(state), state.segments.offset
    update = training.step()
    assert (update.is_skipped, update.offset, update.lr) == (True, offset, 0.0)
    assert not math.isfinite(update.norm)
    assert all(map(torch.equal, before, everything(state)))
    assert all(p.grad is None for p in state.model.parameters())
    assert (state.step, state.skipped, state.skipped_in_a_row) == (3, 1, 1)
    assert state.segments.offset == offset + training.config.train.segment_len
    assert not training.step().is_skipped
    assert (state.skipped, state.skipped_in_a_row) == (1, 0)


def test_what_was_left_out_is_counted_and_reported_with_its_place(
    tmp_path, toy_recipe, spoiled, measured, capsys
):
    spoiled([5, 6], math.nan)
    train(toy_recipe(), tmp_path)
    records = measured(tmp_path, "skip")
    assert [(r["step"], r["offset"]) for r in records] == [(5, 32), (6, 40)]
    said = " ".join(capsys.readouterr().err.split())
    assert "step 6: the norm of the gradient is nan, the loss " in said
    assert "left out (2 so far). Its segments begin 40 tokens into each stream" in said
    logged = [r["bits_per_token"] for r in measured(tmp_path, "train")]
    # The lines at steps 2, 4, 6, ...: of the third nothing was learned.
    assert [math.isnan(bits) for bits in logged] == [False, False, True, False, False, False]


def test_too_many_in_a_row_stop_the_run_with_the_checkpoints_intact(tmp_path, toy_recipe, spoiled):
    spoiled([2, *range(5, 99)], math.inf)
    message = (
        r"3 updates in a row were left out \(train.max_skips=2\): the norm of the gradient is inf, "
        r"the loss [\d.]+, on segments that begin 48 tokens into each stream, after step 7: lower"
    )
    with pytest.raises(RuntimeError, match=message):
        train(toy_recipe(train={"max_skips": 2}), tmp_path, quiet=True)
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(names) == ["step_00000003", "step_00000006"]


def test_segments_without_a_target_have_no_loss(tmp_path, toy_recipe, measured):
    # Long prompts with short completions: most segments have nothing to predict.
    draw = random.Random(0)
    lines = ("abc def ghi " * draw.randint(8, 16) + "\tyes no maybe no\n" for _ in range(40))
    path = tmp_path / "prompts.txt"
    path.write_text("".join(lines))
    data = {"path": str(path), "reset_at": "\n", "completion_at": "\t"}
    one = {"batch_size": 1, "accumulate": 1, "steps": 100, "log_every": 1}
    one |= {"eval_every": 0, "save_every": 0}
    train(toy_recipe(model={"n_layer": 1}, data=data, train=one), tmp_path / "run", quiet=True)
    logged = [r["bits_per_token"] for r in measured(tmp_path / "run", "train")]
    assert 50 < sum(map(math.isnan, logged)) < 100
    assert min(bits for bits in logged if not math.isnan(bits)) > 1
