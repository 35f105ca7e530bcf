import math

import numpy as np
import pytest

from transformer_xl.studies.recl import relative_effective_context_length

CONTEXTS = (100, 200, 300, 400)


def test_a_known_answer() -> None:
    # Two tokens, two models; worked out by hand.
    losses = np.array(
        [
            [[2.0, 1.0], [1.0, 1.0], [1.0, 0.5], [1.0, 0.5]],
            [[3.0, 0.8], [3.0, 0.8], [2.9, 0.8], [0.1, 0.1]],
        ]
    )
    first, second = relative_effective_context_length(losses, CONTEXTS)
    # b(100) = (2, .8); f(100, 100) = 1.4; of the first f(100, 200) = (1 + .8) / 2 = .9
    assert first.gains[0] == pytest.approx(1 - math.exp(0.9 - 1.4))
    assert first.falls[0] == pytest.approx(math.exp(1.4) - math.exp(0.9))
    # b(200) = (1, .8); of the first f(200, 300) = (1 + .5) / 2
    assert first.gains[1] == pytest.approx(1 - math.exp(0.75 - 0.9))
    assert first.gains[2] == 0
    assert (first.length, first.is_bound) == (300, False)
    # The second gains nothing over the baseline until the last step, which comes too late.
    assert second.gains[:2] == (0, 0)
    assert second.gains[2] > 0.01
    assert (second.length, second.is_bound) == (100, False)


def test_only_the_hardest_tokens_count() -> None:
    # The hard token gains once, the easy one to the end.
    losses = np.array([[[9.0, 1.0], [8.0, 0.9], [8.0, 0.8], [8.0, 0.7]]])
    (hard,) = relative_effective_context_length(losses, CONTEXTS, top=0.5)
    (both,) = relative_effective_context_length(losses, CONTEXTS)
    assert hard.length == 200
    assert (both.length, both.is_bound) == (400, True)


def test_a_weak_model_cannot_look_far_by_beginning_low() -> None:
    strong = np.full((4, 5), 1.0)
    weak = np.linspace(6.0, 3.0, 4)[:, None] + np.zeros(5)
    (alone,) = relative_effective_context_length(weak[None], CONTEXTS)
    _, beside = relative_effective_context_length(np.stack([strong, weak]), CONTEXTS)
    assert alone.is_bound
    assert beside.length == 100


def test_the_order_of_models_changes_nothing() -> None:
    losses = np.random.default_rng(0).uniform(1, 3, (3, 4, 50)).cumsum(2)[:, ::-1]
    found = relative_effective_context_length(losses, CONTEXTS, top=0.5)
    turned = relative_effective_context_length(losses[[2, 0, 1]], CONTEXTS, top=0.5)
    assert [found[2], found[0], found[1]] == turned


def test_what_does_not_fit_is_named() -> None:
    losses = np.ones((1, 4, 3))
    with pytest.raises(ValueError, match="no probability at all"):
        relative_effective_context_length(losses * np.inf, CONTEXTS)
