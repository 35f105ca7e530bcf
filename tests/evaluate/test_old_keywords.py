"""The keyword arguments before strategies give the same results, and warnings."""

import re
from dataclasses import asdict

import pytest

from transformer_xl.config.knn import KnnConfig
from transformer_xl.inference.evaluate import (
    Dynamic,
    SlidingWindow,
    WithMemory,
    WithNeighbours,
    evaluate,
)

KNN = KnnConfig(k=3)
DYNAMIC = Dynamic(rule="sgd", lr=0.1)
LENGTHS = {"mem_len": 9, "attn_len": 4, "clamp_len": 3}

FORMS = [
    ({"mem_len": 9}, WithMemory(mem_len=9), "WithMemory(mem_len=9)"),
    (
        {
            "segment_len": 7,
            "ext_len": 2,
            "batch_size": 3,
            "max_steps": 2,
            "window": None,
            **LENGTHS,
        },
        WithMemory(segment_len=7, ext_len=2, batch_size=3, max_steps=2, **LENGTHS),
        "WithMemory(segment_len=7, ext_len=2, batch_size=3, max_steps=2, mem_len=9, ",
    ),
    (
        {"window": 6, "batch_size": 7, "attn_len": 4, "segment_len": 9, "mem_len": 0},
        SlidingWindow(window=6, batch_size=7, attn_len=4),
        "SlidingWindow(window=6, batch_size=7, attn_len=4)",
    ),
    (
        {"dynamic": DYNAMIC, "segment_len": 7, "max_steps": 3, "batch_size": 1, **LENGTHS},
        Dynamic(rule="sgd", lr=0.1, segment_len=7, max_steps=3, **LENGTHS),
        "Dynamic(..., segment_len=7, max_steps=3, mem_len=9, attn_len=4, clamp_len=3)",
    ),
    (
        {"knn": KNN, "segment_len": 7, "ext_len": 2, "max_steps": 3, **LENGTHS},
        WithNeighbours(knn=KNN, segment_len=7, ext_len=2, max_steps=3, **LENGTHS),
        "WithNeighbours(knn=..., segment_len=7, ext_len=2, max_steps=3, mem_len=9, ",
    ),
]


@pytest.mark.parametrize(("keywords", "how", "form"), FORMS, ids=[str(x[2][:9]) for x in FORMS])
def test_keywords_give_what_their_strategy_gives_and_name_it(model, text, keywords, how, form):
    use = re.escape(f"is deprecated: use evaluate(model, ids, {form}")
    with pytest.warns(DeprecationWarning, match=use) as caught:
        results = evaluate(model, text, **keywords), evaluate(model, text, how)
    assert [each.filename for each in caught] == [__file__]
    one, other = ({**asdict(x), "seconds": 0, "tokens_per_second": 0} for x in results)
    assert one == other


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"window": 4, "mem_len": 3}, "mem_len=3 has no effect with SlidingWindow"),
        ({"window": 4, "ext_len": 3}, "ext_len=3 has no effect with SlidingWindow"),
        ({"window": 4, "max_steps": 2}, "max_steps=2 has no effect with SlidingWindow"),
        ({"dynamic": "rms"}, "dynamic='rms' must be a Dynamic"),
        ({"dynamic": DYNAMIC, "batch_size": 2}, "batch_size=2 has no effect with Dynamic"),
        ({"dynamic": DYNAMIC, "window": 3}, "window and dynamic exclude each other"),
        ({"dynamic": DYNAMIC, "ext_len": 2}, "ext_len=2 has no effect with Dynamic"),
        ({"knn": KNN, "batch_size": 2}, "batch_size=2 has no effect with WithNeighbours"),
        ({"segment_len": 0}, "segment_len=0 must be at least 1"),
    ],
    ids=str,
)
def test_keywords_that_exclude_each_other_are_named(model, text, keywords, message):
    with pytest.raises(ValueError, match=message):
        evaluate(model, text, **keywords)


def test_an_unknown_keyword_and_one_beside_a_strategy_are_named(model, text):
    with pytest.raises(TypeError, match="'segmentlen': did you mean 'segment_len'"):
        evaluate(model, text, segmentlen=3)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'x'$"):
        evaluate(model, text, x=3)
    with pytest.raises(TypeError, match="got how and mem_len=3: give all of them in how"):
        evaluate(model, text, WithMemory(), mem_len=3)
