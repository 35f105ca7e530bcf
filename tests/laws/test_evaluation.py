"""What an evaluation measures does not depend on how it is carried out."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from transformer_xl.inference.evaluate import WithMemory, evaluate, score
from transformer_xl.model import build_model
from transformer_xl.model.reading import read, read_all
from transformer_xl.model.segment import Lengths


@pytest.fixture
def text():
    return np.random.default_rng(0).integers(0, 23, 31).astype(np.uint16)


def with_layers(model, n_layer):
    own = (*model.config.layer_attn_lens, 5)[:n_layer] if model.config.layer_attn_lens else ()
    layers = {"n_layer": n_layer, "layer_attn_lens": own}
    # Of one layer, there is no other to mix the embedding into.
    layers["embedding_residual"] = model.config.embedding_residual and n_layer > 1
    return build_model(replace(model.config, **layers)).double().eval()


@torch.no_grad()
def bigram_nll(model, text):
    """What each token costs a model that knows the one before it alone."""
    tokens = torch.from_numpy(text.astype(np.int64))
    return model(tokens[:-1, None], targets=tokens[1:, None], mem_len=0).nll[:, 0]


def test_every_token_but_the_first_is_counted_once(paper, text):
    for n, batch_size in product((2, 3, 17, 31), (1, 2, 7, 30, 100)):
        result = evaluate(
            paper, text[:n], WithMemory(segment_len=1, mem_len=0, batch_size=batch_size)
        )
        assert result.tokens == n - 1
        expected = bigram_nll(paper, text[:n]).mean().item()
        assert result.nll == pytest.approx(expected, rel=1e-12), (n, batch_size)


def test_one_stream_does_not_depend_on_the_segments(model, text):
    # With a key offset, a key has a part of the position before it.
    for lengths in ({"mem_len": 8 + model.config.key_offset, "attn_len": 9}, {"mem_len": 31}):
        if model.config.start_memory == "zeros" and "attn_len" not in lengths:
            # How many zeros a token sees depends on where its segment begins.
            continue
        # The first is longer than the text.
        first, *others = (
            evaluate(model, text, WithMemory(segment_len=T, **lengths)).nll for T in (100, 30, 7, 1)
        )
        assert others == pytest.approx([first] * 3, abs=1e-6), lengths


def test_an_evaluation_is_the_mean_of_the_scores(model, text):
    scores = list(score(model, text.tolist(), segment_len=7, mem_len=5))
    assert scores[0] is None
    assert len(scores) == len(text)
    expected = evaluate(model, text, WithMemory(segment_len=7, mem_len=5)).nll
    assert -np.mean(scores[1:]) == pytest.approx(expected, rel=1e-12)


def test_streams_warmed_by_all_that_matters_say_what_one_stream_says(model, text):
    if model.config.input_recurrence:
        pytest.skip("the recurrence of the inputs has no limit")
    for n_layer in (1, 3):
        # Each layer hands on attn_len - 1 = 3 positions, or 4 with a key offset; what is warmed up
        # holds all of them.
        deep = with_layers(model, n_layer)
        mem_len = (3 + deep.config.key_offset) * n_layer
        lengths = {"segment_len": 6, "mem_len": mem_len, "attn_len": 4}
        one = evaluate(deep, text, WithMemory(**lengths)).nll
        several = evaluate(deep, text, WithMemory(**lengths, batch_size=3)).nll
        assert several == pytest.approx(one, rel=1e-12), n_layer


@torch.no_grad()
def nll_of_parts(model, text, batch_size, lengths):
    """Read each part alone, after as many tokens before it as the memory holds."""
    tokens, n = torch.from_numpy(text.astype(np.int64))[None], len(text) - 1
    starts = [-(-b * n // batch_size) for b in range(batch_size + 1)]
    found = []
    for start, stop in pairwise(starts):
        first, mems = stop - starts[1], model.start_memory(1, lengths.mem_len)
        mems = read_all(model, tokens[:, max(first - lengths.mem_len, 0) : first], lengths, mems)
        given, targets = tokens[:, first:stop], tokens[:, first + 1 : stop + 1]
        part = torch.cat([x.nll[0] for x in read(model, given, lengths, mems, targets=targets)])
        found.append(part[start - first :])
    return torch.cat(found).mean().item()


def test_each_stream_is_warmed_by_a_memory_of_the_text_before_it(model, turn, text):
    mem_lens = (4, 18, 40, 4, 18)[turn % 3 :][:3]
    for batch_size, mem_len in zip((3, 4, 7), mem_lens, strict=True):
        lengths = Lengths.of(model.config, segment_len=5, mem_len=mem_len)
        found = evaluate(
            model, text, WithMemory(segment_len=5, mem_len=mem_len, batch_size=batch_size)
        )
        expected = nll_of_parts(model, text, batch_size, lengths)
        assert found.nll == pytest.approx(expected, rel=1e-12), (batch_size, mem_len)
