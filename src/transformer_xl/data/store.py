"""Objects in a store: what lies at a URL, described, read and fetched by way of ``fsspec``.

An object is told by its URL, its size, and the version that the store gives it. What is read is
data: one file system at a time, no chain of them, nothing that is executed.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from transformer_xl.config.files import checksum, is_disk_full, replace_file, require_space, sync
from transformer_xl.config.locking import Say
from transformer_xl.data.locking import once
from transformer_xl.data.unpacking import optional_package

RANGE_BYTES = 8 << 20
"""How much of an object is asked for at once where all of it is read."""
CONNECTIONS = 8
"""How many objects are asked for at once."""
# Between attempts to read a range. A network that is away for a minute stops no run.
_WAITS_SECONDS = (1.0, 4.0, 15.0, 60.0)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_HIDDEN = r"(^|/)\."
_SECONDS_BETWEEN_LINES = 10.0
_WEB = ("http", "https")
# What stores call the version of an object; a time only where there is nothing better.
_VERSIONS = (
    *("ETag", "etag", "e_tag", "md5Hash", "Content-MD5", "generation", "blob_id", "oid"),
    *("checksum", "Digest", "LastModified", "last_modified", "Last-Modified", "updated", "mtime"),
    *("modified", "created"),
)


class UnreachableError(OSError):
    """A store does not answer, or not as it should."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as the store describes it."""

    url: str
    name: str
    """Its place below the folder or pattern that named it."""
    size: int | None
    """Bytes; None where the server does not tell."""
    version: str
    """What changes with its contents; empty where the server tells nothing."""
    in_folder: bool = False
    """Found in a folder, where what is no text is passed over."""
    sha256: str = ""
    """Its checksum, where it is known."""

    def target(self, folder: Path) -> Path:
        """Return where it is kept in a folder; another version has another place."""
        key = hashlib.sha256(json.dumps([self.url, self.size, self.version]).encode())
        last = re.sub(r"[^\w.+-]", "_", self.name.rsplit("/", 1)[-1])
        return folder / f"{key.hexdigest()[:16]}-{last[-100:]}"


def is_url(given: str) -> bool:
    """Whether something names an object in a store, not a file."""
    return _URL.match(given) is not None


def local_path(given: str) -> str:
    """Return the path of a ``file://`` URL; others as they are."""
    return unquote(urlsplit(given).path) if given.lower().startswith("file://") else given


def _is_web(url: str) -> bool:
    return url.partition("://")[0].lower() in _WEB


def open_store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    if "::" in url:
        raise ValueError(f"{url} chains file systems with ::, which are not read here: give one")
    fsspec = optional_package("fsspec", f"{url}, read with fsspec,")
    protocol = url.partition("://")[0].lower()
    options: dict[str, Any] = {}
    if _is_web(url):
        # What a server packs on the way has another size, and its ranges are others.
        options = {"headers": {"Accept-Encoding": "identity"}, "client_kwargs": {"trust_env": True}}
    try:
        return fsspec.url_to_fs(url, **options)
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or error.name or "the one named above"
        raise ValueError(
            f"{url}: {protocol}:// needs the package {package}: pip install {package}"
        ) from error
    except ValueError as error:
        if "not known" not in str(error):
            raise
        raise ValueError(
            f"{url}: fsspec knows no {protocol}://; there are s3, gs, az, https, hf and those of "
            "fsspec.available_protocols()"
        ) from error
    except Exception as error:  # Each package has classes of its own.
        raise _explained(error, url) from error


@contextmanager
def _explaining(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Each package has classes of its own.
        raise _explained(error, url) from error


def _explained(error: Exception, url: str) -> OSError:
    """Say in our words what a store said in its own."""
    cause = error.__cause__
    status = getattr(error, "status", None) or getattr(cause, "status", None)
    kind = type(error).__name__
    if isinstance(error, PermissionError) or status in (401, 403) or "Credential" in kind:
        return PermissionError(
            f"{url} may not be read: {cause or error}. Credentials are taken from where the "
            "package of the store looks for them, such as AWS_PROFILE or ~/.aws for s3://"
        )
    is_about_network = (
        isinstance(cause, ConnectionError | TimeoutError)
        or type(cause).__module__.startswith("aiohttp")
    ) and status != 404
    if status == 404 or (isinstance(error, FileNotFoundError) and not is_about_network):
        return FileNotFoundError(f"there is nothing at {url}")
    # The last of several is what the system said.
    said = str(cause if isinstance(error, FileNotFoundError) and cause else error) or kind
    return UnreachableError(f"cannot read {url}: {said}")


def describe(url: str, name: str = "") -> StoredObject:
    """Ask the store for one object."""
    fs, path = open_store(url)
    with _explaining(url):
        fs.invalidate_cache()
        return _object(url, name or _last(url), fs.info(path))


def _object(
    url: str, name: str, info: Mapping[str, Any], *, in_folder: bool = False
) -> StoredObject:
    version = next((x for field in _VERSIONS if (x := info.get(field))), "")
    # The same moment, however it is written.
    version = version.timestamp() if isinstance(version, datetime) else version
    return StoredObject(url, name, info.get("size"), str(version), in_folder)


def _last(url: str) -> str:
    path = urlsplit(url).path if _is_web(url) else url
    return unquote(path.rstrip("/").rsplit("/", 1)[-1])


def list_objects(url: str, records: Path, say: Say) -> tuple[StoredObject, ...]:
    """List the object at a URL, those that a pattern matches, or those in a folder, sorted.

    What was found is noted below ``records``. Where the store does not answer another time, the
    note counts. A folder on the web is a URL that ends with ``/`` and shows its files as links.
    """
    note = records / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    try:
        found = _list(url)
    except UnreachableError as error:
        try:
            noted = tuple(StoredObject(**row) for row in json.loads(note.read_bytes()))
        except (OSError, ValueError, TypeError):
            raise error from None
        say(f"warning: {error}; what was there the last time is taken")
        return noted
    content = json.dumps([asdict(x) for x in found]).encode()
    # Where nothing can be written, all that is missing is a note.
    with suppress(OSError):
        if not note.is_file() or note.read_bytes() != content:
            replace_file(note, content)
    for x in found:
        if not x.version:
            say(f"warning: nothing tells the version of {x.url}: only another size is another text")
    return found


def _list(url: str) -> tuple[StoredObject, ...]:
    fs, path = open_store(url)
    is_web, is_pattern = _is_web(url), "*" in path or "[" in path
    with _explaining(url):
        fs.invalidate_cache()
        if is_pattern:
            root = re.split(r"[*\[]", path)[0].rsplit("/", 1)[0]
            found = {p: i for p, i in fs.glob(path, detail=True).items() if i["type"] == "file"}
            if not found:
                raise FileNotFoundError(path)
        else:
            is_web_folder = is_web and path.endswith("/")
            info = {"type": "directory"} if is_web_folder else fs.info(path)
            if info["type"] == "file":
                return (_object(fs.unstrip_protocol(path), _last(url), info),)
            root, found = path.rstrip("/"), fs.find(path, detail=True)
        if is_web:
            # Their lists are names alone.
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                found = dict(zip(found, pool.map(fs.info, found), strict=True))
    names = {p: p.removeprefix(root).lstrip("/") for p in found}
    # As on a disk: what is hidden is found by a pattern that says so.
    shows_hidden = re.search(_HIDDEN, path.removeprefix(root))
    objects = [
        _object(fs.unstrip_protocol(p), names[p], info, in_folder=not is_pattern)
        for p, info in found.items()
        if shows_hidden or not re.search(_HIDDEN, names[p])
    ]
    if not objects:
        raise ValueError(f"the folder {url} holds no files")
    return tuple(sorted(objects, key=lambda x: x.name))


def read_range(fs: Any, path: str, start: int, stop: int, url: str) -> bytes:
    """Read bytes ``start`` to ``stop`` of an object, several times if need be."""
    for wait in (*_WAITS_SECONDS, None):
        try:
            with _explaining(url):
                data = fs.cat_file(path, start=start, end=stop)
            if len(data) == stop - start:
                return data
            raise UnreachableError(
                f"{url} gave {len(data):,} bytes for the {stop - start:,} from {start:,} on: it "
                "changed, or its server gives no byte ranges"
            )
        except UnreachableError:
            if wait is None:
                raise
            time.sleep(wait)
    raise AssertionError


def has_ranges(fs: Any, path: str, size: int) -> bool:
    """Whether a server gives parts of an object; on the web it may send all of it instead."""
    if not _is_web(path) or size < 2:
        return True
    try:
        with fs.open(path, "rb", block_size=1 << 10, cache_type="none") as file:
            file.seek(1)
            return len(file.read(1)) == 1
    except ValueError:
        return False


def fetch(wanted: Mapping[Path, StoredObject], folder: Path, say: Say) -> None:
    """Fetch objects to the files of a folder that are missing, several at once.

    Where another process fetches to the folder, this one waits. A fetch that was stopped goes on
    where it was: a part belongs to one version of its object, whose name it has.

    Raises:
        OSError: An object cannot be read or changed meanwhile, or the disk failed.
        RuntimeError: An object does not have its known checksum.
    """
    once(
        folder,
        say,
        "another process is fetching the same",
        find=lambda: not _missing(wanted),
        make=lambda: _fetch_missing(wanted, folder, say),
    )


def _fetch_missing(wanted: Mapping[Path, StoredObject], folder: Path, say: Say) -> None:
    sizes = {path: wanted[path].size or 0 for path in _missing(wanted)}
    there = sum(_size(_part(path)) or 0 for path in sizes)
    total = sum(sizes.values())
    require_space(folder, total - there, f"what is fetched from {wanted[next(iter(sizes))].url}")
    say(f"fetching {len(sizes):,} objects, {total:,} bytes" + (", going on" * bool(there)))
    stop = threading.Event()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        try:
            tasks = {pool.submit(_fetch, wanted[p], p, stop): size for p, size in sizes.items()}
            done, said = 0, time.monotonic()
            for task in as_completed(tasks):
                task.result()
                done += tasks[task]
                if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                    said = time.monotonic()
                    say(f"fetched {done:,} of {total:,} bytes")
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise OSError(
                f"the disk of {folder} is full; what came is kept: make room, and the same "
                "command goes on"
            ) from error
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _missing(wanted: Mapping[Path, StoredObject]) -> list[Path]:
    return [p for p, x in wanted.items() if (n := _size(p)) is None or n != (x.size or n)]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _fetch(wanted: StoredObject, target: Path, stop: threading.Event) -> None:
    fs, path = open_store(wanted.url)
    part = _part(target)
    size = wanted.size
    at = _size(part) or 0
    if size is not None and size > RANGE_BYTES and not has_ranges(fs, path, size):
        size = None
    if size is None or at > size:
        part.unlink(missing_ok=True)
        at = 0
    part.touch()
    # At its place: where a file system has no locks, another process writes the same there.
    with part.open("r+b") as file:
        file.seek(at)
        if size is None:
            # From the beginning to the end, which needs no ranges.
            options = {"block_size": 0} if _is_web(path) else {}
            with _explaining(wanted.url), fs.open(path, "rb", **options) as stream:
                while (block := stream.read(RANGE_BYTES)) and not stop.is_set():
                    file.write(block)
        while size is not None and at < size and not stop.is_set():
            block = read_range(fs, path, at, min(at + RANGE_BYTES, size), wanted.url)
            file.write(block)
            at += len(block)
    if stop.is_set():
        return
    now = describe(wanted.url)
    is_whole = wanted.size in (None, _size(part))
    if not is_whole or (now.size, now.version) != (wanted.size, wanted.version):
        part.unlink()
        raise UnreachableError(f"{wanted.url} changed while it was read; try again")
    if wanted.sha256 and checksum(part) != wanted.sha256:
        part.unlink()
        raise RuntimeError(
            f"{wanted.url} does not have the checksum {wanted.sha256}: it was damaged on its way "
            "or in the store; fetch it again, or copy it there again"
        )
    sync(part)
    try:
        part.replace(target)
    except FileNotFoundError:
        if not target.is_file():
            raise
