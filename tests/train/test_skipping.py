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


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb", "sgd", "adagrad"])
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


def test_a_gradient_that_is_much_longer_than_usual_is_left_out_if_asked(begun, toy_recipe, spoiled):
    for skip_norm, expected in ((0.0, []), (5.0, [30])):
        training = begun(toy_recipe(train={"skip_norm": skip_norm, "steps": 40}))
        # The second too early to know what is usual.
        spoiled([2, 30], 50.0)
        updates = [training.step() for _ in range(31)]
        assert [n for n, each in enumerate(updates, 1) if each.is_skipped] == expected


@pytest.fixture
def prompted(toy_recipe, tmp_path):
    """A recipe on long prompts with short completions: most segments have nothing to predict."""
    draw = random.Random(0)
    lines = ("abc def ghi " * draw.randint(8, 16) + "\tyes no maybe no\n" for _ in range(40))
    path = tmp_path / "prompts.txt"
    path.write_text("".join(lines))

    def make(**settings):
        data = {"path": str(path), "reset_at": "\n", "completion_at": "\t"}
        one = {"batch_size": 1, "accumulate": 1, "steps": 100, "log_every": 1}
        one |= {"eval_every": 0, "save_every": 0}
        return toy_recipe(model={"n_layer": 1}, data=data, train={**one, **settings})

    return make


def test_segments_without_a_target_say_nothing_of_the_usual_norm(begun, prompted, spoiled):
    training = begun(prompted(skip_norm=3.0))
    updates = [training.step() for _ in range(100)]
    counted = [n for n, update in enumerate(updates) if update.is_counted]
    assert 0 < len(counted) < step.KNOWN_AFTER < training.state.uncounted
    assert all(update.norm == 0 for update in updates if not update.is_counted)
    assert not training.state.skipped
    usual = None
    for n in counted:
        usual = step.running_mean(usual, updates[n].norm)
    assert training.state.usual_norm == usual > 0
    # The norm is not known yet, whatever the number of steps.
    assert counted[5] > step.KNOWN_AFTER
    training = begun(prompted(skip_norm=3.0))
    spoiled([counted[5] + 1], 1e3)
    assert not any(training.step().is_skipped for _ in range(counted[5] + 1))


def test_a_usual_norm_of_zero_in_an_earlier_checkpoint_is_not_known(begun, toy_recipe):
    training = begun(toy_recipe(train={"skip_norm": 5.0, "steps": 40}))
    training.state.step, training.state.usual_norm = 30, 0.0
    update = training.step()
    assert not update.is_skipped
    assert training.state.usual_norm == update.norm


def test_segments_without_a_target_have_no_loss_and_spikes_do_not_depend_on_the_log(
    tmp_path, prompted, measured
):
    train(prompted(), tmp_path / "run", quiet=True)
    logged = [r["bits_per_token"] for r in measured(tmp_path / "run", "train")]
    assert 50 < sum(map(math.isnan, logged)) < 100
    assert min(bits for bits in logged if not math.isnan(bits)) > 1
    assert not measured(tmp_path / "run", "spike")
    spikes = []
    for log_every in (1, 25):
        folder = tmp_path / str(log_every)
        train(prompted(log_every=log_every, spike=0.0), folder, quiet=True)
        spikes.append([(r["step"], r["offset"]) for r in measured(folder, "spike")])
    assert spikes[0]
    assert spikes[0] == spikes[1]


def test_a_loss_far_above_the_usual_one_is_reported(
    tmp_path, toy_recipe, at_step, measured, capsys
):
    # Weights that know nothing any more: the loss of the next step tells.
    def spoil(state):
        with torch.no_grad():
            state.model.embedding.weight.mul_(30)

    at_step(7, spoil)
    train(toy_recipe(train={"lr": 1e-5}), tmp_path)
    records = measured(tmp_path, "spike")
    assert (records[0]["step"], records[0]["offset"]) == (8, 56)
    assert records[0]["nll"] > records[0]["usual"] + 1
    said = " ".join(capsys.readouterr().err.split())
    assert "about step 8: a loss of" in said
    assert "Its segments begin 56 tokens into each stream" in said


def test_a_killed_run_reports_each_spike_once(tmp_path, toy_recipe, at_step, measured):
    recipe = toy_recipe(train={"spike": 0.0, "lr": 1.0, "log_every": 5, "save_every": 4})

    def die(state):
        raise MemoryError

    train(recipe, tmp_path / "whole", quiet=True)
    at_step(6, die)
    with pytest.raises(MemoryError):
        train(recipe, tmp_path / "killed", quiet=True)
    assert any(record["step"] <= 4 for record in measured(tmp_path / "killed", "spike"))
    at_step(0, die)
    train(recipe, tmp_path / "killed", quiet=True)
    assert measured(tmp_path / "killed", "spike") == measured(tmp_path / "whole", "spike")
