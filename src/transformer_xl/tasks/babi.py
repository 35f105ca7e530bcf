"""bAbI: questions about short stories, one model for all twenty tasks (arXiv 1502.05698)."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from transformer_xl.data import SPLITS
from transformer_xl.inference import continuations
from transformer_xl.tasks.babi_stories import BABI_TASKS, Question, babi_stories
from transformer_xl.tasks.task import (
    SEPARATOR,
    Example,
    Measured,
    Task,
    Trained,
    encoded_prompts,
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
        for split in SPLITS:
            stories = {task: babi_stories(source, task, split) for task in tasks}
            examples = [
                Example(_prompt(x), _answer(x), group=task)
                for task, some in stories.items()
                for x in chain.from_iterable(some)
            ]
            write_examples(folder, split, examples, SEPARATOR)
            if split != "test":
                n_versions = _VERSIONS if split == "train" else 1
                short = [*_documents(_short(stories), n_versions)]
                write_documents(folder, f"short_{split}", short, SEPARATOR)
            if split == "train":
                write_documents(folder, split, [*_documents(stories, _VERSIONS)], SEPARATOR)

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
        return _measured(examples, [x.partition(SEPARATOR.strip())[0].strip() for x in answers])

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
        task: [[x] for x in chain.from_iterable(some) if len(_prompt(x).split()) <= _SHORT]
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


def _prompt(question: Question) -> str:
    return _text(*question.facts, question.question)


def _answer(question: Question) -> str:
    return question.answer.replace(",", " , ")


def _measured(examples: list[Example], answers: list[str]) -> Measured:
    right = np.array([x.completion == y for x, y in zip(examples, answers, strict=True)], float)
    groups = np.array([x.group for x in examples])
    by_task = {name: 100 * right[groups == name].mean() for name in dict.fromkeys(groups.tolist())}
    metrics = {"mean": float(np.mean([*by_task.values()]))}
    metrics["passed"] = float(sum(x >= 100 * PASSED for x in by_task.values()))
    return Measured(metrics | by_task, right)
