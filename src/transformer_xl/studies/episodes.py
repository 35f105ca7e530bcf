"""Synthetic sequences in which the answer is a token that stands an exact distance before it.

An episode is one of three tasks. ``d`` is the distance from each answer, in brackets, to the only
earlier token that determines it:

    copy        COPY s1 ... sn, filler, ASK [s1 ... sn]
    recall      RECALL k1 v1 ... kn vn, filler, ASK ki [vi]
    induction   INDUCTION a b, symbols other than a and b, a [b]

An answer is predicted from the token before it, so a model has to look back ``d - 1`` tokens. The
strings, keys, values and pairs are random symbols, so that nothing but this look back tells an
answer: a guess is right in one of ``n_symbols`` cases (in a recall, in one of ``n_pairs`` if the
values are known and not their keys). The symbols of a recall are all different; filler is drawn
from tokens of its own, and that of an induction from the symbols themselves.

In a training text, a recall goes on with other keys and their values, and an induction with the
same pair at other distances, so that there is more to learn from.

The vocabulary is that of ``data.vocab="integers"`` with ``data.vocab_size``: the four marks 0 to 3,
the symbols, the filler, and ``<eos>``, which ends each episode.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from transformer_xl.config import require, write_atomically

TASKS = ("copy", "recall", "induction")

ASK = len(TASKS)
"""The mark before an answer; that of a task is its index in `TASKS`."""
FIRST_SYMBOL = ASK + 1
# Episodes of a training text and of an evaluation come from different random streams.
_TRAINING, _EVALUATION = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeConfig:
    """The sizes of episodes.

    Raises:
        ValueError: A size is out of range.
    """

    n_symbols: int = 32
    """Number of symbols, of which strings, keys, values and pairs are drawn."""
    n_filler: int = 4
    """Number of tokens that only fill."""
    string_len: int = 8
    """Length of the string of a copy."""
    n_pairs: int = 4
    """Number of pairs of a recall."""
    n_asked: int = 4
    """Answers of an induction, and at most of a recall, in a training text; otherwise one."""

    def __post_init__(self) -> None:
        for name in ("n_filler", "string_len", "n_pairs", "n_asked"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value} must be at least 1")
        least = max(2 * self.n_pairs, 3)
        require(
            self.n_symbols >= least,
            f"n_symbols={self.n_symbols} must be at least {least}: the symbols of "
            f"n_pairs={self.n_pairs} pairs are all different, and a pair has others between",
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, ``<eos>`` included."""
        return FIRST_SYMBOL + self.n_symbols + self.n_filler + 1

    @property
    def eos_id(self) -> int:
        """The last token, ``<eos>``."""
        return self.vocab_size - 1

    @property
    def chance(self) -> float:
        """Expected accuracy of a guess, for each task."""
        return 1 / self.n_symbols

    def shortest(self, task: str) -> int:
        """Return the shortest distance of a task."""
        return {"copy": self.string_len + 1, "recall": 2 * self.n_pairs + 1, "induction": 2}[task]


class Episode(NamedTuple):
    """An episode without its ``<eos>``."""

    tokens: Int64[np.ndarray, " length"]
    answers: Int64[np.ndarray, " answers"]
    """Indices of the tokens that are determined by earlier ones."""
    sources: Int64[np.ndarray, " answers"]
    """Indices of the tokens that determine them, which they repeat."""


def make_episode(
    task: str, distance: int, draw: np.random.Generator, config: EpisodeConfig, n_asked: int = 1
) -> Episode:
    """Draw an episode.

    Args:
        task: The task.
        distance: From each answer to the token that it repeats; with ``n_asked`` above 1, from the
            first one.
        draw: The source of random numbers.
        config: The sizes.
        n_asked: Answers of an induction, and at most of a recall.

    Raises:
        ValueError: There is no such task, or the distance is too short for it.
    """
    require(task in TASKS, f"task={task!r} must be one of {', '.join(TASKS)}")
    shortest = config.shortest(task)
    require(
        distance >= shortest,
        f"distance={distance} must be at least {shortest} for {task} with "
        f"string_len={config.string_len} and n_pairs={config.n_pairs}: shorten those, or give a "
        "longer distance",
    )
    if task == "copy":
        return _copy(distance, draw, config)
    if task == "recall":
        return _recall(distance, draw, config, min(n_asked, config.n_pairs))
    return _induction(distance, draw, config, n_asked)


def _copy(distance: int, draw: np.random.Generator, config: EpisodeConfig) -> Episode:
    string = draw.integers(config.n_symbols, size=config.string_len)
    gap = _filler(distance - len(string) - 1, draw, config)
    sources = 1 + np.arange(len(string))
    return _episode("copy", (string, gap, [_ASKED], string), sources + distance, sources)


def _recall(
    distance: int, draw: np.random.Generator, config: EpisodeConfig, n_asked: int
) -> Episode:
    n = config.n_pairs
    pairs = draw.permutation(config.n_symbols)[: 2 * n].reshape(n, 2)
    asked = draw.permutation(n)[:n_asked]
    sources = 2 + 2 * asked
    answers = sources[0] + distance + 2 * np.arange(n_asked)
    # Before the first answer stand the marks, the pairs, the gap and a key.
    gap = _filler(int(answers[0]) - 2 * n - 3, draw, config)
    parts = (pairs.flatten(), gap, [_ASKED], pairs[asked].flatten())
    return _episode("recall", parts, answers, sources)


def _induction(
    distance: int, draw: np.random.Generator, config: EpisodeConfig, n_asked: int
) -> Episode:
    symbols = draw.permutation(config.n_symbols)
    pair, others = symbols[:2], symbols[2:]
    shortest = config.shortest("induction")
    more = [_log_uniform(shortest, distance, draw) for _ in range(n_asked - 1)]
    parts, answers = [pair], [2]
    for d in (distance, *more):
        parts += [draw.choice(others, d - 2), pair]
        answers.append(answers[-1] + d)
    return _episode("induction", parts, np.array(answers[1:]), np.array(answers[:-1]))


_ASKED = ASK - FIRST_SYMBOL


def _filler(n: int, draw: np.random.Generator, config: EpisodeConfig) -> np.ndarray:
    return config.n_symbols + draw.integers(config.n_filler, size=n)


def _episode(task: str, parts: Sequence[Any], answers: np.ndarray, sources: np.ndarray) -> Episode:
    """Join the parts of an episode, whose tokens count from the first symbol."""
    tokens = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]) + FIRST_SYMBOL
    return Episode(np.concatenate([[TASKS.index(task)], tokens]), answers, sources)


def _log_uniform(shortest: int, longest: int, draw: np.random.Generator) -> int:
    # Each distance gets the share of the numbers that are rounded down to it.
    drawn = np.exp(draw.uniform(np.log(shortest), np.log(longest + 1)))
    return min(int(drawn), longest)


def evaluation_episodes(
    task: str, distance: int, n: int, *, config: EpisodeConfig, seed: int = 0
) -> list[Episode]:
    """Draw episodes of one distance; more of them begin with the same ones.

    None of them is drawn for a training text, whatever its seed.

    Raises:
        ValueError: As :func:`make_episode`, or the seed is negative.
    """
    require(seed >= 0, f"seed={seed} must be at least 0")
    place = TASKS.index(task) if task in TASKS else 0
    draws = (np.random.default_rng([_EVALUATION, seed, place, distance, i]) for i in range(n))
    return [make_episode(task, distance, draw, config) for draw in draws]


def training_episodes(
    distances: tuple[int, int],
    *,
    config: EpisodeConfig,
    tasks: Sequence[str] = TASKS,
    seed: int = 1,
) -> Iterator[Episode]:
    """Draw episodes without end, their tasks uniformly and their distances log-uniformly.

    Args:
        distances: The shortest and the longest distance, both included.
        config: The sizes.
        tasks: The tasks.
        seed: Random seed.

    Raises:
        ValueError: A task is unknown, the seed is negative, or the distances are none of a range or
            too short for a task.
    """
    shortest, longest = distances
    require(seed >= 0, f"seed={seed} must be at least 0")
    require(bool(tasks), "tasks=(): give at least one task")
    require(
        shortest <= longest,
        f"distances={shortest} to {longest} must rise: the shortest, then the longest",
    )
    for task in tasks:
        # Refused before the first episode.
        make_episode(task, shortest, np.random.default_rng(seed), config)
    return (_training_episode(shortest, longest, config, tasks, seed, i) for i in count())


def _training_episode(
    shortest: int, longest: int, config: EpisodeConfig, tasks: Sequence[str], seed: int, i: int
) -> Episode:
    draw = np.random.default_rng([_TRAINING, seed, i])
    task = tasks[int(draw.integers(len(tasks)))]
    return make_episode(task, _log_uniform(shortest, longest, draw), draw, config, config.n_asked)


def write_episodes(
    path: Path,
    n_tokens: int,
    distances: tuple[int, int],
    *,
    config: EpisodeConfig,
    tasks: Sequence[str] = TASKS,
    seed: int = 1,
) -> int:
    """Write a training text, an episode a line; return its number of tokens, ``<eos>`` included.

    It is read with ``data.vocab="integers"`` and ``data.vocab_size`` of the ``config``; with
    ``data.reset_at="<eos>"`` no episode sees another one. A longer text begins with a shorter one.

    Args:
        path: The file.
        n_tokens: The text ends with the episode that reaches this number of tokens.
        distances: As for :func:`training_episodes`.
        config: The sizes.
        tasks: The tasks.
        seed: Random seed.

    Raises:
        ValueError: As :func:`training_episodes`.
        OSError: The file cannot be written.
    """
    episodes = training_episodes(distances, config=config, tasks=tasks, seed=seed)
    written = 0

    def write(temporary: Path) -> None:
        nonlocal written
        with temporary.open("w", encoding="ascii") as file:
            while written < n_tokens:
                tokens = next(episodes).tokens
                file.write(" ".join(map(str, tokens.tolist())) + "\n")
                written += len(tokens) + 1

    write_atomically(path, write)
    return written
