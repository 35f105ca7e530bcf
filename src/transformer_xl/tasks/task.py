"""What a task is: data to texts, recipes that train on them, a metric, and baselines."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from transformer_xl.config import Config, checksum
from transformer_xl.data import Vocab
from transformer_xl.model import LanguageModel, Lengths

SPLITS = ("train", "valid", "test")


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
