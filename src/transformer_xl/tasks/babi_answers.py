"""bAbI: questions about short stories, one model for all twenty tasks (arXiv 1502.05698)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from transformer_xl.data.babi import BABI_TASKS, babi_questions
from transformer_xl.inference.answers import continuations
from transformer_xl.tasks.task import (
    SEPARATOR,
    SPLITS,
    Example,
    Measured,
    Task,
    Trained,
    encoded_prompts,
    read_examples,
    write_examples,
)

_ANSWER_LEN = 8
"""Words of an answer at most; the longest has three with two commas."""
PASSED = 0.95
"""Accuracy from which on a task counts as passed, as in the paper."""


class BabiAnswers(Task):
    """The story is read into the memory, and the answer is written after the question."""

    name = "babi"
    title = "bAbI, all 20 tasks by one model"
    metric = "mean accuracy over tasks, %"
    models = {"txl": ("babi",), "lstm": ("babi-lstm",)}  # noqa: RUF012

    def prepare(self, source: Path, folder: Path) -> None:
        """Write the examples of all tasks; ``source`` is a folder of bAbI, such as ``en``."""
        tasks = [task for task in BABI_TASKS if [*source.glob(f"{task}_*")]]
        if not tasks:
            raise FileNotFoundError(f"{source}: no file of bAbI, such as qa1_*_train.txt")
        for split in SPLITS:
            examples = [
                Example(
                    " ".join(map(_words, (*x.facts, x.question))),
                    x.answer.replace(",", " , "),
                    group=task,
                )
                for task in tasks
                for x in babi_questions(source, task, split)
            ]
            if split == "train":
                # Tasks are mixed, so that every batch has all of them.
                order = np.random.default_rng(0).permutation(len(examples))
                examples = [examples[n] for n in order]
            write_examples(folder, split, examples, SEPARATOR)

    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Write the answer to each question and compare it."""
        examples = read_examples(folder, split)
        answers = continuations(
            trained.model,
            trained.vocab,
            encoded_prompts(trained, examples),
            trained.lengths,
            length=_ANSWER_LEN,
            stop="\n",
            batch_size=64,
        )
        return _measured(examples, [answer.strip() for answer in answers])

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield the most frequent answer of each task in the training text."""
        counts: dict[str, Counter[str]] = {}
        for example in read_examples(folder, "train"):
            counts.setdefault(example.group, Counter())[example.completion] += 1
        examples = read_examples(folder, split)
        answers = [counts[x.group].most_common(1)[0][0] for x in examples]
        yield "most frequent answer", _measured(examples, answers)


def _words(sentence: str) -> str:
    """Separate marks from words, as the vocabulary has words between blanks."""
    return sentence.replace(".", " .").replace("?", " ?").lower()


def _measured(examples: list[Example], answers: list[str]) -> Measured:
    right = np.array([x.completion == y for x, y in zip(examples, answers, strict=True)], float)
    groups = np.array([x.group for x in examples])
    by_task = {name: 100 * right[groups == name].mean() for name in dict.fromkeys(groups.tolist())}
    metrics = {"mean": float(np.mean([*by_task.values()]))}
    metrics["passed"] = float(sum(x >= 100 * PASSED for x in by_task.values()))
    return Measured(metrics | by_task, right)
