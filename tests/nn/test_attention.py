from dataclasses import replace

import pytest
import torch
from tests.nn.conftest import filled

from transformer_xl.model import Positions, RelAttention, layer


def made(config):
    return filled(RelAttention(config), 0.3)


def operands(module, B=2, T=3, S=7):
    H, K = module.n_head, module.d_head
    q, rows = torch.randn(B, T, H, K), torch.randn(3, B, S, H, K)
    return q, rows[0], rows[1], rows[2, 0], torch.randn(H, K), torch.randn(H, K)


@pytest.mark.parametrize("M", [0, 5])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_queries_keys_values_and_positions_are_projections(tiny_config, M, has_gradients):
    module = made(tiny_config)
    x, memory = torch.randn(2, 3, 16), torch.randn(2, M, 16)
    weight, both = module.qkv_proj.weight, torch.cat([memory, x], 1)
    expected = x @ weight[:16].T, both @ weight[16:32].T, both @ weight[32:].T
    with torch.set_grad_enabled(has_gradients):
        found = module.project(x, memory if M else None)
    for one, other in zip(found, expected, strict=True):
        assert one.requires_grad == has_gradients
        torch.testing.assert_close(one.flatten(2), other)
    torch.testing.assert_close(module.queries(x), found[0])
    for one, other in zip(module.keys_and_values(both), found[1:], strict=True):
        torch.testing.assert_close(one, other)
    r = module.position_keys(x[0])
    torch.testing.assert_close(r.flatten(1), x[0] @ module.r_proj.weight.T)


@pytest.mark.parametrize("M", [0, 5])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_normalized_queries_and_keys_are_vectors_of_one_length_times_weights(
    tiny_config, M, has_gradients
):
    module = made(replace(tiny_config, qk_norm=True))
    plain = made(tiny_config)
    plain.load_state_dict(module.state_dict(), strict=False)
    x, memory = torch.randn(2, 3, 16), torch.randn(2, M, 16)

    def normalized(y, norm):
        assert norm.weight.shape == (8,)
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight

    with torch.set_grad_enabled(has_gradients):
        q, k, v = plain.project(x, memory if M else None)
        found = module.project(x, memory if M else None)
        expected = normalized(q, module.q_norm), normalized(k, module.k_norm), v
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(module.queries(x), expected[0])
        both = module.keys_and_values(torch.cat([memory, x], 1))
        torch.testing.assert_close(both, expected[1:])
        # What grows with the text is bounded; positions are not touched.
        torch.testing.assert_close(module.position_keys(x[0]), plain.position_keys(x[0]))
        for one, other in zip(module.project(9 * x)[:2], module.project(x)[:2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_attention_weights_are_dropped_in_training_alone(tiny_config, monkeypatch):
    asked = []

    def spy(q, *rest, dropout, **options):
        asked.append(dropout)
        return q

    monkeypatch.setattr(layer, "rel_attention", spy)
    module = made(replace(tiny_config, attn_dropout=0.3, dropout=0.9))
    q, k, v, *positions = operands(module)
    module.train()(q, k, v, Positions(*positions))
    module.eval()(q, k, v, Positions(*positions))
    assert asked == [0.3, 0.0]
