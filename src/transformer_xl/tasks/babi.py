"""bAbI: questions about short stories, one model for all twenty tasks (arXiv 1502.05698)."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer_xl.data import opened
from transformer_xl.errors import DataError
from transformer_xl.tasks.task import (
    Example,
    Measured,
    Task,
    Trained,
    completions,
    read_examples,
    write_documents,
    write_examples,
)

_ANSWER_LEN = 8
"""Words of an answer at most; the longest has three with two commas."""
_VERSIONS = 16
"""How many times each story is written to train on."""
_SINGLE = 0.5
"""Share of the stories of which one question is asked, as when the model is measured."""
_SHORT = 14
"""Words of a story and its question, at most, with which the training begins."""
_NAMES = (
    "mary sandra julie gertrude winona jessica emily",
    "john daniel bill fred jeff lily bernhard brian greg julius",
    "kitchen bathroom bedroom garden hallway office school park cinema",
    "apple milk football",
    "green white gray yellow",
    "journeyed moved travelled",
    "got grabbed took",
    "discarded dropped left",
)
"""Words that may take each other's place in a story."""
_PRONOUNS = ("qa11", "qa13")
"""Tasks in which women and men do not take each other's place."""
_NOT_RENAMED = ("qa17", "qa18", "qa20")
"""Tasks in which the answer depends on what the words mean."""
PASSED = 0.95
"""Accuracy from which on a task counts as passed, as in the paper."""


BABI_TASKS = tuple(f"qa{n}" for n in range(1, 21))
VALID_SHARE = 0.1
"""Share of the training stories, the last ones, that are held out for validation."""

_FACT = re.compile(r"(\d+) (.+)")


class Question(NamedTuple):
    """A question about the facts of a story that stand before it."""

    facts: tuple[str, ...]
    question: str
    answer: str
    """One word, or several with commas between them."""


def read_babi(path: Path) -> list[list[Question]]:
    """Read a file of bAbI, compressed or not; return the questions of each story.

    Raises:
        DataError: A line is none of bAbI.
        OSError: The file cannot be read.
    """
    stories: list[list[Question]] = []
    facts: list[str] = []
    with opened(path) as file:
        lines = file.read().decode().splitlines()
    for number, line in enumerate(lines, 1):
        text, *answer = line.split("\t")
        found = _FACT.fullmatch(text.strip())
        if found is None or (not stories and found[1] != "1"):
            raise DataError(
                f"{path}: line {number:,}, {line[:60]!r}, is none of bAbI: expected a number from "
                "1 on and a fact, or a number, a question, a tab and its answer"
            )
        if found[1] == "1":
            stories.append([])
            facts = []
        if answer:
            stories[-1].append(Question(tuple(facts), found[2], answer[0].strip()))
        else:
            facts.append(found[2])
    return stories


def babi_stories(folder: Path, task: str) -> dict[str, list[list[Question]]]:
    """Read the questions of each story of a task, by split.

    Those of training and validation, the last stories, are from the training file of the task.
    Those that are, facts and all, in the test file too (135 of 1,000 in qa4) are left out.

    Args:
        folder: The folder with files such as ``qa1_single-supporting-fact_train.txt``, compressed
            or not.
        task: One of `BABI_TASKS`.

    Raises:
        FileNotFoundError: The folder lacks a file of the task.
        DataError: A file is none of bAbI.
    """
    files = []
    for part in ("train", "test"):
        if not (paths := sorted(folder.glob(f"{task}_*_{part}.txt*"))):
            raise FileNotFoundError(
                f"{folder} has no {task}_*_{part}.txt or .txt.gz: give the folder of bAbI (en, or "
                f"en-10k) and tasks from {BABI_TASKS[0]} to {BABI_TASKS[-1]}"
            )
        files.append(read_babi(paths[0]))
    stories, tests = files
    n_train = len(stories) - round(len(stories) * VALID_SHARE)
    held_out = {*chain.from_iterable(tests)}

    def others(stories: list[list[Question]]) -> list[list[Question]]:
        rest = ([x for x in story if x not in held_out] for story in stories)
        return [story for story in rest if story]

    valid = others(stories[n_train:])
    held_out |= {*chain.from_iterable(valid)}
    return {"train": others(stories[:n_train]), "valid": valid, "test": tests}


class BabiAnswers(Task):
    """The story is read into the memory, and the answer is written after the question."""

    name = "babi"
    title = "bAbI, all 20 tasks by one model"
    metric = "mean accuracy over tasks, %"
    models = {  # noqa: RUF012
        "txl": ("babi-short", "babi"),
        "lstm": ("babi-lstm-short", "babi-lstm"),
    }
    reads = ("qa*",)

    def prepare(self, source: Path, folder: Path) -> None:
        """Write the examples of all tasks; ``source`` is a folder of bAbI, such as ``en``.

        A document to train on is a story with some of its questions where they are asked. The first
        training reads the shortest stories only (``short_train.txt``), and keeps the weights
        that are best on such stories of the validation.
        """
        tasks = [task for task in BABI_TASKS if [*source.glob(f"{task}_*")]]
        if not tasks:
            raise FileNotFoundError(f"{source}: no file of bAbI, such as qa1_*_train.txt")
        stories = {task: babi_stories(source, task) for task in tasks}
        for split in ("train", "valid", "test"):
            of_split = {task: by_split[split] for task, by_split in stories.items()}
            examples = [
                Example(_text(*x.facts, x.question), _answer(x), task)
                for task, some in of_split.items()
                for x in chain.from_iterable(some)
            ]
            write_examples(folder, split, examples)
            if split == "train":
                write_documents(folder, split, _documents(of_split, _VERSIONS))
            if split != "test":
                short = _documents(_short(of_split), _VERSIONS if split == "train" else 1)
                write_documents(folder, f"short_{split}", short)

    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Write the answer to each question and compare it."""
        examples = read_examples(folder, split)
        return _measured(examples, completions(trained, examples, _ANSWER_LEN))

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield the most frequent answer of each task in the training text."""
        counts: dict[str, Counter[str]] = {}
        for example in read_examples(folder, "train"):
            counts.setdefault(example.group, Counter())[example.completion] += 1
        examples = read_examples(folder, split)
        answers = [counts[x.group].most_common(1)[0][0] for x in examples]
        yield "most frequent answer", _measured(examples, answers)


def _documents(stories: dict[str, list[list[Question]]], n_versions: int) -> Iterator[list[str]]:
    """Yield the stories several times over, with other questions and, but the first time, renamed.

    A model that has always read the answers to the questions before relies on them, and they are
    not there when it is measured; with one question to a document it would read each story as often
    as it has questions. Other names for the same persons, rooms or objects leave the answer as it
    is, up to the name.
    """
    draw = np.random.default_rng(0)
    # Tasks are mixed, so that every batch has all of them.
    order = [(task, n) for task, some in stories.items() for n in range(len(some))]
    words = {task: _all_words(some) for task, some in stories.items()}
    for version in range(n_versions):
        for place in draw.permutation(len(order)):
            task, n = order[place]
            story = stories[task][n]
            asked = [story[draw.integers(len(story))]]
            if draw.random() >= _SINGLE:
                share = draw.random()
                asked = [x for x in story if draw.random() < share] or asked
            parts = _parts(asked)
            if version and task not in _NOT_RENAMED:
                names = _new_names(words[task], draw, may_mix=task not in _PRONOUNS)
                parts = [" ".join(names.get(x, x) for x in part.split()) for part in parts]
            yield parts


def _short(stories: dict[str, list[list[Question]]]) -> dict[str, list[list[Question]]]:
    """Return the questions with few words before them, each as a story."""
    return {
        task: [
            [x]
            for x in chain.from_iterable(some)
            if len(_text(*x.facts, x.question).split()) <= _SHORT
        ]
        for task, some in stories.items()
    }


def _parts(questions: list[Question]) -> list[str]:
    """Return prompts and completions by turns: the facts before each question, and its answer."""
    parts, n_told = [], 0
    for x in questions:
        parts += [_text(*x.facts[n_told:], x.question), _answer(x)]
        n_told = len(x.facts)
    return parts


def _new_names(words: set[str], draw: np.random.Generator, *, may_mix: bool) -> dict[str, str]:
    """Return other names for those that occur in a task, the same ones in another order."""
    women, men, *others = _NAMES
    names: dict[str, str] = {}
    for kind in [f"{women} {men}", *others] if may_mix else _NAMES:
        own = [x for x in kind.split() if x in words]
        names |= zip(own, draw.permutation(own).tolist(), strict=True)
    return names


def _all_words(stories: list[list[Question]]) -> set[str]:
    return {word for x in chain.from_iterable(stories) for word in _text(*x.facts).split()}


def _text(*sentences: str) -> str:
    """Return the words between blanks without those that say nothing: articles, and full stops."""
    words = " ".join(sentences).replace(".", " ").replace("?", " ?").lower().split()
    return " ".join(x for x in words if x not in ("a", "an", "the"))


def _answer(question: Question) -> str:
    return question.answer.replace(",", " , ")


def _measured(examples: list[Example], answers: list[str]) -> Measured:
    right = np.array([x.completion == y for x, y in zip(examples, answers, strict=True)], float)
    groups = np.array([x.group for x in examples])
    by_task = {name: 100 * right[groups == name].mean() for name in dict.fromkeys(groups.tolist())}
    metrics = {"mean": float(np.mean([*by_task.values()]))}
    metrics["passed"] = float(sum(x >= 100 * PASSED for x in by_task.values()))
    return Measured(metrics | by_task, right)
