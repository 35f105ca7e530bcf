"""Downloads: mirrors tried in turn, checksums, and single files out of archives.

A file appears under its name when it is whole and has the checksum that is known for it. Of an
archive only the wanted members are read, by their exact names, into files of our choosing: no
path, link or right in it is followed.
"""

import contextlib
import fnmatch
import hashlib
import http.client
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from transformer_xl.config.files import checksum, replace_file, write_atomically
from transformer_xl.data.catalogue import KnownCorpus, RemoteFile, Source
from transformer_xl.data.locking import locked

Progress = Callable[[str], None]


@runtime_checkable
class Readable(Protocol):
    """A stream of bytes."""

    def read(self, n: int, /) -> bytes:
        """Return up to ``n`` bytes; none at the end."""
        ...


BLOCK_BYTES = 1 << 20
# More than any published corpus has; a hostile archive stops here.
_LARGEST = 64 << 30
_TIMEOUT_SECONDS = 30
# Some hosts of WikiText refuse Python by name.
_AGENT = {"User-Agent": "Mozilla/5.0 (compatible; transformer-xl)"}


def download(
    remote: RemoteFile, folder: Path, corpus: KnownCorpus, name: str, progress: Progress
) -> tuple[Path, ...]:
    """Return the files of ``folder``, fetching them unless they are there already.

    Where another process fetches to the folder, this one waits.

    Args:
        remote: What to fetch; a pattern for its name stands for several files.
        folder: Where it goes.
        corpus: What it belongs to, for errors.
        name: The name of the corpus.
        progress: Takes a line of text for the user now and then.

    Raises:
        OSError: No address answered with what was published, or the disk failed.
    """
    if found := _present(remote, folder):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    with locked(folder, progress, "another process is downloading the same"):
        if found := _present(remote, folder):
            return found
        for source in remote.sources:
            try:
                _fetch_from(source, remote, folder, progress)
            except _SourceError as error:
                failures.append(f"cannot use {source.url}: {error}")
            else:
                for failure in failures:
                    progress(failure)
                return _present(remote, folder)
    raise OSError(
        f"cannot download {remote.name} of {name}. Without a network, --data.path takes a copy "
        f"that is at hand: {copies_of(corpus)}\n" + "\n".join(failures)
    )


class _SourceError(Exception):
    """An address that is of no use."""


# What reading from the network and from archives raises.
_UNREADABLE = (
    *(OSError, http.client.HTTPException, zipfile.BadZipFile, tarfile.TarError),
    *(EOFError, KeyError, NotImplementedError, RuntimeError, ValueError, zlib.error),
)


def copies_of(corpus: KnownCorpus) -> str:
    """Say which files a copy at hand must hold."""
    names = ", ".join(remote.name for remote in corpus.files.values())
    return f"{names} or a folder with it" if len(corpus.files) == 1 else f"a folder with {names}"


def differs(path: Path, known: str) -> str | None:
    """Compare a file with ``md5:...`` or ``sha256:...``; return what it has instead."""
    method, _, expected = known.partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, method).hexdigest()
    return None if found == expected else f"{method}:{found}"


def _present(remote: RemoteFile, folder: Path) -> tuple[Path, ...]:
    """Return what is there as it was fetched; for several files, when all have come."""
    if "*" in remote.name:
        whole = folder / f"{_flat(remote.name)}.complete"
        files = tuple(sorted(folder.glob(remote.name)))
        names = [file.name for file in files]
        is_whole = whole.is_file() and whole.read_text(encoding="utf-8").split() == names
        return files if files and is_whole else ()
    target = folder / remote.name
    if not target.is_file():
        return ()
    known = remote.checksum or _recorded(target)
    return () if known and differs(target, known) else (target,)


def _recorded(target: Path) -> str:
    record = _record(target)
    return f"sha256:{record.read_text(encoding='utf-8').strip()}" if record.is_file() else ""


def _record(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _flat(pattern: str) -> str:
    return pattern.replace("/", "_").replace("*", "all")


def _fetch_from(source: Source, remote: RemoteFile, folder: Path, progress: Progress) -> None:
    if not source.member:
        with _opened(source.url, progress) as stream:
            _keep(stream, folder / remote.name, remote, source.url, progress)
        return
    archive = folder / source.url.rsplit("/", 1)[1]
    whole = RemoteFile(name=archive.name, sources=(), checksum=source.checksum)
    if not _present(whole, folder):
        with _opened(source.url, progress) as stream:
            _keep(stream, archive, whole, source.url, progress)
    outer = source.member.removesuffix(remote.name)
    names = []
    for member, stream in _members(archive, source.member):
        target = folder / (member.removeprefix(outer) if "*" in remote.name else remote.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        _keep(stream, target, remote, f"{source.url} ({member})", progress)
        names.append(target.name)
    if not names:
        raise _SourceError(f"the archive holds no {source.member}")
    if "*" in remote.name:
        listing = " ".join(sorted(names)).encode()
        replace_file(folder / f"{_flat(remote.name)}.complete", listing)


@contextlib.contextmanager
def _opened(url: str, progress: Progress) -> Iterator[Readable]:
    progress(f"downloading {url}")
    request = urllib.request.Request(url, headers=_AGENT)
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except _UNREADABLE as error:
        raise _SourceError(str(error)) from error
    with response:
        yield response


def _keep(
    stream: Readable, target: Path, remote: RemoteFile, where: str, progress: Progress
) -> None:
    """Write a stream to ``target`` if it has the known checksum; without one, note what it has."""

    def write(temporary: Path) -> None:
        n_bytes = 0
        with temporary.open("wb") as file:
            while block := _read(stream):
                n_bytes += len(block)
                if n_bytes > _LARGEST:
                    raise _SourceError(f"what came from {where} has over {_LARGEST:,} bytes")
                file.write(block)
        if remote.checksum and (found := differs(temporary, remote.checksum)):
            raise _SourceError(
                f"what came from {where} has the checksum {found}, not {remote.checksum}: it "
                "changed or was damaged on the way"
            )

    write_atomically(target, write)
    if not remote.checksum and "*" not in remote.name:
        found = checksum(target)
        replace_file(_record(target), f"{found}\n".encode())
        progress(f"no checksum of {target.name} is known; it has the SHA-256 {found}")


def _read(stream: Readable) -> bytes:
    try:
        return stream.read(BLOCK_BYTES)
    except _UNREADABLE as error:
        raise _SourceError(str(error)) from error


def _members(archive: Path, pattern: str) -> Iterator[tuple[str, Readable]]:
    read = _read_zip if zipfile.is_zipfile(archive) else _read_tar
    members = read(archive, pattern)
    while True:
        try:
            member = next(members, None)
        except _UNREADABLE as error:
            raise _SourceError(f"{archive.name} is damaged: {error}") from error
        if member is None:
            return
        yield member


def _read_zip(archive: Path, pattern: str) -> Iterator[tuple[str, Readable]]:
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            if not member.is_dir() and _is_wanted(member.filename, pattern):
                with file.open(member) as stream:
                    yield member.filename, stream


def _read_tar(archive: Path, pattern: str) -> Iterator[tuple[str, Readable]]:
    with tarfile.open(archive, "r|*") as file:
        for member in file:
            if member.isreg() and _is_wanted(member.name, pattern):
                stream = file.extractfile(member)
                if stream is not None:
                    yield member.name, stream


def _is_wanted(name: str, pattern: str) -> bool:
    """Match the whole name; a ``*`` crosses no folder, so that nothing leads out of ours."""
    ours, theirs = name.split("/"), pattern.split("/")
    return (
        len(ours) == len(theirs)
        and ".." not in ours
        and all(fnmatch.fnmatchcase(a, b) for a, b in zip(ours, theirs, strict=True))
    )
