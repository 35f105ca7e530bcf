"""How far back a trained model finds an answer that one token determines.

    python benchmarks/recall.py text recall.txt --tokens 4000000 --distances 10 200
    txl train RECIPE --data.path recall.txt --data.vocab integers --data.vocab_size 41 \
        --data.reset_at "<eos>" --out runs/recall
    python benchmarks/recall.py measure runs/recall --distances 10 100 1000 --json recall.json

An episode is one of three tasks. ``d`` is the distance from each answer, in brackets, to the only
earlier token that determines it:

    copy        COPY s1 ... sn, filler, ASK [s1 ... sn]
    recall      RECALL k1 v1 ... kn vn, filler, ASK ki [vi]
    induction   INDUCTION a b, symbols other than a and b, a [b]

Strings, keys, values and pairs are random symbols, so a guess is right in one of 32 cases. The
text has distances drawn log-uniformly from a range; in it, a recall goes on with other keys and
their values, and an induction with the same pair at other distances. A model is measured at each
given distance, with its memory carried from segment to segment; before an episode stands the end
of others, of different lengths, so that answers stand at all places of a segment.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from result_file import write_result_file
from turns import circumstances

from transformer_xl.config.files import write_atomically
from transformer_xl.config.recipes import recipe_of
from transformer_xl.errors import InputError
from transformer_xl.inference.answers import read_each
from transformer_xl.model import LanguageModel, load_model
from transformer_xl.model.calling import evaluating
from transformer_xl.model.segment import SEGMENT_LEN, Lengths
from transformer_xl.studies import markdown_table

TASKS = ("copy", "recall", "induction")
ASK = len(TASKS)
"""The mark before an answer; that of a task is its index in `TASKS`."""
FIRST_SYMBOL = ASK + 1
N_SYMBOLS, N_FILLER = 32, 4
STRING_LEN, N_PAIRS = 8, 4
"""Length of the string of a copy, and pairs of a recall."""
N_ANSWERS = 4
"""Answers of a recall and of an induction in a training text; otherwise one."""
EOS = FIRST_SYMBOL + N_SYMBOLS + N_FILLER
SHORTEST = {"copy": STRING_LEN + 1, "recall": 2 * N_PAIRS + 1, "induction": 2}
"""The shortest distance of each task."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2
# Episodes of a training text and of an evaluation come from different random streams.
_TRAINING, _EVALUATION = 0, 1


class Episode(NamedTuple):
    """An episode without its ``<eos>``."""

    tokens: np.ndarray
    answers: np.ndarray
    """Indices of the tokens that are determined by earlier ones."""
    sources: np.ndarray
    """Indices of the tokens that determine them, which they repeat."""


def make_episode(task: str, distance: int, draw: np.random.Generator, n: int = 1) -> Episode:
    """Draw an episode.

    Args:
        task: The task.
        distance: From each answer to the token that it repeats; of several answers of a recall or
            an induction, from the first one.
        draw: The source of random numbers.
        n: Answers of a recall and of an induction.

    Raises:
        InputError: The distance is too short for the task.
    """
    if distance < SHORTEST[task]:
        raise InputError(f"distance={distance} must be at least {SHORTEST[task]} for {task}")
    if task == "copy":
        string = draw.integers(N_SYMBOLS, size=STRING_LEN)
        sources = 1 + np.arange(STRING_LEN)
        answers = sources + distance
        parts = [string, _filler(distance - STRING_LEN - 1, draw), [ASK - FIRST_SYMBOL], string]
    elif task == "recall":
        pairs = draw.permutation(N_SYMBOLS)[: 2 * N_PAIRS].reshape(N_PAIRS, 2)
        keys = draw.permutation(N_PAIRS)[:n]
        sources = 2 + 2 * keys
        answers = sources[0] + distance + 2 * np.arange(n)
        # Before the first answer stand the marks, the pairs, the filler and a key.
        filler = _filler(int(answers[0]) - 2 * N_PAIRS - 3, draw)
        parts = [pairs.flatten(), filler, [ASK - FIRST_SYMBOL], pairs[keys].flatten()]
    else:
        symbols = draw.permutation(N_SYMBOLS)
        pair, others = symbols[:2], symbols[2:]
        more = [_log_uniform(SHORTEST[task], distance, draw) for _ in range(n - 1)]
        parts, places = [pair], [2]
        for d in (distance, *more):
            parts += [draw.choice(others, d - 2), pair]
            places.append(places[-1] + d)
        answers, sources = np.array(places[1:]), np.array(places[:-1])
    symbols = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    tokens = np.concatenate([[TASKS.index(task)], symbols + FIRST_SYMBOL])
    return Episode(tokens, answers, sources)


def _filler(n: int, draw: np.random.Generator) -> np.ndarray:
    return N_SYMBOLS + draw.integers(N_FILLER, size=n)


def _log_uniform(shortest: int, longest: int, draw: np.random.Generator) -> int:
    # Each distance gets the share of the numbers that are rounded down to it.
    drawn = np.exp(draw.uniform(np.log(shortest), np.log(longest + 1)))
    return min(int(drawn), longest)


def training_episodes(
    shortest: int, longest: int, tasks: Sequence[str] = TASKS, seed: int = 1
) -> Iterator[Episode]:
    """Draw episodes without end, their tasks uniformly and their distances log-uniformly."""
    for i in count():
        draw = np.random.default_rng([_TRAINING, seed, i])
        task = tasks[int(draw.integers(len(tasks)))]
        yield make_episode(task, _log_uniform(shortest, longest, draw), draw, N_ANSWERS)


def write_text(path: Path, n_tokens: int, episodes: Iterator[Episode]) -> int:
    """Write a training text of at least ``n_tokens``, an episode a line; return its tokens."""
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


def _leads(task: str, distance: int, segment_len: int, seed: int) -> Iterator[list[int]]:
    """Yield what is read before an episode: the end of others, 1 to ``segment_len`` tokens."""
    # No longer than needed to fill a segment.
    distance = max(min(distance, segment_len), SHORTEST[task])
    others = training_episodes(distance, distance, [task], seed)
    for i in count():
        # Spread evenly, whatever the number of episodes.
        length, lead = 1 + int(segment_len * (i * _GOLDEN_RATIO % 1)), [EOS]
        while len(lead) < length:
            lead = [EOS, *next(others).tokens.tolist(), *lead]
        yield lead[-length:]


@torch.no_grad()
def measured(
    model: LanguageModel, task: str, distance: int, lengths: Lengths, n_episodes: int, seed: int
) -> dict[str, Any]:
    """Return the share of answers that are most likely, and their mean -log p in nats."""
    texts, places = [], []
    leads = _leads(task, distance, lengths.segment_len, seed)
    for i, lead in enumerate(islice(leads, n_episodes)):
        draw = np.random.default_rng([_EVALUATION, seed, TASKS.index(task), distance, i])
        episode = make_episode(task, distance, draw)
        texts.append([*lead, *episode.tokens.tolist()])
        places.append(len(lead) + episode.answers)
    is_right, nll = [], []
    with evaluating(model):
        for rows, pieces in read_each(model, texts, lengths, batch_size=25):
            for piece in pieces:
                for row, hidden in zip(rows, piece.hidden, strict=True):
                    # An answer is predicted where the token before it is read.
                    columns = places[row] - 1 - piece.start
                    columns = columns[(columns >= 0) & (columns < len(hidden))]
                    if len(columns):
                        answers = [texts[row][piece.start + column + 1] for column in columns]
                        log_probs = model.head.log_probs(hidden[columns]).double().cpu()
                        nll += (-log_probs[range(len(answers)), answers]).tolist()
                        is_right += (log_probs.argmax(1) == torch.tensor(answers)).tolist()
    about = {"task": task, "distance": distance, "n_answers": len(nll)}
    return about | {"accuracy": float(np.mean(is_right)), "nll": float(np.mean(nll))}


def measured_model(folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a run folder or model folder at all distances.

    Raises:
        InputError: Its vocabulary is not that of the episodes.
    """
    model, recipe = load_model(folder), recipe_of(folder)
    if model.config.vocab_size != EOS + 1:
        raise InputError(
            f"{folder} has a vocabulary of {model.config.vocab_size} tokens, and the episodes have "
            f"{EOS + 1}: train with --data.vocab integers --data.vocab_size {EOS + 1}"
        )
    trained = recipe.train.segment_len if recipe else SEGMENT_LEN
    lengths = Lengths.of(model.config, segment_len=trained, mem_len=arguments.mem_len, ext_len=0)
    results = [
        measured(model, task, distance, lengths, arguments.episodes, arguments.seed)
        for task in arguments.tasks
        for distance in arguments.distances
    ]
    parameters = sum(p.numel() for p in model.parameters())
    return {"name": folder, "parameters": parameters, "results": results}


def main(words: list[str] | None = None) -> None:
    """Write a training text, or measure models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    programs = parser.add_subparsers(dest="program", required=True)
    text = programs.add_parser("text", help="write a training text")
    text.add_argument("file", type=Path)
    text.add_argument("--tokens", type=int, default=4_000_000)
    text.add_argument("--distances", type=int, nargs=2, default=(10, 200))
    measure = programs.add_parser("measure", help="measure trained models")
    measure.add_argument("runs", nargs="+", help="run folders or model folders")
    measure.add_argument("--distances", type=int, nargs="+", default=[10, 30, 100, 300, 1000])
    measure.add_argument("--episodes", type=int, default=100, help="of each task and distance")
    measure.add_argument("--mem_len", type=int, help="default: as configured")
    measure.add_argument("--json", type=Path, help="also write the result to this file")
    for program, seed in ((text, 1), (measure, 0)):
        program.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
        program.add_argument("--seed", type=int, default=seed)
    arguments = parser.parse_args(words)
    if arguments.program == "text":
        shortest, longest = arguments.distances
        episodes = training_episodes(shortest, longest, arguments.tasks, arguments.seed)
        n_tokens = write_text(arguments.file, arguments.tokens, episodes)
        print(f"wrote {n_tokens:,} tokens of {EOS + 1} integers")
        return
    models = [measured_model(folder, arguments) for folder in arguments.runs]
    rows = [
        [x["task"], model["name"], f"{x['distance']:,}", f"{100 * x['accuracy']:.1f}"]
        for model in models
        for x in model["results"]
    ]
    print(markdown_table(["task", "model", "distance", "right, %"], rows))
    if arguments.json:
        write_result_file(arguments.json, circumstances() | {"models": models})


if __name__ == "__main__":
    main()
