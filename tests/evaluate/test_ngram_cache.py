"""An n-gram cache gives probabilities, of the counts in the text before, whatever is batched."""

import copy
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.config import EvalConfig
from transformer_xl.data import Recordings
from transformer_xl.errors import InputError
from transformer_xl.inference.evaluate import (
    Dynamic,
    SlidingWindow,
    WithMemory,
    evaluate,
    ngram_cache,
    plan_ngram_cache,
)
from transformer_xl.inference.evaluate.ngram_cache import (
    CONTEXT_LENGTHS,
    FIRST_WEIGHT,
    NGramCache,
    NGramMixture,
    SortedContexts,
)
from transformer_xl.model import MemoryLimitError, build_model

V = 5


@pytest.fixture(scope="module")
def repetitive():
    """A text in which contexts of every length occur once, several times and often."""
    draw = np.random.default_rng(3)
    passages = [draw.integers(V, size=40) for _ in range(3)]
    return np.concatenate([passages[i] for i in draw.integers(3, size=25)] + [np.zeros(60, int)])


def test_probabilities_of_all_tokens_sum_to_one(repetitive):
    cache, draw = NGramCache(), np.random.default_rng(0)
    for i, token in enumerate(repetitive[:400].tolist()):
        p = draw.dirichlet(np.ones(V)).tolist()
        if i % 20 == 0:
            assert sum(copy.deepcopy(cache).read(w, p[w]) for w in range(V)) == pytest.approx(1)
        cache.read(token, p[token])


@pytest.mark.parametrize("most_tokens", [None, 50])
def test_the_distribution_is_what_each_token_would_get(repetitive, most_tokens):
    cache, draw = NGramCache(2, most_tokens), np.random.default_rng(0)
    streams = repetitive[:800].reshape(2, -1).T
    for i, (stream, token) in enumerate((n, x) for row in streams for n, x in enumerate(row)):
        p = draw.dirichlet(np.ones(V))
        if i % 20 == 0:
            expected = [copy.deepcopy(cache).read(w, p[w], stream=stream) for w in range(V)]
            assert cache.distribution(p, stream).tolist() == expected
        cache.read(int(token), p[token], stream=stream)


def test_streams_share_their_counts_and_not_their_contexts():
    cache, passage = NGramCache(2), [0, 1, 2, 3, 4]
    for token in passage:
        cache.read(token, 1 / V, stream=0)
    found = [cache.read(token, 1 / V, stream=1) for token in passage]
    assert found[:2] == [1 / V] * 2
    assert min(found[2:]) > 1 / V


@pytest.mark.parametrize("repeats", [False, True])
def test_its_memory_is_bounded(repeats):
    """Beyond its limit it takes no more, whether contexts are new or followed by other tokens."""
    draw, most = np.random.default_rng(0), 2_000
    text = draw.integers(256, size=most).tolist()
    if repeats:
        text = [x for token in text for x in (1, 2, 3, token)]
    cache = NGramCache(most_tokens=most)
    tracemalloc.start()
    for token in text * 4:
        cache.count(token)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < ngram_cache.BYTES * most


def test_it_mixes_the_counts_of_the_text_before(repetitive):
    """The formula of the module, with counts by search, and weights by their definition."""
    text, p = repetitive[:300].tolist(), 0.2
    cache, weights = NGramCache(), {}
    for t, token in enumerate(text):
        expected = p
        for n in [n for n in CONTEXT_LENGTHS if n <= t]:
            context = text[t - n : t]
            followers = [text[i + n] for i in range(t - n) if text[i : i + n] == context]
            if not followers:
                break
            total, different = len(followers), len(set(followers))
            size = total if total < 4 else 2 + math.floor(math.log2(total) + 1)
            kind = n, size, min(different, 4)
            weight, examples = weights.get(kind, (FIRST_WEIGHT, 20))
            share = weight * followers.count(token) / total
            expected = (1 - weight) * expected + share
            weight += (share / expected - weight) / examples
            weights[kind] = min(max(weight, 1 / 4096), 1 - 1 / 4096), min(examples + 1, 128)
        assert cache.read(token, p) == pytest.approx(expected)


def test_counts_of_another_text_are_those_of_a_search(repetitive):
    other, text = repetitive, np.concatenate([repetitive[300:420], np.arange(50) % V])
    found = SortedContexts(other).counts(text)
    for t in range(len(text)):
        for column, n in enumerate(CONTEXT_LENGTHS):
            context = text[t - n : t].tolist()
            followers = [
                other[i + n] for i in range(len(other) - n) if other[i : i + n].tolist() == context
            ]
            expected = (followers.count(text[t]), len(followers)) if n <= t else (0, 0)
            assert tuple(found[t, column]) == expected, (t, n)


def test_probabilities_with_the_counts_of_another_text_sum_to_one(repetitive):
    cache, other = NGramCache(), SortedContexts(repetitive[:500])
    text = repetitive[300:420]
    for t, token in enumerate(text.tolist()):
        if t % 10 == 0:
            total = 0.0
            for w in range(V):
                elsewhere = other.counts(np.append(text[:t], w))[-1].tolist()
                total += copy.deepcopy(cache).read(w, 1 / V, elsewhere)
            assert total == pytest.approx(1)
        cache.read(token, 1 / V, other.counts(text[: t + 1])[-1].tolist())


def nats(text, nll, other=None, scored=None):
    nll = np.full(len(text) - 1, nll)
    is_scored = np.ones(len(nll), bool) if scored is None else scored
    return NGramMixture(other).nats(np.asarray(text), nll, is_scored)


def test_a_text_of_the_training_costs_less_with_its_counts(repetitive):
    other = SortedContexts(repetitive)
    assert nats(repetitive, math.log(V), other) < 0.8 * nats(repetitive, math.log(V))


def test_counts_of_blocks_are_those_of_the_whole(repetitive, monkeypatch):
    other, text = SortedContexts(repetitive[:500]), repetitive[300:]
    whole = nats(text, math.log(V), other)
    monkeypatch.setattr(ngram_cache, "_BLOCK", 37)
    assert nats(text, math.log(V), other) == pytest.approx(whole, rel=1e-12)


def test_a_text_without_a_context_has_no_counts():
    for text in ([1], [1, 2]):
        found = SortedContexts(np.array(text, np.int64)).counts(np.array([1, 2, 3]))
        assert not found.any()
    with pytest.raises(InputError, match="at least 1"):
        SortedContexts(np.array([], np.int64))


def test_tokens_at_the_end_of_their_type_are_counted():
    """Corpora store tokens in the smallest type that holds them."""
    text = [65535, 3, 65535, 3, 65535, 3, 5]
    expected = SortedContexts(np.array(text, np.int64)).counts(np.array(text, np.int64))
    assert expected.any()
    small = np.array(text, np.uint16)
    assert np.array_equal(SortedContexts(small).counts(small), expected)


def test_what_is_read_again_costs_little():
    passage = np.random.default_rng(1).integers(1000, size=200)
    once, again = (nats(np.tile(passage, n), math.log(1000)) for n in (4, 5))
    assert (again - once) / 200 < 0.2


def test_what_the_model_excludes_stays_possible():
    assert np.isfinite(nats(np.arange(30) % 3, 1e6))


def test_a_loss_that_is_no_number_stays_one():
    assert np.isnan(nats(np.arange(30) % 3, math.nan))


def test_tokens_that_do_not_count_are_read_up_to_the_last_that_does():
    passage = np.tile(np.arange(30), 2)
    second = np.arange(59) >= 40
    assert nats(passage, 3.0, scored=second) < 2 * second.sum()
    first = np.arange(59) < 7
    assert nats(passage, 3.0, scored=first) == nats(passage[:8], 3.0)


def test_a_text_whose_counts_exceed_the_memory_is_an_error_before_it_is_read(monkeypatch, model):
    monkeypatch.setattr(ngram_cache, "BYTES", 1 << 60)
    monkeypatch.setattr(type(model), "forward", None)
    with pytest.raises(MemoryLimitError, match=r"the n-gram cache .* evaluate a shorter text"):
        evaluate(model, np.arange(30) % 3, WithMemory(ngram_cache=NGramMixture()))
    with pytest.raises(MemoryLimitError, match="the n-gram cache"):
        plan_ngram_cache(EvalConfig(ngram_cache="training"), 30, lambda: None)


@pytest.mark.parametrize("lengths", [{"segment_len": 7}, {"batch_size": 4}])
def test_segments_and_batches_do_not_change_what_it_has_read(model, text, lengths):
    text, model = text % 3, model.double()
    whole = evaluate(model, text, WithMemory(ngram_cache=NGramMixture(), mem_len=len(text)))
    parts = evaluate(
        model, text, WithMemory(ngram_cache=NGramMixture(), mem_len=len(text), **lengths)
    )
    assert parts.nll_with_cache == pytest.approx(whole.nll_with_cache, rel=1e-9)
    assert whole.nll_with_cache < whole.nll


WAYS = [
    WithMemory(segment_len=8),
    SlidingWindow(window=5),
    Dynamic(rule="sgd", lr=0.1, segment_len=8),
]


@pytest.mark.parametrize("how", WAYS, ids=lambda how: type(how).__name__)
def test_the_loss_of_the_model_alone_is_reported_beside_it(model, text, how):
    alone = evaluate(model, text, how)
    mixed = evaluate(model, text, replace(how, ngram_cache=NGramMixture()))
    assert alone.nll_with_cache is None
    assert mixed.nll == pytest.approx(alone.nll, rel=1e-6)
    assert mixed.nll_with_cache != mixed.nll


def test_completions_alone_count(tiny_config, text):
    torch.manual_seed(0)
    config = replace(tiny_config, completion_at=1, reset_at=2)
    model = build_model(config).eval()
    text = np.array(text.tolist()[:60])
    text[[5, 30]], text[[15, 45]] = 1, 2
    alone, mixed = (
        evaluate(model, text, WithMemory(ngram_cache=on, segment_len=60))
        for on in (None, NGramMixture())
    )
    assert mixed.tokens == alone.tokens < 59
    assert mixed.nll == pytest.approx(alone.nll)
    assert mixed.nll_with_cache > 0


def test_counts_of_the_training_text_are_mixed_in(model, text):
    read = evaluate(model, text, WithMemory(ngram_cache=NGramMixture()))
    both = evaluate(model, text, WithMemory(ngram_cache=NGramMixture(SortedContexts(text))))
    assert both.nll_with_cache < read.nll_with_cache
    assert both.nll == read.nll
    assert plan_ngram_cache(EvalConfig(), 9, lambda: text) is None
    assert plan_ngram_cache(EvalConfig(ngram_cache="read"), 9, lambda: text) == NGramMixture()
    planned = plan_ngram_cache(EvalConfig(ngram_cache="training"), 9, lambda: text)
    assert isinstance(planned.other, SortedContexts)


def test_recordings_have_none(tiny_config):
    config = replace(tiny_config, vocab_size=3, n_features=2)
    inputs, targets = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
    recordings = Recordings(inputs, targets, np.zeros(4, bool))
    with pytest.raises(InputError, match="ngram_cache is for text"):
        evaluate(build_model(config), recordings, WithMemory(ngram_cache=NGramMixture()))
