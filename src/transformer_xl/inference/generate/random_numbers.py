"""The random numbers of a text."""

from typing import SupportsIndex

import torch
from torch import Tensor

from transformer_xl.errors import InputError
from transformer_xl.model import whole


def random_numbers(seed: SupportsIndex | Tensor | None, n: int = 0) -> torch.Generator:
    """Return the generator of text ``n`` of a batch.

    Its seed is ``seed + n``, or nondeterministic if that is None; or it has a saved state.

    Raises:
        ValueError: The seed is neither a 64-bit integer nor a state.
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    elif isinstance(seed, Tensor) and seed.ndim:
        try:
            generator.set_state(seed.cpu())
        except (RuntimeError, TypeError) as error:
            raise InputError(
                f"seed is no state of random numbers ({error}): hand in an integer, or the "
                "random_state of another text"
            ) from error
    else:
        # torch takes unsigned seeds.
        generator.manual_seed(seed_of(seed, n) % 2**64)
    return generator


def seed_of(seed: SupportsIndex, n: int) -> int:
    """Return the seed of text ``n`` of a batch: ``seed + n``.

    Seeds are signed or unsigned 64-bit integers; the largest one wraps around to 0.
    """
    number = whole("seed", seed, -(2**63))
    if number >= 2**64:
        raise InputError(f"seed={number} must be below 2**64")
    return (number + n) % 2**64 if number + n >= 2**64 else number + n
