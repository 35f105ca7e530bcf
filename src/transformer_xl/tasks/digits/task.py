"""Spoken digits: the class of a recording, from log-mel frames (Free Spoken Digit Dataset)."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64

from transformer_xl.config import replace_file
from transformer_xl.data import SPLITS, UNCOUNTED, Recordings, read_recordings, write_recordings
from transformer_xl.errors import DataError
from transformer_xl.model import evaluating, read
from transformer_xl.tasks.digits.speech import (
    MU,
    RATE,
    WINDOW,
    augmented,
    log_mel,
    masked,
    mixed,
    mu_law,
    normalized,
    recordings_in,
    resampled,
    stacked,
)
from transformer_xl.tasks.task import Measured, SelfTrainingTask, Task, Trained

RAW_STEP = 16
"""Samples of one input of :class:`RawDigits`."""
Named = tuple[str, Float[np.ndarray, " _"]]
"""Name of a recording, such as ``7_theo_3``, and its samples."""
_HELD_OUT = range(20, 25)
"""Recordings of the training archive that are the validation split, by their index."""
_NAME = re.compile(r"[0-9]_[^_]+_[0-9]+")
_TURNS, _TOLERANCE = 10_000, 1e-6
"""Of :func:`balanced`."""
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

    def inputs(
        self, recordings: Sequence[Named], draw: np.random.Generator | None
    ) -> list[Float[np.ndarray, "_ F"]]:
        """Return the inputs of recordings, normalized by speaker.

        If random numbers are given, they are those of other speakers: each speaker is augmented
        with one length of the vocal tract, and most recordings are mixed with another of the same
        digit.
        """
        by_speaker: dict[str, list[int]] = {}
        for n, (name, _) in enumerate(recordings):
            by_speaker.setdefault(_speaker(name), []).append(n)
        frames: dict[int, np.ndarray] = {}
        for own in by_speaker.values():
            samples = [recordings[n][1] for n in own]
            if draw is None:
                spoken = [log_mel(x) for x in samples]
            else:
                warp = float(np.exp(draw.uniform(-0.2, 0.2)))
                spoken = [augmented(x, draw, warp) for x in samples]
            frames |= zip(own, normalized(spoken), strict=True)
        if draw is not None:
            by_digit: dict[str, list[int]] = {}
            for n, (name, _) in enumerate(recordings):
                by_digit.setdefault(name[0], []).append(n)
            others = [frames[draw.choice(by_digit[name[0]])] for name, _ in recordings]
            frames = {
                n: masked(mixed(x, others[n], draw) if draw.random() < 0.7 else x, draw)
                for n, x in frames.items()
            }
        return [stacked(frames[n]) for n in range(len(recordings))]

    def prepare(self, source: Path, folder: Path) -> None:
        """Write frames and mean spectra; ``source`` holds train.tar.gz and test.tar.gz."""
        self.write(recordings_of(source), folder)

    def write(self, by_split: Mapping[str, Sequence[Named]], folder: Path, seed: int = 0) -> None:
        """Write frames and mean spectra of named recordings; those to train on are augmented."""
        draw = np.random.default_rng(seed)
        for split, recordings in by_split.items():
            digits = [int(name[0]) for name, _ in recordings]
            copies = self.copies if split == "train" else 1
            parts = []
            for _ in range(copies):
                inputs = self.inputs(recordings, draw if split == "train" else None)
                order = draw.permutation(len(inputs)) if split == "train" else range(len(inputs))
                parts += [_labelled(inputs[n], digits[n]) for n in order]
            write_recordings(folder, split, concatenated(parts))
            spectra = np.stack([log_mel(samples).mean(0) for _, samples in recordings])
            about = {"names": [name for name, _ in recordings], "spectra": spectra.tolist()}
            replace_file(folder / f"{split}.json", json.dumps(about).encode())

    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Classify each recording."""
        found = class_log_probs(trained, read_recordings(folder, split))
        return _measured(folder, split, found.argmax(1))

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield the class of the training recording with the nearest mean spectrum."""
        known, asked = (json.loads((folder / f"{x}.json").read_bytes()) for x in ("train", split))
        spectra, queries = np.array(known["spectra"]), np.array(asked["spectra"])
        distances = ((queries[:, None] - spectra) ** 2).sum(-1)
        digits = np.array([int(name[0]) for name in known["names"]])
        yield "nearest mean spectrum", _measured(folder, split, digits[distances.argmin(1)])


class AdaptedDigits(SelfTrainingTask, SpokenDigits):
    """The same, adapted to the speakers of the test by their recordings, without labels.

    A speaker is taken to say each digit as often as it is in the training data: probabilities are
    scaled until that is so (:func:`balanced`). Two further trainings, none of which begins with the
    weights of another, also read recordings of the test, with the digits that the model before them
    gives them: of each speaker a share of the recordings, those in which the likeliest digit has
    the highest probability.
    """

    name = "digits-adapted"
    title = "Spoken digits, adapted to the speakers without labels"
    shares = (0.6, 0.8)
    """Shares of the recordings of a speaker that each further training reads."""
    n_trainings = 1 + len(shares)
    models = {"txl": ("digits",) * n_trainings}  # noqa: RUF012

    def identity(self, source: Path | None) -> dict[str, Any]:
        """Return the checksums of the archives, and the shares."""
        return super().identity(source) | {"shares": [*self.shares]}

    def prepare(self, source: Path, folder: Path) -> None:
        """Write frames and mean spectra.

        Raises:
            ValueError: A speaker has fewer recordings than there are digits.
        """
        by_split = recordings_of(source)
        n_digits = len({name[0] for name, _ in by_split["train"]})
        for split in self.splits:
            counts = Counter(_speaker(name) for name, _ in by_split[split])
            for speaker, n in counts.items():
                if n < n_digits:
                    raise DataError(
                        f"{source}: speaker {speaker} has {n} of the recordings for the split "
                        f"{split}: at least {n_digits}, one for each digit, are needed for "
                        "frequencies of digits as in the training data; use the task digits"
                    )
        self.write(by_split, folder)

    def pseudo_label(
        self, trained: Trained, source: Path, prepared: Path, folder: Path, n: int
    ) -> None:
        """Add recordings of the test to those to train on, with digits that the model gives them.

        The digits in their names are not used.
        """
        by_split = recordings_of(source)
        asked = by_split["test"]
        log_probs = _as_in_training(
            class_log_probs(trained, read_recordings(prepared, "test")), prepared, "test"
        )
        kept = most_confident(log_probs, [_speaker(x) for x, _ in asked], self.shares[n - 1])
        digits = log_probs.argmax(1).tolist()
        more = [(_renamed(asked[k][0], digits[k]), asked[k][1]) for k in kept]
        self.write(by_split | {"train": by_split["train"] + more}, folder, n)

    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Classify the recordings of each speaker, with the frequencies of digits and without."""
        log_probs = class_log_probs(trained, read_recordings(folder, split))
        alone = _measured(folder, split, log_probs.argmax(1)).metrics["accuracy"]
        found = _measured(folder, split, _as_in_training(log_probs, folder, split).argmax(1))
        return found._replace(metrics=found.metrics | {"without frequencies": alone})


class RawDigits(SpokenDigits):
    """The same from samples: 16 of them (2 ms), companded by mu-law to 256 levels, are an input.

    A recording has hundreds of positions, and is read through the memory.
    """

    name = "digits-raw"
    title = "Spoken digits, raw mu-law samples"
    models = {"txl": ("digits-raw",)}  # noqa: RUF012
    copies = 10

    def inputs(
        self, recordings: Sequence[Named], draw: np.random.Generator | None
    ) -> list[Float[np.ndarray, "_ F"]]:
        """Return companded samples between -2 and 2; speed, loudness and noise are drawn."""
        return [self._inputs(samples, draw) for _, samples in recordings]

    def _inputs(self, samples: np.ndarray, draw: np.random.Generator | None) -> np.ndarray:
        x = samples / (np.abs(samples).max() + 1e-9)
        if draw is not None:
            x = resampled(x, float(np.exp(draw.uniform(-0.25, 0.25))))
            x = x * np.exp(draw.uniform(-1.0, 0.0)) + 0.01 * draw.uniform() * draw.normal(
                size=len(x)
            )
            # Frames begin anywhere.
            x = x[draw.integers(0, RAW_STEP) :]
        levels = mu_law(x[: len(x) // RAW_STEP * RAW_STEP])
        return (levels.reshape(-1, RAW_STEP) - MU / 2) / (MU / 4)


def recordings_of(source: Path) -> dict[str, list[Named]]:
    """Return names, such as ``7_theo_3``, and samples by split.

    Raises:
        FileNotFoundError: An archive is missing.
        ValueError: A recording is of another kind, has another name or is too short, or a split has
            none.
    """
    archives = {}
    for part in ("train", "test"):
        path = source / f"{part}.tar.gz"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: recordings named DIGIT_SPEAKER_INDEX.wav in train.tar.gz and "
                "test.tar.gz are read"
            )
        archives[part] = [*recordings_in(path)]
        for name, samples in archives[part]:
            if not _NAME.fullmatch(name):
                raise DataError(
                    f"{path}: {name}.wav is not named DIGIT_SPEAKER_INDEX.wav, such as 7_theo_3.wav"
                )
            if len(samples) < _SHORTEST:
                raise DataError(
                    f"{path}: {name}.wav has {len(samples)} samples: {_SHORTEST} "
                    f"({1000 * _SHORTEST // RATE} ms) are needed"
                )
    is_held_out = [int(name.split("_")[2]) in _HELD_OUT for name, _ in archives["train"]]
    by_split = {
        "train": [x for x, out in zip(archives["train"], is_held_out, strict=True) if not out],
        "valid": [x for x, out in zip(archives["train"], is_held_out, strict=True) if out],
        "test": archives["test"],
    }
    for split, some in by_split.items():
        if not some:
            raise DataError(
                f"{source}: there is no recording for the split {split}: test.tar.gz is the test, "
                f"and of train.tar.gz the indices {_HELD_OUT[0]} to {_HELD_OUT[-1]} are for "
                "validation, the others to train on"
            )
    return {split: by_split[split] for split in SPLITS}


def _speaker(name: str) -> str:
    return name.split("_")[1]


def _renamed(name: str, digit: int) -> str:
    return f"{digit}_{name.partition('_')[2]}"


def _names(folder: Path, split: str) -> list[str]:
    return json.loads((folder / f"{split}.json").read_bytes())["names"]


def _as_in_training(
    log_probs: Float[np.ndarray, "n classes"], folder: Path, split: str
) -> Float[np.ndarray, "n classes"]:
    """Return log-probabilities with which each speaker says the digits as often as in training."""
    digits = [int(name[0]) for name in _names(folder, "train")]
    counts = np.bincount(digits, minlength=log_probs.shape[1])
    return balanced(log_probs, [*map(_speaker, _names(folder, split))], counts / len(digits))


def balanced(
    log_probs: Float[np.ndarray, "n classes"],
    groups: Sequence[str],
    frequencies: Float[np.ndarray, " classes"],
) -> Float[np.ndarray, "n classes"]:
    """Return log-probabilities whose mean probabilities in each group are given ones.

    In each group, the probability of a class is multiplied by the same number for all rows, and
    rows are normalized, by turns (distribution alignment, Berthelot et al. 2020; the iteration is
    that of Sinkhorn and Knopp). It ends when no mean differs by more than 1e-6, or after 10,000
    turns, when means may still differ.

    Args:
        log_probs: Log-probabilities, up to a number that a row has in common.
        groups: The group of each row.
        frequencies: The mean probability of each class.

    Raises:
        ValueError: A log-probability is not finite.
    """
    if not np.isfinite(log_probs).all():
        raise DataError("a probability is not finite: the training has diverged; change its recipe")
    found = np.full_like(log_probs, -np.inf)
    possible = np.flatnonzero(frequencies)
    aim = np.log(frequencies[possible])
    for group in {*groups}:
        own = np.flatnonzero([x == group for x in groups])
        rows = log_probs[np.ix_(own, possible)]
        for _ in range(_TURNS):
            rows = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
            means = np.logaddexp.reduce(rows, axis=0) - math.log(len(rows))
            if np.abs(np.exp(means) - np.exp(aim)).max() < _TOLERANCE:
                break
            rows = rows + (aim - means)
        rows = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
        found[np.ix_(own, possible)] = rows
    return found


def most_confident(
    log_probs: Float[np.ndarray, "n classes"], groups: Sequence[str], share: float
) -> Int64[np.ndarray, " m"]:
    """Return the rows of each group with the most probable best class, in ascending order.

    Ties are broken at random, with a fixed seed.

    Args:
        log_probs: Log-probabilities.
        groups: The group of each row.
        share: The share of each group, rounded up.
    """
    confidence = log_probs.max(1)
    # Not by the order of the rows, which are sorted by the names, and so by the digits.
    drawn = np.random.default_rng(0).permutation(len(log_probs))
    kept: list[int] = []
    for group in dict.fromkeys(groups):
        own = np.flatnonzero([x == group for x in groups])
        best = own[np.lexsort((drawn[own], -confidence[own]))]
        kept += best[: math.ceil(share * len(own))].tolist()
    return np.array(sorted(kept), np.int64)


def _labelled(inputs: Float[np.ndarray, "n F"], digit: int) -> Recordings:
    targets = np.full(len(inputs), UNCOUNTED, np.int64)
    targets[len(inputs) // 2 :] = digit
    starts = np.arange(len(inputs)) == 0
    # Half precision is enough for logarithms, and halves the files.
    return Recordings(inputs.astype(np.float16), targets, starts)


def concatenated(parts: list[Recordings]) -> Recordings:
    """Return recordings one after the other."""
    return Recordings(
        np.concatenate([x.inputs for x in parts]),
        np.concatenate([x.targets for x in parts]),
        np.concatenate([x.starts for x in parts]),
    )


@torch.no_grad()
def class_log_probs(trained: Trained, recordings: Recordings) -> Float[np.ndarray, "n classes"]:
    """Return the mean log-probabilities of the classes of each recording in counted positions."""
    model, found = trained.model, []
    firsts = np.flatnonzero(recordings.starts).tolist()
    with evaluating(model):
        for first, stop in zip(firsts, [*firsts[1:], len(recordings)], strict=True):
            inputs, targets, _ = recordings.at(slice(first, stop))
            mems = model.start_memory(1, trained.lengths.mem_len)
            pieces = read(model, inputs[None], trained.lengths, mems)
            hidden = torch.cat([piece.hidden for piece in pieces], 1)[0]
            log_probs = model.head.log_probs(hidden[targets != UNCOUNTED])
            found.append((log_probs.sum(0).double() / len(log_probs)).cpu().numpy())
    return np.stack(found)


def _measured(folder: Path, split: str, found: Int64[np.ndarray, " n"]) -> Measured:
    """Compare with the digits in the names; also by whether a speaker is in the training data."""
    names = _names(folder, split)
    known = {*map(_speaker, _names(folder, "train"))}
    right = np.array([int(x[0]) == y for x, y in zip(names, found, strict=True)], float)
    is_known = np.array([_speaker(name) in known for name in names])
    metrics = {"accuracy": 100 * right.mean()}
    for who, some in (("training speakers", is_known), ("other speakers", ~is_known)):
        if some.any():
            metrics[who] = 100 * right[some].mean()
    return Measured({name: float(x) for name, x in metrics.items()}, right)
