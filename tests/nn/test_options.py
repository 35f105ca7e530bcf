"""Enhanced recurrence, and what options mean; tests/laws has what holds for them all."""

from dataclasses import replace

import pytest
import torch
from tests.laws.conftest import VARIANTS, made

from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL
from transformer_xl.model.segment import View
from transformer_xl.model.variants.key_offset import offset_keys

EXACT = {"rtol": 0, "atol": 1e-12}
V = 23
ENHANCED = {
    "with zeros": {"start_memory": "zeros"},
    "learned distances": {"attn_type": 1, "n_positions": 9},
    "limited": {"attn_len": 4, "clamp_len": 3},
    "modern": VARIANTS["modern"],
}


def some_text(B=2, length=12):
    return torch.randint(V, (B, length))


def read(model, text, T, mems, **lengths):
    """Read a text in segments of T; return its hidden states and the memory."""
    parts = []
    for segment in text.split(T, 1):
        hidden, mems = model.read(segment, mems, **lengths)
        parts.append(hidden)
    return torch.cat(parts, 1), mems


@pytest.mark.parametrize("name", ENHANCED)
@torch.no_grad()
def test_enhanced_recurrence_remembers_what_each_layer_put_out(name):
    model = made({"n_layer": 3, "enhanced_recurrence": True} | ENHANCED[name])
    put_out = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, given, out: put_out.append(out))
    _, mems = model.read(some_text(2, 6), None)
    for state, expected in zip(mems.states, put_out, strict=True):
        torch.testing.assert_close(state, expected, **EXACT)
    # One layer up it is the cache of the ordinary recurrence.
    other = TransformerXL(replace(model.config, enhanced_recurrence=False)).double().eval()
    other.load_state_dict(model.state_dict())
    read_by = []
    for layer in other.layers:
        layer.register_forward_pre_hook(lambda _, given: read_by.append(given[0]))
    text = some_text(2, 6)
    torch.testing.assert_close(other.read(text)[0], model.read(text)[0], **EXACT)
    for below, above in zip(put_out[len(model.layers) : -1], read_by[1:], strict=True):
        torch.testing.assert_close(below, above, **EXACT)


@pytest.mark.parametrize("is_enhanced", [False, True])
@torch.no_grad()
def test_enhanced_recurrence_reaches_back_without_limit(is_enhanced):
    model = made({"n_layer": 3, "enhanced_recurrence": is_enhanced})
    text = some_text(1, 80)
    other = text.clone()
    other[0, 0] = (text[0, 0] + 1) % V
    # Memory and segment of two tokens in three layers are the reach of the ordinary recurrence.
    one, two = (read(model, x, 2, None, mem_len=2)[0] for x in (text, other))
    has_changed = (one != two).any(-1)[0]
    assert has_changed[: 3 * 2].all()
    assert has_changed[3 * 3 :].any() == is_enhanced


@torch.no_grad()
def test_the_second_half_of_a_key_is_that_of_the_token_before():
    k = torch.randn(2, 6, 3, 5)
    offset = offset_keys(k, View())
    assert torch.equal(offset[..., :2], k[..., :2])
    assert torch.equal(offset[:, 1:, :, 2:], k[:, :-1, :, 2:])
    assert not offset[:, 0, :, 2:].any()
    # The first position that each stream, or each query, sees begins a document.
    for first in (torch.tensor([0, 3]), torch.tensor([[0, 0, 0], [3, 3, 5]])):
        other = offset_keys(k, View(first_key=first))
        begins = torch.zeros(2, 6, dtype=torch.bool).scatter(1, first.view(2, -1), True)
        assert not other[begins][..., 2:].any()
        assert torch.equal(other[~begins], offset[~begins])


@torch.no_grad()
def test_with_a_key_offset_one_layer_finds_what_followed_a_token():
    """Queries are the token itself, keys the token before, values the token of the key."""
    V, config = (
        12,
        ModelConfig(
            vocab_size=12,
            n_layer=1,
            n_head=1,
            d_model=12,
            d_head=24,
            d_inner=1,
            mem_len=40,
            attn_type=1,
            n_positions=1,
            dropout=0.0,
            norm_first=True,
            key_offset=True,
        ),
    )
    model = TransformerXL(config).double().eval()
    for parameter in model.parameters():
        parameter.zero_()
    one = torch.eye(V, dtype=torch.float64)
    model.embedding.weight.copy_(one)
    attention = model.layers[0].attention
    model.layers[0].attention_norm.weight.fill_(1)
    q, k, v = attention.qkv_proj.weight.view(3, 24, V)
    q[V:], k[V:], v[:V], attention.o_proj.weight[:, :V] = 30 * one, 30 * one, one, 9 * one
    text = torch.randperm(V)[:11].repeat(3)[None]
    predicted = model(text).log_probs[0].argmax(-1)
    assert torch.equal(predicted[11:-1], text[0, 12:])


NEUTRAL = {
    "embedding_residual": {"embedding_own": 1.0, "embedding_first": 0.0},
    "input_recurrence": {"input_decay": 0.0},
}


@pytest.mark.parametrize("setting", NEUTRAL)
@torch.no_grad()
def test_with_neutral_factors_a_variant_is_the_model_without_it(setting):
    model = made({"n_layer": 3, setting: True})
    plain = TransformerXL(replace(model.config, **{setting: False})).double().eval()
    for name, factor in NEUTRAL[setting].items():
        getattr(model, name).fill_(factor)
    plain.load_state_dict(model.state_dict(), strict=False)
    text = some_text()
    torch.testing.assert_close(read(model, text, 5, None)[0], read(plain, text, 5, None)[0])
