"""Anomalies in logs: the surprisal of each line, as the log arrives.

The logs are made by :mod:`transformer_xl.tasks.logs.made`. A model is trained on lines without
anomalies and reads the others as `txl score --by line` does; the surprisal of a line is the sum of
-log p of its tokens.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.data import optional_package, train_vocab
from transformer_xl.inference.evaluate import Sums, pieces_of, scores
from transformer_xl.model import Reader
from transformer_xl.studies.baselines import KneserNey
from transformer_xl.tasks.logs.made import ANOMALIES, log_lines, template
from transformer_xl.tasks.task import TASKS_EXTRA, Measured, Task, Trained

LOGS = {
    "train": (1, 1_200_000, 0.0),
    "usual": (2, 10_000, 0.0),
    "test": (3, 20_000, 0.02),
    "valid": (4, 10_000, 0.02),
}
"""By name, the seed of a log, its lines, and the share of those with an anomaly. The training is
validated on `usual`, so that it sees no anomaly."""
_ORDER = 6
_BLOCK = 1 << 16


class Logs(Task):
    """A line is a name, an event and its parameters, as words."""

    name = "logs"
    title = "Anomalies in logs of interleaved sessions"
    metric = "ROC AUC"
    models = {"txl": ("logs",), "lstm": ("logs-lstm",)}  # noqa: RUF012
    makes_data = True

    def identity(self, source: Path | None) -> dict[str, Any]:
        """Return seeds, lines and shares of anomalies."""
        return {"logs": LOGS}

    def prepare(self, source: Path, folder: Path) -> None:
        """Write the logs, and beside them the anomaly of each line."""
        for log, (seed, n, share) in LOGS.items():
            lines = [*log_lines(n, seed=seed, anomalies=share)]
            (folder / f"{log}.txt").write_text("".join(f"{line.text}\n" for line in lines))
            if share:
                (folder / f"{log}.json").write_text(json.dumps([line.anomaly for line in lines]))

    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Score the lines of a log as they arrive."""
        reader, vocab = Reader(trained.model, trained.lengths), trained.vocab
        lines = scores(reader, pieces_of(vocab, _blocks(folder / f"{split}.txt"), "line"))
        surprisal = [Sums.of(vocab, *line).nll_sum for line in lines]
        return _measured(folder, split, surprisal)

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield how rare the template of a line is, and n-grams of its words and those before."""
        known, text = ((folder / f"{name}.txt").read_text() for name in ("train", split))
        counts = Counter(map(template, known.splitlines()))
        rare = [-np.log(counts[template(line)] + 1) for line in text.splitlines()]
        yield "frequency of the template", _measured(folder, split, rare)
        vocab = train_vocab("words", [known])
        grams = KneserNey(np.array(vocab.encode(known)), len(vocab), order=_ORDER)
        ids = np.array(vocab.encode(text))
        ends = np.flatnonzero(ids == vocab.eos_id)[:-1] + 1
        sums = [x.sum() for x in np.split(grams.nll(ids), ends)]
        yield f"{_ORDER}-gram, Kneser-Ney", _measured(folder, split, sums)


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _measured(folder: Path, split: str, surprisal: Sequence[float]) -> Measured:
    """Return the AUC, of all anomalies and of each kind; an anomaly's score is its rank."""
    metrics_of = optional_package("sklearn.metrics", "the task logs", TASKS_EXTRA)
    roc_auc_score = metrics_of.roc_auc_score
    anomalies = json.loads((folder / f"{split}.json").read_bytes())
    values, kinds = np.array(surprisal), np.array([kind or "" for kind in anomalies])
    usual = kinds == ""
    metrics = {"auc": float(roc_auc_score(~usual, values))}
    for kind in ANOMALIES:
        some = usual | (kinds == kind)
        metrics[kind] = float(roc_auc_score(kinds[some] == kind, values[some]))
    ordered = np.sort(values[usual])
    below = [np.searchsorted(ordered, values[~usual], side=side) for side in ("left", "right")]
    # The share of the usual lines that surprisal less: the mean of these is the AUC.
    return Measured(metrics, np.mean(below, axis=0) / len(ordered))
