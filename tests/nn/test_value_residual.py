"""Value residuals; that they hold with any memory, decoder and segmentation is among the laws."""

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
    norm_first=True,
    value_residual=True,
    init_std=0.3,
)


@pytest.fixture
def model():
    model = TransformerXL(CONFIG).double().eval()
    with torch.no_grad():
        model.value_own.copy_(torch.tensor([0.3, 1.7]))
        model.value_first.copy_(torch.tensor([-0.8, 0.6]))
    return model


def inputs_and_values(model, tokens, mems):
    """Return what each layer reads, memory and segment, and the values it attends to."""
    inputs, values = [], []

    def note_input(layer, given):
        inputs.append(torch.cat([given[1], given[0]], 1))

    hooks = [layer.register_forward_pre_hook(note_input) for layer in model.layers]
    hooks += [
        layer.attention.register_forward_pre_hook(lambda _, given: values.append(given[2]))
        for layer in model.layers
    ]
    model(tokens, mems)
    for hook in hooks:
        hook.remove()
    return inputs, values


@torch.no_grad()
def test_values_are_mixed_with_those_of_the_first_layer(model):
    tokens = torch.randint(31, (2, 10))
    mems = model(tokens[:, :6]).mems
    inputs, values = inputs_and_values(model, tokens[:, 6:], mems)
    own = [layer.keys_and_values(x)[1] for layer, x in zip(model.layers, inputs, strict=True)]
    torch.testing.assert_close(values[0], own[0])
    for n in (1, 2):
        a, b = model.value_own[n - 1], model.value_first[n - 1]
        torch.testing.assert_close(values[n], a * own[n] + b * own[0])
