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
    "SwiGLU, a pair of biases for each layer": {
        "norm_first": True,
        "final_norm": True,
        "activation": "swiglu",
        "tie_biases": False,
    },
    "modern": {
        "norm_first": True,
        "final_norm": True,
        "norm": "rms",
        "activation": "relu_squared",
        "qk_norm": True,
    },
    "starting with zeros, RMS norm, GELU": {
        "start_memory": "zeros",
        "norm": "rms",
        "activation": "gelu",
    },
    "limited attention, clamped distances, embedding residuals, GEGLU": {
        "attn_len": 4,
        "clamp_len": 3,
        "embedding_residual": True,
        "activation": "geglu",
    },
    "memory lengths by layer, narrow embeddings, normalized raw queries": {
        "layer_attn_lens": (3, 6),
        "d_embed": 5,
        "tie_embeddings": False,
        "norm_first": True,
        "qk_norm": True,
        "quirks": ("raw_queries",),
    },
    "input recurrence, a last norm": {
        "input_recurrence": True,
        "tie_embeddings": False,
        "norm_first": True,
        "final_norm": True,
    },
    "key offset, input recurrence, normalized queries and keys": {
        "key_offset": True,
        "input_recurrence": True,
        "embedding_residual": True,
        "norm_first": True,
        "final_norm": True,
        "qk_norm": True,
        "scalable_softmax": 2,
    },
    "scalable softmax": {"scalable_softmax": 2},
    "key offset, limited attention": {
        "key_offset": True,
        "scalable_softmax": 2,
        "attn_len": 4,
        "clamp_len": 3,
    },
    "key offset, memory lengths by layer": {"key_offset": True, "layer_attn_lens": (3, 6)},
    "gates, clamped distances": {"norm_first": True, "gate": "gru", "clamp_len": 3},
    "gates, learned distances of normalized queries and keys": {
        "norm_first": True,
        "gate": "gru",
        "qk_norm": True,
        "attn_type": 1,
        "n_positions": 9,
    },
    "gpt with a cache": {"kind": "gpt"},
    "gpt, modern": {
        "kind": "gpt",
        "key_offset": True,
        "scalable_softmax": 2,
        "qk_norm": True,
    },
    "gpt, memory lengths by layer": {
        "kind": "gpt",
        "key_offset": True,
        "layer_attn_lens": (3, 6),
    },
    "gpt with limited attention": {"kind": "gpt", "attn_len": 4, "qk_norm": True, "norm": "rms"},
}
# What each layer put out is remembered, so that it shows where segments begin.
ENHANCED = {
    "enhanced, with zeros": {"enhanced_recurrence": True, "start_memory": "zeros"},
    "enhanced, learned distances": {"enhanced_recurrence": True, "attn_type": 1, "n_positions": 9},
    "enhanced, modern, limited attention": VARIANTS["modern"]
    | {"enhanced_recurrence": True, "attn_len": 4, "clamp_len": 3},
}
ABSOLUTE = {
    "sinusoids, clamped distances": {"attn_type": 2, "norm_first": True, "clamp_len": 4},
    "learned positions, few, limited attention": {
        "attn_type": 3,
        "n_positions": 4,
        "attn_len": 5,
        "final_norm": True,
    },
    "stored positions": {"attn_type": 3, "n_positions": 9, "quirks": ("stored_positions",)},
}
LSTM_SIZES = {"vocab_size": 23, "n_layer": 2, "d_model": 16, "mem_len": 0, "dropout": 0.0}


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    # Models this small only wait for their second thread, the longer the busier the machine is.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.no_grad()
def made(settings: dict[str, object]) -> LanguageModel:
    model = build_model(replace(CONFIG, **settings)).double().eval()
    for parameter in model.parameters():
        # Biases too: what begins as zero hides mistakes.
        parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def lstm(**change: object) -> LanguageModel:
    model = build_model(ModelConfig(kind="lstm", **LSTM_SIZES | change)).double().eval()
    # As after training: no biases are zero, and words differ.
    model.embedding.weight.mul_(10)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(0.0, 0.3)
    return model


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    """A model in double precision, in which a law holds to the last digits or not at all."""
    return made(VARIANTS[request.param])


@pytest.fixture(params=VARIANTS | ENHANCED)
def attending(request: pytest.FixtureRequest) -> LanguageModel:
    """The same, and those for which it matters where segments begin."""
    return made((VARIANTS | ENHANCED)[request.param])


@pytest.fixture(params=VARIANTS | ABSOLUTE)
def positioned(request: pytest.FixtureRequest) -> LanguageModel:
    """The models of the laws, and those with absolute positions, which segments change."""
    return made((VARIANTS | ABSOLUTE)[request.param])


@pytest.fixture(params=VARIANTS | ENHANCED | ABSOLUTE)
def isolating(request: pytest.FixtureRequest) -> LanguageModel:
    """All of them."""
    return made((VARIANTS | ENHANCED | ABSOLUTE)[request.param])


@pytest.fixture(params=[*VARIANTS, "lstm"])
def any_model(request: pytest.FixtureRequest) -> LanguageModel:
    """A model of any kind that reads a text in segments as at once."""
    name = request.param
    return lstm() if name == "lstm" else made(VARIANTS[name])


@pytest.fixture
def turn(request: pytest.FixtureRequest) -> int:
    """The number of the variant, by which values of two parameters meet in turn."""
    return [*VARIANTS].index(request.node.callspec.params["model"])


@pytest.fixture
def paper() -> TransformerXL:
    """The first of them alone, for laws that the variants have no part in."""
    return TransformerXL(CONFIG).double().eval()
