"""What a task is: data to texts, recipes that train on them, a metric, and baselines.

A text may have a document per line: prompts and completions by turns with a separator between them.
Its recipe says so with ``data.reset_at`` and ``data.completion_at``. Where a document begins, the
memory of its stream is reset, and the loss counts completions
(:mod:`transformer_xl.data.completions`).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from transformer_xl.config import Config, checksum, replace_file
from transformer_xl.data import Vocab
from transformer_xl.errors import DataError
from transformer_xl.inference import continuations
from transformer_xl.model import LanguageModel, Lengths

SPLITS = ("train", "valid", "test")
SEPARATOR = " <sep> "
"""Stands between prompt and completion."""


class Trained(NamedTuple):
    """A trained model, and how it reads."""

    model: LanguageModel
    vocab: Vocab | None
    """Its vocabulary; None where it reads recordings."""
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

    def identity(self, source: Path | None) -> Mapping[str, object]:
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


def write_examples(folder: Path, split: str, examples: Sequence[Example]) -> None:
    """Write ``SPLIT.txt`` with a line for each example, and ``SPLIT.json`` to read them again.

    Raises:
        DataError: An example has the separator or a line end in it, which separate examples.
    """
    write_documents(folder, split, ([x.prompt, x.completion] for x in examples))
    replace_file(folder / f"{split}.json", json.dumps(examples, ensure_ascii=False).encode())


def write_documents(folder: Path, name: str, documents: Iterable[Sequence[str]]) -> None:
    """Write ``NAME.txt`` with a line for each document, prompts and completions by turns.

    Raises:
        DataError: A part has the separator or a line end in it, which separate examples.
    """
    lines = []
    for parts in documents:
        if wrong := [x for x in parts if SEPARATOR in x or "\n" in x]:
            raise DataError(f"{wrong[0][:60]!r} has a line end or {SEPARATOR!r} in it")
        lines.append(f"{SEPARATOR.join(parts)}\n")
    replace_file(folder / f"{name}.txt", "".join(lines).encode())


def read_examples(folder: Path, split: str) -> list[Example]:
    """Read what :func:`write_examples` has written."""
    return [Example(*row) for row in json.loads((folder / f"{split}.json").read_bytes())]


def completions(
    trained: Trained, examples: Sequence[Example], length: int, *, batch_size: int = 64
) -> list[str]:
    """Return what a model writes after each prompt, up to the separator or the end of the line.

    Args:
        trained: The model.
        examples: The prompts; their completions are not used.
        length: Number of tokens at most.
        batch_size: Prompts that are continued at once.

    Raises:
        DataError: The model was not trained on prompts and completions.
    """
    begin, end = trained.model.config.reset_at, trained.model.config.completion_at
    vocab = trained.vocab
    if vocab is None or begin is None or end is None:
        raise DataError(
            "the model has no completion_at: train it with data.reset_at and data.completion_at"
        )
    # From the end of the example before it to the separator.
    prompts = [[begin, *vocab.encode(example.prompt), end] for example in examples]
    texts = continuations(
        trained.model,
        vocab,
        prompts,
        trained.lengths,
        length=length,
        stop="\n",
        batch_size=batch_size,
    )
    return [text.partition(SEPARATOR.strip())[0].strip() for text in texts]
