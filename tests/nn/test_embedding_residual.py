"""Embedding residuals; that they hold with any memory and segmentation is among the laws."""

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL

CONFIG = ModelConfig(
    vocab_size=31,
    n_layer=3,
    n_head=2,
    d_model=16,
    d_inner=24,
    mem_len=6,
    dropout=0.0,
    embedding_residual=True,
    init_std=0.5,
)


@pytest.fixture
def model():
    model = TransformerXL(CONFIG).double().eval()
    with torch.no_grad():
        model.embedding_own.copy_(torch.tensor([0.3, 1.7]))
        model.embedding_first.copy_(torch.tensor([-0.8, 0.6]))
    return model


@torch.no_grad()
def test_inputs_are_mixed_with_the_normalized_embedding(model):
    inputs, outputs = [], []

    def note(layer, given, out):
        inputs.append(given[0])
        outputs.append(out)

    tokens = torch.randint(31, (2, 10))
    mems = model(tokens[:, :6]).mems
    for layer in model.layers:
        layer.register_forward_hook(note)
    after = model(tokens[:, 6:], mems).mems
    embedded = model.embedding(tokens[:, 6:])
    torch.testing.assert_close(inputs[0], embedded)
    size = (embedded**2).mean(-1, keepdim=True) + CONFIG.norm_eps
    for n in (1, 2):
        a, b = model.embedding_own[n - 1], model.embedding_first[n - 1]
        torch.testing.assert_close(inputs[n], a * outputs[n - 1] + b * embedded / size.sqrt())
        # The memory holds what the layer has read.
        torch.testing.assert_close(after.states[n][:, -4:], inputs[n])
