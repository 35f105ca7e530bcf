"""Pieces of music in other keys, so that a model learns more from few of them."""

import random
from itertools import cycle, islice

from transformer_xl.config import require
from transformer_xl.tasks.music.reading import REST

Pieces = list[list[tuple[int, ...]]]
"""Pieces of steps, each with the pitches of all voices."""


def ranges_of(pieces: Pieces) -> list[tuple[int, int]]:
    """Return the lowest and the highest pitch of each voice.

    Raises:
        ValueError: There is no step, or a voice rests throughout.
    """
    steps = [step for piece in pieces for step in piece]
    require(len(steps) > 0, "there is no step in the pieces: give some music")
    found = []
    for voice, pitches in enumerate(zip(*steps, strict=True), 1):
        sung = [pitch for pitch in pitches if pitch != REST]
        require(len(sung) > 0, f"voice {voice} rests throughout: leave it out")
        found.append((min(sung), max(sung)))
    return found


def keys_of(piece: list[tuple[int, ...]], ranges: list[tuple[int, int]]) -> list[int]:
    """Return the transpositions, in semitones, that keep each voice in its range; 0 is one."""
    own = ranges_of([piece])
    lowest = max(low - own_low for (low, _), (own_low, _) in zip(ranges, own, strict=True))
    highest = min(high - own_high for (_, high), (_, own_high) in zip(ranges, own, strict=True))
    return list(range(lowest, highest + 1))


def transposed(piece: list[tuple[int, ...]], semitones: int) -> list[tuple[int, ...]]:
    """Return a piece with every pitch so much higher; rests stay."""
    return [tuple(x if x == REST else x + semitones for x in step) for step in piece]


def rounds_of(pieces: Pieces, n_rounds: int, seed: int) -> Pieces:
    """Return the pieces in ``n_rounds`` random orders, each piece in another key each time."""
    numbers = random.Random(seed)
    ranges = ranges_of(pieces)
    keys = [keys_of(piece, ranges) for piece in pieces]
    for own in keys:
        numbers.shuffle(own)
    taken = [list(islice(cycle(own), n_rounds)) for own in keys]
    found: Pieces = []
    for n in range(n_rounds):
        order = numbers.sample(range(len(pieces)), len(pieces))
        found += [transposed(pieces[i], taken[i][n]) for i in order]
    return found
