"""A corpus from text: found, cut into tokens, and kept in a cache."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer_xl.config import FORMAT_VERSION, DataConfig
from transformer_xl.config.files import checksum
from transformer_xl.data.building import build, vocabulary_source
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.finding import fetch_text, find_text
from transformer_xl.data.locking import LOCK, locked
from transformer_xl.data.store import is_url, local_path
from transformer_xl.data.stored import StoredCorpus
from transformer_xl.data.text import TextFiles
from transformer_xl.data.vocab import VOCAB_FILE
from transformer_xl.data.vocab_files import bring, is_vocabulary

_ONE_WEEK = 7 * 24 * 60 * 60


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
