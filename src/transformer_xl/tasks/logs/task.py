"""Anomalies in logs: the surprisal of each line, as the log arrives.

The logs are made by :mod:`transformer_xl.tasks.logs.made`. A model is trained on lines without
anomalies and reads the others as `txl score --by line` does; the surprisal of a line is the sum of
-log p of its tokens.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from transformer_xl.data import Vocab, train_vocab
from transformer_xl.model import Reader
from transformer_xl.studies.baselines import KneserNey
from transformer_xl.tasks.logs.made import ANOMALIES, log_lines, template
from transformer_xl.tasks.task import Measured, Task, Trained

LOGS = {
    "train": (1, 1_200_000, 0.0),
    "usual": (2, 10_000, 0.0),
    "test": (3, 20_000, 0.02),
    "valid": (4, 10_000, 0.02),
}
"""By name, the seed of a log, its lines, and the share of those with an anomaly. The training is
validated on `usual`, so that it sees no anomaly."""
_ORDER = 6


class Logs(Task):
    """A line is a name, an event and its parameters, as words."""

    name = "logs"
    title = "Anomalies in logs of interleaved sessions"
    metric = "ROC AUC"
    models = {"txl": ("logs",), "lstm": ("logs-lstm",)}  # noqa: RUF012
    makes_data = True

    def identity(self, source: Path | None) -> Mapping[str, object]:
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
        """Score the lines of a log, read one after the other with the memory carried."""
        assert trained.vocab is not None
        ids = trained.vocab.encode((folder / f"{split}.txt").read_text())
        scores = Reader(trained.model, trained.lengths).read(ids)
        nll = np.array([0.0 if x is None else -x for x in scores])
        return _measured(folder, split, _line_sums(trained.vocab, ids, nll))

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield how rare the template of a line is, and n-grams of its words and those before."""
        known, text = ((folder / f"{name}.txt").read_text() for name in ("train", split))
        counts = Counter(map(template, known.splitlines()))
        rare = [-np.log(counts[template(line)] + 1) for line in text.splitlines()]
        yield "frequency of the template", _measured(folder, split, rare)
        vocab = train_vocab("words", [known])
        grams = KneserNey(np.array(vocab.encode(known)), len(vocab), order=_ORDER)
        ids = vocab.encode(text)
        sums = _line_sums(vocab, ids, grams.nll(np.array(ids)))
        yield f"{_ORDER}-gram, Kneser-Ney", _measured(folder, split, sums)


def _line_sums(vocab: Vocab, ids: Sequence[int], nll: np.ndarray) -> list[float]:
    """Return the sum of the losses of each line."""
    ends = np.flatnonzero(np.array(ids) == vocab.eos_id)[:-1] + 1
    return [float(x.sum()) for x in np.split(nll, ends)]


def _measured(folder: Path, split: str, surprisal: Sequence[float]) -> Measured:
    """Return the AUC, of all anomalies and of each kind; an anomaly's score is its rank."""
    anomalies = json.loads((folder / f"{split}.json").read_bytes())
    values, kinds = np.array(surprisal), np.array([kind or "" for kind in anomalies])
    is_usual = kinds == ""
    ordered = np.sort(values[is_usual])
    below = [np.searchsorted(ordered, values[~is_usual], side=x) for x in ("left", "right")]
    # The share of the usual lines that surprise less; its mean is the AUC.
    scores = np.mean(below, axis=0) / len(ordered)
    metrics = {"auc": float(scores.mean())}
    metrics |= {
        kind: float(scores[kinds[~is_usual] == kind].mean())
        for kind in ANOMALIES
        if (kinds == kind).any()
    }
    return Measured(metrics, scores)
