"""RECL of texts whose dependency length is known."""

import random
import string
from collections.abc import Sequence

import numpy as np
import pytest
from jaxtyping import Float

from transformer_xl.studies.recl import relative_effective_context_length, target_places

STEP, MARKS = 8, 6
LETTERS = string.ascii_lowercase
FRESH = 0.2
"""Share of random letters, without which the text would lose its variety."""


def dependency_text(n_pairs: int, *, step: int, n_marks: int, seed: int = 1) -> str:
    """Return pairs of a mark and a letter.

    After the mark ``0`` the letter is random, after ``k`` a copy of the one ``k * step`` characters
    before: a model gains from each ``step`` characters of context up to ``n_marks * step``.
    """
    draw = random.Random(seed)
    letters: list[str] = []
    marks: list[int] = []
    for place in range(n_pairs):
        mark = 0 if draw.random() < FRESH else draw.randint(1, n_marks)
        source = place - mark * step // 2
        if source < 0:
            mark = 0
        marks.append(mark)
        letters.append(letters[source] if mark else draw.choice(LETTERS))
    return "".join(f"{mark}{letter}" for mark, letter in zip(marks, letters, strict=True))


def oracle_losses(
    text: str,
    places: Sequence[int],
    contexts: Sequence[int],
    *,
    step: int,
    n_marks: int,
    reach: int | None = None,
) -> Float[np.ndarray, "contexts tokens"]:
    """Return the losses of a model that knows the rule and looks back ``reach`` tokens at most."""
    marks = [FRESH] + [(1 - FRESH) / n_marks] * n_marks
    losses = np.empty((len(contexts), len(places)))
    for row, context in enumerate(contexts):
        seen = context if reach is None else min(context, reach)
        for column, place in enumerate(places):
            character = text[place]
            mark = int(text[place - 1]) if character in LETTERS else 0
            if character not in LETTERS:
                losses[row, column] = -np.log(marks[int(character)])
            elif 0 < mark * step <= seen:
                losses[row, column] = -np.log1p(-1e-3)
            else:
                losses[row, column] = np.log(len(LETTERS))
    return losses


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
