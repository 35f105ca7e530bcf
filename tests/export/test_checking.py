"""A program counts as the model only where rounding alone separates them."""

import math

import pytest
import torch

from transformer_xl.interop.export import Step, compare


@pytest.mark.parametrize(
    "options",
    [{}, {"start_memory": "zeros"}, {"cutoffs": (9,)}],
    ids=str,
)
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_a_step_is_its_model_up_to_rounding(made, options, n_tokens):
    step = Step(made(**options), n_tokens=n_tokens)
    difference, allowed = compare(step, step)
    # In single precision something is always lost.
    assert 0 < difference <= allowed
    assert 1e-5 <= allowed < 1e-4


@pytest.mark.parametrize("place", range(4))
def test_no_result_may_be_another(made, place):
    step = Step(made())

    def another(*given):
        results = list(step(*given))
        # A little more; of what is seen, one position less.
        results[place] = results[place] * 1.01 if place < 3 else (results[place] - 1).clamp(min=0)
        return results

    assert compare(step, another)[0] > 1e-4


def test_the_memory_that_is_handed_out_counts(made):
    step = Step(made())
    forgetful = lambda tokens, *memory: (step(tokens, *memory)[0], *memory)  # noqa: E731
    assert compare(step, forgetful)[0] > 1e-4


def test_what_is_not_a_number_is_not_equal(made):
    model = made()
    model.softmax.bias[3] = torch.nan
    step = Step(model)
    assert math.isnan(compare(step, step)[0])
    step = Step(made())
    broken = lambda *given: [x * torch.nan for x in step(*given)[:1]] + [*step(*given)[1:]]  # noqa: E731
    assert math.isnan(compare(step, broken)[0])
