"""A program counts as the model only where rounding alone separates them."""

import pytest
import torch

from transformer_xl.interop.export import Errors, compare, make_step


@pytest.mark.parametrize(
    "options",
    [{}, {"attn_type": 2}, {"start_memory": "zeros"}, {"reset_at": 7}, {"cutoffs": (9,)}],
    ids=str,
)
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_a_step_is_its_model_up_to_rounding(made, options, n_tokens):
    step = make_step(made(**options), n_tokens=n_tokens)
    errors = compare(step, step)
    assert errors.is_equal
    # In single precision something is always lost.
    assert 0 < errors.model < 1e-5
    assert errors.program < 1e-5
    assert errors.difference <= errors.program + errors.model


@pytest.mark.parametrize("place", range(4))
def test_no_result_may_be_another(made, place):
    step = make_step(made())

    def another(*given):
        results = list(step(*given))
        # A little more; of what is seen, one position less.
        results[place] = results[place] * 1.01 if place < 3 else (results[place] - 1).clamp(min=0)
        return results

    errors = compare(step, another)
    assert errors.program > 1e-4
    assert not errors.is_equal


def test_the_memory_that_is_handed_out_counts(made):
    step = make_step(made())
    forgetful = lambda tokens, *memory: (step(tokens, *memory)[0], *memory)  # noqa: E731
    assert not compare(step, forgetful).is_equal


def test_a_model_that_magnifies_rounding_is_measured_by_itself():
    assert Errors(difference=9e-6, program=9e-6, model=1e-9).is_equal
    assert not Errors(difference=2e-5, program=2e-5, model=1e-9).is_equal
    assert Errors(difference=5e-4, program=3e-4, model=1e-4).is_equal
    assert not Errors(difference=5e-4, program=5e-4, model=1e-4).is_equal


def test_what_is_not_a_number_is_not_equal(made):
    model = made()
    model.softmax.bias[3] = torch.nan
    step = make_step(model)
    assert not compare(step, step).is_equal
    step = make_step(made())
    broken = lambda *given: [x * torch.nan for x in step(*given)[:1]] + [*step(*given)[1:]]  # noqa: E731
    assert not compare(step, broken).is_equal
