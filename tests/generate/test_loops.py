"""A text that repeats one sequence is found, and ended or kept from repeating it, in every path."""

from collections import Counter

import numpy as np
import pytest
import torch

from transformer_xl.inference.generate import History, Sampling, generate, generate_batch
from transformer_xl.inference.generate.loops import LoopRule

RULE = LoopRule(20)
LOOP = {"loop_min_length": 20}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7], [8, 9], [10], [11]]


@pytest.fixture
def model(model):
    """A model that writes mostly the same token."""
    with torch.no_grad():
        model.softmax.bias[5] = 6
    return model


def slow_period(tokens, rule):
    """The definition, word by word."""
    for p in range(1, rule.max_period + 1):
        length = max(rule.min_length, rule.min_count * p)
        end = list(tokens[-length:])
        if len(end) == length and all(end[i] == end[i - p] for i in range(p, length)):
            return p
    return 0


@pytest.mark.parametrize(
    "rule",
    [
        *((1, 2, 1), (3, 4, 1), (5, 2, 4), (9, 3, 40)),
        *((24, 4, 30), (24, 4, 12), (12, 5, 201), (40, 2, 7)),
    ],
)
def test_loops_of_every_period_are_found_and_no_others(rule):
    rule, numbers, found = LoopRule(*rule[::-1]), np.random.default_rng(1), set()
    for period in range(1, rule.max_period + 3):
        pattern = numbers.integers(0, 3, period)
        length = max(rule.min_length, rule.min_count * period)
        text = np.concatenate([numbers.integers(0, 3, 9), np.resize(pattern, length)])
        text = text.astype(np.int32)
        for n in {*range(max(len(text) - 20, 0), len(text) + 1), 0, 1, 2, 3, length // 2}:
            assert rule.period(text[:n]) == slow_period(text[:n], rule)
        found.add(rule.period(text))
        changed = text.copy()
        changed[-1 - period // 2] += 3
        assert rule.period(changed) == slow_period(changed, rule)
    assert len(found) > min(rule.max_period, 8)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_token_that_would_continue_a_loop_is_excluded(model, temperature):
    sampling = Sampling(temperature=temperature, on_loop="break", **LOOP)
    text = [*generate(model, [1, 2, 3], sampling, length=300, seed=3)]
    assert len(text) == 300
    looping = [n for n in range(20, len(text)) if slow_period(text[:n], RULE)]
    assert looping
    assert all(text[n] != text[n - slow_period(text[:n], RULE)] for n in looping)


@pytest.mark.parametrize("bias", [pytest.param(6, marks=pytest.mark.slow), 30])
def test_a_model_that_goes_on_with_a_broken_loop_is_kept_from_it(model, bias):
    with torch.no_grad():
        model.softmax.bias[5] = bias
    text = [*generate(model, [5], length=1000, sampling=Sampling(temperature=0, on_loop="break"))]
    assert text[:200] == [5] * 200
    # At first half of the 200 tokens count as a loop, then a quarter, and so on.
    assert Counter(text[200:])[5] < 0.7 * len(text[200:])
    assert Counter(text[500:])[5] < 0.6 * len(text[500:])


def test_after_a_loop_was_broken_shorter_ones_are_found_until_the_text_is_free_of_it():
    history = History([7] * 9)
    lengths = []
    for n in range(150):
        if n in (20, 30, 35):
            history.add_break()
            history.add_break()
        rule = RULE.after_breaks(history)
        lengths.append(rule.min_length)
        assert rule.min_count == (4 if rule.min_length == 20 else 2)
        history.append(n)
    assert lengths == [20] * 21 + [10] * 10 + [5] * 5 + [2] * 19 + [20] * 95


def test_only_what_was_sampled_counts_as_a_loop(model):
    sampling = Sampling(temperature=0, on_loop="break", **LOOP)
    for length in (20, 50):
        written = [*generate(model, [5] * 300, sampling, length=length)]
        assert written[:20] == [5] * 20
    assert written[20] != 5


def test_a_text_of_a_batch_loops_as_alone(model):
    how = {"sampling": Sampling(on_loop="break", **LOOP), "length": 60}
    alone = [[*generate(model, prompt, seed=3 + n, **how)] for n, prompt in enumerate(PROMPTS)]
    steps = [*generate_batch(model, PROMPTS, seed=3, **how)]
    assert [[step[n] for step in steps] for n in range(len(PROMPTS))] == alone
