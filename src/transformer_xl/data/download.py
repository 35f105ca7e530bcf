"""Downloads of published corpora with ``pooch``: mirrors in turn, and files out of archives.

A file gets its name after its checksum is verified. Only the requested members of an archive are
extracted, by their exact names, to paths of our choosing: paths, links and permissions in it are
ignored.
"""

import fnmatch
import importlib
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from transformer_xl.config import (
    Say,
    checksum,
    is_disk_full,
    remove_temporary,
    replace_file,
    write_atomically,
)
from transformer_xl.data.catalogue import KnownCorpus, RemoteFile, Source
from transformer_xl.data.locking import once
from transformer_xl.errors import DataError

_BLOCK_BYTES = 1 << 20
# Larger than any published corpus; a hostile archive is stopped here.
_LARGEST = 64 << 30
_TIMEOUT_SECONDS = 30
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
                _fetch_from(source, remote, folder, say)
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
    value = importlib.import_module("pooch").file_hash(path, method)
    return None if value == expected else f"{method}:{value}"


def _present(remote: RemoteFile, folder: Path) -> tuple[Path, ...]:
    """Return complete downloads; for several files, only if all are present."""
    if "*" in remote.name:
        record, files = _listing(folder, remote), tuple(sorted(folder.glob(remote.name)))
        listed = record.read_text(encoding="utf-8").split() if record.is_file() else []
        return files if listed == [file.name for file in files] else ()
    target = folder / remote.name
    if not target.is_file():
        return ()
    known, record = remote.checksum, _record(target)
    if not known and record.is_file():
        known = f"sha256:{record.read_text(encoding='utf-8').strip()}"
    return () if known and differs(target, known) else (target,)


def _record(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _listing(folder: Path, remote: RemoteFile) -> Path:
    return folder / f"{remote.name.replace('/', '_').replace('*', 'all')}.complete"


def _fetch_from(source: Source, remote: RemoteFile, folder: Path, say: Say) -> None:
    if not source.member:
        _put(folder / remote.name, remote, _retrieval(source.url, say), say)
        return
    archive = RemoteFile(name=source.url.rsplit("/", 1)[1], sources=(), checksum=source.checksum)
    if not _present(archive, folder):
        _put(folder / archive.name, archive, _retrieval(source.url, say), say)
    outer, names = source.member.removesuffix(remote.name), list[str]()
    for member, stream in _members(folder / archive.name, source.member):
        target = folder / (member.removeprefix(outer) if "*" in remote.name else remote.name)

        def extract(temporary: Path, stream: IO[bytes] = stream, member: str = member) -> None:
            with temporary.open("wb") as file:
                while block := stream.read(_BLOCK_BYTES):
                    if file.tell() + len(block) > _LARGEST:
                        raise DataError(f"{member} has more than {_LARGEST:,} bytes")
                    file.write(block)

        _put(target, remote, extract, say)
        names.append(target.name)
    if not names:
        raise DataError(f"the archive holds no {source.member}")
    if "*" in remote.name:
        replace_file(_listing(folder, remote), " ".join(sorted(names)).encode())


def _retrieval(url: str, say: Say) -> Callable[[Path], None]:
    """Return a function that downloads a file to a path."""
    say(f"downloading {url}")
    fetch = importlib.import_module("pooch").HTTPDownloader(
        chunk_size=_BLOCK_BYTES, headers=_AGENT, timeout=_TIMEOUT_SECONDS
    )

    def write(path: Path) -> None:
        try:
            fetch(url, str(path), None)
        except OSError as error:
            if is_disk_full(error):
                raise
            raise DataError(str(error)) from error

    return write


def _put(target: Path, remote: RemoteFile, write: Callable[[Path], None], say: Say) -> None:
    """Write a file, which gets its name when its checksum is right.

    If none is published, the checksum is recorded, so that a damaged file is noticed.
    """

    def write_checked(temporary: Path) -> None:
        write(temporary)
        if remote.checksum and (value := differs(temporary, remote.checksum)):
            raise DataError(f"{target.name} has the checksum {value}, not {remote.checksum}")

    write_atomically(target, write_checked)
    if not remote.checksum and "*" not in remote.name:
        value = checksum(target)
        replace_file(_record(target), f"{value}\n".encode())
        say(f"no checksum of {target.name} is known; it has the SHA-256 {value}")


def _members(archive: Path, pattern: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the names and contents of the files of an archive that match a pattern."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            for member in file.infolist():
                if not member.is_dir() and _is_wanted(member.filename, pattern):
                    with file.open(member) as stream:
                        yield member.filename, stream
    else:
        with tarfile.open(archive, "r|*") as file:
            for member in file:
                if member.isreg() and _is_wanted(member.name, pattern):
                    yield member.name, cast(IO[bytes], file.extractfile(member))


def _is_wanted(name: str, pattern: str) -> bool:
    """Match the whole name; a ``*`` matches no separator of folders."""
    names, patterns = name.split("/"), pattern.split("/")
    is_as_deep = len(names) == len(patterns) and ".." not in names
    return is_as_deep and all(map(fnmatch.fnmatchcase, names, patterns))
