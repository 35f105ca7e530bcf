"""What a task is: data to texts, recipes that train on them, a metric, and baselines.

The texts of most tasks have a document per line: a prompt and a completion with a separator between
them. Their recipes say so with ``data.reset_at`` and ``data.completion_at``. Where a document
begins, the memory of its stream is reset, and the loss counts completions
(:mod:`transformer_xl.data.completions`).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from transformer_xl.config import Config, checksum, replace_file
from transformer_xl.data import opened
from transformer_xl.errors import DataError
from transformer_xl.model import LanguageModel, Lengths

TASKS_EXTRA = "'transformer-xl[tasks]'"
"""What to install for metrics and baselines."""
SEPARATOR = " <sep> "
"""Stands between prompt and completion where the vocabulary has words."""


class Trained(NamedTuple):
    """A trained model, and how it reads."""

    model: LanguageModel
    vocab: Any
    """Its vocabulary, a :class:`~transformer_xl.data.Vocab`; None where it reads recordings."""
    config: Config
    lengths: Lengths


class Measured(NamedTuple):
    """What a model or a baseline reaches on a split."""

    metrics: dict[str, float]
    """By name, the first of them the one that counts."""
    scores: Float[np.ndarray, " examples"] | None = None
    """The score of each example, for paired tests; more is better."""


class Task(ABC):
    """A task. A subclass says what differs; :func:`transformer_xl.tasks.run.run_task` runs it."""

    name: ClassVar[str]
    title: ClassVar[str]
    metric: ClassVar[str]
    """What is measured, with its unit."""
    models: ClassVar[Mapping[str, Sequence[str]]]
    """By name of a model, the recipes of its trainings, each of which but the first begins with the
    weights and the vocabulary of the one before it, except for a :class:`SelfTrainingTask`."""
    splits: ClassVar[Sequence[str]] = ("valid", "test")
    """What is measured."""
    parts: ClassVar[Sequence[str]] = ("",)
    """Subfolders of the data that are trained on and measured apart, such as the folds of a
    cross-validation. Metrics are their means, and scores are joined."""
    n_shared: ClassVar[int] = 0
    """How many of the first recipes are trained once for all parts, on the folder they are in. The
    last recipe of a model is always trained on each part."""
    makes_data: ClassVar[bool] = False
    """Whether a program of the task makes its data, so that there is no source."""
    version: ClassVar[int] = 1
    """Raised when :meth:`prepare` writes other texts, or :meth:`SelfTrainingTask.pseudo_label`
    other labels: those of another version are not used."""
    reads: ClassVar[Sequence[str]] = ("*",)
    """Patterns of the files that it reads in the folder of its data."""

    def identity(self, source: Path | None) -> dict[str, Any]:
        """Return what tells its data from others, as can be written in JSON.

        Of published data, the checksums of the files that match :attr:`reads`. A task that makes
        its data gives the settings of the program that makes them.

        Args:
            source: The folder or file with the data; None: the task makes them.

        Raises:
            OSError: A file cannot be read.
        """
        if source is None:
            return {}
        if source.is_file():
            return {source.name: checksum(source)}
        files = {x for pattern in self.reads for x in source.glob(pattern) if x.is_file()}
        return {x.relative_to(source).as_posix(): checksum(x) for x in sorted(files)}

    @abstractmethod
    def prepare(self, source: Path, folder: Path) -> None:
        """Write the texts that the recipes read, and what is to be measured, into a new folder.

        Args:
            source: The data as they are published; the folder itself, if the task makes them.
            folder: The folder, to which paths in the recipes are relative.

        Raises:
            OSError: A file is missing.
            ValueError: A file is not what the task reads. Of data from files, other errors that
                unexpected contents cause, such as a KeyError, are turned into this one.
        """

    @abstractmethod
    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Measure a trained model on a split (valid or test) of the prepared data."""

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield what simple methods reach, by name."""
        yield from ()


class SelfTrainingTask(Task):
    """A task whose later trainings read examples with the labels of the model before (Lee, 2013).

    None of them begins with the weights of the one before.
    """

    n_trainings: ClassVar[int] = 2
    """How many trainings there are by a recipe file that the user gives in place of a model."""

    @abstractmethod
    def pseudo_label(
        self, trained: Trained, source: Path, prepared: Path, folder: Path, n: int
    ) -> None:
        """Write all files that the recipe of the next training reads into a new folder.

        What is measured is in ``prepared`` as before.

        Args:
            trained: The model of training ``n``, counted from 1.
            source: The data as they are published; the folder that :meth:`prepare` has written, if
                the task makes them.
            prepared: The folder that :meth:`prepare` has written, or the part of it that is trained
                on.
            folder: The folder.
            n: How many trainings there have been.

        Raises:
            OSError: A file is missing or cannot be written.
            ValueError: Nothing can be labelled.
        """


class Example(NamedTuple):
    """A prompt, and how it goes on."""

    prompt: str
    completion: str
    group: str = ""
    """What it is reported with."""


def write_examples(
    folder: Path, split: str, examples: Sequence[Example], separator: str = "\t"
) -> None:
    """Write ``SPLIT.txt`` with a line for each example, and ``SPLIT.json`` to read them again.

    Args:
        folder: The folder.
        split: The split.
        examples: The examples.
        separator: What stands between prompt and completion: for a vocabulary of words, a word
            between blanks, such as :data:`SEPARATOR`.

    Raises:
        ValueError: An example has the separator or a line end in it, which separate examples.
    """
    write_documents(folder, split, [(x.prompt, x.completion) for x in examples], separator)
    replace_file(folder / f"{split}.json", json.dumps(examples, ensure_ascii=False).encode())


def write_documents(
    folder: Path, split: str, documents: Sequence[Sequence[str]], separator: str = "\t"
) -> None:
    """Write ``SPLIT.txt`` with a line for each document.

    Args:
        folder: The folder.
        split: The split.
        documents: Of each, prompts and completions by turns.
        separator: As for :func:`write_examples`.

    Raises:
        ValueError: A part has the separator or a line end in it, which separate examples.
    """
    for text in chain.from_iterable(documents):
        if separator in text or "\n" in text:
            raise DataError(f"{text[:60]!r} has a line end or {separator!r} in it")
    text = "".join(f"{separator.join(parts)}\n" for parts in documents)
    replace_file(folder / f"{split}.txt", text.encode())


def read_utf8(path: Path) -> str:
    r"""Return the text of a file of UTF-8, decompressed as the end of its name says.

    Lines end with ``\n``, whatever the file has.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged, not UTF-8, or there is nothing but blanks in it.
    """
    with opened(path) as file:
        content = file.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {error.start:,} is 0x{content[error.start]:02x}. "
            "Convert the file to UTF-8"
        ) from None
    if not text.strip():
        raise DataError(f"{path} has no text in it")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_examples(folder: Path, split: str) -> list[Example]:
    """Read what :func:`write_examples` has written."""
    return [Example(*row) for row in json.loads((folder / f"{split}.json").read_bytes())]


def encoded_prompts(trained: Trained, examples: Sequence[Example]) -> list[list[int]]:
    """Return the tokens of each prompt, from the end of the example before it to the separator.

    Raises:
        ValueError: The model was not trained on prompts and completions.
    """
    begin, end = trained.model.config.reset_at, trained.model.config.completion_at
    if begin is None or end is None:
        raise DataError(
            "the model has no completion_at: train it with data.reset_at and data.completion_at"
        )
    return [[begin, *trained.vocab.encode(example.prompt), end] for example in examples]
