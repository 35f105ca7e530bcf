"""Learned relative and absolute positions keep the laws that the paper's own positions keep."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL
from transformer_xl.model.positions import frequencies
from transformer_xl.ops import use_backend

EXACT = {"rtol": 0, "atol": 1e-11}
BACKENDS = ["reference", "skew"]
V = 23
CONFIG = ModelConfig(
    vocab_size=V, n_layer=2, n_head=2, d_model=12, d_inner=20, mem_len=6, dropout=0.0, init_std=0.4
)
RELATIVE = {"attn_type": 1, "n_positions": 20}
SINUSOIDS, LEARNED = {"attn_type": 2}, {"attn_type": 3, "n_positions": 20}
PRE_NORM = {"norm_first": True}
VARIANTS = {
    "relative": RELATIVE,
    "relative, few positions": RELATIVE | {"n_positions": 4},
    "relative, pre-norm": RELATIVE | PRE_NORM | {"tie_biases": False, "attn_len": 5},
    "sinusoids": SINUSOIDS,
    "sinusoids, pre-norm": SINUSOIDS | PRE_NORM | {"clamp_len": 4},
    "learned": LEARNED,
    "learned, few positions": LEARNED | {"n_positions": 4, "attn_len": 5},
    "learned, pre-norm": LEARNED | PRE_NORM | {"final_norm": True},
}
ABSOLUTE = [name for name, settings in VARIANTS.items() if settings["attn_type"] > 1]


@torch.no_grad()
def made(**settings):
    model = TransformerXL(replace(CONFIG, **settings)).double().eval()
    for parameter in model.parameters():
        # Biases too: what begins as zero hides mistakes.
        parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def twin(model, **changes):
    other = TransformerXL(replace(model.config, **changes)).double().eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.fixture(params=VARIANTS)
def model(request):
    return made(**VARIANTS[request.param])


@pytest.fixture(params=ABSOLUTE)
def absolute(request):
    return made(**VARIANTS[request.param])


def some_text(B=2, length=5):
    return torch.randint(V, (B, length))


def position(model, layer, distance):
    """What is added to the state of a token that stands this far before the last one."""
    if model.config.attn_type == 3:
        return model.position_embedding[layer][min(distance, model.config.n_positions - 1)]
    if layer > 0:
        return 0.0
    clamp_len = model.config.clamp_len
    distance = distance if clamp_len is None else min(distance, clamp_len)
    angle = distance * frequencies(model.config.d_model).double()
    return torch.cat([angle.sin(), angle.cos()])


def scores(model, layer, q, k, head, distance):
    """The score of one query for one key, summed up as the formula says."""
    if model.config.attn_type != 1:
        return q @ k
    row = min(distance, model.config.n_positions - 1)
    u = model.content_bias[0 if model.config.tie_biases else layer, head]
    r, b = model.distance_embedding[layer, row, head], model.distance_bias[layer, row, head]
    return (q + u) @ k + q @ r + b


@torch.no_grad()
def by_hand(model, text, mems, raw_queries=False):
    """Read a segment token by token and key by key; return the output and each layer's input."""
    config, width = model.config, model.config.head_width
    x, inputs = model.embedding(text), []
    for n, (layer, past) in enumerate(zip(model.layers, mems.states, strict=True)):
        inputs.append(x)
        seen, M = torch.cat([past, x], 1), past.shape[1]
        S = seen.shape[1]
        if config.attn_type > 1:
            seen = torch.stack([seen[:, s] + position(model, n, S - 1 - s) for s in range(S)], 1)
        x = seen[:, M:]
        read = layer.attention_norm(seen) if config.norm_first else seen
        q, k, v = (y.unflatten(-1, (2, width)) for y in layer.attention.qkv_proj(read).chunk(3, -1))
        if raw_queries:
            q = layer.attention.qkv_proj(seen).chunk(3, -1)[0].unflatten(-1, (2, width))
        attended = torch.zeros_like(q)
        for b, t, h in np.ndindex(len(text), S, 2):
            first = 0 if config.attn_len is None else max(0, t + 1 - config.attn_len)
            keys = range(first, t + 1)
            score = [scores(model, n, q[b, t, h], k[b, s, h], h, t - s) for s in keys]
            weight = (torch.stack(score) / width**0.5).softmax(0)
            attended[b, t, h] = weight @ v[b, first : t + 1, h]
        x = x + layer.attention.o_proj(attended[:, M:].flatten(2))
        x = x if config.norm_first else layer.attention_norm(x)
        inner = layer.feed_forward(layer.feed_forward_norm(x) if config.norm_first else x)
        x = x + inner if config.norm_first else layer.feed_forward_norm(x + inner)
    return (x if model.final_norm is None else model.final_norm(x)), inputs


def assert_remembers(mems, inputs_of_segments):
    """The memory is the newest inputs of each layer, and nothing was added to them."""
    for state, *inputs in zip(mems.states, *inputs_of_segments, strict=True):
        torch.testing.assert_close(state, torch.cat(inputs, 1)[:, -len(mems) :], **EXACT)


@torch.no_grad()
def test_with_memory_and_without_the_numbers_are_those_of_the_formula(model):
    mems, read = model.start_memory(2), []
    for T in (4, 3, 1):
        text = some_text(length=T)
        hidden, inputs = by_hand(model, text, mems)
        read.append(inputs)
        for backend in BACKENDS:
            with use_backend(backend):
                out = model(text, mems)
            torch.testing.assert_close(out.hidden, hidden, **EXACT)
            assert_remembers(out.mems, read)
        mems = out.mems


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_enters_the_memory_but_its_positions_learn(model, backend):
    mems = model(some_text()).mems
    for state in mems.states:
        state.requires_grad_()
    with use_backend(backend):
        model(some_text(length=3), mems, some_text(length=3)).loss.backward()
    assert all(state.grad is None for state in mems.states)
    assert all(parameter.grad.any() for parameter in model.parameters())
    if model.config.attn_type != 2:
        # Of eight states, in the memory too, each distance that is seen.
        is_relative = model.config.attn_type == 1
        table = model.distance_embedding if is_relative else model.position_embedding
        learns = table.grad[0].flatten(1).any(1)
        seen = model.config.attn_len if is_relative and model.config.attn_len else 8
        assert learns.tolist() == [row < seen for row in range(table.shape[1])]


@torch.no_grad()
def test_stored_positions_pile_up_with_each_segment(absolute):
    quirky = twin(absolute, quirks=("stored_positions",))
    text, T = some_text(length=6), 2
    mems = plain = None
    for n, segment in enumerate(text.split(T, 1)):
        out, expected = quirky(segment, mems), absolute(segment, plain)
        mems, plain = out.mems, expected.mems
        # The first segment finds nothing to which they could be added twice.
        assert torch.allclose(out.hidden, expected.hidden) == (n == 0)
    states = quirky.embedding(text)
    for s in range(6):
        for end in range(s - s % T + T, 7, T):
            states[:, s] += position(quirky, 0, end - 1 - s)
    torch.testing.assert_close(mems.states[0], states, **EXACT)
    torch.testing.assert_close(plain.states[0], quirky.embedding(text), **EXACT)


@torch.no_grad()
def test_raw_queries_are_not_normalized(absolute):
    if not absolute.config.norm_first:
        with pytest.raises(ValueError, match="no queries are normalized; leave out 'raw_queries'"):
            twin(absolute, quirks=("raw_queries",))
        return
    quirky = twin(absolute, quirks=("raw_queries",))
    mems, text = absolute(some_text()).mems, some_text(length=3)
    found = quirky(text, mems).hidden
    expected, _ = by_hand(absolute, text, mems, raw_queries=True)
    torch.testing.assert_close(found, expected, **EXACT)
    assert not torch.allclose(found, absolute(text, mems).hidden)
