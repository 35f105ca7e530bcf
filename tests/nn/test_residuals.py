"""Residuals of values and embeddings; that they hold with any memory is among the laws."""

from dataclasses import replace

import torch

from transformer_xl.model import TransformerXL


@torch.no_grad()
def made(tiny_config, kind, **settings):
    model = TransformerXL(replace(tiny_config, **{f"{kind}_residual": True}, **settings))
    model.get_parameter(f"{kind}_own").copy_(torch.tensor([0.3, 1.7]))
    model.get_parameter(f"{kind}_first").copy_(torch.tensor([-0.8, 0.6]))
    return model.double().eval()


@torch.no_grad()
def test_inputs_are_mixed_with_the_normalized_embedding(tiny_config):
    model = made(tiny_config, "embedding", init_std=0.5)
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


@torch.no_grad()
def test_values_are_mixed_with_those_of_the_first_layer(tiny_config):
    model, own, values = made(tiny_config, "value", norm_first=True, init_std=0.3), [], []
    tokens = torch.randint(31, (2, 10))
    mems = model(tokens[:, :6]).mems

    def note_own(layer, given):
        own.append(layer.keys_and_values(torch.cat([given[1], given[0]], 1))[1])

    for layer in model.layers:
        layer.register_forward_pre_hook(note_own)
        layer.attention.register_forward_pre_hook(lambda _, given: values.append(given[2]))
    model(tokens[:, 6:], mems)
    torch.testing.assert_close(values[0], own[0])
    for n in (1, 2):
        a, b = model.value_own[n - 1], model.value_first[n - 1]
        torch.testing.assert_close(values[n], a * own[n] + b * own[0])
