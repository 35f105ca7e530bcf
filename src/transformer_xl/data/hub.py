"""Data sets of Hugging Face, streamed and stored as text.

``hf:ORG/NAME`` or ``hf:ORG/NAME:CONFIG`` names one on the hub, ``hf:FOLDER`` a folder of files that
``datasets`` reads. Texts are written to files of a fixed size; an interrupted import resumes after
the last complete file. Tokens are stored in our own format.
"""

import hashlib
import itertools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformer_xl.config import DataConfig
from transformer_xl.config.files import replace_file
from transformer_xl.config.locating import ask_hub
from transformer_xl.config.locking import Say
from transformer_xl.data.locking import once
from transformer_xl.data.unpacking import optional_package, texts_of

HUB_PREFIX = "hf:"

SHARD_BYTES = 64 << 20
"""Bytes from which a file of imported text is complete."""
_PARTS = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}


def find_hub_text(
    config: DataConfig, downloads: Path, say: Say
) -> tuple[Path, dict[str, tuple[Path, ...]]]:
    """Return the folder with the text of a data set, and its files by part.

    If another process reads the same data set, this one waits.
    """
    name = config.name.removeprefix(HUB_PREFIX)
    definition = json.dumps([*_identity(name), config.json_field])
    key = hashlib.sha256(definition.encode()).hexdigest()[:12]
    folder = downloads / "hf" / f"{Path(name.replace(':', '-')).name}-{key}"
    listing = folder / "parts.json"
    once(
        folder,
        say,
        "another process is reading the same data set",
        find=listing.is_file,
        make=lambda: _import(name, config.json_field, listing, say),
    )
    parts = json.loads(listing.read_bytes())
    if not parts.get("train"):
        raise ValueError(f"data.name={config.name!r}: the data set has no split named train")
    return folder, {part: tuple(folder / x for x in names) for part, names in parts.items()}


def _identity(name: str) -> list[Any]:
    """Return what determines the text of a data set: of a folder, its place and its files."""
    path, _, configuration = name.partition(":")
    if not path:
        raise ValueError(f"data.name={HUB_PREFIX + name!r} has no data set: write hf:ORG/NAME")
    folder = Path(path)
    if not folder.is_dir():
        return [name]
    files = []
    for file in sorted(folder.rglob("*")):
        within = file.relative_to(folder)
        # Hidden ones, as those of git, are no texts.
        if file.is_file() and not any(part.startswith(".") for part in within.parts):
            about = file.stat()
            files.append([within.as_posix(), about.st_size, about.st_mtime_ns])
    return [str(folder.resolve()), configuration, files]


def _import(name: str, field: str, listing: Path, say: Say) -> None:
    datasets = optional_package("datasets", f"data.name={HUB_PREFIX + name!r}")
    path, _, configuration = name.partition(":")
    _require_answer(path)
    say(f"reading {name} with datasets; its text is kept in {listing.parent}")
    try:
        splits = datasets.load_dataset(path, configuration or None, streaming=True)
        parts = {
            part: _write_part(part, rows, field, name, listing.parent, say)
            for part, names in _PARTS.items()
            if (rows := next((splits[x] for x in names if x in splits), None)) is not None
        }
    except (ValueError, OSError):
        raise
    except Exception as error:  # The package has classes of its own for each kind of trouble.
        raise OSError(f"datasets cannot read {name}: {type(error).__name__}: {error}") from error
    replace_file(listing, json.dumps(parts).encode())


def _require_answer(path: str) -> None:
    """Require that the hub answers, for a data set that is no folder.

    Raises:
        OSError: It cannot be reached; datasets would try that for half a minute.
    """
    if Path(path).exists() or find_spec("huggingface_hub") is None:
        return
    from huggingface_hub import errors

    failed = ask_hub(path, "README.md", "dataset")
    answers = errors.HfHubHTTPError, errors.HFValidationError, errors.OfflineModeIsEnabled
    if failed is not None and not isinstance(failed, answers):
        raise OSError(
            f"{path} is no folder, and the Hugging Face hub cannot be reached "
            f"({type(failed).__name__}): connect to the network, give hf:FOLDER, or a text with "
            "data.path"
        ) from failed


def _write_part(part: str, rows: Any, field: str, name: str, folder: Path, say: Say) -> list[str]:
    """Write the texts of a split to files; return their names."""
    names, n_rows = [], 0
    # Each file has a record of the number of rows up to its end.
    while (note := folder / f"{part}-{len(names):05d}.rows").is_file():
        n_rows = int(note.read_text(encoding="utf-8"))
        names.append(f"{note.stem}.txt")
    if n_rows:
        say(f"{part}: resuming after {n_rows:,} rows")
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
        say(f"{part}: {n_rows:,} rows")
    return names
