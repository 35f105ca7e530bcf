"""Data sets of Hugging Face, streamed and stored as text.

``hf:ORG/NAME`` or ``hf:ORG/NAME:CONFIG`` names one on the hub, ``hf:FOLDER`` a folder of files that
``datasets`` reads. Texts are written to files of a fixed size; an interrupted import resumes after
the last complete file. Tokens are stored in our own format.
"""

import hashlib
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

from transformer_xl.config import DataConfig
from transformer_xl.config.files import replace_file
from transformer_xl.data.download import Progress
from transformer_xl.data.locking import locked
from transformer_xl.data.unpacking import texts_of

HUB_PREFIX = "hf:"

SHARD_BYTES = 64 << 20
"""Bytes from which a file of imported text is complete."""
_PARTS = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}


def find_hub_text(
    config: DataConfig, downloads: Path, progress: Progress
) -> tuple[Path, dict[str, tuple[Path, ...]]]:
    """Return the folder with the text of a data set, and its files by part.

    If another process reads the same data set, this one waits.
    """
    name = config.name.removeprefix(HUB_PREFIX)
    key = hashlib.sha256(json.dumps([name, config.json_field]).encode()).hexdigest()[:12]
    folder = downloads / "hf" / f"{Path(name.replace(':', '-')).name}-{key}"
    if (found := _whole(folder)) is None:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, progress, "another process is reading the same data set"):
            if (found := _whole(folder)) is None:
                _import(name, config.json_field, folder, progress)
                found = _whole(folder)
    if not found or not found.get("train"):
        raise ValueError(f"data.name={config.name!r}: the data set has no split named train")
    return folder, found


def _whole(folder: Path) -> dict[str, tuple[Path, ...]] | None:
    """Return the files of a finished import."""
    listing = folder / "parts.json"
    if not listing.is_file():
        return None
    parts = json.loads(listing.read_text(encoding="utf-8"))
    return {part: tuple(folder / name for name in names) for part, names in parts.items()}


def _import(name: str, field: str, folder: Path, progress: Progress) -> None:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"data.name={HUB_PREFIX + name!r} needs the package datasets: pip install datasets"
        ) from error
    path, _, configuration = name.partition(":")
    progress(f"reading {name} with datasets; its text is kept in {folder}")
    try:
        splits = datasets.load_dataset(path, configuration or None, streaming=True)
        parts = {
            part: _write_part(part, rows, field, name, folder, progress)
            for part, names in _PARTS.items()
            if (rows := next((splits[x] for x in names if x in splits), None)) is not None
        }
    except (ValueError, OSError):
        raise
    except Exception as error:  # The package has classes of its own for each kind of trouble.
        raise OSError(f"datasets cannot read {name}: {type(error).__name__}: {error}") from error
    replace_file(folder / "parts.json", json.dumps(parts).encode())


def _write_part(
    part: str, rows: Any, field: str, name: str, folder: Path, progress: Progress
) -> list[str]:
    """Write the texts of a split to files; return their names."""
    names, n_rows = [], 0
    # Each file has a record of the number of rows up to its end.
    while (note := folder / f"{part}-{len(names):05d}.rows").is_file():
        n_rows = int(note.read_text(encoding="utf-8"))
        names.append(f"{note.stem}.txt")
    if n_rows:
        progress(f"{part}: resuming after {n_rows:,} rows")
    left = iter(texts_of(rows.skip(n_rows) if n_rows else rows, field, name))
    for first in left:
        stem = f"{part}-{len(names):05d}"
        texts = bytearray()
        for text in itertools.chain([first], left):
            texts += text.encode("utf-8", "surrogatepass")
            n_rows += 1
            if len(texts) >= SHARD_BYTES:
                break
        replace_file(folder / f"{stem}.txt", bytes(texts))
        replace_file(folder / f"{stem}.rows", str(n_rows).encode())
        names.append(f"{stem}.txt")
        progress(f"{part}: {n_rows:,} rows")
    return names
