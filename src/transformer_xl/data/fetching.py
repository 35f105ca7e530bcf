"""Objects of a store are fetched once, to files that appear when they are whole.

A large object comes in ranges. A fetch that was stopped goes on where it was: a part belongs to one
version of its object, whose name it has.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from transformer_xl.config.files import checksum, is_disk_full, require_space, sync
from transformer_xl.data.locking import locked
from transformer_xl.data.store import (
    CONNECTIONS,
    RANGE_BYTES,
    Say,
    StoredObject,
    UnreachableError,
    describe,
    has_ranges,
    open_store,
    opened_stream,
    read_range,
)

_SECONDS_BETWEEN_LINES = 10.0


def fetch(wanted: Mapping[Path, StoredObject], folder: Path, say: Say) -> None:
    """Bring objects to files, unless they are there.

    Several are fetched at once. Where another process fetches to the folder, this one waits.

    Args:
        wanted: Files, and the objects that belong there.
        folder: Where all of them lie.
        say: Takes a line of text for the user now and then.

    Raises:
        OSError: An object cannot be read or changed meanwhile, or the disk failed.
        RuntimeError: An object does not have its known checksum.
    """
    if not _missing(wanted):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, say, "another process is fetching the same"):
        if not (missing := _missing(wanted)):
            return
        sizes = {path: wanted[path].size or 0 for path in missing}
        there = sum(_size(_part(path)) or 0 for path in missing)
        total = sum(sizes.values())
        require_space(folder, total - there, f"what is fetched from {wanted[missing[0]].url}")
        say(f"fetching {len(missing):,} objects, {total:,} bytes" + (", going on" * bool(there)))
        stop = threading.Event()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            try:
                tasks = {pool.submit(_fetch, wanted[p], p, stop): sizes[p] for p in missing}
                done, said = 0, time.monotonic()
                for task in as_completed(tasks):
                    _finish(task, folder)
                    done += tasks[task]
                    if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                        said = time.monotonic()
                        say(f"fetched {done:,} of {total:,} bytes")
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)


def _finish(task: "Future[None]", folder: Path) -> None:
    try:
        task.result()
    except OSError as error:
        if is_disk_full(error):
            raise OSError(
                f"the disk of {folder} is full; what came is kept: make room, and the same command "
                "goes on"
            ) from error
        raise


def _missing(wanted: Mapping[Path, StoredObject]) -> Sequence[Path]:
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
            with opened_stream(wanted.url) as stream:
                while (block := stream.read(RANGE_BYTES)) and not stop.is_set():
                    file.write(block)
        while size is not None and at < size and not stop.is_set():
            block = read_range(fs, path, at, min(at + RANGE_BYTES, size), wanted.url)
            file.write(block)
            at += len(block)
    if stop.is_set():
        return
    found = _size(part)
    now = describe(wanted.url)
    if (now.size, now.version) != (wanted.size, wanted.version) or wanted.size not in (None, found):
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
