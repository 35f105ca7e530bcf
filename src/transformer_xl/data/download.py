"""Downloads of published corpora: mirrors in turn, and files out of archives.

A file gets its name after its checksum is verified. Only the requested members of an archive are
extracted, by their exact names, to paths of our choosing: paths, links and permissions in it are
ignored.
"""

import importlib
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, cast

from transformer_xl.config import (
    Say,
    is_disk_full,
    remove_temporary,
    replace_file,
    write_atomically,
)
from transformer_xl.data.catalogue import KnownCorpus, RemoteFile, Source
from transformer_xl.data.locking import once
from transformer_xl.errors import DataError

# Some hosts of WikiText refuse the default agent of Python.
_AGENT = {"User-Agent": "Mozilla/5.0 (compatible; transformer-xl)"}
# What downloads and damaged archives raise, beside OSError.
_UNUSABLE = (
    *(OSError, ValueError, zipfile.BadZipFile, tarfile.TarError, zlib.error),
    *(EOFError, KeyError, NotImplementedError, RuntimeError),
)


def download(
    remote: RemoteFile, folder: Path, corpus: KnownCorpus, name: str, say: Say
) -> tuple[Path, ...]:
    """Return the files of ``folder``, downloading those that are missing.

    If another process downloads to the folder, this one waits. A pattern for the name of
    ``remote`` stands for several files; errors name the corpus and what a copy of it holds.
    """

    def try_sources() -> None:
        remove_temporary(folder)
        failures: list[str] = []
        for source in remote.sources:
            try:
                _read_source(source, remote, folder, say)
            except _UNUSABLE as error:
                if is_disk_full(error):
                    raise
                failures.append(f"cannot use {source.url}: {error}")
            else:
                for failure in failures:
                    say(failure)
                return
        raise OSError(
            f"cannot download {remote.name} of {name}. Without a network, --data.path takes a copy "
            f"that is at hand: {copies_of(corpus)}\n" + "\n".join(failures)
        )

    activity = "another process is downloading the same"
    return once(folder, say, activity, find=lambda: _present(remote, folder), make=try_sources)


def copies_of(corpus: KnownCorpus) -> str:
    """Describe the files that a local copy must contain."""
    names = ", ".join(remote.name for remote in corpus.files.values())
    return f"{names} or a folder with it" if len(corpus.files) == 1 else f"a folder with {names}"


def differs(path: Path, known: str) -> str | None:
    """Compare a file with ``md5:...`` or ``sha256:...``; return its checksum if it differs."""
    method, _, expected = known.partition(":")
    value = importlib.import_module("pooch").file_hash(path, method or "sha256")
    return None if value == expected else f"{method or 'sha256'}:{value}"


def _present(remote: RemoteFile, folder: Path) -> tuple[Path, ...]:
    """Return complete downloads; for several files, only if all are present."""
    if "*" not in remote.name:
        target = folder / remote.name
        is_whole = target.is_file() and not (remote.checksum and differs(target, remote.checksum))
        return (target,) if is_whole else ()
    record, files = _listing(folder, remote), tuple(sorted(folder.glob(remote.name)))
    listed = record.read_text(encoding="utf-8").split() if record.is_file() else []
    return files if listed == [file.name for file in files] else ()


def _listing(folder: Path, remote: RemoteFile) -> Path:
    return folder / f"{remote.name.replace('/', '_').replace('*', 'all')}.complete"


def _read_source(source: Source, remote: RemoteFile, folder: Path, say: Say) -> None:
    """Download a file, or an archive, unless it is there, and extract from it."""
    file = RemoteFile(name=source.url.rsplit("/", 1)[1], sources=(), checksum=source.checksum)
    file = file if source.member else remote
    if not _present(file, folder):
        say(f"downloading {source.url}")
        _put(folder / file.name, file, partial(_fetch, source.url), say)
    if not source.member:
        return
    names, outer = list[str](), source.member.removesuffix(remote.name)
    try:
        for member, stream in _members(folder / file.name, source.member):
            target = folder / (member.removeprefix(outer) if "*" in remote.name else remote.name)
            _put(target, remote, partial(_copy, stream), say)
            names.append(target.name)
    except _UNUSABLE as error:
        if not is_disk_full(error):
            # It may be damaged.
            (folder / file.name).unlink()
        raise
    if not names:
        raise DataError(f"the archive holds no {source.member}")
    if "*" in remote.name:
        replace_file(_listing(folder, remote), " ".join(sorted(names)).encode())


def _put(target: Path, remote: RemoteFile, write: Callable[[Path], object], say: Say) -> None:
    """Write a file, which gets its name when its checksum is right."""

    def write_checked(temporary: Path) -> None:
        write(temporary)
        value = differs(temporary, remote.checksum)
        if value and remote.checksum:
            raise DataError(f"{target.name} has the checksum {value}, not {remote.checksum}")
        if value and "*" not in remote.name:
            say(f"no checksum of {target.name} is known; it has the SHA-256 {value[7:]}")

    write_atomically(target, write_checked)


def _fetch(url: str, path: Path) -> None:
    read = importlib.import_module("pooch").HTTPDownloader(headers=_AGENT, timeout=30)
    try:
        read(url, str(path), None)
    except OSError as error:
        if is_disk_full(error):
            raise
        raise DataError(str(error)) from error


def _copy(stream: IO[bytes], path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(stream, file)


def _members(archive: Path, pattern: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the names and contents of the files of an archive that match a pattern."""

    def is_wanted(name: str) -> bool:
        # A star matches no separator of folders.
        return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)

    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            for name in filter(is_wanted, file.namelist()):
                with file.open(name) as stream:
                    yield name, stream
    else:
        with tarfile.open(archive, "r|*") as file:
            for member in file:
                if member.isreg() and is_wanted(member.name):
                    yield member.name, cast(IO[bytes], file.extractfile(member))
