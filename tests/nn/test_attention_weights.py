"""Which past positions a token attends to: what is shown is what the operation uses."""

from dataclasses import replace
from threading import Thread

import pytest
import torch
from tests.laws.conftest import CONFIG

from transformer_xl.model import TransformerXL, build_model

CONFIG = replace(CONFIG, n_layer=3)
VARIANTS = {
    "paper": {},
    "pre-norm": {"norm_first": True},
    "a pair of biases for each layer": {"tie_biases": False},
    "limited": {"attn_len": 3, "clamp_len": 2},
    "learned distances": {"attn_type": 1, "n_positions": 9},
    "sinusoids": {"attn_type": 2},
    "sinusoids, limited": {"attn_type": 2, "attn_len": 4},
    "normalized": {"qk_norm": True, "enhanced_recurrence": True},
}


@pytest.fixture(params=VARIANTS)
def model(request):
    return TransformerXL(replace(CONFIG, **VARIANTS[request.param])).double().eval()


def text(T=5):
    return torch.randint(23, (2, T))


def after(model, is_kept, T=4):
    mems = model.start_memory(2)
    mems = model.keep(mems) if is_kept else mems
    return model.read(text(T), mems)[1].reset([1])


@pytest.mark.parametrize("is_kept", [False, True])
@torch.no_grad()
def test_weights_times_values_are_what_each_layer_attended(model, is_kept):
    segment, mems = text(), after(model, is_kept)
    weights = model.attention_weights(segment, mems)
    seen = []
    for layer in model.layers:
        # A copy: with enhanced recurrence, kept values are replaced when the layer is done.
        layer.attention.register_forward_hook(
            lambda _, given, out: seen.append((given[2].clone(), out))
        )
    model(segment, mems)
    assert len(weights) == len(seen) == 3
    for layer, weight, (v, out) in zip(model.layers, weights, seen, strict=True):
        assert weight.shape == (2, 2, 5, 4 + 5)
        torch.testing.assert_close(weight.sum(-1), torch.ones(2, 2, 5, dtype=torch.float64))
        attended = torch.einsum("bhts,bshk->bthk", weight, v).flatten(2)
        torch.testing.assert_close(attended @ layer.attention.o_proj.weight.T, out)


def test_no_token_attends_to_its_future_or_to_what_was_forgotten(model):
    with torch.no_grad():
        mems = after(model, is_kept=False)
    for weight in model.attention_weights(text(), mems):
        assert not weight.requires_grad
        for t in range(5):
            assert (weight[:, :, t, 4 + t + 1 :] == 0).all()
            assert (weight[1, :, t, :4] == 0).all()
            assert (weight[:, :, t, 4 + t] > 0).all()
            if model.config.attn_len is not None:
                assert (weight[:, :, t, : max(4 + t + 1 - model.config.attn_len, 0)] == 0).all()


def test_other_lengths_may_be_asked_for():
    model = TransformerXL(CONFIG).eval()
    first, *_ = model.attention_weights(text(), attn_len=1)
    torch.testing.assert_close(first, torch.eye(5).expand(2, 2, 5, 5))
    one, other = (model.attention_weights(torch.arange(5)[None], clamp_len=n) for n in (1, 2))
    assert not torch.equal(one[0], other[0])


def test_what_another_thread_reads_meanwhile_is_not_looked_at():
    model = TransformerXL(CONFIG).eval()
    segment, other = text(), text(T=3)
    expected, expected_other = model.attention_weights(segment), model.attention_weights(other)
    found = []

    def read_other(*_):
        hook.remove()
        thread = Thread(target=lambda: found.append(model.attention_weights(other)))
        thread.start()
        thread.join()

    hook = model.layers[1].register_forward_hook(read_other)
    found.insert(0, model.attention_weights(segment))
    for weights, right in zip(found, (expected, expected_other), strict=True):
        assert len(weights) == len(right)
        assert all(map(torch.equal, weights, right))


def test_a_model_without_attention_says_so(of_kind):
    model = build_model(of_kind(CONFIG, "lstm"))
    with pytest.raises(ValueError, match="a model of kind='lstm' has no attention"):
        model.attention_weights(text())
