"""What is coded does not depend on the last digits of what was computed."""

import math

import numpy as np
import pytest
import torch

from transformer_xl.apps.compress import arithmetic
from transformer_xl.apps.compress.arithmetic import MARGIN, SHIFTS, STEPS

_STEP = math.log(2) / STEPS


def _some_log_probs(n=200, V=50):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, V, dtype=torch.float64, generator=generator) * 4
    return x.log_softmax(-1)


def test_rounding_never_moves_a_probability_on_the_grid():
    log_probs = _some_log_probs()
    # The worst there is: half of all numbers on a border of the grid as it lies at first.
    on_border = (log_probs / _STEP).round() * _STEP
    log_probs[::2] = on_border[::2]
    shift = arithmetic.safe_shift(log_probs)
    steps = arithmetic.on_grid(log_probs, shift)
    assert shift != 0
    for error in (0.5, -0.5):
        moved = log_probs + error * MARGIN * _STEP
        assert torch.equal(arithmetic.on_grid(moved, shift), steps)
    # Without the shift it would have.
    down, up = (arithmetic.on_grid(log_probs + e * MARGIN * _STEP, 0) for e in (0.5, -0.5))
    assert not torch.equal(down, up)


def test_a_number_near_every_border_is_refused():
    every = -(torch.arange(SHIFTS, dtype=torch.float64) / SHIFTS + 7) * _STEP
    with pytest.raises(ValueError, match="fewer streams"):
        arithmetic.safe_shift(every)
    assert arithmetic.safe_shift(every[1:]) == 0


def test_the_grid_costs_next_to_nothing():
    log_probs = _some_log_probs(2000)
    coded = arithmetic.weights(arithmetic.on_grid(log_probs, arithmetic.safe_shift(log_probs)))
    coded /= coded.sum(1, keepdims=True)
    p = log_probs.exp().numpy()
    divergence = (p * (log_probs.numpy() / math.log(2) - np.log2(coded))).sum(1).mean()
    assert 0 < divergence < 2 * math.log(2) / 2 / (12 * STEPS**2)


def test_what_was_written_is_read():
    draw = np.random.default_rng(0)
    probabilities = draw.random((300, 40)) ** 8 * 2.0**40
    symbols = draw.integers(0, 40, 300).astype(np.int32)
    chosen = draw.random(7) < 0.5
    before = draw.random(7) < 0.5
    written = [
        ([63], arithmetic.SHIFT_PROBABILITIES),
        (symbols, probabilities),
        (chosen, arithmetic.choice_probabilities(before)),
        ([0xDE, 0xAD, 0xBE, 0xEF], arithmetic.CHECK_PROBABILITIES),
    ]
    encoder = arithmetic.Encoder()
    for given, distributions in written:
        encoder.put(given, distributions)
    decoder = arithmetic.Decoder(encoder.finish())
    for given, distributions in written:
        assert np.array_equal(decoder.get(distributions), given)


def test_what_cannot_have_been_written_is_said():
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        arithmetic.Decoder(b"12345")
    decoder = arithmetic.Decoder(b"\xff" * 64)
    with pytest.raises(ValueError, match="code is invalid"):
        decoder.get(np.ones((8, 3)))


def test_a_symbol_costs_at_least_what_is_claimed():
    sure = np.full((20_000, 256), 1e-30)
    sure[:, 7] = 1.0
    encoder = arithmetic.Encoder()
    encoder.put(np.full(20_000, 7, dtype=np.int32), sure)
    n_bits = 8 * len(encoder.finish())
    assert n_bits + 64 >= -20_000 * math.log2(1 - 255 * 2.0**-24) > 0
