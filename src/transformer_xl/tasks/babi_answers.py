"""bAbI: questions about short stories, one model for all twenty tasks (arXiv 1502.05698)."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from transformer_xl.data.babi import BABI_TASKS, Question, babi_stories
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
    write_documents,
    write_examples,
)

_ANSWER_LEN = 8
"""Words of an answer at most; the longest has three with two commas."""
_VERSIONS = 8
"""How many times each story is written to train on."""
_KEPT = 0.8
"""Share of the questions that are asked in all versions but the first."""
_NAMES = (
    "mary sandra julie",
    "john daniel bill fred jeff",
    "gertrude winona jessica emily",
    "lily bernhard brian greg julius",
    "kitchen bathroom bedroom garden hallway office school park cinema",
    "apple milk football",
    "green white gray yellow",
)
"""Words that may take each other's place in a story."""
_NOT_RENAMED = ("qa17", "qa18", "qa20")
"""Tasks in which the answer depends on what the words mean."""
PASSED = 0.95
"""Accuracy from which on a task counts as passed, as in the paper."""


class BabiAnswers(Task):
    """The story is read into the memory, and the answer is written after the question."""

    name = "babi"
    title = "bAbI, all 20 tasks by one model"
    metric = "mean accuracy over tasks, %"
    models = {"txl": ("babi",), "lstm": ("babi-lstm",)}  # noqa: RUF012

    def prepare(self, source: Path, folder: Path) -> None:
        """Write the examples of all tasks; ``source`` is a folder of bAbI, such as ``en``.

        A document to train on is a whole story, with several of its questions where they are asked.
        """
        tasks = [task for task in BABI_TASKS if [*source.glob(f"{task}_*")]]
        if not tasks:
            raise FileNotFoundError(f"{source}: no file of bAbI, such as qa1_*_train.txt")
        for split in SPLITS:
            stories = {task: babi_stories(source, task, split) for task in tasks}
            examples = [
                Example(_text(*x.facts, x.question), _answer(x), group=task)
                for task, some in stories.items()
                for x in chain.from_iterable(some)
            ]
            write_examples(folder, split, examples, SEPARATOR)
            if split == "train":
                write_documents(folder, split, [*_training_documents(stories)], SEPARATOR)

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


def _training_documents(stories: dict[str, list[list[Question]]]) -> Iterator[list[str]]:
    """Yield stories several times over: as they are, then with questions left out, and renamed.

    Where a question before is left out, its answer is no help, as when the model is measured. Other
    names for the same persons, rooms or objects leave the answer as it is, up to the name.
    """
    draw = np.random.default_rng(0)
    # Tasks are mixed, so that every batch has all of them.
    order = [(task, n) for task, some in stories.items() for n in range(len(some))]
    words = {task: _all_words(some) for task, some in stories.items()}
    for version in range(_VERSIONS):
        for place in draw.permutation(len(order)):
            task, n = order[place]
            story = stories[task][n]
            asked = [x for x in story if version == 0 or draw.random() < _KEPT]
            parts = _parts(asked or story[-1:])
            if version and task not in _NOT_RENAMED:
                names = _new_names(words[task], draw)
                parts = [" ".join(names.get(x, x) for x in part.split()) for part in parts]
            yield parts


def _parts(questions: list[Question]) -> list[str]:
    """Return prompts and completions by turns: the facts before each question, and its answer."""
    parts, n_told = [], 0
    for x in questions:
        parts += [_text(*x.facts[n_told:], x.question), _answer(x)]
        n_told = len(x.facts)
    return parts


def _new_names(words: set[str], draw: np.random.Generator) -> dict[str, str]:
    """Return other names for those that occur in a task, the same ones in another order."""
    names: dict[str, str] = {}
    for kind in _NAMES:
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
