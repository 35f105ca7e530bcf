"""RECL of texts whose dependency length is known, as `benchmarks/recl.py` measures it."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from transformer_xl.studies.recl import relative_effective_context_length, target_places

STEP, MARKS = 8, 6
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    synthetic = import_module("dependency_text")
dependency_text, oracle_losses = synthetic.dependency_text, synthetic.oracle_losses


@pytest.fixture(scope="module")
def text() -> str:
    return dependency_text(4000, step=STEP, n_marks=MARKS)


@pytest.mark.parametrize("top", [0.1, 0.5, 1.0])
def test_the_measured_length_is_the_true_one(text: str, top: float) -> None:
    contexts = range(STEP, 2 * MARKS * STEP + 1, STEP)
    places = target_places(len(text), contexts, 3000)
    reaches = (None, 24, 40)
    losses = [
        oracle_losses(text, places, contexts, step=STEP, n_marks=MARKS, reach=reach)
        for reach in reaches
    ]
    found = relative_effective_context_length(np.stack(losses), contexts, top=top)
    assert [model.length for model in found] == [MARKS * STEP, 24, 40]
    assert not any(model.is_bound for model in found)


def test_too_short_a_longest_context_is_said(text: str) -> None:
    contexts = range(STEP, MARKS * STEP, STEP)
    places = target_places(len(text), contexts, 3000)
    losses = oracle_losses(text, places, contexts, step=STEP, n_marks=MARKS)
    (found,) = relative_effective_context_length(losses[None], contexts)
    assert (found.length, found.is_bound) == (contexts[-1], True)
