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
from transformer_xl.errors import DataError
from transformer_xl.model import LanguageModel, Lengths

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
    weights and the vocabulary of the one before it."""
    makes_data: ClassVar[bool] = False
    """Whether a program of the task makes its data, so that there is no source."""
    reads: ClassVar[Sequence[str]] = ("*",)
    """Patterns of the files that it reads in the folder of its data."""

    def identity(self, source: Path | None) -> dict[str, Any]:
        """Return what tells its data from others, as can be written in JSON.

        Of published data, the checksums of the files that match :attr:`reads`. A task that makes
        its data gives the settings of the program that makes them.

        ``source`` is the folder or file with the data; None: the task makes them.
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
            DataError: A file is not what the task reads. Of data from files, other errors that
                unexpected contents cause, such as a KeyError, are turned into this one.
        """

    @abstractmethod
    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Measure a trained model on a split (valid or test) of the prepared data."""

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield what simple methods reach, by name."""
        yield from ()


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

    ``separator`` stands between prompt and completion: for a vocabulary of words, a word between
    blanks, such as :data:`SEPARATOR`.

    Raises:
        DataError: An example has the separator or a line end in it, which separate examples.
    """
    write_documents(folder, split, [(x.prompt, x.completion) for x in examples], separator)
    replace_file(folder / f"{split}.json", json.dumps(examples, ensure_ascii=False).encode())


def write_documents(
    folder: Path, split: str, documents: Sequence[Sequence[str]], separator: str = "\t"
) -> None:
    """Write ``SPLIT.txt`` with a line for each document.

    Each consists of prompts and completions by turns. ``separator`` is as for
    :func:`write_examples`.

    Raises:
        DataError: A part has the separator or a line end in it, which separate examples.
    """
    for text in chain.from_iterable(documents):
        if separator in text or "\n" in text:
            raise DataError(f"{text[:60]!r} has a line end or {separator!r} in it")
    text = "".join(f"{separator.join(parts)}\n" for parts in documents)
    replace_file(folder / f"{split}.txt", text.encode())


def read_examples(folder: Path, split: str) -> list[Example]:
    """Read what :func:`write_examples` has written."""
    return [Example(*row) for row in json.loads((folder / f"{split}.json").read_bytes())]


def encoded_prompts(trained: Trained, examples: Sequence[Example]) -> list[list[int]]:
    """Return the tokens of each prompt, from the end of the example before it to the separator.

    Raises:
        DataError: The model was not trained on prompts and completions.
    """
    begin, end = trained.model.config.reset_at, trained.model.config.completion_at
    if begin is None or end is None:
        raise DataError(
            "the model has no completion_at: train it with data.reset_at and data.completion_at"
        )
    return [[begin, *trained.vocab.encode(example.prompt), end] for example in examples]
