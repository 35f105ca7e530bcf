"""Bach's chorales: how likely the test pieces are, note by note and frame by frame.

A frame is what four voices sing in a sixteenth note. Its likelihood is that of its notes, soprano
first, each predicted from all before it. The losses of marks and of the end of a piece count, too:
the sum is that of the whole piece.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from transformer_xl.data import train_vocab
from transformer_xl.errors import DataError
from transformer_xl.inference import losses
from transformer_xl.studies.baselines import KneserNey
from transformer_xl.tasks.music.reading import REST
from transformer_xl.tasks.music.transposing import rounds_of
from transformer_xl.tasks.music.writing import HIGHEST, MARKS, text_of
from transformer_xl.tasks.task import Measured, Task, Trained

VOICES = 4
ROUNDS = 16
"""Times that the training text has each chorale, each time in another key."""
_SOURCE = "Jsb16thSeparated.json"
_DATA = "music.json"
_Pitch = Annotated[int, Meta(ge=REST, le=HIGHEST)]
_ORDER = 12


_Frame = tuple[_Pitch, _Pitch, _Pitch, _Pitch]
_Pieces = Annotated[list[Annotated[list[_Frame], Meta(min_length=1)]], Meta(min_length=1)]


class _Published(msgspec.Struct):
    """The pieces of each split."""

    train: _Pieces
    valid: _Pieces
    test: _Pieces


class Music(Task):
    """Pieces are lines of integers, with a mark before each quarter note."""

    name = "music"
    title = "Bach's chorales, four voices in sixteenth notes"
    metric = "nats per note, whole pieces"
    models = {"txl": ("music",), "lstm": ("music-lstm",)}  # noqa: RUF012
    reads = (_SOURCE,)

    def prepare(self, source: Path, folder: Path) -> None:
        """Write the pieces, those of the training text in other keys; ``source`` has the file."""
        path = source / _SOURCE if source.is_dir() else source
        try:
            published = msgspec.json.decode(path.read_bytes(), type=_Published)
        except msgspec.DecodeError as error:
            raise DataError(
                f"{path}: {error}; under train, valid and test a list of pieces is needed, which "
                f"are lists of frames of {VOICES} pitches from 0 to {HIGHEST}, or {REST} for a rest"
            ) from error
        pieces = msgspec.structs.asdict(published)
        pieces["train"] = rounds_of(pieces["train"], ROUNDS, seed=1)
        texts = {
            split: [[*map(int, text_of(piece, marked=True).split())] for piece in some]
            for split, some in pieces.items()
        }
        (folder / _DATA).write_text(json.dumps(texts, separators=(",", ":")))

    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Read each piece by itself, from its start to its end."""
        vocab, pieces = trained.vocab, _pieces(folder, split)
        assert vocab is not None
        begin = [vocab.eos_id]
        texts = [[*begin, *vocab.encode(" ".join(map(str, piece))), *begin] for piece in pieces]
        return _measured(pieces, losses(trained.model, texts, trained.lengths))

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield the frequencies of tokens, and n-grams of the order that is best on valid."""
        text = {name: _lines(folder, name) for name in {"train", "valid", split}}
        vocab = train_vocab("integers", [text["train"]])
        ids = {name: np.array(vocab.encode(some)) for name, some in text.items()}
        pieces = _pieces(folder, split)
        ends = np.cumsum([len(piece) + 1 for piece in pieces])[:-1]

        def cut(nll: np.ndarray) -> Measured:
            return _measured(pieces, np.split(nll, ends))

        counts = np.bincount(ids["train"], minlength=len(vocab)) + 1
        yield "unigram", cut(-np.log(counts / counts.sum())[ids[split]])
        grams = KneserNey(ids["train"], len(vocab), order=_ORDER)
        best = grams.best_order(ids["valid"])
        yield "n-gram, Kneser-Ney", cut(grams.nll(ids[split], order=best))


def _pieces(folder: Path, split: str) -> list[list[int]]:
    return json.loads((folder / _DATA).read_bytes())[split]


def _lines(folder: Path, split: str) -> str:
    return "".join(" ".join(map(str, piece)) + "\n" for piece in _pieces(folder, split))


def _measured(pieces: list[list[int]], nll: Sequence[np.ndarray]) -> Measured:
    notes = np.array([sum(x not in MARKS for x in piece) for piece in pieces])
    sums = np.array([x.sum() for x in nll])
    per_note = float(sums.sum() / notes.sum())
    return Measured({"note": per_note, "frame": VOICES * per_note}, -sums / notes)
