"""The gate of GTrXL is the gate of the paper, and begins near the identity."""

from dataclasses import replace

import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import DecoderLayer, GRUGate, Positions, TransformerXL

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


def filled(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)
    return module.double().eval()


def equations(gate, x, y):
    """Section 3.2 of Parisotto et al., each matrix by its own name."""
    W_r, W_z, W_g = gate.made_proj.weight.chunk(3)
    U_r, U_z = gate.old_proj.weight.chunk(2)
    r = torch.sigmoid(y @ W_r.T + x @ U_r.T)
    z = torch.sigmoid(y @ W_z.T + x @ U_z.T - gate.bias)
    h = torch.tanh(y @ W_g.T + (r * x) @ gate.reset_proj.weight.T)
    return (1 - z) * x + z * h


def test_a_gate_computes_the_equations():
    gate = filled(GRUGate(CONFIG))
    x, y = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(gate(x, y), equations(gate, x, y))
    assert sum(p.numel() for p in gate.parameters()) == 6 * 6**2 + 6


def test_a_gated_layer_is_that_of_the_paper():
    layer = filled(DecoderLayer(CONFIG))
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


def test_the_gradients_are_those_of_the_formula():
    gate = filled(GRUGate(CONFIG))
    x, y = (torch.randn(1, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(gate, (x, y))
    weights = [p.detach().requires_grad_() for p in gate.parameters()]
    names = [n for n, _ in gate.named_parameters()]

    def of_weights(*values):
        return torch.func.functional_call(gate, dict(zip(names, values, strict=True)), (x, y))

    assert torch.autograd.gradcheck(of_weights, tuple(weights))


@torch.no_grad()
def test_the_larger_the_bias_the_nearer_the_model_is_to_the_identity():
    model = filled(TransformerXL(CONFIG))
    vectors = torch.randn(2, 5, 6, dtype=torch.float64)
    found = []
    for bias in (0.0, 4.0, 8.0, 40.0):
        for layer in model.layers:
            layer.attention_gate.bias.fill_(bias)
            layer.feed_forward_gate.bias.fill_(bias)
        hidden, _ = model.read(inputs_embeds=vectors)
        found.append((hidden - vectors).abs().max().item())
    assert sorted(found, reverse=True) == found
    assert found[0] > 0.1
    assert found[-1] < 1e-12


def test_gates_begin_mostly_open_for_what_goes_in():
    model = TransformerXL(CONFIG)
    for layer in model.layers:
        for gate in (layer.attention_gate, layer.feed_forward_gate):
            assert (gate.bias == 2).all()
            assert 0 < gate.made_proj.weight.std() < 0.1


def test_under_autocast_what_layers_hand_on_stays_in_the_precision_of_the_weights():
    model = TransformerXL(CONFIG).eval()
    tokens = torch.randint(11, (2, 5))
    expected = model.read(tokens)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = model.read(tokens)[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)
