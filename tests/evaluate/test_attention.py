"""Shares of tokens are those that the attention gives them, layer by layer and through memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.inference.evaluate.rollout import attended
from transformer_xl.model import TransformerXL, build_model

KINDS = {
    "relative": {},
    "learned relative": {"attn_type": 1, "n_positions": 9},
    "sinusoids": {"attn_type": 2},
    "enhanced recurrence": {"enhanced_recurrence": True},
}


@pytest.fixture(params=KINDS)
def any_model(tiny_config, request):
    return TransformerXL(replace(tiny_config, init_std=0.3, **KINDS[request.param])).eval()


def test_shares_add_up_to_all(any_model, text):
    for segment_len in (4, 7, 59, 100):
        seen = attended(any_model, text, segment_len=segment_len)
        for shares in (seen.direct, seen.through, seen.by_distance):
            assert shares.sum(1).tolist() == pytest.approx([1.0] * 3, abs=1e-5), segment_len
            assert shares.min() >= 0


def test_what_has_no_share_has_no_influence_and_what_has_one_has_some(any_model, text):
    """The shares against the model itself: change a token, and see what it predicts."""
    model, n = any_model.double(), len(text) - 1
    seen = attended(model, text, segment_len=4, mem_len=5)
    # In each row another token is changed, in the last one none.
    rows = torch.from_numpy(text).repeat(seen.place + 1, 1)
    for place in range(seen.place):
        rows[place, place] = (rows[place, place] + 1) % 31
    mems = model.start_memory(len(rows), 5)
    starts = [0, *range(n % 4, n, 4)] if n % 4 else [*range(0, n, 4)]
    with torch.no_grad():
        for start, stop in zip(starts, [*starts[1:], n], strict=True):
            x, mems = model.read(rows[:, start:stop], mems, mem_len=5)
    hidden = x[:, seen.place - 1 - starts[-1]]
    moved = (hidden - hidden[-1]).abs().amax(1) > 1e-13
    assert moved[:-1].tolist() == (seen.through[-1] > 0).tolist()


def test_one_layer_and_one_segment_is_the_table_of_weights(tiny_config, text):
    model = TransformerXL(replace(tiny_config, n_layer=1, init_std=0.3)).eval()
    seen = attended(model, text[:20], segment_len=30)
    tokens = torch.from_numpy(text[None, :19])
    row = model.attention_weights(tokens)[0][0].mean(0)[seen.place - 1].numpy()
    own = np.eye(19)[seen.place - 1]
    np.testing.assert_allclose(seen.direct[0], row[: seen.place], atol=1e-6)
    np.testing.assert_allclose(seen.through[0], ((row + own) / 2)[: seen.place], atol=1e-6)


def test_the_token_is_the_one_that_the_memory_helps_most(model, text):
    seen = attended(model, text, segment_len=6, mem_len=9)
    with torch.no_grad():
        last = torch.from_numpy(text[None, -7:])
        _, mems = model.read(torch.from_numpy(text[None, :-7]), None, mem_len=9)
        alone, known = (
            model(last[:, :-1], memory, last[:, 1:], mem_len=9).nll[0] for memory in (None, mems)
        )
    best = 3 + int((alone - known)[3:].argmax())
    assert seen.place == 60 - 6 + best
    assert seen.nll == pytest.approx(known[best].item(), rel=1e-4)
    assert seen.nll_without_memory == pytest.approx(alone[best].item(), rel=1e-4)


def test_zeros_at_the_start_are_nobodys_share(tiny_config, text):
    model = TransformerXL(replace(tiny_config, init_std=0.3, start_memory="zeros")).eval()
    seen = attended(model, text[:4], segment_len=8, mem_len=20)
    assert (seen.direct.sum(1) < 0.99).all()


def test_a_model_without_attention_is_refused(tiny_config, of_kind, text):
    model = build_model(of_kind(tiny_config, "lstm", mem_len=0))
    with pytest.raises(ValueError, match="has no attention to look at"):
        attended(model, text)
    assert model.training
