r"""Questions about facts that are hidden in books, answered by trained models.

    python benchmarks/babilong.py text babi.txt --babi babi/en --books pg19 --lengths 0 2000
    python benchmarks/babilong.py text babi_valid.txt --babi babi/en --books pg19 \
        --lengths 0 2000 --split valid --tokens 400000
    txl train benchmarks/babi.toml --out runs/babi
    python benchmarks/babilong.py measure runs/babi --babi babi/en --books pg19 --json babi.json

or with all contestants of a comparison on that text, in one table:

    txl compare benchmarks/babi.toml --models txl gpt gpt-cache lstm mamba2 --out runs/babi

The loss is of the answers alone: they follow a tab, the `data.completion_at` of babi.toml.

Samples and score are those of BABILong (`transformer_xl.studies.babi`, `studies.babilong`), with
lengths in tokens of each model's vocabulary. The text is of other stories and other books than the
test. The folder of bAbI has files such as qa1_single-supporting-fact_train.txt, compressed or not;
that of books at least three, named by their numbers, such as 860.txt.

All models are trained from scratch, on these tasks alone: no row of the table may stand beside one
of a pretrained model, such as those of the paper, as its equal.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import trained_runs
from trained_runs import Run, load_runs, say, table

from transformer_xl.data import load_vocab
from transformer_xl.studies.babi import (
    BABI_TASKS,
    Books,
    babi_questions,
    book_files,
    evaluation_samples,
    fitting,
    training_samples,
    utf8_size,
    write_samples,
)
from transformer_xl.studies.babilong import LENGTHS, answer_samples


def write_text(arguments: argparse.Namespace) -> None:
    """Write a training or validation text."""
    count = utf8_size
    if arguments.vocab:
        vocab = load_vocab(arguments.vocab)
        count = lambda text: len(vocab.encode(text))  # noqa: E731
    books = Books(book_files(arguments.books)[arguments.split], count)
    questions = {
        task: babi_questions(arguments.babi, task, arguments.split) for task in arguments.tasks
    }
    samples = training_samples(questions, books, arguments.lengths, seed=arguments.seed)
    n_tokens = write_samples(arguments.file, arguments.tokens, samples, books)
    say(f"wrote {n_tokens:,} tokens to {arguments.file}")


def measured(run: Run, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a model; a length into which no question of a task fits is left out."""
    books = Books(
        book_files(arguments.books)[arguments.split], lambda text: len(run.vocab.encode(text))
    )
    results = []
    for task in arguments.tasks:
        questions = babi_questions(arguments.babi, task, arguments.split)
        for length in arguments.lengths:
            if not fitting(questions, length, books.count):
                say(f"{task}: no question has its facts in {length} tokens")
                continue
            samples = evaluation_samples(
                questions, books, length, arguments.samples, seed=arguments.seed
            )
            answered = answer_samples(
                run.model,
                run.vocab,
                samples,
                batch_size=arguments.batch_size,
                **run.lengths,
            )
            found = asdict(answered)
            # A few, to see what it writes.
            found["outputs"] = found["outputs"][:5]
            results.append({"task": task, "length": length} | found)
            say(f"{run.name}, {task}, {length} tokens: {answered.accuracy:.0%}")
    return results


def shown(models: list[dict[str, Any]], tasks: list[str], lengths: list[int]) -> str:
    """Return the accuracies as a table, a row for each task and model."""
    rows = []
    for task in tasks:
        for model in models:
            found = {x["length"]: x for x in model["results"] if x["task"] == task}
            cells = [f"{100 * found[n]['accuracy']:.0f}" if n in found else "-" for n in lengths]
            rows.append([task, model["name"], f"{model['parameters']:,}", *cells])
        found = {x["length"]: x for x in models[0]["results"] if x["task"] == task}
        cells = [f"{100 * found[n]['most_frequent']:.0f}" if n in found else "-" for n in lengths]
        rows.append([task, "*the most frequent answer*", "", *cells])
    counts = {x["n_samples"] for model in models for x in model["results"]} or {0}
    notes = [
        f"Answers that are right, in %, by tokens of the text (0: the facts alone); {min(counts)} "
        f"to {max(counts)} samples each. All models trained from scratch on these tasks: not "
        "comparable with pretrained models."
    ]
    return table(["task", "model", "parameters", *map(str, lengths)], rows, notes)


def main(words: list[str] | None = None) -> None:
    """Write a training text, or measure models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    programs = parser.add_subparsers(dest="program", required=True)
    text = programs.add_parser("text", help="write a text for training or validation")
    text.add_argument("file", type=Path)
    text.add_argument("--split", choices=("train", "valid"), default="train")
    text.add_argument("--tokens", type=int, default=10_000_000)
    text.add_argument("--lengths", type=int, nargs="+", default=[0, 500, 1000])
    text.add_argument("--vocab", type=Path, help="folder of a vocabulary; default: bytes")
    text.add_argument("--seed", type=int, default=1)
    measure = programs.add_parser("measure", help="measure trained models")
    trained_runs.add_options(measure)
    measure.add_argument("--split", choices=("valid", "test"), default="test")
    measure.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    measure.add_argument("--samples", type=int, default=100, help="of each task and length")
    measure.add_argument("--batch_size", type=int, default=10)
    measure.add_argument("--seed", type=int, default=0)
    for each in (text, measure):
        each.add_argument("--babi", type=Path, required=True, help="folder of the bAbI tasks")
        each.add_argument("--books", type=Path, required=True, help="folder of the books")
        each.add_argument(
            "--tasks", nargs="+", choices=BABI_TASKS, default=list(BABI_TASKS[:5]), metavar="TASK"
        )
    arguments = parser.parse_args(words)
    try:
        if arguments.program == "text":
            write_text(arguments)
            return
        models = []
        for run in load_runs(arguments):
            models.append(run.about | {"results": measured(run, arguments)})
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")
    names = ("split", "tasks", "lengths", "samples", "seed", "mem_len")
    result = {"settings": {name: getattr(arguments, name) for name in names}, "models": models}
    trained_runs.write_result(arguments, result, shown(models, arguments.tasks, arguments.lengths))


if __name__ == "__main__":
    main()
