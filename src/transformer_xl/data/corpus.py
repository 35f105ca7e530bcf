"""A corpus: text as numbers on disk, read without loading it.

A corpus folder holds ``tokenizer.json`` and ``vocab.json`` (the vocabulary), ``train.bin``,
``valid.bin`` and ``test.bin`` (the symbols, 16 or 32 bits each) and ``manifest.json`` (what is
there, with checksums, and where it came from). It is written once, under a temporary name, and
renamed when it is whole. Text passes through in blocks; no part is ever in memory as a whole.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from transformer_xl.config import FORMAT_VERSION, DataConfig
from transformer_xl.data.sources import find_text
from transformer_xl.data.text import SPLITS, Span, TextFiles, divide, read_blocks, read_bytes
from transformer_xl.data.vocab import Vocab, load_vocab, train_vocab

_ONE_DAY = 24 * 60 * 60


class Corpus:
    """A prepared text.

    Attributes:
        folder: Where it lies.
        manifest: The contents of ``manifest.json``.
        vocab: Its vocabulary.

    Raises:
        FileNotFoundError: The folder holds no corpus.
        RuntimeError: The corpus is damaged or from a newer version.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        path = self.folder / "manifest.json"
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
            self._dtype = np.dtype(self.manifest["dtype"])
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
        expected = about["tokens"] * self._dtype.itemsize
        found = path.stat().st_size if path.is_file() else None
        if found != expected:
            raise RuntimeError(
                self._damage(path, f"{found:,} bytes instead of {expected:,}")
                if found is not None
                else self._damage(path, "it is missing")
            )

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
        if about["tokens"] == 0:
            raise ValueError(
                f"the corpus has no {name} split: nothing was held out for it; set "
                f"data.{name}_fraction above 0 or give data.{name}_path"
            )
        return np.memmap(self.folder / about["file"], dtype=self._dtype, mode="r")

    def verify(self) -> None:
        """Compare every token file with its checksum.

        Raises:
            RuntimeError: A file differs.
        """
        for name in SPLITS:
            path = self.folder / self._about(name)["file"]
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != self._about(name)["sha256"]:
                raise RuntimeError(
                    self._damage(path, "its contents do not match the checksum in manifest.json")
                )


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

    Args:
        config: Which text, cut and split how.
        progress: Takes a line of text for the user now and then.

    Raises:
        ValueError: The settings or the text do not fit.
        OSError: A file is missing, a download failed, the cache cannot be written.
        RuntimeError: The corpus in the cache is damaged.
    """
    say = progress or (lambda line: None)
    cache = cache_folder(config)
    files = find_text(config, cache / "downloads", say)
    settings = _settings(config)
    folder = cache / f"{config.name or files.root.name or 'text'}-{_key(settings, files)}"
    if folder.is_dir():
        corpus = Corpus(folder)
        corpus.verify()
        return corpus
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        temporary = Path(tempfile.mkdtemp(dir=cache, prefix=f".building-{_builder()}-"))
    except OSError as error:
        raise OSError(
            f"cannot write to the cache {cache}: {error.strerror or error}; "
            "choose another folder with --data.cache_dir or the variable TXL_CACHE"
        ) from error
    try:
        _build(config, files, settings, temporary, say)
        try:
            temporary.rename(folder)
        except OSError:
            # Another process was faster; what it built has the same key.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Corpus(folder)


def _settings(config: DataConfig) -> dict[str, Any]:
    """Return the settings on which the symbols depend; where they lie is not one."""
    settings = dataclasses.asdict(config)
    del settings["cache_dir"]
    if config.vocab not in ("words", "bpe"):
        settings["vocab_size"] = None
    return settings


def _key(settings: dict[str, Any], files: TextFiles) -> str:
    parts = (files.train, files.valid or (), files.test or ())
    identity = [
        [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
        for paths in parts
        for path in paths
    ]
    definition = json.dumps([FORMAT_VERSION, settings, identity], sort_keys=True)
    return hashlib.sha256(definition.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _builder() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _remove_abandoned(cache: Path) -> None:
    """Remove what killed processes left: ours at once, that of other machines after a day."""
    for folder in cache.glob(".building-*"):
        match = re.fullmatch(r"\.building-(.*)-(\d+)-[^-]*", folder.name)
        is_ours = match is not None and match[1] == socket.gethostname()
        if is_ours and match and Path("/proc/self").exists():
            is_abandoned = not Path("/proc", match[2]).exists()
        else:
            is_abandoned = time.time() - folder.stat().st_mtime > _ONE_DAY
        if is_abandoned:
            shutil.rmtree(folder, ignore_errors=True)


def _build(
    config: DataConfig,
    files: TextFiles,
    settings: dict[str, Any],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    splits = divide(config, files)
    if not sum(map(len, splits["train"])):
        raise ValueError(
            f"there is no text to train on in {files.description}: it is empty, or too short "
            "for the shares that are held out"
        )
    say(f"making a vocabulary of {config.vocab}")
    held_out = splits["valid"] + splits["test"]
    vocab = train_vocab(
        config.vocab,
        read_blocks(config.vocab, splits["train"]),
        config.vocab_size,
        read_blocks(config.vocab, held_out),
    )
    vocab.save(folder)
    dtype = np.dtype(np.uint16 if len(vocab) <= 1 << 16 else np.uint32)
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "dtype": dtype.name,
        "vocab": {"kind": vocab.kind, "size": len(vocab), "hash": vocab.hash},
        "splits": {},
        "source": {"name": config.name, "description": files.description},
        "settings": settings,
    }
    for name in SPLITS:
        say(f"writing {name}: {sum(map(len, splits[name])):,} bytes of text")
        about = _write(vocab, splits[name], folder / f"{name}.bin", dtype)
        about["text_files"] = [os.path.relpath(s.path, files.root) for s in splits[name]]
        manifest["splits"][name] = about
        say(f"{name}: {about['tokens']:,} tokens, {about['bytes']:,} bytes")
    with (folder / "manifest.json").open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _write(vocab: Vocab, spans: Sequence[Span], path: Path, dtype: np.dtype) -> dict[str, Any]:
    digest = hashlib.sha256()
    n_tokens = 0
    with path.open("wb") as file:
        for tokens in _encode(vocab, spans):
            block = np.asarray(tokens).astype(dtype)
            digest.update(block.data)
            file.write(block.data)
            n_tokens += len(block)
        file.flush()
        os.fsync(file.fileno())
    return {
        "file": path.name,
        "tokens": n_tokens,
        "bytes": sum(map(len, spans)),
        "sha256": digest.hexdigest(),
    }


def _encode(vocab: Vocab, spans: Sequence[Span]) -> Iterator[np.ndarray | list[int]]:
    if vocab.kind == "bytes":
        for span in spans:
            for block in read_bytes(span):
                yield np.frombuffer(block, dtype=np.uint8)
        return
    for block in read_blocks(vocab.kind, spans):
        yield vocab.encode(block)
