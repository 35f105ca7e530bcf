"""Files that are no plain text, and the text in them: compressed files, records, and integers.

What is read is data: no pickle, nothing that is executed.
"""

import bz2
import glob
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
from transformer_xl.data.normalizing import Normalizer
from transformer_xl.errors import DataError

Unpacking = Literal["", "text", "records", "json", "numpy"]

_BLOCK = 1 << 20
_READ_BYTES = 1 << 16
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = ".parquet"
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


def _suffix(path: Path) -> str:
    """Return the end of a name, without that of compression."""
    name = Path(path.name.lower())
    return name.with_suffix("").suffix if name.suffix in COMPRESSED else name.suffix


def unpacking_of(path: Path, config: DataConfig) -> Unpacking:
    """Say how the text in a file is found: by the end of its name; empty: it is plain text."""
    if (suffix := _suffix(path)) in (*_JSON_LINES, _PARQUET):
        return "records"
    # A NumPy file is mapped, which a compressed one cannot be.
    suffix = path.suffix.lower() if suffix == ".npy" else suffix
    if config.vocab == "integers" and suffix in (".json", ".npy"):
        return "json" if suffix == ".json" else "numpy"
    return "text" if path.suffix.lower() in COMPRESSED else ""


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file, decompressing it as the end of its name says."""
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(
        path.suffix.lower(), open
    )
    if path.suffix.lower() == ".zst":
        opener = optional_package("zstandard", f"{path}, compressed with zstd,").open
    try:
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


def text_blocks(
    path: Path, how: Unpacking, field: str, part: str, is_raw: bool, changes: Counter[str]
) -> Iterator[bytes]:
    """Yield the text in a file, normalized unless it ``is_raw``; add the changes to ``changes``.

    Args:
        path: The file.
        how: How the text in it is found.
        field: The field or column of records that holds the text.
        part: The split that is taken of a file that holds several.
        is_raw: Whether the bytes stay as they are.
        changes: Counts of what normalization changed.

    Raises:
        OSError: The file cannot be read.
        DataError: It is damaged or no text.
    """
    if how in ("", "text"):
        blocks = _bytes_of(path)
    elif how == "records" and _suffix(path) == _PARQUET:
        splits = load_splits(str(path), "parquet", data_files=glob.escape(str(path)))
        blocks = texts_of(splits["train"], field, str(path))
    elif how == "records":
        blocks = _texts_of_lines(path, field)
    else:
        blocks = _json_integers(path, part) if how == "json" else _numpy_integers(path)
    if is_raw:
        yield from blocks
        return
    normalizer = Normalizer(str(path), RAW_REMEDY)
    yield from normalizer.blocks(blocks)
    # Counts that were corrected to zero are none.
    changes += +normalizer.changes


def _bytes_of(path: Path) -> Iterator[bytes]:
    with opened(path) as file:
        while block := file.read(_READ_BYTES):
            yield block


def _lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, normalized, without their line ends."""
    parts: list[bytes] = []
    for block in Normalizer(str(path), RAW_REMEDY).blocks(_bytes_of(path)):
        first, *others = block.split(b"\n")
        parts.append(first)
        for line in others:
            yield b"".join(parts)
            parts = [line]
    yield b"".join(parts)


def _texts_of_lines(path: Path, field: str) -> Iterator[bytes]:
    """Yield the texts of JSON lines, each with a line end.

    Not by ``datasets``, which gives each field one type, also those that are not read, and turns
    texts that look like dates into times.
    """
    for number, line in enumerate(_lines_of(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number:,} is not JSON: {error}") from None
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            fields = ", ".join(record) if isinstance(record, dict) else "none"
            raise DataError(
                f"{path}: line {number:,} has no text in the field {field!r} (its fields are "
                f"{fields[:100]}); name the field with --data.json_field"
            )
        yield _with_line_end(text)


def _with_line_end(text: str) -> bytes:
    text = text if text.endswith("\n") else f"{text}\n"
    return text.encode("utf-8", "surrogatepass")


@contextmanager
def _read_by_datasets(where: str) -> Iterator[None]:
    """Name what was read in errors of ``datasets``, which has classes of its own."""
    try:
        yield
    except Exception as error:
        is_of_machine = isinstance(error, (ImportError, MemoryError)) or getattr(error, "errno", 0)
        if is_of_machine or isinstance(error, DataError):
            raise
        raise DataError(
            f"{where} cannot be read by datasets: {type(error).__name__}: {error}"
        ) from error


def load_splits(where: str, *source: str, **how: Any) -> dict[str, Iterable[Any]]:
    """Return the splits of records that ``datasets.load_dataset`` opens, read as they are taken."""
    datasets = optional_package("datasets", f"{where}, read with datasets,")
    with _read_by_datasets(where):
        return datasets.load_dataset(*source, streaming=True, **how)


def texts_of(rows: Iterable[Any], field: str, where: str) -> Iterator[bytes]:
    """Yield the texts of records, each with a line end."""
    with _read_by_datasets(where):
        for row in rows:
            if not isinstance(text := row.get(field), str):
                raise DataError(
                    f"{where} has no text in the field {field!r} (its fields are "
                    f"{', '.join(row)}); name the field with --data.json_field"
                )
            yield _with_line_end(text)


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


def _json_integers(path: Path, part: str) -> Iterator[bytes]:
    content = read_json(path)
    if isinstance(content, dict):
        content = content.get(part, [])
    if not isinstance(content, list):
        raise DataError(
            f"{path} holds no sequences of integers: expected a list of lists, or an object with "
            "such a list under train, valid and test"
        )
    for sequence in content if any(isinstance(x, list) for x in content) else [content]:
        yield " ".join([str(x) for x in _flat(sequence, path)]).encode() + b"\n"


def _flat(sequence: Any, path: Path) -> Iterator[int]:
    """Return the integers of a sequence; what happens at once comes one after the other."""
    for item in sequence if isinstance(sequence, list) else [sequence]:
        for value in item if isinstance(item, list) else [item]:
            if type(value) is not int:
                raise DataError(
                    f"{path}: {json.dumps(value)[:60]} is no integer; a sequence holds "
                    "integers, or lists of integers that happen at once"
                )
            yield value


def _numpy_integers(path: Path) -> Iterator[bytes]:
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
            yield block.encode() + (b"\n" if start + _BLOCK >= len(row) else b" ")
