"""How far back a trained model finds an answer that one token determines.

    python benchmarks/recall.py text recall.txt --tokens 4000000 --distances 10 200
    txl train benchmarks/recall.toml --data.path recall.txt --out runs/recall
    python benchmarks/recall.py measure runs/recall --distances 10 100 1000 --json recall.json

Or all contestants of a comparison on that text, in one table:

    txl compare benchmarks/recall.toml --models txl gpt gpt-cache lstm mamba2 --out runs/recall

The first command says which settings of the data belong to the text; another recipe needs these.

Copy, recall and induction at exact distances (`transformer_xl.studies.episodes`). The text has
distances drawn log-uniformly from a range, and a model is measured at each of the given ones, with
its memory carried from segment to segment. A table compares models trained on the same text, and
on no other.
"""

import argparse
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import trained_runs
from trained_runs import Run, load_runs, say, table

from transformer_xl.studies.episodes import TASKS, EpisodeConfig, write_episodes
from transformer_xl.studies.recall import DISTANCES, Recalled, accuracy_by_distance


def measured(run: Run, arguments: argparse.Namespace, config: EpisodeConfig) -> list[Recalled]:
    """Measure a model.

    Raises:
        ValueError: Its vocabulary is not that of the episodes.
    """
    expected = [*map(str, range(config.eos_id)), "<eos>"]
    if run.vocab.symbols != expected:
        raise ValueError(
            f"{run.name} has a vocabulary of {len(run.vocab)} {run.vocab.kind}, and these episodes "
            f"the integers 0 to {config.eos_id - 1} and <eos>: give the sizes of its training "
            "text (--n_symbols and so on), or train on one that this program has written"
        )
    return accuracy_by_distance(
        run.model,
        arguments.distances,
        tasks=arguments.tasks,
        n_episodes=arguments.episodes,
        config=config,
        seed=arguments.seed,
        **run.lengths,
    )


def shown(
    models: list[dict[str, Any]], distances: list[int], tasks: list[str], chance: float
) -> str:
    """Return the accuracies as a table, a row for each task and model."""
    rows = []
    for task in tasks:
        for model in models:
            cells = (
                f"{100 * x['accuracy']:.1f}"
                for d in distances
                for x in model["results"]
                if (x["task"], x["distance"]) == (task, d)
            )
            rows.append([task, model["name"], f"{model['parameters']:,}", *cells])
    counts = {x["n_answers"] for model in models for x in model["results"]}
    notes = [
        f"Answers that are right, in %, by distance in tokens; {min(counts)} to {max(counts)} "
        f"answers each; a guess: {100 * chance:.1f}. All models trained from scratch on episodes."
    ]
    return table(["task", "model", "parameters", *map(str, distances)], rows, notes)


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
    text.add_argument("--seed", type=int, default=1)
    measure = programs.add_parser("measure", help="measure trained models")
    trained_runs.add_options(measure)
    measure.add_argument("--distances", type=int, nargs="+", default=list(DISTANCES))
    measure.add_argument("--episodes", type=int, default=100, help="of each task and distance")
    measure.add_argument("--seed", type=int, default=0)
    for each in (text, measure):
        each.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
        for field in fields(EpisodeConfig):
            each.add_argument(f"--{field.name}", type=int, default=field.default)
    arguments = parser.parse_args(words)
    try:
        config = EpisodeConfig(
            **{field.name: getattr(arguments, field.name) for field in fields(EpisodeConfig)}
        )
        if arguments.program == "text":
            n_tokens = write_episodes(
                arguments.file,
                arguments.tokens,
                tuple(arguments.distances),
                config=config,
                tasks=arguments.tasks,
                seed=arguments.seed,
            )
            say(
                f'wrote {n_tokens:,} tokens\n[data]\npath = "{arguments.file}"\n'
                f'vocab = "integers"\nvocab_size = {config.vocab_size}\nreset_at = "<eos>"'
            )
            return
        models = []
        for run in load_runs(arguments):
            results = [asdict(x) for x in measured(run, arguments, config)]
            models.append(run.about | {"results": results})
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")
    names = ("distances", "tasks", "episodes", "seed", "mem_len")
    settings = {name: getattr(arguments, name) for name in names} | {"sizes": asdict(config)}
    result = {"settings": settings, "chance": config.chance, "models": models}
    trained_runs.write_result(
        arguments, result, shown(models, arguments.distances, arguments.tasks, config.chance)
    )


if __name__ == "__main__":
    main()
