"""A corpus of recordings: the arrays of each split, and the streams that a model reads."""

from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float
from torch import Tensor, from_numpy

from transformer_xl.config import DataConfig, Say, checksum
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.preparing import prepare
from transformer_xl.data.recordings import PARTS, UNCOUNTED, Recordings, read_recordings
from transformer_xl.data.segments import Segments
from transformer_xl.data.text import SPLITS


class FeatureCorpus:
    """The recordings of a folder.

    Attributes:
        folder: The folder.
        n_features: Width of the inputs.
        are_real: Whether the targets are numbers; else they are classes.
        vocab: None, where a text has its vocabulary.

    Raises:
        FileNotFoundError: A file of the training or validation split is missing.
        ValueError: A file is not as described above, or the splits differ in width or type.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder, self.vocab = Path(folder), None
        names = [x for x in SPLITS if x != "test" or (self.folder / "test_inputs.npy").exists()]
        self._splits = {name: read_recordings(self.folder, name) for name in names}
        train = self._splits["train"]
        self.n_features, self.are_real = train.inputs.shape[1], train.are_real
        for name, split in self._splits.items():
            if (split.inputs.shape[1], split.are_real) != (self.n_features, self.are_real):
                raise ValueError(
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

    def split(self, name: str) -> Recordings:
        """Return a split.

        Raises:
            ValueError: There is none of this name.
        """
        if name not in self._splits:
            raise ValueError(f"{self.folder} has no {name} split: write {name}_inputs.npy, ...")
        return self._splits[name]


def open_features(config: DataConfig) -> FeatureCorpus:
    """Open the recordings that the settings describe (``data.vocab = "features"``).

    Raises:
        OSError: A file is missing.
        ValueError: ``data.path`` is not set, or a file is not as it must be.
    """
    if config.path is None:
        raise ValueError(
            "data.vocab=features reads arrays: set data.path to their folder "
            "(train_inputs.npy, train_targets.npy, train_starts.npy, ...)"
        )
    return FeatureCorpus(Path(config.path).expanduser())


def open_corpus(config: DataConfig, say: Say) -> Corpus | FeatureCorpus:
    """Open recordings, or prepare a text, whichever the settings describe; errors as of both."""
    return open_features(config) if config.vocab == "features" else prepare(config, say)


class FeatureSegments(Segments):
    """Reads recordings in segments, forever, as :class:`Segments` reads a text.

    Attributes:
        starts: Where recordings begin in the segment read last, or a stream jumps to another part
            of the data, (B, T).
        completed: Which targets of it are predicted, (B, predicted).
    """

    def next_segment(self) -> tuple[Float[Tensor, "B T F"], Tensor]:  # pyright: ignore
        """Return the next inputs of each stream, and what is predicted at each position.

        The inputs begin with the ``ext_len`` before the segment; these have no targets.
        """
        first, stop = self.tokens_read - self.ext_len, self.tokens_read + self.length
        # With one position before, to find out where a stream jumps.
        places = self._places(first - 1, stop)
        recordings = self._tokens
        assert isinstance(recordings, Recordings)
        inputs, targets, starts = recordings.at(places[:, 1:])
        jumps = np.diff(places) != 1
        self.starts = starts | from_numpy(jumps)
        targets = targets[:, self.ext_len :].contiguous()
        counted = ~targets.isnan() if recordings.are_real else targets != UNCOUNTED
        self.completed = counted
        self.segments_read += 1
        self.tokens_read += self.length
        return inputs, targets
