"""Where text is: files of one's own, copies of known corpora, the sources of Python itself."""

import codecs
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from transformer_xl.config import DataConfig, Say, replace_file, write_atomically
from transformer_xl.data.catalogue import KNOWN_CORPORA, RemoteFile
from transformer_xl.data.download import copies_of, differs, download
from transformer_xl.data.locking import once
from transformer_xl.data.normalizing import Normalizer
from transformer_xl.data.store import StoredObject, fetch, is_url, list_objects, local_path
from transformer_xl.data.text import TextFiles
from transformer_xl.data.unpacking import (
    RAW_REMEDY,
    first_bytes,
    optional_package,
    parts_within,
    texts_of,
    unpacking_of,
)
from transformer_xl.errors import DataError, SettingsError

HUB_PREFIX = "hf:"
_HUB_SPLITS = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}
_PROBE_BYTES = 8192
_LISTED_SKIPPED = 5
_OWN_TEXT = "for text of your own, delete data.name in the recipe, or give --data.name ''"
_SUBFOLDERS = ("", "data", "simple-examples/data")
# Beside a URL, which has colons of its own, a colon divides before a URL or an absolute path.
_BEFORE_URL = rf"(?<!:){os.pathsep}" + r"(?=[A-Za-z][A-Za-z0-9+.-]+://)"
_BETWEEN_URLS = rf"{_BEFORE_URL}|{os.pathsep}(?=/(?!/))"


def find_text(config: DataConfig, downloads: Path, say: Say) -> TextFiles:
    """Find the files of a corpus, downloading them where they must be.

    Objects in a store are listed; :func:`fetch_text` fetches them.
    """
    name, path = config.name, config.path
    if not (name or path):
        raise SettingsError(
            "data.name and data.path are both empty: give a file or folder with --data.path, or "
            f"name one of the known corpora: {', '.join(KNOWN_CORPORA)}"
        )
    keys = ("path", "valid_path", "test_path")
    if empty := [key for key in keys if getattr(config, key) == ""]:
        raise SettingsError(
            f"data.{empty[0]}='' is no file or folder: give one (. is the current folder), or None"
        )
    is_hub = name.startswith(HUB_PREFIX)
    known = KNOWN_CORPORA.get(name)
    if name and not is_hub and known is None:
        raise SettingsError(
            f"data.name={name!r} is no known corpus; there are {', '.join(KNOWN_CORPORA)}, and "
            f"{HUB_PREFIX}ORG/NAME of Hugging Face datasets. For text of your own leave it empty "
            "and give --data.path FILE_OR_FOLDER"
        )
    if name and path and is_url(path):
        raise SettingsError(
            f"data.name={name!r} with data.path={path!r}: of a known corpus, data.path takes a "
            "copy on this machine; leave out data.name to read any text at a URL"
        )
    held_out = {
        part: list_texts(place, config, downloads, say)
        for part, place in (("valid", config.valid_path), ("test", config.test_path))
        if place is not None
    }
    stored = {file: x for texts in held_out.values() for file, x in texts.stored.items()}
    if name == "python-stdlib":
        root = Path(path or sysconfig.get_path("stdlib"))
        parts = {"train": _python_sources(root)}
    elif is_hub:
        root, parts = find_hub_text(config, downloads, say)
    elif name:
        root, parts = _find_known(config, downloads, say)
    else:
        listed = list_texts(path or "", config, downloads, say)
        root, parts, stored = listed.root, listed.parts, {**stored, **listed.stored}
    # A folder may hold its held-out files itself; nothing is trained on that is also measured.
    away = {file.resolve() for texts in held_out.values() for file in texts.train}
    kept = tuple(file for file in parts["train"] if file.resolve() not in away)
    if parts["train"] and not kept:
        raise SettingsError(f"{root} holds nothing but what data.valid_path and test_path hold out")
    parts["train"] = kept
    if len(kept) == 1 and unpacking_of(kept[0], config) == "json":
        # Which parts it has is in it.
        fetch({x: stored[x] for x in kept if x in stored}, kept[0].parent, say)
        parts |= dict.fromkeys(parts_within(kept[0]), kept)
    parts |= {part: texts.train for part, texts in held_out.items()}
    description = known.summary if known else name or f"text at {path}"
    found = TextFiles(root=root, description=description, train=kept, stored=stored)
    return replace(found, **parts)


def fetch_text(config: DataConfig, files: TextFiles, say: Say) -> TextFiles:
    """Fetch what lies in a store, and leave out what a folder there holds beside text."""
    if not files.stored:
        return files
    fetch(files.stored, next(iter(files.stored)).parent, say)
    in_folder = [path for path, x in files.stored.items() if x.in_folder]
    skipped = {path for path in in_folder if not _begins_like_text(path, config)}
    _say_skipped([files.name(path) for path in sorted(skipped)], files.description, say)
    kept = {
        part: tuple(x for x in paths if x not in skipped) for part, paths in files.parts.items()
    }
    for part, paths in kept.items():
        if not paths:
            raise DataError(f"{files.description} ({part}): the folder holds no text files")
    return replace(files, **kept)


def list_texts(path: str, config: DataConfig, downloads: Path, say: Say) -> TextFiles:
    """List what ``data.path`` names: a file, folder, pattern or URL, or several, in that order."""
    if not is_url(path) and not re.search(_BEFORE_URL, path):
        root, files = _list_local(path, config, say)
        return TextFiles(root=root, description=path, train=files)
    stored: dict[Path, StoredObject] = {}
    files, roots = list[Path](), list[Path]()
    for item in map(local_path, re.split(_BETWEEN_URLS, path)):
        if is_url(item):
            objects = list_objects(item, downloads / "objects", say)
            _require_text((x.name for x in objects), item)
            listed = {x.target(downloads / "objects"): x for x in objects}
            stored |= listed
            # A name for people.
            root = re.split(r"[*?\[]", item.partition("://")[2])[0]
            roots.append(Path(root if objects[0].in_folder else root.rpartition("/")[0]))
        else:
            root, listed = _list_local(item, config, say)
            roots.insert(0, root)
        files += listed
    unique = tuple(dict.fromkeys(files))
    return TextFiles(root=roots[0], description=path, train=unique, stored=stored)


def _list_local(given: str, config: DataConfig, say: Say) -> tuple[Path, tuple[Path, ...]]:
    # A name with a colon or a star in it is a name first.
    items = [given] if given and Path(given).exists() else given.split(os.pathsep)
    if not all(items):
        raise SettingsError(
            f"{given!r} has an empty path: delete the {os.pathsep!r} beside it, or give . for the "
            "current folder"
        )
    places: list[Path] = []
    for item in items:
        if Path(item).exists() or not glob.has_magic(item):
            places.append(Path(item))
            continue
        matched = [Path(x) for x in sorted(glob.glob(item, recursive=True))]  # noqa: PTH207 - patterns may be absolute
        if not matched:
            raise FileNotFoundError(f"no file matches the pattern {item}")
        # Of the matches of a pattern alone, folders are what ** passed through.
        is_alone = len(items) == 1 and len(matched) > 1
        places += [match for match in matched if match.is_file() or not is_alone]
    files = tuple(dict.fromkeys(file for place in places for file in list_text(place, config, say)))
    if len(places) == 1:
        return (places[0] if places[0].is_dir() else places[0].parent), files
    return Path(os.path.commonpath([file.absolute().parent for file in files])), files


def list_text(path: Path, config: DataConfig, say: Say) -> tuple[Path, ...]:
    """List a file, or the text files of a folder and its subfolders, sorted.

    In a folder, hidden files are left out, and files that begin like no text; these are named.
    Compressed files count by what is in them.
    """
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {path}")
    _require_text((file.name for file in path.iterdir()), path)
    files = _walk(path, _is_hidden)
    is_text = {file: _begins_like_text(file, config) for file in files}
    skipped = [str(file.relative_to(path)) for file in files if not is_text[file]]
    _say_skipped(skipped, path, say)
    if len(skipped) == len(files):
        raise DataError(f"the folder {path} holds no text files")
    return tuple(file for file in files if is_text[file])


def _require_text(names: Iterable[str], where: object) -> None:
    if {"manifest.json", "vocab.json", "train.bin"} <= {*names}:
        raise SettingsError(f"{where} is a prepared corpus, no text: give it with --data.corpus")


def _say_skipped(names: list[str], where: object, say: Say) -> None:
    if names:
        more = len(names) - _LISTED_SKIPPED
        say(
            f"skipped {len(names)} files of {where} that are empty or no text: "
            + ", ".join(names[:_LISTED_SKIPPED])
            + (f" and {more} more" if more > 0 else "")
        )


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _walk(root: Path, is_skipped: Callable[[str], bool]) -> list[Path]:
    """List the files below a folder, sorted, without the folders and files that are skipped."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not is_skipped(name)]
        files = (Path(folder, name) for name in names if not is_skipped(name))
        found += [file for file in files if file.is_file()]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _begins_like_text(file: Path, config: DataConfig) -> bool:
    if unpacking_of(file, config) in ("numpy", "parquet"):
        return True
    head = first_bytes(file, _PROBE_BYTES)
    try:
        # UTF-16 with a byte-order mark is text, too.
        text = head if config.raw else Normalizer(str(file), RAW_REMEDY).push(head)
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


def _python_sources(root: Path) -> tuple[Path, ...]:
    def is_skipped(name: str) -> bool:
        return name in _NOT_PYTHON_LIBRARY or name.startswith((".", "config-", "_sysconfigdata"))

    files = (file for file in _walk(root, is_skipped) if file.suffix == ".py")
    found = tuple(file for file in files if _begins_like_text(file, DataConfig()))
    if not found:
        raise FileNotFoundError(
            f"no Python sources in {root}: this Python comes without the text of its library; "
            "give a folder that has it with --data.path"
        )
    return found


def find_hub_text(
    config: DataConfig, downloads: Path, say: Say
) -> tuple[Path, dict[str, tuple[Path, ...]]]:
    """Return the folder with the text of a data set of ``datasets``, and its files by part.

    ``hf:ORG/NAME`` or ``hf:ORG/NAME:CONFIG`` names one of the hub, ``hf:FOLDER`` a folder of files.
    ``datasets`` downloads it, and goes on with a download that was stopped; its text is written to
    a file for each split. If another process does so, this one waits.
    """
    name, _, configuration = config.name.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise SettingsError(f"data.name={config.name!r} has no data set: write hf:ORG/NAME")
    identity: list[object] = [config.name.removeprefix(HUB_PREFIX)]
    if (folder := Path(name)).is_dir():
        files = [(x.relative_to(folder).as_posix(), x.stat()) for x in _walk(folder, _is_hidden)]
        about = [[file, stat.st_size, stat.st_mtime_ns] for file, stat in files]
        identity = [str(folder.resolve()), configuration, about]
    key = hashlib.sha256(json.dumps([*identity, config.json_field]).encode()).hexdigest()[:12]
    title = Path(config.name.removeprefix(HUB_PREFIX).replace(":", "-")).name
    folder = downloads / "hf" / f"{title}-{key}"

    def read() -> None:
        datasets = optional_package("datasets", f"data.name={config.name!r}")
        say(f"reading {name} with datasets; its text is kept in {folder}")
        try:
            splits = datasets.load_dataset(name, configuration or None)
        except (ValueError, OSError):
            raise
        except Exception as error:  # The package has classes of its own for each kind of trouble.
            raise OSError(
                f"datasets cannot read {name}: {type(error).__name__}: {error}"
            ) from error
        parts = {}
        for part, names in _HUB_SPLITS.items():
            for rows in [splits[x] for x in names if x in splits][:1]:
                texts = texts_of(rows, config.json_field, name)

                def write(path: Path, texts: Iterable[str] = texts) -> None:
                    with path.open("wb") as file:
                        file.writelines(x.encode("utf-8", "surrogatepass") for x in texts)

                write_atomically(folder / f"{part}.txt", write)
                parts[part] = [f"{part}.txt"]
        replace_file(folder / "parts.json", json.dumps(parts).encode())

    activity = "another process is reading the same data set"
    once(folder, say, activity, find=(folder / "parts.json").is_file, make=read)
    parts = json.loads((folder / "parts.json").read_bytes())
    if not parts.get("train"):
        raise DataError(f"data.name={config.name!r}: the data set has no split named train")
    return folder, {part: tuple(folder / x for x in names) for part, names in parts.items()}


def _find_known(
    config: DataConfig, downloads: Path, say: Say
) -> tuple[Path, dict[str, tuple[Path, ...]]]:
    name, corpus = config.name, KNOWN_CORPORA[config.name]
    remotes = corpus.files
    if config.path is None:
        folder = downloads / name
        return folder, {part: download(x, folder, corpus, name, say) for part, x in remotes.items()}
    given = Path(config.path)
    parts = {part: _copies(given, x, len(remotes)) for part, x in remotes.items()}
    missing = [remotes[part].name for part, files in parts.items() if not files]
    if missing == [remotes["train"].name] and len(parts) > 1:
        say(
            f"warning: {given} holds no {missing[0]}: there is no training text, and symbols "
            "are counted in what is held out, so that results compare with nothing"
        )
    elif missing:
        problem = f"{given} holds no {', '.join(missing)}"
        if not given.exists():
            problem = f"there is no file or folder {given}"
        urls = dict.fromkeys(remote.sources[0].url for remote in remotes.values())
        raise FileNotFoundError(
            f"{problem}: of {name}, --data.path takes a copy: {copies_of(corpus)} "
            f"(published at {' '.join(urls)}); {_OWN_TEXT}"
        )
    for part, files in parts.items():
        for file in files:
            if warning := _difference(file, remotes[part], name):
                say(warning)
    return (given if given.is_dir() else given.parent), parts


def _copies(given: Path, remote: RemoteFile, n_parts: int) -> tuple[Path, ...]:
    """Find a file of a known corpus below a path, under any of its names."""
    if given.is_file() and n_parts == 1:
        return (given,)
    for name in (remote.name, *remote.also):
        for place in _SUBFOLDERS:
            if found := tuple(sorted(given.glob(f"{place}/{name}".lstrip("/")))):
                return found if "*" in remote.name else found[:1]
    return ()


def _difference(file: Path, remote: RemoteFile, name: str) -> str:
    """Return a warning if a copy is not what was published, a note if that is not known."""
    size = file.stat().st_size
    if remote.n_bytes is not None and size < remote.n_bytes:
        return (
            f"warning: {file} is a part of {remote.name}, {size:,} of {remote.n_bytes:,} bytes; it "
            "is split by the same shares, and results will not compare with published ones; "
            f"{_OWN_TEXT}"
        )
    if remote.checksum and differs(file, remote.checksum):
        return (
            f"warning: {file} differs from the published {remote.name} of {name}: results will "
            f"not compare with published ones; {_OWN_TEXT}"
        )
    is_unknown = not remote.checksum and "*" not in remote.name
    return f"no checksum of {remote.name} is known: {file} is taken as it is" if is_unknown else ""
