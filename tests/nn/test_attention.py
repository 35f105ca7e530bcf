from dataclasses import replace

import torch

from transformer_xl.nn import Positions, RelAttention, attention
from transformer_xl.ops import reference


def made(config):
    module = RelAttention(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    return module


def operands(module, B=2, T=3, S=7):
    H, K = module.n_head, module.d_head
    x, rows = torch.randn(B, T, module.o_proj.out_features), torch.randn(3, B, S, H, K)
    return x, rows[0], rows[1], rows[2, 0], torch.randn(H, K), torch.randn(H, K)


def test_no_projection_has_a_bias_and_heads_may_have_any_width(tiny_config):
    module = RelAttention(replace(tiny_config, d_head=5))
    shapes = {name: tuple(x.shape) for name, x in module.named_parameters()}
    assert shapes == {
        "qkv_proj.weight": (3 * 10, 16),
        "r_proj.weight": (10, 16),
        "o_proj.weight": (16, 10),
    }


def test_the_output_is_the_operation_between_its_projections(tiny_config):
    module = made(tiny_config)
    x, k, v, r, u, w = operands(module)
    first_key = torch.tensor([0, 2])
    q = (x @ module.qkv_proj.weight[:16].T).view(2, 3, 2, 8)
    attended = reference.rel_attention(q, k, v, r, u, w, attn_len=4, first_key=first_key)
    expected = attended.reshape(2, 3, 16) @ module.o_proj.weight.T
    found = module(x, k, v, Positions(r, u, w), 4, first_key)
    torch.testing.assert_close(found, expected)


def test_keys_values_and_positions_are_projections(tiny_config):
    module = made(tiny_config)
    x = torch.randn(2, 5, 16)
    k, v = module.keys_and_values(x)
    torch.testing.assert_close(k.flatten(2), x @ module.qkv_proj.weight[16:32].T)
    torch.testing.assert_close(v.flatten(2), x @ module.qkv_proj.weight[32:].T)
    r = module.positions(x[0])
    torch.testing.assert_close(r.flatten(1), x[0] @ module.r_proj.weight.T)


def test_attention_weights_are_dropped_in_training_alone(tiny_config, monkeypatch):
    asked = []

    def spy(q, *rest, dropout, **options):
        asked.append(dropout)
        return q

    monkeypatch.setattr(attention, "rel_attention", spy)
    module = made(replace(tiny_config, attn_dropout=0.3, dropout=0.9))
    x, k, v, *positions = operands(module)
    module.train()(x, k, v, Positions(*positions))
    module.eval()(x, k, v, Positions(*positions))
    assert asked == [0.3, 0.0]


def test_a_memory_of_another_precision_is_read_in_that_of_the_query(tiny_config):
    module = made(tiny_config)
    x, k, v, r, u, w = operands(module)
    expected = module(x, k.bfloat16().float(), v.bfloat16().float(), Positions(r, u, w))
    torch.testing.assert_close(module(x, k.bfloat16(), v.bfloat16(), Positions(r, u, w)), expected)
