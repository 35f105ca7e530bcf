"""A model and texts for evaluations of every kind."""

from dataclasses import replace

import numpy as np
import pytest

from transformer_xl.model import TransformerXL


@pytest.fixture(autouse=True)
def _one_thread(one_thread) -> None:
    """Models this small only wait for a second thread."""


@pytest.fixture
def model(tiny_config):
    """Weights far from zero: at the start of a training attention hides mistakes."""
    return TransformerXL(replace(tiny_config, init_std=0.3)).eval()


@pytest.fixture
def text():
    return np.random.default_rng(0).integers(0, 31, 60)
