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

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64
from torch import Tensor, from_numpy

from transformer_xl.config import write_atomically
from transformer_xl.data.text import SPLITS

UNCOUNTED = -100
"""A class that is not predicted."""
_BLOCK = 1 << 16
"""Positions that are validated at once."""
PARTS = ("inputs", "targets", "starts")


@dataclass(frozen=True)
class Recordings:
    """Recordings, one after the other."""

    # Their types are checked below, with an error that names the rule.
    inputs: np.ndarray
    targets: np.ndarray
    """Classes, or numbers; -100 or NaN where nothing is predicted."""
    starts: np.ndarray
    """Where recordings begin."""

    def __post_init__(self) -> None:
        shapes = {name: getattr(self, name).shape for name in PARTS}
        N = self.targets.size
        if shapes != {"inputs": (N, *self.inputs.shape[-1:]), "targets": (N,), "starts": (N,)}:
            raise ValueError(
                f"recordings of the shapes {shapes} must be (N, F), (N,) and (N,) for one N"
            )
        kinds = self.inputs.dtype.kind, self.targets.dtype.kind, self.starts.dtype.kind
        if not (kinds[0] == "f" and kinds[1] in "if" and kinds[2] == "b"):
            types = {name: str(getattr(self, name).dtype) for name in PARTS}
            raise ValueError(
                f"recordings of the types {types} must be real inputs, int64 or real targets, and "
                "starts of bool"
            )

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def are_real(self) -> bool:
        """Whether the targets are numbers; else they are classes."""
        return self.targets.dtype.kind == "f"

    def counted(self, part: slice | None = None) -> Bool[np.ndarray, " counted"]:
        """Mark the positions, or those of a part, where something is predicted."""
        targets = self.targets if part is None else self.targets[part]
        return ~np.isnan(targets) if self.are_real else targets != UNCOUNTED

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
            ValueError: A value is not finite, or a class is negative; ``what`` names the data.
        """
        for first in range(0, len(self), _BLOCK):
            part = slice(first, first + _BLOCK)
            # Also what float32 cannot hold.
            is_wrong = ~np.isfinite(self.inputs[part].astype(np.float32)).all(1)
            targets = self.targets[part]
            if self.are_real:
                wrong_targets = np.isinf(targets.astype(np.float32))
            else:
                wrong_targets = (targets < 0) & (targets != UNCOUNTED)
            for wrong, rule in (
                (is_wrong, "inputs must be finite"),
                (wrong_targets, "targets must be finite, or NaN where none is predicted")
                if self.are_real
                else (wrong_targets, "classes are 0, 1, 2, ..., or -100 where none is predicted"),
            ):
                if wrong.any():
                    place = first + int(wrong.argmax())
                    raise ValueError(
                        f"{what}, position {place:,}: input {self.inputs[place].tolist()}, target "
                        f"{self.targets[place]}; {rule}"
                    )


def write_recordings(folder: Path, split: str, recordings: Recordings) -> None:
    """Write the files of a split.

    Raises:
        OSError: They cannot be written.
        ValueError: A value is not finite, or there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
    recordings.validate(f"the {split} split")
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        array = getattr(recordings, part)

        def write(path: Path, array: np.ndarray = array) -> None:
            with path.open("wb") as file:
                np.save(file, array, allow_pickle=False)

        write_atomically(folder / f"{split}_{part}.npy", write)


def read_recordings(folder: Path, split: str) -> Recordings:
    """Open the files of a split, memory-mapped.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is no array, or the arrays do not fit each other.
    """
    arrays = []
    for part in PARTS:
        path = folder / f"{split}_{part}.npy"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: data.vocab=features reads {split}_inputs.npy, "
                f"{split}_targets.npy and {split}_starts.npy from data.path"
            )
        try:
            arrays.append(np.lib.format.open_memmap(path, mode="r"))
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(f"{path} is no array of numbers: {error}") from error
    try:
        return Recordings(*arrays)
    except ValueError as error:
        raise ValueError(f"{folder}, {split} split: {error}") from error
