"""The stories and questions of bAbI (Weston et al., 2015, arXiv 1502.05698), as published."""

import re
from pathlib import Path
from typing import Literal, NamedTuple

from transformer_xl.data import opened
from transformer_xl.errors import DataError

Split = Literal["train", "valid", "test"]

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


def babi_stories(folder: Path, task: str, split: Split) -> list[list[Question]]:
    """Read the questions of each story of a task.

    Those of training and validation are from the training file of the task. Those that
    are, facts and all, in the test file too (135 of 1,000 in qa4) are left out.

    Args:
        folder: The folder with files such as ``qa1_single-supporting-fact_train.txt``, compressed
            or not.
        task: One of `BABI_TASKS`.
        split: The split; for ``valid`` the last stories of the training file.

    Raises:
        FileNotFoundError: The folder lacks a file of the task.
        DataError: A file is none of bAbI.
    """
    tests = read_babi(_babi_file(folder, task, "test"))
    if split == "test":
        return tests
    stories = read_babi(_babi_file(folder, task, "train"))
    n_train = len(stories) - round(len(stories) * VALID_SHARE)
    chosen = stories[:n_train] if split == "train" else stories[n_train:]
    held_out = {x for story in tests for x in story}
    if split == "train":
        held_out |= {x for story in stories[n_train:] for x in story}
    kept = ([x for x in story if x not in held_out] for story in chosen)
    return [story for story in kept if story]


def _babi_file(folder: Path, task: str, part: str) -> Path:
    found = sorted(folder.glob(f"{task}_*_{part}.txt*"))
    if not found:
        raise FileNotFoundError(
            f"{folder} has no {task}_*_{part}.txt or .txt.gz: give the folder of bAbI (en, or "
            f"en-10k) and tasks from {BABI_TASKS[0]} to {BABI_TASKS[-1]}"
        )
    return found[0]
