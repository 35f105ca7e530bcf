"""Recordings: real-valued sequences in arrays, in the place of a text.

A folder holds NumPy files for each of the splits train, valid and, optionally, test:

======================  ========================================================================
``train_inputs.npy``    (N, F) of float16, float32 or float64: the input at each position
``train_targets.npy``   (N,) of int64: the class to predict at each position, -100 where none is;
                        or of float32 or float64: the number to predict, NaN where none is
``train_starts.npy``    (N,) of bool: where recordings begin, at which the memory is reset
======================  ========================================================================

Unlike the tokens of a text, a target is not the next input: a data program writes what is to be
predicted, for example the next value of a series, or the class of a recording at its last position.
The files are memory-mapped, and a file with Python objects (a pickle) is refused.
"""

from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Int64
from torch import Tensor, from_numpy

from transformer_xl.config import DataConfig, Say, checksum, write_atomically
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.preparing import prepare
from transformer_xl.data.text import SPLITS
from transformer_xl.errors import DataError, InputError, SettingsError

_BLOCK = 1 << 16
"""Positions that are validated at once."""


@dataclass(frozen=True)
class Recordings:
    """Recordings, one after the other.

    Raises:
        DataError: The shapes or types do not fit each other.
    """

    UNCOUNTED: ClassVar[int] = -100
    """A class that is not predicted."""

    inputs: np.ndarray
    targets: np.ndarray
    """Classes, or numbers; -100 or NaN where nothing is predicted."""
    starts: np.ndarray
    """Where recordings begin."""

    def __post_init__(self) -> None:
        arrays = {part: getattr(self, part) for part in PARTS}
        N, F = self.targets.size, self.inputs.shape[-1:]
        is_shaped = [x.shape for x in arrays.values()] == [(N, *F), (N,), (N,)]
        if not is_shaped or "".join(x.dtype.kind for x in arrays.values()) not in ("fib", "ffb"):
            found = ", ".join(f"{part} {x.dtype} {x.shape}" for part, x in arrays.items())
            raise DataError(
                f"recordings of {found} must be real inputs (N, F), int64 or real targets (N,) "
                "and starts of bool (N,)"
            )

    @classmethod
    def read(cls, folder: Path, split: str) -> "Recordings":
        """Open the files of a split, memory-mapped.

        Raises:
            FileNotFoundError: A file is missing.
            DataError: A file is no array, or the arrays do not fit each other.
        """
        arrays = []
        for path in (folder / f"{split}_{part}.npy" for part in PARTS):
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing: data.vocab=features reads {split}_inputs.npy, "
                    f"{split}_targets.npy and {split}_starts.npy from data.path"
                )
            try:
                arrays.append(np.lib.format.open_memmap(path, mode="r"))
            except (ValueError, EOFError, OSError) as error:
                raise DataError(f"{path} is no array of numbers: {error}") from error
        try:
            return cls(*arrays)
        except DataError as error:
            raise DataError(f"{folder}, {split} split: {error}") from error

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def are_real(self) -> bool:
        """Whether the targets are numbers; else they are classes."""
        return self.targets.dtype.kind == "f"

    def counted(self, part: slice = slice(None)) -> Bool[np.ndarray, " counted"]:
        """Mark the positions, or those of a part, where something is predicted."""
        targets = self.targets[part]
        return ~np.isnan(targets) if self.are_real else targets != self.UNCOUNTED

    def at(self, places: slice | Int64[np.ndarray, "..."]) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets and starts at some positions; real numbers in float32."""
        # Copied, as a memory-mapped array is read-only.
        dtype = np.float32 if self.are_real else np.int64
        return (
            from_numpy(self.inputs[places].astype(np.float32)),
            from_numpy(self.targets[places].astype(dtype)),
            from_numpy(self.starts[places].astype(bool)),
        )

    def validate(self, what: str) -> None:
        """Require finite inputs, and targets that are finite or left out.

        Raises:
            DataError: A value is not finite, or a class is negative; ``what`` names the data.
        """
        rule = "classes are 0, 1, 2, ..., or -100 where none is predicted"
        if self.are_real:
            rule = "targets must be finite, or NaN where none is predicted"
        for first in range(0, len(self), _BLOCK):
            # In float32, which does not hold all that is finite in float64.
            inputs, targets, _ = self.at(slice(first, first + _BLOCK))
            limit = (
                targets.isinf() if self.are_real else (targets < 0) & (targets != self.UNCOUNTED)
            )
            for is_wrong, what_holds in (
                (~inputs.isfinite().all(1), "inputs must be finite"),
                (limit, rule),
            ):
                if is_wrong.any():
                    place = first + int(is_wrong.int().argmax())
                    raise DataError(
                        f"{what}, position {place:,}: input {self.inputs[place].tolist()}, target "
                        f"{self.targets[place]}; {what_holds}"
                    )


PARTS = [field.name for field in fields(Recordings)]


def write_recordings(folder: Path, split: str, recordings: Recordings) -> None:
    """Write the files of a split.

    Raises:
        OSError: They cannot be written.
        DataError: A value is not finite.
        InputError: There is no such split.
    """
    if split not in SPLITS:
        raise InputError(f"split {split!r} is none of {', '.join(SPLITS)}")
    recordings.validate(f"the {split} split")
    for part in PARTS:
        save = partial(_save, getattr(recordings, part))
        write_atomically(folder / f"{split}_{part}.npy", save)


def _save(array: np.ndarray, path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)


class FeatureCorpus:
    """The recordings of a folder.

    Attributes:
        folder: The folder.
        n_features: Width of the inputs.
        are_real: Whether the targets are numbers; else they are classes.
        vocab: None, where a text has its vocabulary.

    Raises:
        FileNotFoundError: A file of the training or validation split is missing.
        DataError: A file is not as described above, or the splits differ in width or type.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder, self.vocab = Path(folder), None
        names = [x for x in SPLITS if x != "test" or (self.folder / "test_inputs.npy").exists()]
        self._splits = {name: Recordings.read(self.folder, name) for name in names}
        train = self._splits["train"]
        self.n_features, self.are_real = train.inputs.shape[1], train.are_real
        for name, split in self._splits.items():
            if (split.inputs.shape[1], split.are_real) != (self.n_features, self.are_real):
                raise DataError(
                    f"{self.folder}: the {name} split has inputs of width {split.inputs.shape[1]} "
                    f"and {split.targets.dtype} targets, the train split width {self.n_features} "
                    f"and {train.targets.dtype}: they must agree"
                )
            split.validate(f"{self.folder}, {name} split")

    @cached_property
    def n_classes(self) -> int:
        """The number of classes: one more than the largest one; 0 if the targets are numbers."""
        if self.are_real:
            return 0
        return 1 + max(int(x.targets.max(initial=-1)) for x in self._splits.values())

    @cached_property
    def checksums(self) -> dict[str, str]:
        """What identifies the data: the SHA-256 of the files of each split."""
        return {
            name: " ".join(checksum(self.folder / f"{name}_{part}.npy") for part in PARTS)
            for name in self._splits
        }

    def n_tokens(self, name: str) -> int:
        """Number of positions of a split; 0 if there is none."""
        return len(self._splits.get(name, ()))

    def n_bytes(self, name: str) -> int:
        """Number of bytes of text: 0, as there is none."""
        return 0

    @property
    def held_out(self) -> str:
        """The split that says how good a model is: test, or valid where there is none."""
        return "test" if self.n_tokens("test") > 1 else "valid"

    def split(self, name: str) -> Recordings:
        """Return a split.

        Raises:
            DataError: There is none of this name.
        """
        if name not in self._splits:
            raise DataError(f"{self.folder} has no {name} split: write {name}_inputs.npy, ...")
        return self._splits[name]


def open_corpus(config: DataConfig, say: Say | None = None) -> Corpus | FeatureCorpus:
    """Open recordings (``data.vocab = "features"``), or prepare a text.

    Raises:
        OSError: A file is missing.
        SettingsError: ``data.path`` is not set, or as :func:`prepare`.
        DataError: A file is not as it must be.
    """
    if config.vocab != "features":
        return prepare(config, say)
    if config.path is None:
        raise SettingsError(
            "data.vocab=features reads arrays: set data.path to their folder "
            "(train_inputs.npy, train_targets.npy, train_starts.npy, ...)"
        )
    return FeatureCorpus(Path(config.path).expanduser())
