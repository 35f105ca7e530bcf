"""Sentiment of whole reviews: IMDb (5,000 to train on), and polarity v2.0 by ten folds."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.data import SPLITS, opened, optional_package
from transformer_xl.errors import DataError
from transformer_xl.inference import next_log_probs
from transformer_xl.tasks.task import (
    SEPARATOR,
    TASKS_EXTRA,
    Example,
    Measured,
    Task,
    Trained,
    encoded_prompts,
    read_examples,
    write_examples,
)

LABELS = ("negative", "positive")
_WORD = re.compile(r"[a-z0-9']+|[!?]")
_N_FOLDS = 10
"""Folds of polarity v2.0, numbered from 1."""
_N_VALID = 200


class Sentiment(Task):
    """The whole review is read into the memory, and one of two labels comes next."""

    name = "sentiment"
    title = "sentiment of IMDb reviews, 5,000 to train on"
    metric = "accuracy, %"
    models = {  # noqa: RUF012
        "txl": ("sentiment",),
        "txl-pretrained": ("sentiment-language", "sentiment-tuned"),
    }
    reads = tuple(f"{split}.jsonl.gz" for split in SPLITS)

    def prepare(self, source: Path, folder: Path) -> None:
        """Write the reviews; ``source`` has train.jsonl.gz, valid.jsonl.gz and test.jsonl.gz."""
        for split in SPLITS:
            write_examples(folder, split, _reviews(source / f"{split}.jsonl.gz"), SEPARATOR)

    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Compare the probabilities of the labels after each review."""
        examples = read_examples(folder, split)
        log_probs = next_log_probs(
            trained.model, encoded_prompts(trained, examples), trained.lengths
        )
        labels = [trained.vocab.number_of(label) for label in LABELS]
        return _measured(examples, log_probs[:, labels].argmax(1).tolist())

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield naive Bayes and logistic regression over words and word pairs."""
        train, examples = read_examples(folder, "train"), read_examples(folder, split)
        for name, method in _methods():
            method.fit([x.prompt for x in train], [LABELS.index(x.completion) for x in train])
            yield name, _measured(examples, method.predict([x.prompt for x in examples]))


class Polarity(Sentiment):
    """The same with the reviews of polarity v2.0, after a training on those of IMDb."""

    name = "polarity"
    title = "polarity v2.0, ten folds"
    models = {"txl": ("sentiment", "polarity")}  # noqa: RUF012
    reads = (*Sentiment.reads, "polarity/reviews.jsonl.gz")
    n_shared = 1
    splits = ("test",)
    parts = tuple(f"fold_{n}" for n in range(1, _N_FOLDS + 1))

    def prepare(self, source: Path, folder: Path) -> None:
        """Write the reviews of IMDb and the folds; ``source`` has ``polarity/reviews.jsonl.gz``.

        Nine folds are to train on and one to test, so validation takes reviews of IMDb.
        """
        super().prepare(source, folder)
        valid = read_examples(folder, "valid")[:_N_VALID]
        path = source / "polarity" / "reviews.jsonl.gz"
        reviews = _reviews(path, has_folds=True)
        missing = {str(n) for n in range(1, _N_FOLDS + 1)} - {x.group for x in reviews}
        if missing:
            raise DataError(
                f"{path} has no review of fold {min(missing, key=int)}: folds 1 to {_N_FOLDS} are "
                "needed"
            )
        for n, part in enumerate(self.parts, 1):
            (folder / part).mkdir()
            test = [x for x in reviews if x.group == str(n)]
            train = [x for x in reviews if x.group != str(n)]
            for split, some in zip(SPLITS, (train, valid, test), strict=True):
                write_examples(folder / part, split, some, SEPARATOR)


def words(text: str) -> str:
    """Return the words of a review and its exclamation and question marks, between blanks."""
    return " ".join(_WORD.findall(text.lower().replace("<br />", " ")))


def _reviews(path: Path, *, has_folds: bool = False) -> list[Example]:
    """Return the reviews of a file of JSON lines; the group of one is its fold."""
    needs = "a text and a label, 0 or 1"
    if has_folds:
        needs += f", and a fold, 1 to {_N_FOLDS}"
    found = []
    with opened(path) as file:
        lines = [(n, line) for n, line in enumerate(file.read().splitlines(), 1) if line.strip()]
    for number, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number:,} is no JSON: {error}") from None
        if not _is_review(row, has_folds=has_folds):
            shown = json.dumps(row, ensure_ascii=False)[:60]
            raise DataError(f"{path}: line {number:,} is no review with {needs}: {shown}")
        group = str(row["fold"]) if has_folds else ""
        found.append(Example(words(row["text"]), LABELS[row["label"]], group))
    if not found:
        raise DataError(f"{path} has no review in it")
    # Files may be sorted by label, and batches need both.
    return [found[row] for row in np.random.default_rng(0).permutation(len(found))]


def _is_review(row: Any, *, has_folds: bool) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        return False

    def is_number(name: str, lowest: int, highest: int) -> bool:
        # By type, as True and 1.0 equal 1.
        return type(row.get(name)) is int and lowest <= row[name] <= highest

    return is_number("label", 0, 1) and (not has_folds or is_number("fold", 1, _N_FOLDS))


def _methods() -> Iterator[tuple[str, Any]]:
    def sklearn(module: str) -> Any:
        what = "the comparison with naive Bayes"
        return optional_package(f"sklearn.{module}", what, TASKS_EXTRA)

    text, pipeline = sklearn("feature_extraction.text"), sklearn("pipeline").make_pipeline
    how: dict[str, Any] = {"tokenizer": str.split, "token_pattern": None, "lowercase": False}
    pairs = how | {"ngram_range": (1, 2)}
    counts = text.CountVectorizer(binary=True, **pairs)
    yield "naive Bayes, words and pairs", pipeline(counts, sklearn("naive_bayes").MultinomialNB())
    # The strengths of regularization are the best of 1, 4 and 16 on the validation reviews.
    for name, options, strength in (("words", how, 4.0), ("words and pairs", pairs, 16.0)):
        weights = text.TfidfVectorizer(sublinear_tf=True, binary=True, **options)
        regression = sklearn("linear_model").LogisticRegression(C=strength, max_iter=200)
        yield f"logistic regression, {name}", pipeline(weights, regression)


def _measured(examples: Sequence[Example], labels: Sequence[int] | np.ndarray) -> Measured:
    right = np.array([x.completion == LABELS[y] for x, y in zip(examples, labels, strict=True)])
    return Measured({"accuracy": 100 * float(right.mean())}, right.astype(float))
