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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Literal

import msgspec

from transformer_xl.config import DataConfig
from transformer_xl.data.normalizing import Normalizer
from transformer_xl.errors import DataError

Unpacking = Literal["", "text", "records", "json"]
_Integers = list[int | list[int | list[int]]]


class _Parts(msgspec.Struct):
    """The parts of a JSON file of integers; other keys are ignored."""

    train: _Integers | None = None
    valid: _Integers | None = None
    test: _Integers | None = None


"""A sequence of integers or several, whose items may be integers that happen at once."""

_READ_BYTES = 1 << 16
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_Record = Mapping[str, object]
_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = ".parquet"
RAW_REMEDY = "--data.raw True reads every byte as it is"


class MissingPackageError(DataError):
    """A file needs an optional package."""


def optional_package(name: str, what: str, extra: str = "") -> ModuleType:
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
    if config.vocab == "integers" and suffix == ".json":
        return "json"
    if config.vocab == "integers" and suffix == ".npy":
        raise DataError(f"{path}: integers are read from text or JSON: numpy.savetxt writes text")
    return "text" if path.suffix.lower() in COMPRESSED else ""


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file, decompressing it as the end of its name says."""
    suffix = path.suffix.lower()
    opener: Callable[..., AbstractContextManager[io.BufferedIOBase]]
    opener = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(suffix, open)
    if suffix == ".zst":
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
    content = _integers_in(path)
    return tuple(part for part in ("valid", "test") if getattr(content, part, None))


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
        blocks = _json_integers(path, part)
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
        record = record if isinstance(record, dict) else {}
        yield _text_in(record, field, f"{path}: line {number:,}")


def _text_in(record: _Record, field: str, where: str) -> bytes:
    """Return the text of a record, with a line end."""
    if not isinstance(text := record.get(field), str):
        raise DataError(
            f"{where} has no text in the field {field!r} (its fields are "
            f"{', '.join(record)[:100] or 'none'}); name the field with --data.json_field"
        )
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


def load_splits(where: str, *source: str, **how: object) -> Mapping[str, Iterable[_Record]]:
    """Return the splits of records that ``datasets.load_dataset`` opens, read as they are taken."""
    datasets = optional_package("datasets", f"{where}, read with datasets,")
    with _read_by_datasets(where):
        return datasets.load_dataset(*source, streaming=True, **how)


def texts_of(rows: Iterable[_Record], field: str, where: str) -> Iterator[bytes]:
    """Yield the texts of records, each with a line end."""
    with _read_by_datasets(where):
        for row in rows:
            yield _text_in(row, field, where)


def _integers_in(path: Path) -> _Integers | _Parts:
    with opened(path) as file:
        content = file.read()
    try:
        return msgspec.json.decode(content, type=_Integers | _Parts)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} holds no sequences of integers (a list of lists, or an object with such a "
            f"list under train, valid and test): {error}"
        ) from None


def _json_integers(path: Path, part: str) -> Iterator[bytes]:
    content = _integers_in(path)
    sequences = getattr(content, part) or [] if isinstance(content, _Parts) else content
    for sequence in sequences if any(isinstance(x, list) for x in sequences) else [sequences]:
        yield " ".join(map(str, _flat(sequence))).encode() + b"\n"


def _flat(sequence: object) -> list[object]:
    """Return the integers of a sequence; what happens at once comes one after the other."""
    if not isinstance(sequence, list):
        return [sequence]
    return [value for item in sequence for value in _flat(item)]
