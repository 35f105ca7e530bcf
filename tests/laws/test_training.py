"""The fast operation trains the model that its definition trains."""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_xl.data import Segments
from transformer_xl.model import TransformerXL
from transformer_xl.ops import BACKENDS, use_backend
from transformer_xl.train import TrainState
from transformer_xl.train.optim import Optimizer
from transformer_xl.train.runner import Network
from transformer_xl.train.step import train_step

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
STEPS = 200
BOUND = 1e-3
"""By how much two losses may differ, relatively: other orders of the same sums add up."""
MODEL = ModelConfig(
    vocab_size=256,
    n_layer=3,
    n_head=2,
    d_model=64,
    d_inner=128,
    mem_len=32,
    dropout=0.0,
    # Attention that is nearly uniform, as it begins with smaller weights, hides mistakes for long.
    init_std=0.05,
)
TRAIN = TrainConfig(steps=STEPS, batch_size=4, segment_len=32, lr=1e-3, warmup_steps=20)


def curve(backend, precision):
    """The loss of each step of a training on the source code of a module that every Python has."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
    settings = replace(TRAIN, precision=precision)
    config = Config(model=MODEL, data=DataConfig(), train=settings)
    torch.manual_seed(0)
    model = TransformerXL(MODEL)
    state = TrainState(
        model=model,
        optimizer=Optimizer(model, settings),
        segments=Segments(text, settings.batch_size, settings.segment_len),
        mems=[None],
        total_steps=STEPS,
        corpus={},
    )
    with use_backend(backend):
        losses = [
            train_step(config, state, Network(model, settings, state.world)).loss
            for _ in range(STEPS)
        ]
    return torch.stack(losses).double()


def deviation(found, expected):
    return (found - expected).abs() / expected


@pytest.fixture(scope="module")
def defined():
    """The curve of the definition."""
    return curve("reference", "float32")


def test_the_fast_operation_has_the_loss_curve_of_its_definition(defined):
    assert deviation(curve("skew", "float32"), defined).max() < BOUND
    # The frequencies of the bytes alone would give about 2.9.
    assert defined[0] > 4
    assert defined[-10:].mean() < 2.6


def shifted(q, k, v, r, *rest, **options):
    return BACKENDS["reference"](q, k, v, r.roll(1, 0), *rest, **options)


def without_gradient_of_keys(q, k, v, *rest, **options):
    return BACKENDS["reference"](q, k.detach(), v, *rest, **options)


@pytest.mark.parametrize("wrong", [shifted, without_gradient_of_keys])
def test_loss_curves_tell_a_wrong_operation(defined, monkeypatch, wrong):
    monkeypatch.setitem(BACKENDS, "skew", wrong)
    assert deviation(curve("skew", "float32"), defined).max() > BOUND


def test_in_half_precision_a_curve_strays_less_than_one_rounding(defined):
    # Single losses stray by chance; 2^-9 is the most by which bfloat16 rounds a number.
    assert deviation(curve("skew", "bfloat16"), defined).mean() < 2**-9
