"""bAbI questions whose facts are hidden in books, as in BABILong.

bAbI (Weston et al., 2015, arXiv 1502.05698) asks questions about a few facts. BABILong (Kuratov et
al., 2024, arXiv 2406.10149) puts the facts, in order, at random places between the sentences of
books, so that the same question has a text of any length before it. A sample is one line:

    sentence fact sentence sentence fact ... question<tab> answer.

Lengths are in tokens of the vocabulary in use. Text for training, validation and testing has other
stories and other books.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

from transformer_xl.config.checks import require
from transformer_xl.config.files import write_atomically
from transformer_xl.data.text import SPLITS
from transformer_xl.data.unpacking import opened

Split = Literal["train", "valid", "test"]

BABI_TASKS = tuple(f"qa{n}" for n in range(1, 21))
VALID_SHARE = 0.1
"""Share of the training stories, the last ones, that are held out for validation."""

_FACT = re.compile(r"(\d+) (.+)")
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE_START = re.compile(r"\s+(?=[\"'(\[_]*[A-Z0-9])")
_SENTENCE_END = re.compile(r"[.!?][\"')\]_]*$")
_ABBREVIATION = re.compile(r"(?:^|[\s\"'(])(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Rev|Hon|Capt|Col|Gen|No)\.$")
# Samples of a training text and of an evaluation come from different random streams.
_TRAINING, _EVALUATION = 0, 1


class Question(NamedTuple):
    """A question about the facts of a story that stand before it."""

    facts: tuple[str, ...]
    question: str
    answer: str
    """One word, or several with commas between them."""


class Sample(NamedTuple):
    """A question with a text before it in which its facts are hidden."""

    sentences: tuple[str, ...]
    """Sentences of books, and the facts."""
    facts: tuple[int, ...]
    """Indices of the facts in ``sentences``."""
    question: str
    answer: str

    @property
    def text(self) -> str:
        """The sentences and the question."""
        return " ".join((*self.sentences, self.question))

    @property
    def prompt(self) -> str:
        """The text as a model is to continue it: it follows the line end of another sample."""
        return f"\n{self.text}\t"

    @property
    def line(self) -> str:
        """A line of a training text: the text, a tab, and the answer as a sentence.

        The space before the answer makes its first word the same byte-pair units as in the facts.
        """
        return f"{self.text}\t {self.answer}.\n"


def utf8_size(text: str) -> int:
    """Return the number of tokens of a text in the vocabulary ``bytes``."""
    return len(text.encode())


def read_babi(path: Path) -> list[list[Question]]:
    """Read a file of bAbI, compressed or not; return the questions of each story.

    Raises:
        ValueError: A line is none of bAbI.
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
            raise ValueError(
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
        ValueError: There is no such split, or a file is none of bAbI.
    """
    require(split in SPLITS, f"split={split!r} must be one of {', '.join(SPLITS)}")
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


def babi_questions(folder: Path, task: str, split: Split) -> list[Question]:
    """Return the questions of :func:`babi_stories` one after the other."""
    return [x for story in babi_stories(folder, task, split) for x in story]


def _babi_file(folder: Path, task: str, part: str) -> Path:
    found = sorted(folder.glob(f"{task}_*_{part}.txt*"))
    if not found:
        raise FileNotFoundError(
            f"{folder} has no {task}_*_{part}.txt or .txt.gz: give the folder of bAbI (en, or "
            f"en-10k) and tasks from {BABI_TASKS[0]} to {BABI_TASKS[-1]}"
        )
    return found[0]


def book_files(folder: Path) -> dict[str, list[Path]]:
    """Divide the books of a folder, files such as 860.txt, among the splits.

    In the order of their numbers, the last one is for testing, the one before it for validation.

    Raises:
        FileNotFoundError: There are fewer than three.
    """
    found = [path for path in folder.glob("*.txt") if path.stem.isdecimal()]
    found.sort(key=lambda path: int(path.stem))
    if len(found) < len(SPLITS):
        raise FileNotFoundError(
            f"{folder} has {len(found)} books, files such as 860.txt, and at least "
            f"{len(SPLITS)} are needed: one for each split"
        )
    return {"train": found[:-2], "valid": found[-2:-1], "test": found[-1:]}


def book_sentences(text: str) -> list[str]:
    """Split the text of a book into sentences, each on one line; headings are left out."""
    sentences = []
    for paragraph in _PARAGRAPH.split(text):
        waiting = ""
        for part in _SENTENCE_START.split(" ".join(paragraph.split())):
            waiting = f"{waiting} {part}" if waiting else part
            if _SENTENCE_END.search(waiting) and not _ABBREVIATION.search(waiting):
                sentences.append(waiting)
                waiting = ""
    return sentences


class Books:
    """The sentences of books and their sizes.

    Attributes:
        sentences: The sentences, one book after the other.
        count: Returns the number of tokens of a text.

    Args:
        paths: Files of plain text.
        count: As the attribute.

    Raises:
        ValueError: There is no sentence in them.
        OSError: A file cannot be read.
    """

    def __init__(self, paths: Sequence[Path], count: Callable[[str], int] = utf8_size) -> None:
        texts = (path.read_text(encoding="utf-8") for path in paths)
        self.sentences = [sentence for text in texts for sentence in book_sentences(text)]
        require(bool(self.sentences), f"no sentence in {', '.join(map(str, paths)) or 'no book'}")
        self.count = count
        # With the blank before it.
        self._sizes = [count(f" {sentence}") for sentence in self.sentences]

    def excerpt(self, start: int, size: int) -> list[str]:
        """Return as many sentences from ``start`` on as have ``size`` tokens, or a few less.

        After the last sentence comes the first one.
        """
        found: list[str] = []
        while True:
            place = (start + len(found)) % len(self.sentences)
            size -= self._sizes[place]
            if size < 0:
                return found
            found.append(self.sentences[place])


def fitting(
    questions: Sequence[Question], length: int, count: Callable[[str], int] = utf8_size
) -> list[Question]:
    """Return the questions that have, with their facts, at most ``length`` tokens; 0: all."""
    if not length:
        return list(questions)
    return [x for x in questions if count(" ".join((*x.facts, x.question))) <= length]


def hide(question: Question, books: Books, length: int, draw: np.random.Generator) -> Sample:
    """Put the facts of a question, in order, at random places between sentences of books.

    Args:
        question: The question.
        books: The books.
        length: Tokens of the text with the question; as many sentences are taken as fit. 0: the
            facts alone.
        draw: The source of random numbers.

    Raises:
        ValueError: The facts and the question alone are longer.
    """
    facts = question.facts
    size = books.count(" ".join((*facts, question.question)))
    if length == 0:
        return Sample(facts, tuple(range(len(facts))), question.question, question.answer)
    require(
        size <= length,
        f"length={length} is less than the {size} tokens of the facts and the question: choose "
        "questions with babi.fitting, or a longer length",
    )
    sentences = books.excerpt(int(draw.integers(len(books.sentences))), length - size)
    # How many sentences stand before each fact.
    before = np.sort(draw.integers(len(sentences) + 1, size=len(facts)))
    places: Int64[np.ndarray, " facts"] = before + np.arange(len(facts))
    for place, fact in zip(places.tolist(), facts, strict=True):
        sentences.insert(place, fact)
    return Sample(tuple(sentences), tuple(places.tolist()), question.question, question.answer)


def evaluation_samples(
    questions: Sequence[Question], books: Books, length: int, n: int, *, seed: int = 0
) -> list[Sample]:
    """Draw samples of one length, each of another question; more of them begin with the same ones.

    There are fewer than ``n`` if fewer questions fit into the length.

    Raises:
        ValueError: None fits, or the seed is negative.
    """
    require(seed >= 0, f"seed={seed} must be at least 0")
    chosen = fitting(questions, length, books.count)
    require(
        bool(chosen),
        f"no question has its facts in length={length} tokens: give a longer length",
    )
    order = np.random.default_rng([_EVALUATION, seed]).permutation(len(chosen))[:n]
    draws = (np.random.default_rng([_EVALUATION, seed, length, i]) for i in range(len(order)))
    return [
        hide(chosen[place], books, length, draw) for place, draw in zip(order, draws, strict=True)
    ]


def training_samples(
    questions: Mapping[str, Sequence[Question]],
    books: Books,
    lengths: Sequence[int],
    *,
    seed: int = 1,
) -> Iterator[Sample]:
    """Draw samples without end; task, length and question of each are drawn uniformly.

    Args:
        questions: The questions of each task.
        books: The books.
        lengths: The lengths, as for :func:`hide`. One that is named twice is drawn twice as often.
        seed: Random seed.

    Raises:
        ValueError: No question of a task fits into any length, there is no task or length, or the
            seed is negative.
    """
    require(seed >= 0, f"seed={seed} must be at least 0")
    require(bool(questions), "questions={}: give those of at least one task")
    require(bool(lengths), "lengths=(): give at least one length")
    fit = {
        task: [
            (length, chosen)
            for length in lengths
            if (chosen := fitting(questions[task], length, books.count))
        ]
        for task in questions
    }
    for task, chosen in fit.items():
        require(
            bool(chosen),
            f"no question of {task} has its facts in {max(lengths)} tokens: give a longer length",
        )
    return _training_samples(list(fit.values()), books, seed)


def _training_samples(
    fit: list[list[tuple[int, list[Question]]]], books: Books, seed: int
) -> Iterator[Sample]:
    draw = np.random.default_rng([_TRAINING, seed])
    while True:
        by_length = fit[int(draw.integers(len(fit)))]
        length, chosen = by_length[int(draw.integers(len(by_length)))]
        yield hide(chosen[int(draw.integers(len(chosen)))], books, length, draw)


def write_samples(path: Path, n_tokens: int, samples: Iterator[Sample], books: Books) -> int:
    r"""Write samples with their answers, one a line; return the number of tokens.

    The line end separates them: with ``data.reset_at`` of ``"\n"`` (``"<eos>"`` for words) no
    sample sees another one. Only an answer follows a tab: with ``data.completion_at`` of ``"\t"``
    (bytes, characters and byte-pair units) the loss is of answers alone. A longer text begins with
    a shorter one.

    Args:
        path: The file.
        n_tokens: The text ends with the sample that reaches this number of tokens.
        samples: The samples, of :func:`training_samples`.
        books: The books, which count the tokens.

    Raises:
        OSError: The file cannot be written.
    """
    written = 0

    def write(temporary: Path) -> None:
        nonlocal written
        with temporary.open("w", encoding="utf-8") as file:
            while written < n_tokens:
                line = next(samples).line
                file.write(line)
                written += books.count(line)

    write_atomically(path, write)
    return written
