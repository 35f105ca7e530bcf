from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from tests.nn.conftest import filled

from transformer_xl.model import DecoderLayer, FeedForward, Positions
from transformer_xl.ops import reference

B, T, M, H, K, D = 2, 3, 4, 2, 8, 16


def surroundings(M=M):
    """What a layer is given besides its segment: memory, positions, biases."""
    return torch.randn(B, M, D), torch.randn(M + T, H, K), torch.randn(H, K), torch.randn(H, K)


def attended(layer, query, keys, r, u, w):
    """Relative attention as the paper writes it, before the residual connection."""
    q_weight, k_weight, v_weight = layer.attention.qkv_proj.weight.chunk(3)
    q, k, v = (
        (x @ weight.T).unflatten(-1, (H, K))
        for x, weight in ((query, q_weight), (keys, k_weight), (keys, v_weight))
    )
    values = reference.rel_attention(q, k, v, r, u, w)
    return values.flatten(2) @ layer.attention.o_proj.weight.T


ACTIVATIONS = {
    "relu": lambda x: x.clamp(min=0),
    "relu_squared": lambda x: x.clamp(min=0) * x,
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "geglu": lambda x: ACTIVATIONS["gelu"](x[..., :32]) * x[..., 32:],
    "swiglu": lambda x: x[..., :32] / (1 + (-x[..., :32]).exp()) * x[..., 32:],
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_stands_between_the_maps_is_a_setting(tiny_config, activation):
    module, x = (
        filled(FeedForward(replace(tiny_config, activation=activation))),
        torch.randn(B, T, D),
    )
    assert module.outer.weight.shape == (16, 32)
    for training, has_gradients in product((False, True), repeat=2):
        module.train(training)
        with torch.set_grad_enabled(has_gradients):
            inner = ACTIVATIONS[activation](x @ module.inner.weight.T + module.inner.bias)
            expected = inner @ module.outer.weight.T + module.outer.bias
            torch.testing.assert_close(module(x), expected, msg=f"{training} {has_gradients}")


def layer_norm(module, x):
    return F.layer_norm(x, (D,), module.weight, module.bias, module.eps)


def rms(module, x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("name", "norm"), [("layer", layer_norm), ("rms", rms)])
def test_a_layer_is_attention_and_feed_forward_each_with_a_norm(
    tiny_config, name, norm, norm_first
):
    layer = filled(DecoderLayer(replace(tiny_config, norm=name, norm_first=norm_first)))
    x, (memory, r, u, w) = torch.randn(B, T, D), surroundings()
    keys = torch.cat([memory, x], 1)
    if norm_first:
        # What is read is normalized, the memory too.
        keys = norm(layer.attention_norm, keys)
        o = x + attended(layer, keys[:, M:], keys, r, u, w)
        expected = o + layer.feed_forward(norm(layer.feed_forward_norm, o))
    else:
        o = norm(layer.attention_norm, x + attended(layer, x, keys, r, u, w))
        expected = norm(layer.feed_forward_norm, o + layer.feed_forward(o))
    torch.testing.assert_close(layer(x, memory, Positions(r, u, w)), expected)
