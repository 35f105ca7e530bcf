"""N-grams: probabilities sum to one and are those of the definition, written out for each order."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from transformer_xl.errors import InputError
from transformer_xl.studies.baselines import KneserNey, unigram_nll
from transformer_xl.studies.baselines.kneser_ney import discounts_of

V = 6


def _text(seed: int, n: int, size: int = V) -> np.ndarray:
    """Return a text that is not uniform: each token depends on the two before it."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(size, 0.4), (size, size))
    text = [0, 1]
    for _ in range(n - 2):
        text.append(int(rng.choice(size, p=table[text[-2], text[-1]])))
    return np.array(text)


def _by_definition(training: list[int], history: tuple[int, ...], token: int, order: int) -> float:
    """Return the probability of a token as Chen and Goodman define it, by dictionaries."""

    def counts_of(length: int, is_highest: bool) -> Counter[tuple[int, ...]]:
        starts = range(len(training) - length + 1)
        if is_highest:
            return Counter(tuple(training[n : n + length]) for n in starts)
        before = defaultdict(set)
        for n in starts:
            before[tuple(training[n : n + length])].add(training[n - 1] if n else "start")
        return Counter({key: len(value) for key, value in before.items()})

    p = 1 / V
    for length in range(1, order + 1):
        if length - 1 > len(history):
            break
        context = history[len(history) - length + 1 :]
        counts = counts_of(length, length == order)
        discounts = discounts_of(np.array([*counts.values()]))
        after = {key[-1]: n for key, n in counts.items() if key[:-1] == context}
        if not after:
            break
        total = sum(after.values())
        left = sum(discounts[min(n, 3)] for n in after.values()) / total
        n = after.get(token, 0)
        p = (n - discounts[min(n, 3)]) / total + left * p
    return p


def test_probabilities_sum_to_one_after_every_context():
    for order in (1, 2, 3, 5, 8):
        model = KneserNey(_text(1, 400), V, order=order)
        held_out = _text(2, 60)
        for end in (0, 1, 3, 20, 59):
            texts = [np.append(held_out[:end], token) for token in range(V)]
            p = [math.exp(-model.nll(text)[-1]) for text in texts]
            assert sum(p) == pytest.approx(1, abs=1e-12), order
            assert min(p) > 0, order


def test_words_that_the_training_text_lacks_have_their_share():
    model = KneserNey(np.array([0, 1, 2, 0, 1, 2, 2, 1]), 50, order=3)
    p = np.exp([-model.nll(np.array([0, 1, token]))[-1] for token in range(50)])
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert p.min() > 0
    assert p[2] == p.max()


def test_the_loss_is_that_of_the_definition():
    for order in (1, 2, 3, 4):
        training, text = _text(3, 300), _text(4, 40)
        found = KneserNey(training, V, order=4).nll(text, order=order)
        for n in range(len(text)):
            # As a text begins, only shorter contexts are known.
            history = tuple(text[max(n - order + 1, 0) : n])
            p = _by_definition(training.tolist(), history, text[n], order)
            assert found[n] == pytest.approx(-math.log(p), rel=1e-9), order


def test_discounts_are_those_of_the_counts_of_counts():
    counts = np.repeat([1, 2, 3, 4, 7], [40, 20, 10, 5, 3])
    y = 40 / (40 + 2 * 20)
    wanted = [0, 1 - 2 * y * 20 / 40, 2 - 3 * y * 10 / 20, 3 - 4 * y * 5 / 10]
    assert discounts_of(counts) == pytest.approx(wanted)
    assert discounts_of(np.array([9, 9])).tolist() == [0, 0.5, 1, 1.5]


def test_the_first_order_is_the_closed_form():
    training = np.repeat(np.arange(5), [1, 2, 3, 4, 90])
    text = np.array([4, 0, 5])
    # Of the counts of counts each is one: Y = 1/3, and the discounts are 1/3, 1 and 5/3.
    taken = (1 / 3 + 1 + 3 * 5 / 3) / 100
    wanted = [
        -math.log((90 - 5 / 3) / 100 + taken / V),
        -math.log((1 - 1 / 3) / 100 + taken / V),
        -math.log(taken / V),
    ]
    assert KneserNey(training, V, order=3).nll(text, order=1) == pytest.approx(wanted)


def test_frequencies_with_one_added():
    found = unigram_nll(np.array([0, 0, 2]), np.array([0, 1, 2]), 3)
    assert found == pytest.approx([-math.log(3 / 6), -math.log(1 / 6), -math.log(2 / 6)])


def test_the_order_of_the_source_is_found():
    text = _text(5, 12_000)
    model, held_out = KneserNey(text[:10_000], V, order=6), text[10_000:]
    losses = [model.nll(held_out, order=order).mean() for order in range(1, 7)]
    assert model.best_order(held_out) == 3 == 1 + int(np.argmin(losses))


def test_a_text_shorter_than_the_order():
    model = KneserNey(np.array([1, 2]), 3, order=5)
    assert model.order == 2
    assert np.isfinite(model.nll(np.array([0, 1, 2, 1]))).all()
    assert model.nll(np.array([], dtype=int)).shape == (0,)


def test_a_text_without_tokens_is_refused():
    with pytest.raises(ValueError, match="a training text of 0 tokens"):
        KneserNey(np.array([], dtype=int), 3)


def test_tokens_outside_the_vocabulary_are_refused():
    model = KneserNey(np.array([1, 2, 0]), 3, order=2)
    for token in (3, -1):
        message = f"token {token} is not in the vocabulary of 3"
        with pytest.raises(InputError, match=message):
            model.nll(np.array([0, token]))
        with pytest.raises(InputError, match=message):
            KneserNey(np.array([token]), 3)
