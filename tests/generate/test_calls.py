"""What calls refuse before anything is drawn, and what they take."""

from dataclasses import replace
from inspect import unwrap

import numpy as np
import pytest
import torch

from transformer_xl.inference.generate import generate, generate_batch
from transformer_xl.inference.generate.random_numbers import random_numbers
from transformer_xl.model import TransformerXL

# Unwrapped: the check of types in signatures, where it is on, refuses them before we can.
_generate, _generate_batch = unwrap(generate), unwrap(generate_batch)


OF_WRONG_TYPES = [
    ({"length": 1.5}, "length=1.5 must be an integer"),
    ({"length": True}, "length=True must be an integer"),
    ({"length": -1}, "length=-1 must be at least 0"),
    ({"mem_len": -1}, "mem_len=-1 must be at least 0"),
    ({"seed": 1.0}, "seed=1.0 must be an integer"),
    ({"seed": 2**64}, "must be below"),
    ({"seed": torch.zeros(3, dtype=torch.uint8)}, "seed"),
    ({"sampling": 0.8}, r"sampling=0.8 must be a Sampling: give sampling=Sampling\(...\)"),
]


def test_a_wrong_argument_is_named_before_a_draw(model, refused):
    for settings, message in OF_WRONG_TYPES:
        for call, ids in ((_generate, [1]), (_generate_batch, [[1]])):
            with refused(message):
                call(model, ids, **settings)


NO_PROMPTS = [
    ([], "the prompt is empty"),
    ([1, 31], "token 31 of the prompt is outside the vocabulary of 31"),
    ([-1], "token -1 of the prompt is outside the vocabulary"),
    ([1.5], r"the prompt must be integers in a row, not \[1.5\]"),
    ([True], r"not \[True\]"),
    ("abc", "not the text 'abc', of which vocab.encode makes them"),
    (5, "not 5"),
    (None, "not None"),
    ([[1, 2]], r"not \[\[1, 2\]\]"),
    (torch.tensor([1.0]), r"shape \(1,\) and torch.float32"),
    (torch.ones(1, 2, dtype=torch.int64), r"shape \(1, 2\)"),
    (np.array(1), r"shape \(\)"),
    ([10**30], "must be integers"),
]


def test_a_prompt_that_is_no_row_of_integers_is_named(model, refused):
    for ids, message in NO_PROMPTS:
        with refused(message):
            _generate(model, ids)
        with refused(message):
            _generate_batch(model, [[1], ids])


def test_what_is_no_vocabulary_is_named_before_a_draw(model, refused):
    begun, batch = generate(model, [1], length=2), generate_batch(model, [[1], [2]], length=2)
    for wrong in ([1, 2], None, "runs/demo", torch.ones(2)):
        for each in (begun._batch, batch):
            with refused(r"vocab=.* is no vocabulary: give the one that from_pretrained returned"):
                unwrap(type(each).decode)(each, wrong)
    assert len(list(begun)) == len(list(batch)) == 2


@pytest.mark.parametrize(
    "other", [{"n_layer": 2}, {"d_model": 8, "d_inner": 16}, {"d_head": 4}], ids=str
)
def test_a_memory_of_another_depth_or_width_is_named(model, other, refused):
    wrong = TransformerXL(replace(model.config, **other))
    kept = wrong.keep(wrong.start_memory(1))
    memories = [kept] if "d_head" in other else [kept, wrong.start_memory(1)]
    for mems in memories:
        with refused("the memory is that of another model"):
            generate(model, [1], mems=mems)
        with torch.no_grad(), refused("that of another model"):
            model(torch.ones(1, 2, dtype=torch.int64), mems)
        with refused("that of another model"):
            generate_batch(model, [[1], [2]], mems=mems)


@pytest.mark.parametrize("mems", [[], [torch.zeros(1, 0, 16)] * 3, "memory"], ids=str)
def test_what_is_no_memory_is_named(model, mems, refused):
    with refused(r"mems=.* is no memory"):
        _generate(model, [1], mems=mems)
    with refused(r"mems=.* is no memory"):
        unwrap(TransformerXL.forward)(model, torch.ones(1, 2, dtype=torch.int64), mems)


@pytest.mark.parametrize("model", ["runs/demo", None, torch.nn.Linear(1, 1)], ids=str)
def test_what_is_no_model_is_named(model, refused):
    for call in (_generate, _generate_batch):
        with refused("is no TransformerXL"):
            call(model, [[1]])


INTEGERS = [
    (1, 2, 3),
    range(1, 4),
    iter([1, 2, 3]),
    np.array([1, 2, 3], dtype=np.uint8),
    torch.tensor([1, 2, 3], dtype=torch.int32),
    torch.tensor([1, 2, 3], dtype=torch.uint8),
    [np.int64(1), np.int16(2), 3],
    [torch.tensor(1), 2, 3],
]


def test_integers_of_every_kind_are_tokens(model):
    for ids in INTEGERS:
        assert list(_generate(model, ids, length=4, seed=1)) == list(
            generate(model, [1, 2, 3], length=4, seed=1)
        )


def test_seeds_are_of_64_bits_with_a_sign_or_without():
    def first(seed):
        return torch.rand(3, generator=random_numbers(seed)).tolist()

    assert first(-1) == first(2**64 - 1) == first(np.int64(-1))
    assert first(torch.tensor(3)) == first(3)
