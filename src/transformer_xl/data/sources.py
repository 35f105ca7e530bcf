"""Where text comes from: files of one's own, known corpora, the sources of Python itself.

Nothing is downloaded but what :data:`KNOWN_CORPORA` lists, and nothing is kept that does not have
the checksum listed there.
"""

import codecs
import hashlib
import http.client
import os
import sysconfig
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from transformer_xl.config import DataConfig
from transformer_xl.data.text import BLOCK_BYTES, TextFiles

Progress = Callable[[str], None]

_TIMEOUT_SECONDS = 30
_PROBE_BYTES = 8192
_LISTED_SKIPPED = 5
_SUBFOLDERS = ("", "data", "simple-examples/data")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A published file, and the checksum that it has."""

    name: str
    url: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownCorpus:
    """A corpus that ``data.name`` may name."""

    summary: str
    terms: str
    """Under which terms the text is published, as far as its publishers say."""
    files: Mapping[str, RemoteFile]
    """By part: ``train`` (split as the settings say unless the others are there), ``valid``,
    ``test``. Empty for a corpus that is already on every machine."""


def _penn_treebank(stem: str, sums: tuple[str, str, str]) -> dict[str, RemoteFile]:
    mirror = "https://raw.githubusercontent.com/townie/PTB-dataset-from-Tomas-Mikolov-s-webpage"
    return {
        part: RemoteFile(f"{stem}.{part}.txt", f"{mirror}/master/data/{stem}.{part}.txt", sha256)
        for part, sha256 in zip(("train", "valid", "test"), sums, strict=True)
    }


KNOWN_CORPORA: Mapping[str, KnownCorpus] = MappingProxyType(
    {
        "python-stdlib": KnownCorpus(
            summary="the source text of the standard library of the running Python, about 8 MB",
            terms="Python Software Foundation License",
            files={},
        ),
        "tiny-shakespeare": KnownCorpus(
            summary="40,000 lines of Shakespeare's plays, 1.1 MB (A. Karpathy, char-rnn)",
            terms="the plays are in the public domain",
            files={
                "train": RemoteFile(
                    "input.txt",
                    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                    "tinyshakespeare/input.txt",
                    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                )
            },
        ),
        "ptb-word": KnownCorpus(
            summary="Penn Treebank in words, T. Mikolov's preprocessing, 929,589 training words",
            terms="for research; may not be redistributed (Linguistic Data Consortium)",
            files=_penn_treebank(
                "ptb",
                (
                    "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
                    "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
                    "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
                ),
            ),
        ),
        "ptb-char": KnownCorpus(
            summary="Penn Treebank in characters divided by blanks (use data.vocab=words), "
            "50 symbols, T. Mikolov's preprocessing",
            terms="for research; may not be redistributed (Linguistic Data Consortium)",
            files=_penn_treebank(
                "ptb.char",
                (
                    "e313d91425e06c4f0a8fb6e881dcce0c291f2a0e9f4dda54833069b122f91da9",
                    "21661f63ec355085879458b6524644d4add5573541b4be14fb52ab2e2e995eb8",
                    "1ef5607ac3c463b16e38bfe7900dd3bfc91de5a96e0f21e7eab5188b465b8ebe",
                ),
            ),
        ),
    }
)
"""The corpora that ``data.name`` may name."""


def find_text(config: DataConfig, downloads: Path, progress: Progress) -> TextFiles:
    """Find the files of a corpus, downloading them where they must be.

    Raises:
        ValueError: The settings name an unknown corpus, or files that hold no text.
        FileNotFoundError: A file is missing.
        OSError: A download failed.
    """
    if not (config.name or config.path):
        raise ValueError(
            "data.name and data.path are both empty: give a file or folder with --data.path, or "
            f"name one of the known corpora: {', '.join(KNOWN_CORPORA)}"
        )
    if config.name and config.name not in KNOWN_CORPORA:
        raise ValueError(
            f"data.name={config.name!r} is no known corpus; there are "
            f"{', '.join(KNOWN_CORPORA)}. For text of your own leave it empty "
            "and give --data.path FILE_OR_FOLDER"
        )
    parts: dict[str, tuple[Path, ...]]
    held_out = {
        part: list_text(Path(path), progress)
        for part, path in (("valid", config.valid_path), ("test", config.test_path))
        if path is not None
    }
    if config.name == "python-stdlib":
        root = Path(config.path or sysconfig.get_path("stdlib"))
        parts = {"train": _python_sources(root)}
    elif config.name:
        parts = {
            part: (_locate(config, remote, downloads, progress),)
            for part, remote in KNOWN_CORPORA[config.name].files.items()
        }
        root = parts["train"][0].parent
    else:
        root = Path(config.path or "")
        parts = {"train": list_text(root, progress)}
    # A folder may hold its held-out files itself; nothing is trained on that is also measured.
    away = {file.resolve() for files in held_out.values() for file in files}
    parts["train"] = tuple(file for file in parts["train"] if file.resolve() not in away)
    if not parts["train"]:
        raise ValueError(f"{root} holds nothing but what data.valid_path and test_path hold out")
    parts |= held_out
    return TextFiles(
        root=root if root.is_dir() else root.parent,
        description=KNOWN_CORPORA[config.name].summary if config.name else f"text at {root}",
        train=parts["train"],
        valid=parts.get("valid"),
        test=parts.get("test"),
    )


def list_text(path: Path, progress: Progress) -> tuple[Path, ...]:
    """List a file, or the text files of a folder and its subfolders, sorted.

    In a folder, hidden files are left out, and files that begin like no text; these are named.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        ValueError: The folder holds no text.
    """
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {path}")
    found, skipped = [], []
    for file in _walk(path, lambda name: name.startswith(".")):
        if file.name.startswith("."):
            continue
        (found if _begins_like_text(file) else skipped).append(file)
    if skipped:
        names = ", ".join(str(file.relative_to(path)) for file in skipped[:_LISTED_SKIPPED])
        more = len(skipped) - _LISTED_SKIPPED
        progress(
            f"skipped {len(skipped)} files of {path} that are empty or no text: {names}"
            + (f" and {more} more" if more > 0 else "")
        )
    if not found:
        raise ValueError(f"the folder {path} holds no text files")
    return tuple(found)


def _walk(root: Path, is_skipped: Callable[[str], bool]) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not is_skipped(name)]
        found += [file for name in names if (file := Path(folder, name)).is_file()]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _begins_like_text(file: Path) -> bool:
    with file.open("rb") as stream:
        head = stream.read(_PROBE_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < _PROBE_BYTES)
    except UnicodeDecodeError:
        return False
    return bool(head) and b"\0" not in head


# Tests and tables, and what many systems install separately or not at all: the corpus should be
# nearly the same on every machine with the same Python.
_NOT_PYTHON_LIBRARY = {
    *("__phello__", "__pycache__", "dist-packages", "distutils", "encodings", "ensurepip"),
    *("idlelib", "lib-dynload", "lib2to3", "pydoc_data", "site-packages", "test", "tests"),
    *("tkinter", "turtledemo"),
}


def _python_sources(root: Path) -> tuple[Path, ...]:
    def is_skipped(name: str) -> bool:
        return name in _NOT_PYTHON_LIBRARY or name.startswith((".", "config-"))

    found = tuple(
        file
        for file in _walk(root, is_skipped)
        if file.suffix == ".py"
        and not file.name.startswith("_sysconfigdata")
        and _begins_like_text(file)
    )
    if not found:
        raise FileNotFoundError(
            f"no Python sources in {root}: this Python comes without the text of its library; "
            "give a folder that has it with --data.path"
        )
    return found


def _locate(config: DataConfig, remote: RemoteFile, downloads: Path, progress: Progress) -> Path:
    if config.path is None:
        return download(remote, downloads / config.name, config.name, progress)
    given = Path(config.path)
    if given.is_file() and len(KNOWN_CORPORA[config.name].files) == 1:
        path = given
    else:
        places = [given / folder / remote.name for folder in _SUBFOLDERS]
        path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{given} is no folder with {remote.name}: --data.path for {config.name} takes "
            f"{_where_from(config.name)}"
        )
    if _sha256(path) != remote.sha256:
        progress(
            f"warning: {path} differs from the published {remote.name} (its SHA-256 is not "
            f"{remote.sha256}); results will not compare with published ones"
        )
    return path


def _where_from(name: str) -> str:
    names = ", ".join(remote.name for remote in KNOWN_CORPORA[name].files.values())
    urls = " ".join(remote.url for remote in KNOWN_CORPORA[name].files.values())
    return f"a folder with {names} (published at {urls})"


def download(remote: RemoteFile, folder: Path, name: str, progress: Progress) -> Path:
    """Fetch a file unless it is there already; it appears only when its checksum is right.

    Raises:
        OSError: The network or the disk failed, or what came is not what was published.
    """
    target = folder / remote.name
    if target.is_file() and _sha256(target) == remote.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    progress(f"downloading {remote.url}")
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{remote.name}-")
    try:
        digest = hashlib.sha256()
        with os.fdopen(handle, "wb") as file:
            for block in _fetch(remote.url, name):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != remote.sha256:
            raise OSError(
                f"what came from {remote.url} has the SHA-256 {digest.hexdigest()}, not "
                f"{remote.sha256}: it changed or was damaged on the way. Try again, or give "
                f"--data.path {_where_from(name)}"
            )
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _fetch(url: str, name: str) -> Iterator[bytes]:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            while block := response.read(BLOCK_BYTES):
                yield block
    except (OSError, http.client.HTTPException) as error:
        raise OSError(
            f"cannot download {url}: {error}. Without a network, "
            f"--data.path takes a copy that is already at hand: {_where_from(name)}"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
