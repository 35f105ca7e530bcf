"""Learning rates are functions of the step; each parameter belongs to the right optimizer."""

import math
from itertools import pairwise

import pytest
import torch

from transformer_xl.config import ModelConfig, TrainConfig
from transformer_xl.model import TransformerXL, build_model
from transformer_xl.train.optim import Optimizer, lr_scale


def scales(total=100, **settings):
    config = TrainConfig(steps=total, **settings)
    return [lr_scale(config, step, total) for step in range(total)]


@pytest.mark.parametrize("schedule", ["cosine", "inverse_sqrt", "constant_cooldown"])
def test_a_rate_rises_in_equal_steps_to_the_peak_and_never_after_it(schedule):
    warm = scales(schedule=schedule, warmup_steps=4)
    assert warm[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    for rates in (warm[4:], scales(schedule=schedule)):
        assert rates[0] == pytest.approx(1.0)
        assert all(later <= earlier for earlier, later in pairwise(rates))
        assert 0 < rates[-1] < 1


def test_the_cosine_is_half_down_in_the_middle_and_ends_at_the_floor():
    found = scales(schedule="cosine", warmup_steps=20, min_lr_ratio=0.1)
    assert found[60] == pytest.approx(0.55)
    assert found[40] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert found[-1] == pytest.approx(0.1, abs=1e-3)
    assert min(found[20:]) > 0.1


def test_the_inverse_square_root_halves_when_the_step_is_fourfold():
    found = scales(schedule="inverse_sqrt", warmup_steps=5, min_lr_ratio=0.25)
    assert found[20] == pytest.approx(found[5] / 2)
    assert found[45] == pytest.approx(found[5] / 3)
    # The floor is reached at the sixteenfold step.
    assert found[79] > 0.25
    assert found[81:] == [0.25] * 19


def test_the_cooldown_is_a_line_from_the_peak_to_the_floor():
    for floor in (0.0, 0.2):
        found = scales(schedule="constant_cooldown", cooldown_fraction=0.4, min_lr_ratio=floor)
        assert found[:61] == [1.0] * 61, floor
        fall = (1 - floor) / 40
        assert found[61:] == pytest.approx([1 - fall * step for step in range(1, 40)]), floor


@pytest.fixture
def model():
    return TransformerXL(
        ModelConfig(vocab_size=11, n_layer=2, n_head=2, d_model=8, d_inner=12, d_embed=6)
    )


def with_gradients(model, value=None):
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if value is None else value * parameter
    return model


def moved(model, config):
    """How each parameter changes when its gradient is zero: by the decay alone."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    Optimizer(with_gradients(model, 0.0), config).step(1.0)
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}, before


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_decay_touches_matrices_only(model, optimizer):
    rates = {"lr": 0.5} | ({"muon_lr": 0.25} if optimizer == "muon" else {})
    config = TrainConfig(optimizer=optimizer, weight_decay=0.1, **rates)
    found, before = moved(model, config)
    kinds = set()
    for name, change in found.items():
        is_muon = optimizer == "muon" and name.startswith("layers.")
        rate = config.muon_lr if is_muon else config.lr
        share = rate * config.weight_decay if change.ndim == 2 else 0.0
        torch.testing.assert_close(change, -share * before[name], msg=name)
        kinds.add((is_muon, change.ndim))
    assert {(False, 1), (False, 2), (False, 3)} <= kinds


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest(model):
    optimizer = Optimizer(model, TrainConfig(optimizer="muon"))
    adamw, muon = optimizer.parts
    names = {id(p): name for name, p in model.named_parameters()}
    of_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    of_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert of_muon | of_adamw == {*names.values()}
    assert not of_muon & of_adamw
    # Queries, keys and values; positions; output; two of the feed-forward layer.
    assert len(of_muon) == 5 * model.config.n_layer
    assert {group["parts"] for group in muon.param_groups} == {1, 3}
    thirds = next(group for group in muon.param_groups if group["parts"] == 3)
    assert {p.shape for p in thirds["params"]} == {(24, 8)}


def test_embeddings_have_a_rate_of_their_own_and_their_projections_have_not():
    for d_embed in (6, 8):
        for optimizer in ("adamw", "muon", "lamb", "sgd"):
            sizes = {"n_layer": 1, "n_head": 2, "d_model": 8, "d_inner": 12, "d_embed": d_embed}
            model = TransformerXL(ModelConfig(vocab_size=11, cutoffs=(4,), **sizes))
            config = TrainConfig(optimizer=optimizer, lr=0.1, embedding_lr=3.0, warmup_steps=3)
            found = Optimizer(with_gradients(model), config)
            found.step(lr_scale(config, 1, 100))
            part, *_ = found.parts
            rates = {id(p): group["lr"] for group in part.param_groups for p in group["params"]}
            for name, parameter in model.named_parameters():
                if id(parameter) in rates:
                    expected = 0.15 if name == "embedding.weight" else 0.05
                    assert rates[id(parameter)] == pytest.approx(expected), name


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"n_head": 2, "d_inner": 12, "activation": "geglu"}, {2: (24, 8), 3: (24, 8)}),
        ({"kind": "lstm", "mem_len": 0}, {4: (32, 8)}),
    ],
    ids=["gated feed-forward", "LSTM"],
)
def test_muon_takes_stacked_matrices_one_by_one(settings, expected):
    model = build_model(ModelConfig(vocab_size=11, n_layer=2, d_model=8, **settings))
    _, muon = Optimizer(model, TrainConfig(optimizer="muon")).parts
    shapes = {group["parts"]: {p.shape for p in group["params"]} for group in muon.param_groups}
    del shapes[1]
    assert shapes == {n: {shape} for n, shape in expected.items()}
