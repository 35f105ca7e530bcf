"""A model of bytes that is sure of some things, and its vocabulary."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.data import train_vocab
from transformer_xl.model import TransformerXL

pytest.importorskip("constriction")

TINY = ModelConfig(
    vocab_size=256,
    n_layer=2,
    n_head=2,
    d_model=16,
    d_inner=32,
    mem_len=8,
    dropout=0.1,
    # Far from uniform, so that the numbers matter.
    init_std=0.4,
)


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Threads wait for each other longer than such models take to compute."""


@pytest.fixture(scope="session")
def tiny():
    return TINY


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(1)
    return TransformerXL(TINY).eval()


@pytest.fixture(scope="session")
def vocab():
    return train_vocab("bytes", [])


@pytest.fixture(scope="session")
def surprising(model):
    """Bytes that the model compresses: drawn from what it predicts, at random but for that."""
    generator = torch.Generator().manual_seed(2)
    tokens, mems = torch.full((16, 1), 10), None
    written = []
    with torch.no_grad():
        for _ in range(200):
            out = model(tokens, mems)
            mems = out.mems
            tokens = torch.multinomial(out.log_probs[:, -1].exp(), 1, generator=generator)
            written.append(tokens[:, 0])
    return torch.stack(written, 1).flatten().to(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="session")
def noise():
    return np.random.default_rng(3).bytes(2000)


@pytest.fixture(scope="session")
def changed(tiny):
    """Makes models of other settings: `changed(attn_type=2)`."""

    def make(**settings):
        torch.manual_seed(4)
        from transformer_xl.model import build_model

        return build_model(replace(tiny, **settings)).eval()

    return make
