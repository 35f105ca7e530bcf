"""Synthetic texts with a known dependency length, to test RECL.

A text is a sequence of pairs, a mark and a letter. After the mark ``0`` the letter is random; after
the mark ``k`` it is a copy of the letter ``k * step`` characters before, and so predictable given
that context only. So a model gains from each ``step`` characters of context up to
``n_marks * step``, the true dependency length, and from none beyond.
"""

import random
import string
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

LETTERS = string.ascii_lowercase
FRESH = 0.2
"""Share of random letters, without which the text would lose its variety."""


def dependency_text(n_pairs: int, *, step: int = 16, n_marks: int = 8, seed: int = 1) -> str:
    """Generate a text whose dependency length is ``n_marks * step`` characters.

    Args:
        n_pairs: Number of pairs; the text has twice as many characters.
        step: Distance per mark; even, so that it points to letters.
        n_marks: Number of distances, at most 9.
        seed: Random seed.

    Raises:
        ValueError: A number is out of range.
    """
    if step < 2 or step % 2:
        raise ValueError(f"step={step} must be even and at least 2: letters are two apart")
    if not 1 <= n_marks <= 9:
        raise ValueError(f"n_marks={n_marks} must be from 1 to 9: a mark is one digit")
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
    step: int = 16,
    n_marks: int = 8,
    reach: int | None = None,
    doubt: float = 1e-3,
) -> Float[np.ndarray, "contexts tokens"]:
    """Return the losses of a model that knows the rule and looks back ``reach`` tokens at most.

    Args:
        text: What :func:`dependency_text` wrote.
        places: The characters that are predicted.
        contexts: The context lengths.
        step: As the text was written with.
        n_marks: As the text was written with.
        reach: How far back the model can look. None: as far as its context reaches.
        doubt: The probability that it leaves to the other letters where it knows the right one.
    """
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
                losses[row, column] = -np.log1p(-doubt)
            else:
                losses[row, column] = np.log(len(LETTERS))
    return losses
