"""Numbers of symbols, as they are handed in to be written as text."""

from operator import index
from typing import Any

import numpy as np


def symbol_numbers(ids: Any, n: int) -> list[int]:
    """Return the numbers of symbols as a list, if all are of a vocabulary of ``n``.

    Raises:
        ValueError: They are no integers in a row, or one is no symbol.
    """
    # Arrays and tensors have a quick way of their own.
    given = ids.tolist() if hasattr(ids, "tolist") else ids
    try:
        if isinstance(given, str | bytes | dict):
            raise TypeError
        numbers = list(given)
        if kinds := set(map(type, numbers)) - {int}:
            if kinds & {bool, np.bool_}:
                raise TypeError
            numbers = list(map(index, numbers))
    except TypeError:
        raise ValueError(
            f"{ids!r:.60} must be integers in a row, the numbers of symbols; "
            "decode([number]) writes a single one"
        ) from None
    if numbers and not 0 <= min(numbers) <= max(numbers) < n:
        raise no_symbol(next(number for number in numbers if not 0 <= number < n), n)
    return numbers


def no_symbol(number: int, n: int) -> ValueError:
    """Return the error for a number that is no symbol of a vocabulary of ``n``."""
    return ValueError(f"{number} is no symbol: this vocabulary has 0 to {n - 1}")
