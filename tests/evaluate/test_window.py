"""A sliding window says what a forward pass of its own says for each token."""

from dataclasses import replace

import pytest
import torch

from transformer_xl.inference.evaluate import Passage, SlidingWindow, WithMemory, evaluate
from transformer_xl.model import build_model

KINDS = {
    "relative": {},
    "learned relative": {"attn_type": 1, "n_positions": 9},
    "sinusoids": {"attn_type": 2},
    "learned absolute": {"attn_type": 3, "n_positions": 7},
    "zeros at the start": {"start_memory": "zeros"},
    "adaptive": {"cutoffs": (6, 14), "div_val": 2},
    "LSTM": {"kind": "lstm", "n_head": 8, "d_inner": 2048, "mem_len": 0},
}


@pytest.fixture(params=KINDS)
def any_model(tiny_config, request):
    config = replace(tiny_config, init_std=0.3, **KINDS[request.param])
    return build_model(config).double().eval()


@torch.no_grad()
def one_by_one(model, text, window, **lengths):
    found = []
    for i in range(1, len(text)):
        seen = torch.from_numpy(text[None, max(i - window, 0) : i])
        log_probs = model(seen, mem_len=0, ext_len=0, **lengths).log_probs
        found.append(-log_probs[0, -1, text[i]].item())
    return found


@torch.no_grad()
def by_window(model, text, window, batch_size, **lengths):
    how = SlidingWindow(window=window, batch_size=batch_size, **lengths)
    passage = Passage.of(text, model.config)
    return torch.cat([nll[0] for nll, _ in how.losses(model, passage, how.lengths(model.config))])


def test_each_token_costs_what_a_pass_of_its_own_says(any_model, text):
    text = text[:12]
    for window in (1, 5, 11, 200):
        expected = one_by_one(any_model, text, window)
        for batch_size in (1, 4, 100):
            found = by_window(any_model, text, window, batch_size)
            assert found.tolist() == pytest.approx(expected, rel=1e-9), (window, batch_size)


def test_lengths_of_attention_hold_within_the_window(model, text):
    model, text = model.double(), text[:20]
    usual = one_by_one(model, text, 6)
    for lengths in ({"attn_len": 2}, {"clamp_len": 1}):
        found = by_window(model, text, 6, 8, **lengths)
        assert found.tolist() == pytest.approx(one_by_one(model, text, 6, **lengths), rel=1e-9)
        assert found.tolist() != pytest.approx(usual, rel=1e-3)


def test_an_evaluation_by_windows_is_the_mean_of_them(model, text):
    result = evaluate(model, text, SlidingWindow(window=6, batch_size=7))
    expected = by_window(model, text, 6, 7).double().mean().item()
    assert result.nll == pytest.approx(expected, rel=1e-12)
    assert (result.tokens, result.window, result.segment_len, result.mem_len) == (59, 6, 6, 0)
    assert evaluate(model, text).window is None


def test_a_window_of_all_the_text_is_a_memory_of_all_the_text(model, text):
    model = model.double()
    windowed = evaluate(model, text, SlidingWindow(window=60, batch_size=8)).nll
    remembered = evaluate(model, text, WithMemory(segment_len=7, mem_len=60)).nll
    assert windowed == pytest.approx(remembered, rel=1e-12)
