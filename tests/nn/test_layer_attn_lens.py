"""Attention lengths, and so memory lengths, that differ by layer."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.laws.conftest import CONFIG

from transformer_xl.model import TransformerXL, build_model

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = replace(CONFIG, n_layer=3, mem_len=8, layer_attn_lens=(2, 9, 4))
NETWORKS = {
    "paper": {},
    "learned distances": {"attn_type": 1, "n_positions": 9},
    "sinusoids of positions": {"attn_type": 2},
    "positions stored": {"attn_type": 2, "quirks": ("stored_positions",)},
    "learned positions": {"attn_type": 3, "n_positions": 12},
    "states of the layer itself": {"enhanced_recurrence": True},
}
GPT = {"kind": "gpt", "key_offset": True, "scalable_softmax": 2, "reset_at": 3}


def drawn(n):
    return torch.randint(CONFIG.vocab_size, (2, n), generator=torch.Generator().manual_seed(n))


@pytest.fixture(params=NETWORKS)
def config(request):
    return replace(CONFIG, **NETWORKS[request.param])


@pytest.mark.parametrize(
    ("settings", "is_kept"),
    [*product(NETWORKS.values(), [False, True]), (GPT, False)],
    ids=[*(f"{name}, kept {x}" for name, x in product(NETWORKS, [False, True])), "gpt"],
)
@torch.no_grad()
def test_the_same_length_in_all_layers_is_the_attention_length(settings, is_kept):
    config = replace(CONFIG, **settings)
    model = build_model(replace(config, layer_attn_lens=(4, 4, 4))).double().eval()
    other = build_model(replace(config, layer_attn_lens=(), attn_len=4)).double().eval()
    other.load_state_dict(model.state_dict())
    mems = [each.keep(each.start_memory(2)) if is_kept else None for each in (model, other)]
    for segment in drawn(17).split(5, 1):
        outs = [each(segment, m) for each, m in zip((model, other), mems, strict=True)]
        mems = [out.mems for out in outs]
        torch.testing.assert_close(outs[0].hidden, outs[1].hidden, rtol=0, atol=1e-12)


@torch.no_grad()
def test_each_layer_attends_as_far_as_it_may(config):
    model = TransformerXL(config).double().eval()
    _, mems = model.read(drawn(8))
    weights = model.attention_weights(drawn(5), mems)
    distance = torch.arange(8, 13)[:, None] - torch.arange(13)
    for of_layer, own in zip(weights, config.layer_attn_lens, strict=True):
        assert of_layer.shape == (2, 2, 5, 13)
        torch.testing.assert_close(of_layer.sum(-1), torch.ones(2, 2, 5, dtype=torch.float64))
        is_seen = (distance >= 0) & (distance < own)
        assert torch.equal((of_layer > 0).all(0).all(0), is_seen)
