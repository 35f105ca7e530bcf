"""Downloads by ``pooch``: mirrors tried in turn, and single files out of archives.

Files are put in their place after their checksum is verified. Only the requested members of an
archive are extracted, by their exact names, to paths of our choosing: paths, links and permissions
in it are ignored.
"""

import fnmatch
import hashlib
import importlib
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from transformer_xl.config.files import checksum, remove_temporary, replace_file, write_atomically
from transformer_xl.config.locking import Say
from transformer_xl.data.catalogue import KnownCorpus, RemoteFile, Source
from transformer_xl.data.locking import once

_BLOCK_BYTES = 1 << 20
# Larger than any published corpus; a hostile archive is stopped here.
_LARGEST = 64 << 30
_TIMEOUT_SECONDS = 30
# Some hosts of WikiText refuse the default agent of Python.
_AGENT = {"User-Agent": "Mozilla/5.0 (compatible; transformer-xl)"}


class _SourceError(Exception):
    """A source that cannot be used."""


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
            except _SourceError as error:
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
    with path.open("rb") as file:
        found = hashlib.file_digest(file, method).hexdigest()
    return None if found == expected else f"{method}:{found}"


def _present(remote: RemoteFile, folder: Path) -> tuple[Path, ...]:
    """Return complete downloads; for several files, only if all are present."""
    if "*" in remote.name:
        whole = _listing(folder, remote)
        files = tuple(sorted(folder.glob(remote.name)))
        names = [file.name for file in files]
        is_whole = whole.is_file() and whole.read_text(encoding="utf-8").split() == names
        return files if is_whole else ()
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
        _retrieve(source.url, remote, folder, say)
        return
    archive = RemoteFile(name=source.url.rsplit("/", 1)[1], sources=(), checksum=source.checksum)
    if not _present(archive, folder):
        _retrieve(source.url, archive, folder, say)
    outer = source.member.removesuffix(remote.name)
    names = []
    for member, stream in _members(folder / archive.name, source.member):
        target = folder / (member.removeprefix(outer) if "*" in remote.name else remote.name)
        where = f"{source.url} ({member})"
        _put(target, remote, partial(_extract, stream, where), where, say)
        names.append(target.name)
    if not names:
        raise _SourceError(f"the archive holds no {source.member}")
    if "*" in remote.name:
        replace_file(_listing(folder, remote), " ".join(sorted(names)).encode())


def _retrieve(url: str, remote: RemoteFile, folder: Path, say: Say) -> None:
    say(f"downloading {url}")
    pooch, requests = importlib.import_module("pooch"), importlib.import_module("requests")
    fetch = pooch.HTTPDownloader(chunk_size=_BLOCK_BYTES, headers=_AGENT, timeout=_TIMEOUT_SECONDS)

    def write(temporary: Path) -> None:
        try:
            fetch(url, str(temporary), None)
        except (requests.RequestException, ValueError) as error:
            raise _SourceError(str(error)) from error

    _put(folder / remote.name, remote, write, "it", say)


def _put(
    target: Path, remote: RemoteFile, write: Callable[[Path], None], what: str, say: Say
) -> None:
    """Write a file, which is put in its place when its checksum is right.

    Of a file of which none is published, the checksum is recorded, to notice a damaged one.
    """

    def write_checked(temporary: Path) -> None:
        write(temporary)
        if remote.checksum and (found := differs(temporary, remote.checksum)):
            raise _SourceError(f"{what} has the checksum {found}, not {remote.checksum}")

    write_atomically(target, write_checked)
    if not remote.checksum and "*" not in remote.name:
        found = checksum(target)
        replace_file(_record(target), f"{found}\n".encode())
        say(f"no checksum of {target.name} is known; it has the SHA-256 {found}")


# What reading from archives raises.
_UNREADABLE = (
    *(OSError, zipfile.BadZipFile, tarfile.TarError, zlib.error),
    *(EOFError, KeyError, NotImplementedError, RuntimeError, ValueError),
)


def _members(archive: Path, pattern: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the names and contents of the files of an archive that match a pattern."""
    try:
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
    except _UNREADABLE as error:
        raise _SourceError(f"{archive.name} is damaged: {error}") from error


def _is_wanted(name: str, pattern: str) -> bool:
    """Match the whole name; a ``*`` matches no separator of folders."""
    ours, theirs = name.split("/"), pattern.split("/")
    is_as_deep = len(ours) == len(theirs) and ".." not in ours
    return is_as_deep and all(map(fnmatch.fnmatchcase, ours, theirs))


def _extract(stream: Any, where: str, temporary: Path) -> None:
    with temporary.open("wb") as file:
        while True:
            # An error of the disk is none of the archive.
            try:
                block = stream.read(_BLOCK_BYTES)
            except _UNREADABLE as error:
                raise _SourceError(f"the archive is damaged: {error}") from error
            if not block:
                return
            if file.tell() + len(block) > _LARGEST:
                raise _SourceError(f"{where} has more than {_LARGEST:,} bytes")
            file.write(block)
