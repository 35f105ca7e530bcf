"""Pieces of music in other keys, so that a model learns more from few of them."""

import random
from itertools import cycle, islice

from transformer_xl.tasks.music.reading import REST

Pieces = list[list[tuple[int, ...]]]
"""Pieces of steps, each with the pitches of all voices."""


def ranges_of(pieces: Pieces) -> list[tuple[int, int] | None]:
    """Return the lowest and the highest pitch of each voice; None: it rests throughout."""
    voices = zip(*(step for piece in pieces for step in piece), strict=True)
    sung = ([pitch for pitch in voice if pitch != REST] for voice in voices)
    return [(min(pitches), max(pitches)) if pitches else None for pitches in sung]


def keys_of(piece: list[tuple[int, ...]], ranges: list[tuple[int, int] | None]) -> list[int]:
    """Return the transpositions, in semitones, that keep each voice in its range; 0 is one."""
    pairs = [(x, y) for x, y in zip(ranges, ranges_of([piece]), strict=True) if x and y]
    lowest = max((x[0] - y[0] for x, y in pairs), default=0)
    highest = min((x[1] - y[1] for x, y in pairs), default=0)
    return list(range(lowest, highest + 1))


def transposed(piece: list[tuple[int, ...]], semitones: int) -> list[tuple[int, ...]]:
    """Return a piece with every pitch so much higher; rests stay."""
    return [tuple(x if x == REST else x + semitones for x in step) for step in piece]


def rounds_of(pieces: Pieces, n_rounds: int, seed: int) -> Pieces:
    """Return the pieces in ``n_rounds`` random orders, each piece in another key each time."""
    numbers, ranges = random.Random(seed), ranges_of(pieces)
    keys = [keys_of(piece, ranges) for piece in pieces]
    for of_piece in keys:
        numbers.shuffle(of_piece)
    drawn = [list(islice(cycle(of_piece), n_rounds)) for of_piece in keys]
    rounds: Pieces = []
    for n in range(n_rounds):
        order = numbers.sample(range(len(pieces)), len(pieces))
        rounds += [transposed(pieces[i], drawn[i][n]) for i in order]
    return rounds
