"""Residuals of embeddings; that they hold with any memory is among the laws."""

from dataclasses import replace

import torch

from transformer_xl.model import TransformerXL


@torch.no_grad()
def test_inputs_are_mixed_with_the_normalized_embedding(tiny_config):
    model = TransformerXL(replace(tiny_config, embedding_residual=True, init_std=0.5))
    model.embedding_own.copy_(torch.tensor([0.3, 1.7]))
    model.embedding_first.copy_(torch.tensor([-0.8, 0.6]))
    model.double().eval()
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
    size = (embedded**2).mean(-1, keepdim=True) + tiny_config.norm_eps
    for n in (1, 2):
        a, b = model.embedding_own[n - 1], model.embedding_first[n - 1]
        torch.testing.assert_close(inputs[n], a * outputs[n - 1] + b * embedded / size.sqrt())
        # The memory holds what the layer has read.
        torch.testing.assert_close(after.states[n][:, -4:], inputs[n])
