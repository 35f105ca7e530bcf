"""A corpus: text as numbers on disk, read without loading it.

A corpus folder holds ``tokenizer.json`` and ``vocab.json`` (the vocabulary), ``train.bin``,
``valid.bin`` and ``test.bin`` (the symbols, 16 or 32 bits each) and ``manifest.json`` (what is
there, with checksums, and where it came from). It is written once, under a temporary name, and
renamed when it is whole (`building`). Text passes through in blocks; no part is ever in memory
as a whole. ``verified.json`` remembers that the checksums were right, until a file changes.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from transformer_xl.config import FORMAT_VERSION, DataConfig
from transformer_xl.config.files import checksum, replace_file
from transformer_xl.data.brought import bring, is_vocabulary
from transformer_xl.data.building import build, vocabulary_source
from transformer_xl.data.finding import fetch_text, find_text
from transformer_xl.data.locking import LOCK, locked
from transformer_xl.data.store import is_url, local_path
from transformer_xl.data.text import SPLITS, TextFiles
from transformer_xl.data.tokens import Tokens
from transformer_xl.data.vocab import VOCAB_FILE, Vocab, load_vocab

MANIFEST = "manifest.json"
VERIFIED = "verified.json"
"""Which token files were compared with their checksums, and their sizes and times then."""
_ONE_WEEK = 7 * 24 * 60 * 60
_LONG_BYTES = 1 << 30


class Corpus:
    """A prepared text.

    Attributes:
        folder: Where it lies.
        manifest: The contents of ``manifest.json``.
        vocab: Its vocabulary.
        dtype: Of a token on disk, ``uint16`` or ``uint32``.

    Raises:
        FileNotFoundError: The folder holds no corpus.
        RuntimeError: The corpus is damaged or from a newer version.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{self.folder} holds no corpus: manifest.json is missing")
        try:
            self.manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            version = self.manifest["format_version"]
            if not isinstance(version, int) or version > FORMAT_VERSION:
                raise RuntimeError(
                    f"{path} has format {version!r}, this version reads up to {FORMAT_VERSION}: "
                    "update transformer_xl"
                )
            if self.manifest["dtype"] not in ("uint16", "uint32"):
                raise ValueError(f"dtype {self.manifest['dtype']!r} is not uint16 or uint32")
            self.dtype = np.dtype(self.manifest["dtype"])
            vocab_hash = self.manifest["vocab"]["hash"]
            for name in SPLITS:
                self._check_size(name)
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(self._damage(path, f"it cannot be read: {error!r}")) from error
        try:
            self.vocab: Vocab = load_vocab(self.folder)
        except (FileNotFoundError, ValueError, RuntimeError) as error:
            raise RuntimeError(self._damage(self.folder, str(error))) from error
        if self.vocab.hash != vocab_hash:
            raise RuntimeError(
                self._damage(
                    self.folder / "vocab.json", "it is not the vocabulary in manifest.json"
                )
            )

    def _damage(self, path: Path, what: str) -> str:
        return f"{path} is damaged: {what}. Delete the folder {self.folder} and prepare it again"

    def _check_size(self, name: str) -> None:
        about = self.manifest["splits"][name]
        path = self.folder / about["file"]
        if path.name != about["file"]:
            raise ValueError(
                f"the {name} split is in {about['file']!r}, which is no name of a file"
            )
        expected = about["tokens"] * self.dtype.itemsize
        found = self._size(path.name)
        if found != expected:
            raise RuntimeError(
                self._damage(path, f"{found:,} bytes instead of {expected:,}")
                if found is not None
                else self._damage(path, "it is missing")
            )

    def _size(self, file: str) -> int | None:
        path = self.folder / file
        return path.stat().st_size if path.is_file() else None

    def _about(self, name: str) -> dict[str, Any]:
        if name not in SPLITS:
            raise ValueError(f"split {name!r} is none of {', '.join(SPLITS)}")
        return self.manifest["splits"][name]

    def n_tokens(self, name: str) -> int:
        """Symbols of a split."""
        return self._about(name)["tokens"]

    def n_bytes(self, name: str) -> int:
        """Bytes of the text that a split was made from."""
        return self._about(name)["bytes"]

    def split(self, name: str) -> Integer[np.ndarray, " length"]:
        """Return the symbols of a split, memory-mapped.

        Raises:
            ValueError: The split is empty.
        """
        about = self._about(name)
        if about["tokens"] == 0 and name == "train":
            raise ValueError(
                "the corpus has no train split: the text at hand holds none; give --data.path with "
                "the training text"
            )
        if about["tokens"] == 0:
            raise ValueError(
                f"the corpus has no {name} split: nothing was held out for it; set "
                f"data.{name}_fraction above 0 or give data.{name}_path"
            )
        return np.memmap(self.folder / about["file"], dtype=self.dtype, mode="r")

    def tokens(self, name: str) -> Tokens:
        """Return the symbols of a split, to be read where they lie: indexed by places.

        Raises:
            ValueError: The split is empty.
        """
        return self.split(name)

    def verify(self) -> None:
        """Compare every token file with its checksum.

        Raises:
            RuntimeError: A file differs.
        """
        for name in SPLITS:
            about = self._about(name)
            if self._digest(about["file"]) != about["sha256"]:
                raise RuntimeError(self._wrong_checksum(self.folder / about["file"]))

    def verify_once(self, say: Callable[[str], None]) -> None:
        """Do what :meth:`verify` does, unless it was done since the files changed.

        Where another process is at it, this one waits for it. In a folder that cannot be written,
        where nothing can be remembered, it is done each time.

        Raises:
            RuntimeError: A file differs.
        """
        if self._is_verified():
            return
        with locked(self.folder, say, "another process is comparing checksums"):
            if self._is_verified():
                return
            seen = self._seen()
            n_bytes = sum(size for _, size, _ in seen.values())
            if n_bytes > _LONG_BYTES:
                say(f"comparing {n_bytes:,} bytes of tokens with their checksums, this once")
            self.verify()
            with suppress(OSError):
                replace_file(self.folder / VERIFIED, json.dumps(seen).encode())
                (self.folder / LOCK).unlink(missing_ok=True)

    def _seen(self) -> dict[str, list[Any]]:
        """Return checksum, size and time of change, in nanoseconds, of each token file."""
        abouts = [self._about(name) for name in SPLITS]
        stats = [(self.folder / about["file"]).stat() for about in abouts]
        return {
            about["file"]: [about["sha256"], stat.st_size, stat.st_mtime_ns]
            for about, stat in zip(abouts, stats, strict=True)
        }

    def _is_verified(self) -> bool:
        try:
            return json.loads((self.folder / VERIFIED).read_bytes()) == self._seen()
        except (OSError, ValueError):
            return False

    def _digest(self, file: str) -> str:
        return checksum(self.folder / file)

    def _wrong_checksum(self, path: Path) -> str:
        return self._damage(path, f"its contents do not match the checksum in {MANIFEST}")


def raw_split(corpus: Corpus, name: str) -> bytes:
    """Restore the bytes of a split from its symbols, as a compressor would be given them.

    Raises:
        ValueError: The split is empty, or its symbols do not determine the text.
    """
    tokens = corpus.split(name)
    if corpus.vocab.kind == "bytes":
        return tokens.astype(np.uint8).tobytes()
    return corpus.vocab.decode_bytes(tokens.tolist())


def cache_folder(config: DataConfig) -> Path:
    """Return where corpora and downloads are kept."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    if chosen := os.environ.get("TXL_CACHE"):
        return Path(chosen).expanduser()
    return Path.home() / ".cache" / "transformer_xl"


def prepare(config: DataConfig, progress: Callable[[str], None] | None = None) -> Corpus:
    """Return the corpus that the settings describe, building it unless the cache has it.

    A build that was stopped goes on where it was. Where another process builds the same corpus,
    this one waits for it.

    Args:
        config: Which text, cut and split how.
        progress: Takes a line of text for the user now and then.

    Raises:
        ValueError: The settings or the text do not fit.
        OSError: A file is missing, a download failed, the cache cannot be written.
        RuntimeError: The corpus in the cache is damaged, or a process that cut text was killed.
    """
    say = progress or (lambda line: None)
    given = cache_folder(config)
    cache = given.absolute()
    if config.corpus:
        return _verified(_prepared(config, config.corpus, cache, say), config, say)
    files = find_text(config, cache / "downloads", say)
    settings = _settings(config)
    folder = cache / f"{_title(config, files)}-{_key(settings, files)}"
    if folder.is_dir():
        return _verified(Corpus(folder), config, say)
    building = cache / f".building-{folder.name}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache, building)
        building.mkdir(exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot write to the cache {given}: {error.strerror or error}; "
            "choose another folder with --data.cache_dir or the variable TXL_CACHE"
        ) from error
    with locked(building, say) as is_ours:
        if is_ours and folder.is_dir():
            # Another process finished it just before.
            shutil.rmtree(building, ignore_errors=True)
        elif is_ours:
            try:
                build(config, fetch_text(config, files, say), settings, building, say)
            except ValueError:
                # What does not fit will not fit later.
                shutil.rmtree(building, ignore_errors=True)
                raise
            # The lock goes with it: who waits for it finds that it is not where it was.
            building.rename(folder)
            (folder / LOCK).unlink(missing_ok=True)
    return _verified(Corpus(folder), config, say) if is_ours else prepare(config, progress)


def _verified(corpus: Corpus, config: DataConfig, say: Callable[[str], None]) -> Corpus:
    if config.verify == "always":
        corpus.verify()
    elif config.verify == "once":
        corpus.verify_once(say)
    return corpus


def _prepared(config: DataConfig, place: str, cache: Path, say: Callable[[str], None]) -> Corpus:
    """Open the corpus that ``data.corpus`` names, if it is what the other settings say."""
    place = local_path(place)
    if is_url(place):
        from transformer_xl.data.stored import StoredCorpus

        corpus = StoredCorpus(place, cache / "downloads", say)
    else:
        corpus = Corpus(Path(place).expanduser())
    name = corpus.manifest.get("source", {}).get("name", config.name)
    vocab = corpus.manifest.get("settings", {}).get("vocab", config.vocab)
    if config.name not in ("", name):
        raise ValueError(
            f"data.name={config.name!r}, but data.corpus={config.corpus!r} was made with "
            f"data.name={name!r}: set that, or name another corpus"
        )
    if config.tokenizer:
        if bring(Path(config.tokenizer)).hash != corpus.vocab.hash:
            raise ValueError(
                f"data.tokenizer={config.tokenizer!r} is not the vocabulary of data.corpus="
                f"{config.corpus!r}: leave it out, or name another corpus"
            )
    elif vocab not in ("brought", config.vocab):
        raise ValueError(
            f"data.vocab={config.vocab}, but data.corpus={config.corpus!r} has {vocab}: set "
            f"data.vocab to {vocab}"
        )
    _require_made_with(config, corpus)
    return corpus


def _require_made_with(config: DataConfig, corpus: Corpus) -> None:
    """Refuse settings of the text and its symbols with which a prepared corpus was not made."""
    made = corpus.manifest.get("settings")
    if not made:
        return
    names = ["path", "valid_path", "test_path", "json_field", "split_by", "valid_fraction"]
    names += ["test_fraction"] + ["vocab_size", "vocab_from"] * (not config.tokenizer)
    default = dataclasses.asdict(DataConfig())
    # The manifest leaves out where symbols are counted where that is the training text.
    made = default | {"vocab_from": "train"} | made
    for name in names:
        value = getattr(config, name)
        if value not in (default[name], made[name]):
            raise ValueError(
                f"data.{name}={value!r}, but data.corpus={config.corpus!r} was made with "
                f"{made[name]!r}: leave it at {default[name]!r}, or name another corpus"
            )


def _title(config: DataConfig, files: TextFiles) -> str:
    name = config.name or files.root.name or "text"
    return re.sub(r"[^\w.+-]", "_", name)


def _settings(config: DataConfig) -> dict[str, Any]:
    """Return the settings on which the symbols depend; where they lie is not one.

    Those that came later are left out where they change nothing, so that what was prepared before
    is still found.
    """
    settings = dataclasses.asdict(config)
    for name in (
        *("cache_dir", "workers", "vocab_from", "json_field", "tokenizer", "reset_at"),
        *("corpus", "verify"),
    ):
        del settings[name]
    if config.tokenizer:
        settings["tokenizer"] = checksum(_tokenizer_file(config.tokenizer))
        if is_vocabulary(folder := Path(config.tokenizer)):
            # How symbols are joined, and where lines end.
            settings["tokenizer_rules"] = checksum(folder / VOCAB_FILE)
        settings["vocab"] = "brought"
    if config.vocab not in ("words", "bpe", "integers") or config.tokenizer:
        settings["vocab_size"] = None
    if config.vocab in ("words", "chars") and vocabulary_source(config) != "train":
        settings["vocab_from"] = vocabulary_source(config)
    if config.json_field != DataConfig().json_field:
        settings["json_field"] = config.json_field
    return settings


def _tokenizer_file(given: str) -> Path:
    path = Path(given)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"data.tokenizer={given!r}: there is no file {path}. A run keeps its vocabulary: to go "
            "on with one or evaluate it, give --data.tokenizer RUN/model/last"
        )
    return path


def _key(settings: dict[str, Any], files: TextFiles) -> str:
    parts = (files.train, files.valid or (), files.test or ())
    identity = [
        [x.url, x.size, x.version]
        if (x := files.stored.get(path))
        else [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
        for paths in parts
        for path in paths
    ]
    definition = json.dumps([FORMAT_VERSION, settings, identity], sort_keys=True)
    return hashlib.sha256(definition.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _remove_abandoned(cache: Path, ours: Path) -> None:
    """Remove what was stopped and not gone on with for a week."""
    for folder in cache.glob(".building-*"):
        if folder != ours and time.time() - folder.stat().st_mtime > _ONE_WEEK:
            shutil.rmtree(folder, ignore_errors=True)
