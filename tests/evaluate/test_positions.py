"""Losses by place add up to the evaluation, and are those of the places they name."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from transformer_xl.inference.evaluate import (
    WithMemory,
    evaluate,
    loss_from_start,
    loss_in_segment,
    score,
    spans,
)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("mem_len", [0, 9])
def test_places_in_the_segment_hold_all_that_an_evaluation_holds(model, text, batch_size, mem_len):
    settings = {"segment_len": 7, "mem_len": mem_len, "batch_size": batch_size}
    found = loss_in_segment(model, text, **settings)
    n, parts = len(text) - 1, min(batch_size, len(text) - 1)
    ends = [-(-b * n // parts) for b in range(parts + 1)]
    longest = ends[1]
    # A part that is shorter than the first begins a place later.
    places = [
        (i + longest - (stop - start)) % 7
        for start, stop in pairwise(ends)
        for i in range(stop - start)
    ]
    counts = np.bincount(places, minlength=len(found))
    expected = evaluate(model, text, WithMemory(**settings)).nll
    assert (found * counts).sum() / n == pytest.approx(expected, rel=1e-6)


def test_one_stream_has_the_scores_of_its_places(model, text):
    scores = -np.array([*score(model, text.tolist(), segment_len=7, mem_len=9)][1:])
    found = loss_in_segment(model, text, segment_len=7, mem_len=9)
    expected = [scores[place::7].mean() for place in range(7)]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_text_shorter_than_a_segment_has_no_later_places(model, text):
    assert len(loss_in_segment(model, text[:5], segment_len=7)) == 4


def test_each_piece_begins_without_memory(model, text):
    model = model.double()
    pieces = [text[start : start + 14] for start in range(0, 59 - 12, 13)]
    assert len(pieces) == 4
    expected = np.mean([[*score(model, x.tolist(), mem_len=13)][1:] for x in pieces], axis=0)
    for segment_len, batch_size in product((1, 4, 13, 50), (1, 2, 100)):
        lengths = {"segment_len": segment_len, "mem_len": 13, "batch_size": batch_size}
        found = loss_from_start(model, text, length=13, **lengths)
        assert found.tolist() == pytest.approx((-expected).tolist(), rel=1e-9), lengths


def test_the_first_token_is_predicted_from_one_alone(model, text):
    with torch.no_grad():
        alone = model(torch.from_numpy(text[:-1, None]), targets=torch.from_numpy(text[1:, None]))
    found = loss_from_start(model, text, length=1)
    assert found.tolist() == pytest.approx([alone.nll.mean().item()], rel=1e-5)


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1000])
def test_spans_cover_every_place_once_and_keep_the_mean(n):
    losses = np.random.default_rng(0).random(n)
    found = spans(losses)
    places = [place for x in found for place in range(int(x["first"]), int(x["last"]) + 1)]
    assert places == [*range(1, n + 1)]
    total = sum(x["nll"] * (x["last"] - x["first"] + 1) for x in found)
    assert total == pytest.approx(losses.sum())
    assert len(found) <= 4 * np.log2(n + 1) + 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 0}, "length=0 must be at least 1"),
        ({"length": 60}, "length=60 needs a text of 61 tokens, not 60"),
        ({"length": 5, "segment_len": 0}, "segment_len=0 must be at least 1"),
    ],
    ids=str,
)
def test_lengths_out_of_range_are_named(model, text, settings, message):
    with pytest.raises(ValueError, match=message):
        loss_from_start(model, text, **settings)
