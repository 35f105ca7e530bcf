"""The models on which every law must hold."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import LanguageModel, TransformerXL, build_model

# Weights far from zero: at the start of a training attention is nearly uniform and hides mistakes.
CONFIG = ModelConfig(
    vocab_size=23,
    n_layer=2,
    n_head=2,
    d_model=12,
    d_inner=20,
    mem_len=6,
    dropout=0.0,
    init_std=0.4,
    proj_init_std=0.4,
)
VARIANTS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "pre-norm and a last norm": {"norm_first": True, "final_norm": True},
    "a pair of biases for each layer": {"tie_biases": False},
    "starting with zeros": {"start_memory": "zeros"},
    "clamped distances": {"clamp_len": 3},
    "limited attention": {"attn_len": 4},
    "memory lengths by layer": {"layer_attn_lens": (3, 6)},
    "narrow embeddings": {"d_embed": 5, "tie_embeddings": False},
    "value residuals": {"norm_first": True, "value_residual": True},
    "embedding residuals": {"embedding_residual": True},
    "input recurrence": {"input_recurrence": True, "tie_embeddings": False},
    "gpt with a cache": {"kind": "gpt"},
    "gpt with limited attention": {"kind": "gpt", "attn_len": 4, "qk_norm": True, "norm": "rms"},
}


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    # Models this small only wait for their second thread, the longer the busier the machine is.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    """A model in double precision, in which a law holds to the last digits or not at all."""
    return build_model(replace(CONFIG, **VARIANTS[request.param])).double().eval()


@pytest.fixture
def paper() -> TransformerXL:
    """The first of them alone, for laws that the variants have no part in."""
    return TransformerXL(CONFIG).double().eval()
