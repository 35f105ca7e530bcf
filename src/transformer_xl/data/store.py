"""Objects at URLs, listed and fetched with ``fsspec``: texts, and prepared corpora.

An object is identified by its URL, its size, and the version that the store reports. What is read
is data: one file system, no chain of them, nothing that is executed.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
from jaxtyping import Integer

from transformer_xl.config import Say, is_disk_full, replace_file, require_space, sync
from transformer_xl.data.locking import once
from transformer_xl.data.unpacking import MissingPackageError, optional_package
from transformer_xl.errors import DataError, InputError

BLOCK_BYTES = 1 << 20
"""Bytes of a block of `StoredTokens`."""
CONNECTIONS = 8
"""Objects that are fetched at once."""
# Between attempts to read, so that a network that is away for a minute ends no training.
_WAITS_SECONDS = (1.0, 4.0, 15.0, 60.0)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_HIDDEN = re.compile(r"(^|/)\.")
# What stores call the version of an object; a time only where there is nothing better.
_VERSIONS = (
    *("ETag", "etag", "e_tag", "md5Hash", "Content-MD5", "generation", "blob_id", "oid"),
    *("checksum", "Digest", "LastModified", "last_modified", "Last-Modified", "updated", "mtime"),
    *("modified", "created"),
)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as the store describes it."""

    url: str
    name: str
    """Its path below the folder or pattern that named it."""
    size: int | None
    """Bytes; None if the server does not report them."""
    version: str
    """Changes with the contents; empty if the server reports nothing."""
    in_folder: bool = False
    """Found in a folder, where files that are no text are skipped."""

    def target(self, folder: Path) -> Path:
        """Return the path of its copy in a folder; another version has another path."""
        key = hashlib.sha256(json.dumps([self.url, self.size, self.version]).encode())
        last = re.sub(r"[^\w.+-]", "_", self.name.rsplit("/", 1)[-1])
        return folder / f"{key.hexdigest()[:16]}-{last[-100:]}"


def is_url(path: str) -> bool:
    """Whether a path is a URL."""
    return _URL.match(path) is not None


def local_path(path: str) -> str:
    """Return the path of a ``file://`` URL; other paths and URLs unchanged."""
    return unquote(urlsplit(path).path) if path.lower().startswith("file://") else path


def open_store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Raises:
        InputError: The URL chains file systems, or its protocol is unknown.
        MissingPackageError: A package is missing.
    """
    if "::" in url:
        raise InputError(f"{url} chains file systems with ::, which are not read here: give one")
    fsspec = optional_package("fsspec", f"{url}, read with fsspec,")
    # What a server compresses on the way has another size, and other ranges.
    web = {"headers": {"Accept-Encoding": "identity"}, "client_kwargs": {"trust_env": True}}
    try:
        return fsspec.url_to_fs(url, **(web if url.lower().startswith("http") else {}))
    except ImportError as error:
        raise MissingPackageError(f"{url}: {error}") from error
    except ValueError as error:
        raise InputError(f"{url}: {error}; there are s3, gs, az, https, hf ...") from error


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Name the URL in errors: a PermissionError, a FileNotFoundError, or another OSError."""
    try:
        yield
    except Exception as error:  # Each package has classes of its own.
        cause = error.__cause__ or error
        status = getattr(cause, "status", None)
        if isinstance(error, PermissionError) or status in (401, 403):
            raise PermissionError(
                f"{url} may not be read: {cause}. Credentials are taken from where the package of "
                "the store looks for them, such as AWS_PROFILE or ~/.aws for s3://"
            ) from error
        if status == 404 or (error is cause and isinstance(error, FileNotFoundError)):
            raise FileNotFoundError(f"there is nothing at {url}") from error
        raise OSError(f"cannot read {url}: {cause or type(cause).__name__}") from error


def patiently(url: str, read: Callable[[], _Result]) -> _Result:
    """Return what ``read`` returns; call it again, up to four times, while the store fails."""
    for wait in _WAITS_SECONDS:
        try:
            with _named(url):
                return read()
        except (PermissionError, FileNotFoundError):
            raise
        except OSError as error:
            if is_disk_full(error):
                raise
            time.sleep(wait)
    with _named(url):
        return read()


def describe(url: str) -> StoredObject:
    """Return an object as the store describes it now."""
    fs, path = open_store(url)
    with _named(url):
        fs.invalidate_cache()
        return _object(url, path.rsplit("/", 1)[-1], fs.info(path))


def _object(
    url: str, name: str, info: Mapping[str, Any], *, in_folder: bool = False
) -> StoredObject:
    version = next((x for field in _VERSIONS if (x := info.get(field))), "")
    # The same moment, however it is written.
    version = version.timestamp() if isinstance(version, datetime) else version
    return StoredObject(url, name, info.get("size"), str(version), in_folder)


def list_objects(url: str, records: Path, say: Say) -> tuple[StoredObject, ...]:
    """List the object at a URL, those that a pattern matches, or those in a folder, sorted.

    The list is recorded below ``records``, and used while the store cannot be reached. A folder on
    the web is a URL that ends with ``/`` and shows its files as links.
    """
    record = records / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    try:
        objects = _list(url)
    except (PermissionError, FileNotFoundError):
        raise
    except OSError as error:
        try:
            recorded = tuple(StoredObject(**row) for row in json.loads(record.read_bytes()))
        except (OSError, ValueError, TypeError):
            raise error from None
        say(f"warning: {error}; what was there the last time is taken")
        return recorded
    # In a read-only cache, only the record is missing.
    with suppress(OSError):
        replace_file(record, json.dumps([asdict(x) for x in objects]).encode())
    for x in objects:
        if not x.version:
            say(f"warning: {x.url} has no version: only another size is noticed as another text")
    return objects


def _list(url: str) -> tuple[StoredObject, ...]:
    fs, path = open_store(url)
    is_web = url.lower().startswith("http")
    with _named(url):
        fs.invalidate_cache()
        is_pattern = "*" in path or "[" in path
        if is_pattern:
            root = re.split(r"[*\[]", path)[0].rsplit("/", 1)[0]
            infos = {p: i for p, i in fs.glob(path, detail=True).items() if i["type"] == "file"}
            if not infos:
                raise FileNotFoundError(path)
        elif path.endswith("/") if is_web else fs.isdir(path):
            root, infos = path.rstrip("/"), fs.find(path, detail=True)
        else:
            last = urlsplit(path).path if is_web else path
            name = unquote(last.rsplit("/", 1)[-1])
            return (_object(fs.unstrip_protocol(path), name, fs.info(path)),)
        if is_web:
            # Pages list names alone.
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                infos = dict(zip(infos, pool.map(fs.info, infos), strict=True))
    names = {p: p.removeprefix(root).lstrip("/") for p in infos}
    shows_hidden = _HIDDEN.search(path.removeprefix(root))
    objects = [
        _object(fs.unstrip_protocol(p), names[p], info, in_folder=not is_pattern)
        for p, info in infos.items()
        if shows_hidden or not _HIDDEN.search(names[p])
    ]
    if not objects:
        raise DataError(f"the folder {url} holds no files")
    return tuple(sorted(objects, key=lambda x: x.name))


def fetch(wanted: Mapping[Path, StoredObject], folder: Path, say: Say) -> None:
    """Fetch objects to the files of a folder that are missing, several at once.

    If another process fetches to the folder, this one waits. Each file appears when it is whole.

    Raises:
        OSError: An object cannot be read or changed meanwhile, or the disk failed.
    """

    def fetch_missing() -> None:
        missing = [path for path in wanted if not path.is_file()]
        n_bytes = sum(wanted[path].size or 0 for path in missing)
        require_space(folder, n_bytes, f"what is fetched from {wanted[missing[0]].url}")
        say(f"fetching {len(missing):,} objects, {n_bytes:,} bytes")
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for _ in pool.map(lambda path: _fetch(wanted[path], path), missing):
                pass

    activity = "another process is fetching the same"
    once(folder, say, activity, lambda: all(path.is_file() for path in wanted), fetch_missing)


def _fetch(stored: StoredObject, target: Path) -> None:
    fs, path = open_store(stored.url)
    part = target.with_name(f".{target.name}.part")
    part.touch()
    patiently(stored.url, lambda: fs.get_file(path, str(part)))
    now, size = patiently(stored.url, lambda: describe(stored.url)), part.stat().st_size
    if (now.version, stored.size or size) != (stored.version, size):
        part.unlink()
        raise OSError(f"{stored.url} changed while it was read; try again")
    sync(part)
    part.replace(target)


class StoredTokens:
    """The tokens of a file in a store, as an array that is read where it is indexed.

    It holds the blocks of the last call: with B sequential streams, one or two for each.

    Raises:
        OSError: The file has another size, or its server returns no byte ranges.
    """

    def __init__(self, url: str, dtype: np.dtype, n_tokens: int) -> None:
        self.dtype, self.shape, self.ndim = dtype, (n_tokens,), 1
        self._url, self._blocks = url, dict[int, np.ndarray]()
        self._per_block = BLOCK_BYTES // dtype.itemsize
        self._fs, self._path = open_store(url)
        n_bytes = n_tokens * dtype.itemsize
        if (size := describe(url).size) != n_bytes:
            raise OSError(f"{url} has {size} bytes instead of {n_bytes}")
        with _named(url), self._fs.open(self._path, "rb", block_size=1, cache_type="none") as file:
            # Not every server returns ranges.
            file.seek(n_bytes - 1)
            file.read(1)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, places: Any) -> Any:
        """Return the tokens of a slice, or at an array of positions."""
        if isinstance(places, slice):
            start, stop, step = places.indices(len(self))
            return self._read([(start, max(start, stop))])[0][::step]
        if np.size(places) == 0:
            return np.empty(np.shape(places), self.dtype)
        flat = np.asarray(places).ravel() % len(self)
        numbers, where = np.unique(flat // self._per_block, return_inverse=True)
        missing = [n for n in numbers.tolist() if n not in self._blocks]
        starts = [n * self._per_block for n in missing]
        stops = [min(start + self._per_block, len(self)) for start in starts]
        blocks = self._blocks | dict(
            zip(missing, self._read([*zip(starts, stops, strict=True)]), strict=True)
        )
        self._blocks = {n: blocks[n] for n in numbers.tolist()}
        tokens = np.empty(flat.shape, self.dtype)
        order, ends = np.argsort(where, kind="stable"), np.cumsum(np.bincount(where))
        for n, chosen in zip(self._blocks, np.split(order, ends[:-1]), strict=True):
            tokens[chosen] = self._blocks[n][flat[chosen] - n * self._per_block]
        return tokens.reshape(np.shape(places))[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read all tokens."""
        return self[:].astype(dtype or self.dtype, copy=False)

    def _read(self, ranges: list[tuple[int, int]]) -> list[np.ndarray]:
        starts, stops = ([x[n] * self.dtype.itemsize for x in ranges] for n in (0, 1))
        paths = [self._path] * len(ranges)

        def read() -> list[bytes]:
            return self._fs.cat_ranges(paths, starts, stops, on_error="raise")

        parts = [np.frombuffer(x, self.dtype) for x in patiently(self._url, read)]
        if any(len(x) != stop - start for x, (start, stop) in zip(parts, ranges, strict=True)):
            raise OSError(f"{self._url} changed while it was read; open it again")
        return parts


Tokens = Integer[np.ndarray | StoredTokens, " length"]
"""A split in tokens: memory-mapped, or in a store."""
