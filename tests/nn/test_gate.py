"""The gate of GTrXL is the gate of the paper, and begins near the identity."""

from dataclasses import replace

import torch
from tests.nn.conftest import filled

from transformer_xl.config import ModelConfig
from transformer_xl.model import DecoderLayer, GRUGate, Positions

CONFIG = ModelConfig(
    vocab_size=11,
    n_layer=2,
    n_head=2,
    d_model=6,
    d_inner=10,
    mem_len=4,
    dropout=0.0,
    norm_first=True,
    gate="gru",
)


def equations(gate, x, y):
    """Section 3.2 of Parisotto et al., each matrix by its own name."""
    W_r, W_z, W_g = gate.made_proj.weight.chunk(3)
    U_r, U_z = gate.old_proj.weight.chunk(2)
    r = torch.sigmoid(y @ W_r.T + x @ U_r.T)
    z = torch.sigmoid(y @ W_z.T + x @ U_z.T - gate.bias)
    h = torch.tanh(y @ W_g.T + (r * x) @ gate.reset_proj.weight.T)
    return (1 - z) * x + z * h


def test_a_gate_computes_the_equations():
    gate = filled(GRUGate(CONFIG)).double()
    x, y = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(gate(x, y), equations(gate, x, y))
    assert sum(p.numel() for p in gate.parameters()) == 6 * 6**2 + 6


def test_a_gated_layer_is_that_of_the_paper():
    layer = filled(DecoderLayer(CONFIG)).double()
    x, memory = torch.randn(2, 3, 6).double(), torch.randn(2, 4, 6).double()
    r, (u, w) = torch.randn(7, 2, 3).double(), torch.randn(2, 2, 3).double()
    plain = replace(CONFIG, gate="none")
    same = DecoderLayer(plain).double().eval()
    same.load_state_dict({n: p for n, p in layer.state_dict().items() if "gate" not in n})
    # What the blocks make, read off a layer that adds it.
    attended = []
    same.attention.register_forward_hook(lambda *given: attended.append(given[-1]))
    same(x, memory, Positions(r, u, w))
    y = equations(layer.attention_gate, x, attended[0].relu())
    made = layer.feed_forward(layer.feed_forward_norm(y)).relu()
    expected = equations(layer.feed_forward_gate, y, made)
    torch.testing.assert_close(layer(x, memory, Positions(r, u, w)), expected)
