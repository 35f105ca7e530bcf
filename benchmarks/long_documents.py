"""Documents of any length, classified with and without the memory.

    python benchmarks/long_documents.py
    python benchmarks/long_documents.py --jsb jsb-chorales/Jsb16thSeparated.json
    python benchmarks/long_documents.py --only marks --documents 400 --epochs 2

Two tasks. *Marks*: one symbol within the first segment tells the class, of four; everything behind
it is noise, three to ten segments of it. *Chorales*: is a chorale in major or in minor, by all its
notes? The program finds the key (Krumhansl and Kessler, 1982: the profile that fits the durations
of all notes best), so the answer is a property of the whole piece, while its last bars often end a
piece in minor with a major chord. A note for every quarter of each voice; each piece is
transposed at random, in training alone.

Four ways to read, all of the same size and trained alike:

    memory                  each layer remembers what it put out (enhanced_recurrence)
    memory, the paper's     each layer remembers what it read: the reach is n_layer * mem_len tokens
    no memory               each segment by itself; the class is said at the last one
    last segment            the rest is cut off, in training too, as a model without memory has to
"""

import argparse
import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_file import write_result_file
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.inference.classify import Fit, LongDocumentClassifier, accuracy, fit
from transformer_xl.model import TransformerXL

WAYS = ("memory", "memory, the paper's", "no memory", "last segment")
_MAJOR = (6.35, 2.23, 3.48, 2.33, 4.38, 4.09, 2.52, 5.19, 2.39, 3.66, 2.29, 2.88)
_MINOR = (6.33, 2.68, 3.52, 5.38, 2.60, 3.53, 2.54, 4.75, 3.98, 2.69, 3.34, 3.17)
_QUARTER = 4
_REST = 128


@dataclass(frozen=True)
class Documents:
    """Documents and their classes."""

    texts: list[Tensor]
    labels: Tensor

    def last(self, length: int) -> "Documents":
        """Return their ends alone."""
        return replace(self, texts=[text[-length:] for text in self.texts])


@dataclass(frozen=True)
class Task:
    """What is to be learned."""

    name: str
    vocab_size: int
    n_classes: int
    segment_len: int
    train: Documents
    test: Documents


def marks(n_documents: int, segment_len: int = 16) -> Task:
    """Make documents whose class one symbol of the first segment tells."""
    classes, symbols = 4, 32
    draw = random.Random(0)

    def some(n: int) -> Documents:
        texts, labels = [], [draw.randrange(classes) for _ in range(n)]
        for label in labels:
            length = draw.randrange(4 * segment_len, 11 * segment_len)
            text = [draw.randrange(classes, symbols) for _ in range(length)]
            text[draw.randrange(segment_len)] = label
            texts.append(torch.tensor(text))
        return Documents(texts, torch.tensor(labels))

    train, test = some(n_documents), some(400)
    return Task("marks", symbols, classes, segment_len, train, test)


def chorales(path: Path, transpositions: int) -> Task:
    """Read the chorales; each is given in several transpositions, for training."""
    pieces = json.loads(path.read_text(encoding="utf-8"))
    draw = random.Random(0)

    def some(splits: Sequence[str], n: int) -> Documents:
        texts, labels = [], []
        for piece in (piece for split in splits for piece in pieces[split]):
            label = int(is_minor(piece))
            for _ in range(n):
                by = draw.randrange(-5, 7) if n > 1 else 0
                quarters = piece[::_QUARTER]
                notes = [note + by if note > 0 else _REST for step in quarters for note in step]
                texts.append(torch.tensor(notes))
                labels.append(label)
        return Documents(texts, torch.tensor(labels))

    train, test = some(("train",), transpositions), some(("valid", "test"), 1)
    return Task("chorales", _REST + 1, 2, 32, train, test)


def is_minor(piece: Sequence[Sequence[int]]) -> bool:
    """Whether the notes of a piece fit a minor key better than any major one."""
    notes = np.array([note for step in piece for note in step if note > 0])
    durations = np.bincount(notes % 12, minlength=12)
    best = [
        max(np.corrcoef(np.roll(profile, tonic), durations)[0, 1] for tonic in range(12))
        for profile in (_MAJOR, _MINOR)
    ]
    return best[1] > best[0]


def learned(task: Task, way: str, settings: Fit, seed: int) -> dict[str, Any]:
    """Train one way and return what it finds in the test documents."""
    torch.manual_seed(seed)
    remembers = way.startswith("memory")
    config = ModelConfig(
        vocab_size=task.vocab_size,
        n_layer=2,
        n_head=2,
        d_model=32,
        d_inner=64,
        mem_len=task.segment_len if remembers else 0,
        norm_first=True,
        final_norm=True,
        enhanced_recurrence=way == "memory",
        init_std=0.1,
        dropout=0.0,
    )
    train, test = task.train, task.test
    if way == "last segment":
        train, test = train.last(task.segment_len), test.last(task.segment_len)
    classifier = LongDocumentClassifier(
        TransformerXL(config), task.n_classes, segment_len=task.segment_len
    )
    started = time.perf_counter()
    losses: list[float] = []
    tell: Callable[[int, float], None] = lambda epoch, loss: losses.append(loss)  # noqa: E731
    fit(classifier, train.texts, train.labels, replace(settings, seed=seed), tell)
    return {
        "task": task.name,
        "way": way,
        "seed": seed,
        "accuracy": accuracy(classifier, test.texts, test.labels),
        "train_loss": losses[-1],
        "seconds": time.perf_counter() - started,
    }


def machine() -> dict[str, Any]:
    """Return what ran it."""
    return {
        "processor": str(torch.cpu.get_capabilities().get("cpu_name") or platform.machine()),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Train every way on every task and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jsb", type=Path, help="Jsb16thSeparated.json")
    parser.add_argument("--only", choices=["marks", "chorales"])
    parser.add_argument("--documents", type=int, default=1600, help="of marks, to learn from")
    parser.add_argument("--transpositions", type=int, default=4, help="of each chorale")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    tasks = []
    if arguments.only != "chorales":
        tasks.append(marks(arguments.documents))
    if arguments.jsb and arguments.only != "marks":
        tasks.append(chorales(arguments.jsb, arguments.transpositions))
    settings = Fit(epochs=arguments.epochs, batch_size=32, lr=5e-3)
    rows = []
    print("| task | reads | accuracy | most frequent class | s |\n|---|---|---|---|---|")
    for task in tasks:
        most_frequent = task.test.labels.bincount().max().item() / len(task.test.labels)
        for way in arguments.ways:
            found = [learned(task, way, settings, seed) for seed in range(arguments.seeds)]
            rows += [row | {"most_frequent_class": most_frequent} for row in found]
            shown = ", ".join(f"{row['accuracy']:.3f}" for row in found)
            seconds = sum(row["seconds"] for row in found)
            row = f"| {task.name} | {way} | {shown} | {most_frequent:.3f} | {seconds:.0f} |"
            print(row, flush=True)
    if arguments.out:
        content = {
            "format_version": 1,
            "machine": machine(),
            "settings": {
                "documents": arguments.documents,
                "transpositions": arguments.transpositions,
                **asdict(settings),
            },
            "rows": rows,
        }
        write_result_file(arguments.out, content)


if __name__ == "__main__":
    main()
