"""Where numbers are dropped while training, how many, and which together."""

from dataclasses import replace

import pytest
import torch

from transformer_xl import model as nn
from transformer_xl.model import AdaptiveEmbedding, Embedding, RelAttention, TransformerXL
from transformer_xl.ops.dropout import rounded

SHARES = {"dropout": 0.2, "input_dropout": 0.6, "ff_dropout": 0.3, "output_dropout": 0.5}


@pytest.fixture
def places(monkeypatch):
    """What is dropped: shape, share, and whether it is the same at all positions."""
    found = []

    def spy(x, p, training, locked):
        found.append((tuple(x.shape), p if training else 0.0, locked))
        return x

    for room in (nn.language_model, nn.layer):
        monkeypatch.setattr(room, "dropout", spy)
    monkeypatch.setitem(nn.layer._ACTIVATIONS, "relu", spy)
    return found


def tokens(T=4):
    return torch.randint(31, (2, T))


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("activation", ["relu", "relu_squared", "gelu", "geglu"])
def test_each_place_has_its_own_share(tiny_config, places, activation, locked):
    config = replace(
        tiny_config, n_layer=2, activation=activation, variational_dropout=locked, **SHARES
    )
    model = TransformerXL(config)
    model(tokens())
    inner, outer = ((2, 4, 32), 0.3, locked), ((2, 4, 16), 0.2, locked)
    layer = [outer, inner, outer]
    first, last = ((2, 4, 16), 0.6, locked), ((2, 4, 16), 0.5, locked)
    assert places == [first, ((4, 16), 0.6, locked), *layer, *layer, last]
    places.clear()
    model.eval()(tokens())
    assert {p for _, p, _ in places} == {0.0}


@pytest.mark.parametrize("activation", ["relu", "relu_squared", "swiglu"])
def test_variational_dropout_is_the_same_at_all_positions(tiny_config, activation):
    # One word again and again, seen without its past: without dropout all positions are alike.
    config = replace(
        tiny_config,
        variational_dropout=True,
        activation=activation,
        attn_len=1,
        embed_dropout=0.1,
        **SHARES,
    )
    model = TransformerXL(config)
    word = torch.full((3, 6), 7)
    out = model(word)
    torch.testing.assert_close(out.hidden, out.hidden[:, :1].expand_as(out.hidden))
    assert not torch.allclose(out.hidden[0], out.hidden[1])
    assert not torch.allclose(out.hidden, model(word).hidden)
    free = TransformerXL(replace(config, variational_dropout=False))(word).hidden
    assert not torch.allclose(free, free[:, :1].expand_as(free))


def test_raw_hidden_states_are_those_before_dropout(tiny_config):
    config = replace(tiny_config, output_dropout=0.5, final_norm=True)
    model, text = TransformerXL(config), tokens()
    out = model(text)
    is_kept = out.hidden != 0
    assert 0.2 < is_kept.double().mean() < 0.8
    torch.testing.assert_close(out.hidden[is_kept], out.raw_hidden[is_kept] * 2)
    assert (out.raw_hidden != 0).all()
    out = model.eval()(text)
    assert torch.equal(out.hidden, out.raw_hidden)
    (out.raw_hidden[:, 1:] - out.raw_hidden[:, :-1]).square().mean().backward()
    assert model.layers[0].attention.qkv_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("made", "settings"),
    [
        (Embedding, {}),
        (Embedding, {"d_embed": 8}),
        (AdaptiveEmbedding, {"cutoffs": (8, 20), "div_val": 2}),
    ],
)
def test_embedding_dropout_drops_whole_words_wherever_they_stand(tiny_config, made, settings):
    p = 0.3
    module = made(replace(tiny_config, vocab_size=31, embed_dropout=p, **settings))
    torch.nn.init.normal_(module.weight if made is Embedding else module.weights[0])
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    # After a first word, which is not dropped.
    text = torch.cat([torch.tensor([[3], [9]]), torch.arange(31).repeat(2, 2)], 1)
    exact, dropped, n = module.eval()(text), 0, 200
    module.train()
    for _ in range(n):
        found = module(text)
        torch.testing.assert_close(found[:, 0], exact[:, 0])
        found, expected = found[:, 1:], exact[:, 1:]
        is_zero = (found == 0).all(-1)
        # Both times and in both streams.
        assert torch.equal(is_zero[0, :31], is_zero[1, 31:])
        rest = (expected / (1 - rounded(p))).masked_fill(is_zero[..., None], 0)
        torch.testing.assert_close(found, rest, rtol=1e-4, atol=1e-4)
        dropped += int(is_zero[0, :31].sum())
    assert abs(dropped / (31 * n) - p) < 5 * (p * (1 - p) / (31 * n)) ** 0.5


@pytest.mark.parametrize("marker", [7, 20])
@pytest.mark.parametrize(
    ("made", "settings"),
    [(Embedding, {}), (AdaptiveEmbedding, {"cutoffs": (8, 20), "div_val": 2})],
)
def test_the_separator_of_completions_is_never_dropped(tiny_config, made, settings, marker):
    markers = {"completion_at": marker, "reset_at": 5}
    module = made(replace(tiny_config, vocab_size=31, embed_dropout=0.9, **markers, **settings))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    text = torch.tensor([6, *range(31)])[None]
    exact = module.eval()(text)[0, 1 + marker]
    module.train()
    found = torch.cat([module(text) for _ in range(20)])[:, 1:]
    assert torch.equal(found[:, marker], exact.expand(20, -1))
    # All but the two symbols.
    assert (found == 0).all(-1).any(0).sum() == 31 - len({marker, 5})


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("M", [0, 3])
def test_queries_keys_and_values_are_dropped_after_they_are_made(tiny_config, locked, M):
    p = 0.25
    config = replace(tiny_config, qkv_dropout=p, variational_dropout=locked, qk_norm=True)
    module = RelAttention(config)
    x, memory = torch.randn(2, 40, 16), torch.randn(2, M, 16) if M else None
    exact = *module.eval().project(x, memory), module.position_keys(x[0])[None]
    found = *module.train().project(x, memory), module.position_keys(x[0])[None]
    for one, other in zip(found, exact, strict=True):
        is_kept = one != 0
        torch.testing.assert_close(one, other / (1 - p) * is_kept)
        assert 0.4 < is_kept.double().mean() < 1
        assert torch.equal(is_kept, is_kept[:, :1].expand_as(is_kept)) == locked
