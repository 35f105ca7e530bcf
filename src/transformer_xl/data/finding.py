"""Where text is: files of one's own, copies of known corpora, the sources of Python itself."""

import codecs
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

from transformer_xl.config import DataConfig, Say, write_atomically
from transformer_xl.data.catalogue import KNOWN_CORPORA, RemoteFile
from transformer_xl.data.download import copies_of, differs, download
from transformer_xl.data.locking import once
from transformer_xl.data.normalizing import Normalizer
from transformer_xl.data.text import TextFiles
from transformer_xl.data.unpacking import (
    first_bytes,
    load_splits,
    parts_within,
    texts_of,
    unpacking_of,
)
from transformer_xl.errors import DataError, SettingsError

HUB_PREFIX = "hf:"
_HUB_SPLITS = {"test": ("test",), "valid": ("validation", "valid", "dev"), "train": ("train",)}
_PROBE_BYTES = 8192
"""Bytes at the beginning of a file by which it is recognized as text."""
_LISTED_SKIPPED = 5
"""Maximum number of skipped files that a line names."""
_OWN_TEXT = "for text of your own, delete data.name in the recipe, or give --data.name ''"
_SUBFOLDERS = ("", "data", "simple-examples/data")
Parts = dict[str, tuple[Path, ...]]


def find_text(config: DataConfig, downloads: Path, say: Say) -> TextFiles:
    """Return the files of a text and its splits; those of a known corpus are downloaded.

    Args:
        config: The source of the text, and of held-out texts.
        downloads: Folder of downloaded files.
        say: Called with lines about downloads, skipped files and copies that differ.

    Returns:
        The files. Those of the held-out texts are not in the training text, so that nothing is
        trained on that is also evaluated.

    Raises:
        SettingsError: The settings name no source, or one that cannot be.
        DataError: A folder has no text, a download has another checksum, or a dataset has no
            training text.
        FileNotFoundError: There is no such file or folder.
        OSError: A file cannot be read, downloaded or written.
    """
    _require_source(config)
    held_out = {
        part: list_texts(path, config, say).train
        for part, path in (("valid", config.valid_path), ("test", config.test_path))
        if path is not None
    }
    if config.name == "python-stdlib":
        root = Path(config.path or sysconfig.get_path("stdlib"))
        parts: Parts = {"train": _list_python_sources(root)}
    elif config.name:
        is_of_hub = config.name.startswith(HUB_PREFIX)
        root, parts = (find_hub_text if is_of_hub else _find_known)(config, downloads, say)
    else:
        listed = list_texts(config.path or "", config, say)
        root, parts = listed.root, listed.parts
    # The folder of the training text may have the held-out files in it.
    held_out_files = {file.resolve() for files in held_out.values() for file in files}
    train = tuple(file for file in parts["train"] if file.resolve() not in held_out_files)
    if parts["train"] and not train:
        raise SettingsError(f"{root} holds nothing but what data.valid_path and test_path hold out")
    parts["train"] = train
    if len(train) == 1 and unpacking_of(train[0], config) == "json":
        # A file of JSON may have several splits in it.
        parts |= dict.fromkeys(parts_within(train[0]), train)
    parts |= held_out
    corpus = KNOWN_CORPORA.get(config.name)
    return TextFiles(
        root=root,
        description=corpus.summary if corpus else config.name or f"text at {config.path}",
        train=parts["train"],
        valid=parts.get("valid"),
        test=parts.get("test"),
    )


def _require_source(config: DataConfig) -> None:
    """Require that the settings name a source of text, before anything is read."""
    name, paths = config.name, ("path", "valid_path", "test_path")
    for path in filter(None, (getattr(config, x) for x in paths)):
        require_path(path)
    empty = next((x for x in paths if getattr(config, x) == ""), None)
    is_known = not name or name.startswith(HUB_PREFIX) or name in KNOWN_CORPORA
    for is_wrong, message in (
        (
            not (name or config.path),
            "data.name and data.path are both empty: give a file or folder with --data.path, or "
            f"name one of the known corpora: {', '.join(KNOWN_CORPORA)}",
        ),
        (
            empty,
            f"data.{empty}='' is not a file or folder: give one (. is the current folder), or None",
        ),
        (
            not is_known,
            f"data.name={name!r} is not a known corpus; there are {', '.join(KNOWN_CORPORA)}, and "
            f"{HUB_PREFIX}ORG/NAME of Hugging Face datasets. For text of your own leave it empty "
            "and give --data.path FILE_OR_FOLDER",
        ),
    ):
        if is_wrong:
            raise SettingsError(message)


def require_path(path: str) -> None:
    """Require that a text or corpus is not named by a URL.

    Raises:
        SettingsError: It is.
    """
    if "://" in path and not Path(path).exists():
        raise SettingsError(
            f"{path!r} is a URL: give the path of a file or folder; curl -O, aws s3 cp --recursive "
            "or hf download get what is not on this machine"
        )


def list_texts(path: str, config: DataConfig, say: Say) -> TextFiles:
    """Return the files that ``data.path`` names: a file, folder or pattern, or several.

    Args:
        path: The names, separated by a colon.
        config: How files are unpacked and decoded, which decides what is text.
        say: Called with lines about skipped files.

    Returns:
        The files as training text, in the order of the names, and the folder they have in common.

    Raises:
        SettingsError: A name is empty, a URL, or that of a prepared corpus.
        DataError: A folder has no text.
        FileNotFoundError: There is no such file or folder, or no file matches a pattern.
    """
    require_path(path)
    # A file whose name has a colon or a star comes first.
    items = [path] if Path(path).exists() else path.split(os.pathsep)
    if not all(items):
        raise SettingsError(
            f"{path!r} has an empty path: delete the {os.pathsep!r} beside it, or give . for the "
            "current folder"
        )
    places: list[Path] = []
    for item in items:
        if Path(item).exists() or not glob.has_magic(item):
            places.append(Path(item))
        elif matched := [Path(x) for x in sorted(glob.glob(item, recursive=True))]:  # noqa: PTH207 - patterns may be absolute
            # Of the matches of a pattern alone, folders are what ** passed through.
            is_alone = len(items) == 1 and len(matched) > 1
            places += [match for match in matched if match.is_file() or not is_alone]
        else:
            raise FileNotFoundError(f"no file matches the pattern {item}")
    files = tuple(dict.fromkeys(file for place in places for file in list_text(place, config, say)))
    if len(places) == 1:
        root = places[0] if places[0].is_dir() else places[0].parent
    else:
        root = Path(os.path.commonpath([file.absolute().parent for file in files]))
    return TextFiles(root=root, description=path, train=files)


def list_text(path: Path, config: DataConfig, say: Say) -> tuple[Path, ...]:
    """Return a file, or the text files of a folder and its subfolders, sorted.

    In a folder, hidden files are left out, and files that do not begin like text. Compressed files
    count by their contents.

    Args:
        path: The file or folder.
        config: How files are unpacked and decoded, which decides what is text.
        say: Called with a line that names the files that are left out, but for hidden ones.

    Raises:
        SettingsError: The folder is a prepared corpus.
        DataError: The folder has no text.
        FileNotFoundError: There is no such file or folder.
    """
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {path}")
    if {"manifest.json", "vocab.json", "train.bin"} <= {file.name for file in path.iterdir()}:
        raise SettingsError(f"{path} is a prepared corpus, not a text: give it with --data.corpus")
    files = _walk(path)
    texts = tuple(file for file in files if _begins_like_text(file, config))
    if skipped := [str(file.relative_to(path)) for file in files if file not in texts]:
        more = len(skipped) - _LISTED_SKIPPED
        say(
            f"skipped {len(skipped)} files of {path} that are empty or not text: "
            + ", ".join(skipped[:_LISTED_SKIPPED])
            + (f" and {more} more" if more > 0 else "")
        )
    if not texts:
        raise DataError(f"the folder {path} holds no text files")
    return texts


def _walk(
    root: Path, is_skipped: Callable[[str], bool] = lambda name: name.startswith(".")
) -> list[Path]:
    """Return the files below a folder, sorted, without files and folders of skipped names."""
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not is_skipped(name)]
        paths = (Path(folder, name) for name in names if not is_skipped(name))
        files += [path for path in paths if path.is_file()]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _begins_like_text(file: Path, config: DataConfig) -> bool:
    """Whether a file begins with text, or is of a format that is read as text."""
    if file.suffix.lower() == ".parquet":
        return True
    head = first_bytes(file, _PROBE_BYTES)
    try:
        text = head if config.raw else Normalizer(str(file)).push(head)
        codecs.getincrementaldecoder("utf-8")().decode(text, final=len(head) < _PROBE_BYTES)
    except ValueError:
        return False
    return bool(head) and b"\0" not in text


# Tests and tables, and what many systems install separately or not at all: the corpus should be
# nearly the same on every machine with the same Python.
_NOT_PYTHON_LIBRARY = {
    *("__phello__", "__pycache__", "dist-packages", "distutils", "encodings", "ensurepip"),
    *("idlelib", "lib-dynload", "lib2to3", "pydoc_data", "site-packages", "test", "tests"),
    *("tkinter", "turtledemo"),
}


def _list_python_sources(root: Path) -> tuple[Path, ...]:
    """Return the sources of the library of Python below a folder.

    Raises:
        FileNotFoundError: There are none.
    """
    skipped = (".", "config-", "_sysconfigdata")
    files = _walk(root, lambda x: x in _NOT_PYTHON_LIBRARY or x.startswith(skipped))
    config = DataConfig()
    sources = tuple(x for x in files if x.suffix == ".py" and _begins_like_text(x, config))
    if not sources:
        raise FileNotFoundError(
            f"no Python sources in {root}: this Python comes without the text of its library; "
            "give a folder that has it with --data.path"
        )
    return sources


def find_hub_text(config: DataConfig, downloads: Path, say: Say) -> tuple[Path, Parts]:
    """Return the folder with the text of a data set of ``datasets``, and its files by split.

    ``hf:ORG/NAME`` or ``hf:ORG/NAME:CONFIG`` names one of the hub, ``hf:FOLDER`` a folder of files.
    The text of each split is written to a file; that of the training split last.

    Args:
        config: The name of the data set, and the column that holds the text.
        downloads: Folder in which the texts are kept.
        say: Called with a line before the data set is read.

    Raises:
        SettingsError: The name is empty.
        DataError: The data set has no training split.
        OSError: The data set cannot be read, or its text cannot be written.
    """
    name, _, configuration = config.name.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise SettingsError(f"data.name={config.name!r} has no data set: write hf:ORG/NAME")
    identity: list[object] = [name, configuration, config.json_field]
    if (source := Path(name)).is_dir():
        stats = [(str(x.resolve()), x.stat()) for x in _walk(source)]
        identity += [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
    folder = downloads / "hf" / f"{source.name}-{key}"

    def read() -> None:
        splits = load_splits(f"data.name={config.name!r}", name, name=configuration or None)
        say(f"reading {name} with datasets; its text is kept in {folder}")
        if "train" not in splits:
            raise DataError(f"data.name={config.name!r}: the data set has no split named train")
        for part, names in _HUB_SPLITS.items():
            for rows in [splits[x] for x in names if x in splits][:1]:
                texts = texts_of(rows, config.json_field, name)

                def write(path: Path, texts: Iterable[bytes] = texts) -> None:
                    with path.open("wb") as file:
                        file.writelines(texts)

                write_atomically(folder / f"{part}.txt", write)

    activity = "another process is reading the same data set"
    once(folder, say, activity, find=(folder / "train.txt").is_file, make=read)
    files = {part: folder / f"{part}.txt" for part in _HUB_SPLITS}
    return folder, {part: (file,) for part, file in files.items() if file.is_file()}


def _find_known(config: DataConfig, downloads: Path, say: Say) -> tuple[Path, Parts]:
    """Return the folder of a known corpus and its files by split: a copy, or downloaded ones.

    Args:
        config: The name of the corpus; ``data.path``: a copy of it.
        downloads: Folder of downloaded files.
        say: Called with lines about downloads, and with warnings if a copy differs.

    Raises:
        FileNotFoundError: The copy lacks a file other than the training text.
        OSError: A download failed.
    """
    name, corpus = config.name, KNOWN_CORPORA[config.name]
    remotes = corpus.files
    if config.path is None:
        folder = downloads / name
        return folder, {part: download(x, folder, corpus, name, say) for part, x in remotes.items()}
    place = Path(config.path)
    is_single = len(remotes) == 1
    parts = {part: _find_copies(place, x, is_single=is_single) for part, x in remotes.items()}
    missing = [remotes[part].name for part, files in parts.items() if not files]
    if missing == [remotes["train"].name] and len(parts) > 1:
        say(
            f"warning: {place} holds no {missing[0]}: there is no training text, and symbols "
            "are counted in what is held out, so that results compare with nothing"
        )
    elif missing:
        problem = f"{place} holds no {', '.join(missing)}"
        if not place.exists():
            problem = f"there is no file or folder {place}"
        urls = dict.fromkeys(remote.sources[0].url for remote in remotes.values())
        raise FileNotFoundError(
            f"{problem}: of {name}, --data.path takes a copy: {copies_of(corpus)} "
            f"(published at {' '.join(urls)}); {_OWN_TEXT}"
        )
    for remote, file in ((remotes[part], x) for part, files in parts.items() for x in files):
        if remote.n_bytes is not None and (size := file.stat().st_size) < remote.n_bytes:
            difference = f"is a part of {remote.name}, {size:,} of {remote.n_bytes:,} bytes"
        elif remote.checksum and differs(file, remote.checksum):
            difference = f"differs from the published {remote.name} of {name}"
        else:
            continue
        say(
            f"warning: {file} {difference}: results will not compare with published ones; "
            f"{_OWN_TEXT}"
        )
    return (place if place.is_dir() else place.parent), parts


def _find_copies(place: Path, remote: RemoteFile, *, is_single: bool) -> tuple[Path, ...]:
    """Return the copy of a published file, or the copies if its name is a pattern.

    Args:
        place: The folder in which it is looked for, under any of its names; of a corpus with a
            single file, also that file, whatever its name.
        remote: The published file.
        is_single: Whether it is the only file of its corpus.

    Returns:
        The files; empty if there is no copy.
    """
    if place.is_file() and is_single:
        return (place,)
    for name in (remote.name, *remote.also):
        for folder in _SUBFOLDERS:
            if matched := tuple(sorted(place.glob(f"{folder}/{name}".lstrip("/")))):
                return matched if "*" in remote.name else matched[:1]
    return ()
