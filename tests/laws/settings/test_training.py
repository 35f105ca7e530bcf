"""Every setting of the training changes what is trained, logged or kept: `TRAIN` has a row each."""

import json
from dataclasses import fields
from functools import cache

import pytest
import torch

from transformer_xl.config import ModelConfig, TrainConfig
from transformer_xl.config.distributed import World
from transformer_xl.model import build_model
from transformer_xl.model.layer import DecoderLayer
from transformer_xl.train import loop, runner, step, train

CPU = torch.device("cpu")
NETWORK = ModelConfig(vocab_size=9, n_layer=2, n_head=2, d_model=16, d_inner=32)
TRAIN = {
    # Beside which others, another value, and where it is seen.
    "steps": ({}, 5, "numbers"),
    "minutes": ({"schedule": "constant_cooldown"}, 1.0, "state"),
    "batch_size": ({}, 2, "numbers"),
    "segment_len": ({}, 6, "numbers"),
    "stages": ({"segment_len": 8}, ((0.0, 4, 4), (0.5, 8, 8)), "numbers"),
    "random_segment_len": ({}, True, "numbers"),
    "random_mem_len": ({}, 1, "numbers"),
    "roll": ({}, True, "numbers"),
    "accumulate": ({}, 2, "calls"),
    "loss": ({}, "half", "numbers"),
    "activation_reg": ({}, 2.0, "numbers"),
    "temporal_activation_reg": ({}, 2.0, "numbers"),
    "prompt_loss_weight": ({}, 0.5, "completions"),
    "reset_memory": ({}, 0.5, "numbers"),
    "optimizer": ({}, "lamb", "numbers"),
    "lr": ({}, 2e-2, "numbers"),
    "embedding_lr": ({}, 2.0, "numbers"),
    "muon_lr": ({"optimizer": "muon"}, 0.05, "numbers"),
    "momentum": ({"optimizer": "sgd"}, 0.9, "numbers"),
    "weight_decay": ({}, 1.0, "numbers"),
    "beta1": ({}, 0.5, "numbers"),
    "beta2": ({}, 0.5, "numbers"),
    "eps": ({}, 1e-2, "numbers"),
    "schedule": ({}, "inverse_sqrt", "numbers"),
    "warmup_steps": ({}, 2, "numbers"),
    "cooldown_fraction": ({"schedule": "constant_cooldown"}, 0.9, "numbers"),
    "min_lr_ratio": ({}, 0.5, "numbers"),
    "clip_norm": ({}, 1e-3, "numbers"),
    "average": ({}, "ema", "numbers"),
    "average_decay": ({"average": "ema"}, 0.5, "numbers"),
    "average_start": ({"average": "ema"}, 0.7, "numbers"),
    "precision": ({}, "bfloat16", "numbers"),
    "parallel": ({}, "fsdp", "shared"),
    "recompute": ({}, True, "calls"),
    "init_from": ({}, "model", "numbers"),
    "compile": ({}, True, "compiled"),
    "seed": ({}, 2, "numbers"),
    "max_skips": ({}, 1, "skips"),
    "hang_minutes": ({}, 3.0, "waits"),
    "log_every": ({}, 1, "files"),
    "eval_every": ({}, 1, "files"),
    "save_every": ({}, 1, "files"),
    "keep_checkpoints": ({"save_every": 1}, 1, "files"),
}


def test_every_setting_has_a_row():
    assert [*TRAIN] == [field.name for field in fields(TrainConfig)]
    for name, (base, value, *_) in TRAIN.items():
        assert TrainConfig(**base | {name: value}) != TrainConfig(**base), name


def test_the_command_line_hands_every_setting_on(handed_on):
    assert handed_on("train", TrainConfig, TRAIN) == {n: x for n, (_, x, *_) in TRAIN.items()}


def state_of(monkeypatch, begun, config):
    return begun(config)[1].end_is_fixed


def calls(monkeypatch, begun, config):
    """How often layers are called in a step, and on how many streams."""
    seen, forward = [], DecoderLayer.forward

    def counted(self, x, *rest):
        seen.append(len(x))
        return forward(self, x, *rest)

    monkeypatch.setattr(DecoderLayer, "forward", counted)
    config, state, network = begun(config)
    step.train_step(config, state, network)
    return seen


def compiled(monkeypatch, begun, config):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: seen.append(options) or model)
    begun(config)
    return seen


def shared(monkeypatch, begun, config):
    """Which parts of a model are divided over two processes."""
    seen = []
    monkeypatch.setattr(runner, "fully_shard", lambda part, **how: seen.append(type(part)))
    runner.shard(build_model(NETWORK), config.train, World(size=2), CPU)
    return seen


def skips(monkeypatch, begun, config):
    """How many updates are left out, and what ends the run, where gradients are no numbers."""
    config, state, network = begun(config)
    for _ in range(2):
        step.train_step(config, state, network)
    skipped = state.skipped
    monkeypatch.setattr(step, "get_total_norm", lambda gradients: torch.tensor(torch.nan))
    try:
        for _ in range(3):
            step.train_step(config, state, network)
    except RuntimeError as error:
        return skipped, "max_skips" in str(error)
    return skipped, None


def waits(monkeypatch, begun, config):
    def join(device, minutes):
        raise TimeoutError(minutes)

    monkeypatch.setattr(loop.World, "join", join)
    with pytest.raises(TimeoutError) as caught:
        train(config, "nowhere", quiet=True)
    return caught.value.args


def files(monkeypatch, begun, config, folder):
    """Which lines are logged, and which checkpoints are there."""
    monkeypatch.setattr(loop, "finish", lambda *about: {})
    train(config, folder, quiet=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return [(line["kind"], line["step"]) for line in lines], checkpoints


SEEN = {
    "state": state_of,
    "calls": calls,
    "compiled": compiled,
    "shared": shared,
    "files": files,
    "skips": skips,
    "waits": waits,
}


def test_every_setting_is_looked_at_in_a_place_that_there_is():
    assert {place for *_, place in TRAIN.values()} == {"numbers", "completions", *SEEN}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("where", ["numbers", "completions", *SEEN])
def test_a_setting_of_the_training_counts(monkeypatch, recipe, begun, numbers, tmp_path, where):
    data = {"reset_at": "\n", "completion_at": "w"} if where == "completions" else {}

    @cache
    def seen(config):
        if where in ("numbers", "completions"):
            return numbers(config).tolist()
        folder = {"folder": tmp_path / str(hash(config))} if where == "files" else {}
        with monkeypatch.context() as patch:
            return SEEN[where](patch, begun, config, **folder)

    for name, (base, value, place) in TRAIN.items():
        if place == where:
            one, other = (recipe(train=x, data=data) for x in (base, base | {name: value}))
            assert seen(one) != seen(other), name
