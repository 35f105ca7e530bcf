"""Spoken digits: the class of a recording, from log-mel frames (Free Spoken Digit Dataset)."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64

from transformer_xl.config import replace_file
from transformer_xl.data import Recordings, write_recordings
from transformer_xl.errors import DataError
from transformer_xl.model import evaluating, read
from transformer_xl.tasks.digits.speech import (
    RATE,
    WINDOW,
    augmented,
    log_mel,
    masked,
    normalized,
    recordings_in,
    stacked,
)
from transformer_xl.tasks.task import SPLITS, Measured, Task, Trained

Named = tuple[str, Float[np.ndarray, " _"]]
"""Name of a recording, such as ``7_theo_3``, and its samples."""
_HELD_OUT = range(20, 25)
"""Recordings of the training archive that are the validation split, by their index."""
_NAME = re.compile(r"[0-9]_[^_]+_[0-9]+")
_SHORTEST = 2 * WINDOW
"""Samples (50 ms) of a recording at least: also the fastest copy of it has an input."""


class SpokenDigits(Task):
    """A recording is read to its end; its class is predicted in its second half.

    The mean of the log-probabilities of these positions decides. Two speakers are in the training
    data, and four more in the test.
    """

    name = "digits"
    title = "Spoken digits, log-mel frames"
    metric = "accuracy, %"
    models = {"txl": ("digits",)}  # noqa: RUF012
    reads = ("train.tar.gz", "test.tar.gz")
    copies = 25
    """Augmented copies of each training recording."""

    def prepare(self, source: Path, folder: Path) -> None:
        """Write frames and mean spectra; ``source`` holds train.tar.gz and test.tar.gz."""
        draw = np.random.default_rng(0)
        for split, recordings in read_splits(source).items():
            parts = []
            for _ in range(self.copies if split == "train" else 1):
                inputs = _inputs(recordings, draw if split == "train" else None)
                order = draw.permutation(len(inputs)) if split == "train" else range(len(inputs))
                parts += [_labelled(inputs[n], int(recordings[n][0][0])) for n in order]
            columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
            write_recordings(folder, split, Recordings(*columns))
            spectra = np.stack([log_mel(samples).mean(0) for _, samples in recordings])
            about = {"names": [name for name, _ in recordings], "spectra": spectra.tolist()}
            replace_file(folder / f"{split}.json", json.dumps(about).encode())

    @torch.no_grad()
    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Classify each recording by its mean log-probabilities in counted positions."""
        model, recordings, classes = trained.model, Recordings.read(folder, split), []
        firsts = np.flatnonzero(recordings.starts).tolist()
        with evaluating(model):
            for first, stop in zip(firsts, [*firsts[1:], len(recordings)], strict=True):
                inputs, targets, _ = recordings.at(slice(first, stop))
                mems = model.start_memory(1, trained.lengths.mem_len)
                pieces = read(model, inputs[None], trained.lengths, mems)
                hidden = torch.cat([piece.hidden for piece in pieces], 1)[0]
                log_probs = model.head.log_probs(hidden[targets != Recordings.UNCOUNTED])
                classes.append(int((log_probs.sum(0).double() / len(log_probs)).argmax()))
        return _measured(folder, split, np.array(classes))

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield the class of the training recording with the nearest mean spectrum."""
        known, queries = (json.loads((folder / f"{x}.json").read_bytes()) for x in ("train", split))
        spectra, others = np.array(known["spectra"]), np.array(queries["spectra"])
        distances = ((others[:, None] - spectra) ** 2).sum(-1)
        digits = np.array([int(name[0]) for name in known["names"]])
        yield "nearest mean spectrum", _measured(folder, split, digits[distances.argmin(1)])


def _inputs(
    recordings: Sequence[Named], draw: np.random.Generator | None
) -> list[Float[np.ndarray, "_ F"]]:
    """Return the inputs of recordings, normalized by speaker.

    If random numbers are given, they are those of other speakers: each speaker is augmented with
    one length of the vocal tract.
    """
    frames: dict[int, np.ndarray] = {}
    speakers = [_speaker(name) for name, _ in recordings]
    for speaker in dict.fromkeys(speakers):
        rows = [n for n, each in enumerate(speakers) if each == speaker]
        samples = [recordings[n][1] for n in rows]
        if draw is None:
            spoken = normalized([log_mel(x) for x in samples])
        else:
            warp = float(np.exp(draw.uniform(-0.2, 0.2)))
            spoken = normalized([augmented(x, draw, warp) for x in samples])
            spoken = [masked(x, draw) for x in spoken]
        frames |= zip(rows, spoken, strict=True)
    return [stacked(frames[n]) for n in range(len(recordings))]


def read_splits(source: Path) -> dict[str, list[Named]]:
    """Read the recordings of each split, as pairs of a name and samples.

    ``test.tar.gz`` is the test split. Recordings of ``train.tar.gz`` with an index from 20 to 24
    are the validation split, the others the training split.

    Args:
        source: The folder with both archives. A file in them is a mono 16-bit WAV file at 8 kHz
            named DIGIT_SPEAKER_INDEX.wav, such as ``7_theo_3.wav``.

    Returns:
        The recordings by split, in the order of their paths in the archive.

    Raises:
        FileNotFoundError: ``train.tar.gz`` or ``test.tar.gz`` is missing.
        DataError: An archive is not a gzip-compressed tar archive; a recording is not such a WAV
            file, is named otherwise or is shorter than 50 ms; or a split is empty.
    """
    by_split: dict[str, list[Named]] = {split: [] for split in SPLITS}
    for archive in ("train", "test"):
        path = source / f"{archive}.tar.gz"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: the task reads train.tar.gz and test.tar.gz with recordings "
                "named DIGIT_SPEAKER_INDEX.wav"
            )
        for name, samples in recordings_in(path):
            if not _NAME.fullmatch(name):
                raise DataError(
                    f"{path}: {name}.wav is not named DIGIT_SPEAKER_INDEX.wav, such as 7_theo_3.wav"
                )
            if len(samples) < _SHORTEST:
                raise DataError(
                    f"{path}: {name}.wav has {len(samples)} samples: a recording needs at "
                    f"least {_SHORTEST} ({1000 * _SHORTEST // RATE} ms)"
                )
            is_held_out = archive == "train" and int(name.split("_")[2]) in _HELD_OUT
            by_split["valid" if is_held_out else archive].append((name, samples))
    for split, recordings in by_split.items():
        if not recordings:
            raise DataError(
                f"{source}: the split {split} is empty: it takes the recordings of test.tar.gz for "
                f"test, those of train.tar.gz with the indices {_HELD_OUT[0]} to {_HELD_OUT[-1]} "
                "for valid, and its others for train"
            )
    return by_split


def _speaker(name: str) -> str:
    return name.split("_")[1]


def _labelled(inputs: Float[np.ndarray, "n F"], digit: int) -> tuple[np.ndarray, ...]:
    """Return the inputs, targets and starts of a recording."""
    targets = np.full(len(inputs), Recordings.UNCOUNTED, np.int64)
    targets[len(inputs) // 2 :] = digit
    # Half precision is enough for logarithms, and halves the files.
    return inputs.astype(np.float16), targets, np.arange(len(inputs)) == 0


def _measured(folder: Path, split: str, classes: Int64[np.ndarray, " n"]) -> Measured:
    """Compare with the digits in the names; also by whether a speaker is in the training data."""
    names, known = (
        json.loads((folder / f"{x}.json").read_bytes())["names"] for x in (split, "train")
    )
    right = np.array([int(x[0]) == y for x, y in zip(names, classes, strict=True)], float)
    speakers = {*map(_speaker, known)}
    is_known = np.array([_speaker(name) in speakers for name in names])
    metrics = {"accuracy": 100 * right.mean()}
    for who, rows in (("training speakers", is_known), ("other speakers", ~is_known)):
        if rows.any():
            metrics[who] = 100 * right[rows].mean()
    return Measured({name: float(x) for name, x in metrics.items()}, right)
