"""Repetition noise replaces spans of the input by repetitions of what stands before them."""

import numpy as np
import pytest
import torch

from transformer_xl.config.distributed import World
from transformer_xl.data import prepare
from transformer_xl.train import Network, loop
from transformer_xl.train.beginning import fit_to_corpus, new_state
from transformer_xl.train.repetitions import with_repetitions

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = torch.arange(64 * 128).view(64, 128)


def test_every_replaced_token_repeats_one_that_stood_before_it_in_its_stream():
    found = with_repetitions(TOKENS, 0.1, np.random.default_rng(1))
    changed = found != TOKENS
    distance = TOKENS - found
    assert changed.any()
    assert (distance[changed] >= 1).all()
    # Never from another stream.
    assert (distance[changed] <= torch.arange(128).expand(64, -1)[changed]).all()


def test_a_span_repeats_a_sequence_once_to_four_times():
    seen = set()
    for seed in range(900):
        found = with_repetitions(TOKENS[:1], 0.02, np.random.default_rng(seed))[0]
        (places,) = torch.nonzero(found != TOKENS[0], as_tuple=True)
        if not len(places):
            continue
        start, end = int(places[0]), int(places[-1]) + 1
        periods = [
            p
            for p in range(1, min(start, 32) + 1)
            if all(found[i] == found[i - p] for i in range(start, end))
        ]
        # Two spans in one stream need not be one repetition.
        if periods:
            seen.add((periods[0], end - start))
    assert {period for period, _ in seen} >= set(range(1, 8))
    assert max(period for period, _ in seen) > 16
    assert all(length <= 4 * period for period, length in seen)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("length", [16, 32, 64, 128])
@pytest.mark.parametrize("n_before", [0, 3, 32])
def test_the_share_is_what_is_asked_for(share, length, n_before):
    text = torch.arange(256 * 160).view(256, 160)
    before, tokens = text[:, :n_before], text[:, n_before : n_before + length]
    shares = [
        (with_repetitions(tokens, share, np.random.default_rng(seed), before) != tokens)
        .double()
        .mean()
        for seed in range(40)
    ]
    # Places in the middle are covered more often than the first ones.
    assert 0.85 * share < float(torch.stack(shares).mean()) < 1.1 * share


def test_a_segment_repeats_the_tokens_before_it():
    before, tokens = TOKENS[:, :32], TOKENS[:, 32:64]
    first, distances = 0, set()
    for seed in range(200):
        found = with_repetitions(tokens, 0.5, np.random.default_rng(seed), before)
        first += int((found[:, 0] != tokens[:, 0]).sum())
        distances |= set((tokens - found)[:, 0].tolist())
    assert distances == set(range(33))
    assert first > 0.05 * 200 * len(tokens)


def test_short_segments_are_possible():
    one = torch.zeros(4, 1, dtype=torch.int64)
    assert torch.equal(with_repetitions(one, 0.9, np.random.default_rng(1)), one)
    two = torch.arange(8).view(4, 2)
    for seed in range(50):
        found = with_repetitions(two, 0.5, np.random.default_rng(seed))
        assert torch.equal(found[:, 0], two[:, 0])


def losses(recipe, **settings):
    config = recipe(train=settings)
    corpus = prepare(config.data)
    config = fit_to_corpus(config, corpus)
    state = new_state(config, corpus, torch.device("cpu"), World())
    network = Network(state.model, config.train, state.world)
    return [float(loop.train_step(config, state, network).loss) for _ in range(4)]


def test_noise_is_a_function_of_seed_and_step_and_off_by_default(toy_recipe):
    plain = losses(toy_recipe)
    assert losses(toy_recipe, repetition_noise=0.0) == plain
    noisy = losses(toy_recipe, repetition_noise=0.3)
    assert noisy != plain
    assert losses(toy_recipe, repetition_noise=0.3) == noisy
    assert losses(toy_recipe, repetition_noise=0.3, accumulate=2) == pytest.approx(noisy, rel=1e-4)
