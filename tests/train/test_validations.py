"""Validations with other settings are not compared with those before, and the user is told."""

import pytest
import torch

from transformer_xl.model import TransformerXL
from transformer_xl.train import Interrupted, train
from transformer_xl.train.checkpoint.checkpoints import read_about

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "unfinished")]


@pytest.fixture
def stopped(tmp_path, toy_recipe, at_step, interrupted_at, validated):
    """A run that was stopped at step 5, after a validation with a loss of 1."""

    def run(**train_settings):
        validated(1.0)
        interrupted_at(5)
        with pytest.raises(Interrupted):
            train(toy_recipe(train=train_settings), tmp_path / "run", quiet=True)
        at_step(5, lambda state: None)
        return tmp_path / "run"

    return run


def best_of(run):
    return TransformerXL.from_pretrained(run / "model" / "best").content_bias


def newest(run):
    return max((run / "checkpoints").iterdir())


@pytest.mark.parametrize("settings", [{"max_steps": 1}, {"mem_len": 3, "batch_size": 2}], ids=str)
def test_a_best_model_by_other_validations_is_replaced_and_the_user_told(
    stopped, toy_recipe, validated, capsys, settings
):
    run = stopped()
    weights = validated(3.0, 2.0)
    train(toy_recipe(eval=settings), run)
    output = " ".join(capsys.readouterr().err.split())
    assert "the next one replaces model/best, even by a worse model; copy that folder" in output
    assert torch.equal(best_of(run), weights[1])
    assert read_about(newest(run))["best"] == 2.0


@pytest.mark.parametrize(
    "settings",
    [{}, {"mem_len": 8, "ext_len": 0}, {"split": "test", "mem_lens": (0, 3), "dynamic": "sgd"}],
    ids=["the same", "the defaults in words", "others than of validations"],
)
def test_a_best_model_by_the_same_validations_is_kept(
    stopped, toy_recipe, validated, capsys, settings
):
    run = stopped()
    best = best_of(run)
    validated(3.0, 2.0)
    train(toy_recipe(eval=settings), run)
    assert "settings of validations differ" not in capsys.readouterr().err
    assert torch.equal(best_of(run), best)
    assert read_about(newest(run))["best"] == 1.0
