"""Files that are no plain text, and the text in them.

Compressed files, JSON lines, Parquet tables, and integers in JSON or NumPy files. What is read is
data: no pickle, nothing that is executed.
"""

import bz2
import gzip
import importlib
import io
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transformer_xl.config import DataConfig
from transformer_xl.data.normalizing import Normalizer, describe_changes, normalized
from transformer_xl.errors import DataError

Unpacking = Literal["", "text", "lines", "parquet", "json", "numpy"]

_BLOCK = 1 << 20
_READ_BYTES = 1 << 16
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# Enough to show where the trouble is.
_SHOWN = 60
RAW_REMEDY = "--data.raw True reads every byte as it is"


class MissingPackageError(DataError):
    """A file needs an optional package."""


def optional_package(name: str, what: str, extra: str = "") -> Any:
    """Import an optional package, which ``what`` needs.

    ``extra`` is what to install where the package has another name.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"{what} needs the package {name}: pip install {extra or name}"
        ) from error


def unpacking_of(path: Path, config: DataConfig) -> Unpacking:
    """Say how the text in a file is found: by the end of its name; empty: it is plain text."""
    name = path.name.lower()
    is_compressed = name.endswith(COMPRESSED)
    inner = name.rsplit(".", 1)[0] if is_compressed else name
    kinds: dict[str, Unpacking] = {".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet"}
    if config.vocab == "integers":
        kinds |= {".json": "json", ".npy": "numpy"}
    for end, kind in kinds.items():
        if inner.endswith(end):
            return kind
    return "text" if is_compressed else ""


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file, decompressing it as the end of its name says."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".zst":
            zstandard = optional_package("zstandard", f"{path}, compressed with zstd,")
            with io.BufferedReader(zstandard.open(path, "rb")) as file:
                yield file
            return
        opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(suffix, open)
        with opener(path, "rb") as file:
            yield file
    except Exception as error:
        # Of the system's own errors, those with a number; the others are about what is in the file.
        is_known = isinstance(error, ValueError) or getattr(error, "errno", None)
        is_about_it = isinstance(error, OSError | EOFError | lzma.LZMAError | zlib.error)
        if is_known or not (is_about_it or type(error).__name__ == "ZstdError"):
            raise
        raise DataError(f"{path} is damaged: {error}") from error


def first_bytes(path: Path, n: int) -> bytes:
    """Return the beginning of what is in a file; nothing when it is damaged."""
    try:
        with opened(path) as file:
            return file.read(n)
    except MissingPackageError:
        raise
    except (OSError, ValueError):
        return b""


def parts_within(path: Path) -> tuple[str, ...]:
    """Return which held-out parts a JSON file of integers brings along."""
    content = read_json(path)
    parts = ("valid", "test") if isinstance(content, dict) else ()
    return tuple(part for part in parts if content.get(part))


def blocks_of(path: Path, how: Unpacking, field: str, part: str) -> Iterator[bytes]:
    """Yield the text in a file in blocks.

    It is in the field or column ``field`` of records. Of a file that holds several parts, ``part``
    is taken.
    """
    if how in ("", "text"):
        with opened(path) as file:
            while block := file.read(_READ_BYTES):
                yield block
        return
    readers = {
        "lines": lambda: _json_lines(path, field),
        "parquet": lambda: _parquet(path, field),
        "json": lambda: _json_integers(path, part),
        "numpy": lambda: _numpy_integers(path),
    }
    for piece in readers[how]():
        yield piece.encode("utf-8", "surrogatepass")


def text_blocks(
    path: Path, how: Unpacking, field: str, part: str, is_raw: bool, changes: Counter[str]
) -> Iterator[bytes]:
    """Yield the text in a file, normalized unless it ``is_raw``; add the changes to ``changes``.

    Raises:
        OSError: The file cannot be read.
        DataError: It is damaged or no text.
    """
    blocks = blocks_of(path, how, field, part)
    if is_raw:
        yield from blocks
        return
    normalizer = Normalizer(str(path), RAW_REMEDY)
    yield from normalized(blocks, normalizer)
    # Counts that were corrected to zero are none.
    changes += +normalizer.changes
    if changes and normalizer.n_zeros:
        raise DataError(
            f"{path} has {normalizer.n_zeros:,} zero bytes, so that it is no text, and "
            f"normalizing it would change bytes ({describe_changes(changes)}): {RAW_REMEDY}, or "
            "remove the zero bytes"
        )


def _as_lines(text: str) -> str:
    """End a text with a line end, unless it has one: texts follow one another in a file."""
    return text if text.endswith("\n") else f"{text}\n"


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and values of the lines of a file, compressed or not, but for empty ones.

    Raises:
        OSError: It cannot be read.
        DataError: It is damaged, or a line is no JSON.
    """
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number:,} is no JSON: {error}") from None


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, normalized, without their line ends."""
    waiting: list[bytes] = []
    for block in normalized(blocks_of(path, "text", "", ""), Normalizer(str(path))):
        first, *others = block.split(b"\n")
        waiting.append(first)
        for line in others:
            yield b"".join(waiting)
            waiting = [line]
    yield b"".join(waiting)


def _json_lines(path: Path, field: str) -> Iterator[str]:
    for number, record in json_lines(path):
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            known = ", ".join(map(repr, record)) if isinstance(record, dict) else "none"
            raise DataError(
                f"{path}: line {number:,} has no text in the field {field!r} (its fields are "
                f"{known[:_SHOWN]}); name the field with --data.json_field"
            )
        yield _as_lines(text)


def _parquet(path: Path, field: str) -> Iterator[str]:
    datasets = optional_package("datasets", f"{path}, a Parquet table,")
    yield from texts_of(_rows(datasets, path), field, str(path))


def _rows(datasets: Any, path: Path) -> Iterator[Any]:
    try:
        yield from datasets.load_dataset(
            "parquet", data_files=[str(path)], split="train", streaming=True
        )
    except Exception as error:  # The packages have classes of their own for each kind of trouble.
        if isinstance(error, (ImportError, MemoryError)) or getattr(error, "errno", None):
            # Of the machine, and not of the file.
            raise
        raise DataError(
            f"{path} cannot be read by datasets: {type(error).__name__}: {error}"
        ) from error


def texts_of(rows: Iterable[Any], field: str, where: str) -> Iterator[str]:
    """Return the texts of the rows of a data set, each with a line end."""
    for row in rows:
        text = row.get(field)
        if not isinstance(text, str):
            raise DataError(
                f"{where} has no text in the column {field!r} (its columns are "
                f"{', '.join(row)}); name the column with --data.json_field"
            )
        yield _as_lines(text)


def read_json(path: Path) -> Any:
    """Return what a JSON file holds, decompressing it as the end of its name says.

    Raises:
        OSError: It cannot be read.
        DataError: It is no JSON.
    """
    try:
        with opened(path) as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}") from None


def _json_integers(path: Path, part: str) -> Iterator[str]:
    content = read_json(path)
    if isinstance(content, dict):
        content = content.get(part, [])
    if not isinstance(content, list):
        raise DataError(
            f"{path} holds no sequences of integers: expected a list of lists, or an object with "
            "such a list under train, valid and test"
        )
    sequences = content if any(isinstance(x, list) for x in content) else [content]
    for sequence in sequences:
        yield " ".join([str(x) for x in _flat(sequence, path)]) + "\n"


def _flat(sequence: Any, path: Path) -> Iterator[int]:
    """Return the integers of a sequence; what happens at once comes one after the other."""
    for item in sequence if isinstance(sequence, list) else [sequence]:
        for value in item if isinstance(item, list) else [item]:
            if type(value) is not int:
                raise DataError(
                    f"{path}: {json.dumps(value)[:_SHOWN]} is no integer; a sequence holds "
                    "integers, or lists of integers that happen at once"
                )
            yield value


def _numpy_integers(path: Path) -> Iterator[str]:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is no NumPy file of integers: {error}") from None
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise DataError(
            f"{path} holds {array.dtype.name} of {array.ndim} dimensions; integers are expected, "
            "a sequence (1 dimension) or a sequence a row (2)"
        )
    for row in np.atleast_2d(array):
        for start in range(0, len(row), _BLOCK):
            block = " ".join(map(str, row[start : start + _BLOCK].tolist()))
            yield block + ("\n" if start + _BLOCK >= len(row) else " ")
