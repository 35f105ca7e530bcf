"""A corpus: tokens in memory-mapped files.

A corpus folder holds ``tokenizer.json`` and ``vocab.json`` (the vocabulary), ``train.bin``,
``valid.bin`` and ``test.bin`` (the tokens, 16 or 32 bits each) and ``manifest.json`` (the files,
with checksums, and their sources). It is built under a temporary name and renamed when complete
(`preparing`). Text is processed in blocks and never held in memory as a whole. ``verified.json``
records verified checksums until a file changes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import msgspec
import numpy as np
from jaxtyping import Integer

from transformer_xl.config import FORMAT_VERSION, Say, checksum, replace_file, write_atomically
from transformer_xl.data.locking import LOCK, once
from transformer_xl.data.text import SPLITS
from transformer_xl.data.vocab import Vocab
from transformer_xl.data.vocab_files import load_vocab, require_format
from transformer_xl.errors import DataError, InputError

MANIFEST = "manifest.json"
VERIFIED = "verified.json"
"""Token files whose checksums were verified, with their sizes and times of change."""


class _Written(TypedDict):
    file: str
    tokens: int
    sha256: str


class SplitFile(msgspec.Struct):
    """The tokens of a split, as ``manifest.json`` describes them."""

    file: Annotated[str, msgspec.Meta(pattern=r"^[^/\\]+$")]
    tokens: int
    bytes: int
    """Of the text."""
    sha256: str
    text_files: list[str] = []
    """The files that it was made of."""


class SplitFiles(msgspec.Struct):
    """Those of all splits."""

    train: SplitFile
    valid: SplitFile
    test: SplitFile


class VocabHash(msgspec.Struct):
    """The vocabulary of a corpus, by its hash."""

    hash: str


class Manifest(msgspec.Struct):
    """The contents of ``manifest.json``."""

    format_version: int
    dtype: Literal["uint16", "uint32"]
    vocab: VocabHash
    splits: SplitFiles
    source: dict[str, str] = {}
    """The name of a known corpus, and what the text is."""
    settings: dict[str, object] = {}
    """The settings on which the tokens depend."""
    text_changes: dict[str, int] = {}
    """What normalization changed in a text that is not raw."""


class Corpus:
    """A prepared text.

    Attributes:
        folder: Its folder.
        manifest: The contents of ``manifest.json``.
        vocab: Its vocabulary.
        dtype: Type of a token on disk, ``uint16`` or ``uint32``.

    Raises:
        FileNotFoundError: The folder holds no corpus.
        DataError: The corpus is damaged or from a newer version.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{self.folder} holds no corpus: manifest.json is missing")
        try:
            # By Python's own reader: names of files may have bytes that are not UTF-8.
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise self._damage(path, f"it cannot be read: {error}") from error
        require_format(path, content)
        try:
            self.manifest = msgspec.convert(content, Manifest)
        except msgspec.ValidationError as error:
            raise self._damage(path, f"it cannot be read: {error}") from error
        self.dtype = np.dtype(self.manifest.dtype)
        for split in map(self._split_file, SPLITS):
            file, expected = self.folder / split.file, split.tokens * self.dtype.itemsize
            size = file.stat().st_size if file.is_file() else "no"
            if size != expected:
                raise self._damage(file, f"it has {size} bytes instead of {expected:,}")
        try:
            self.vocab: Vocab = load_vocab(self.folder)
        except (FileNotFoundError, DataError) as error:
            raise self._damage(self.folder, str(error)) from error
        if self.vocab.hash != self.manifest.vocab.hash:
            problem = "it is not the vocabulary in manifest.json"
            raise self._damage(self.folder / "vocab.json", problem)

    def _damage(self, path: Path, what: str) -> DataError:
        return DataError(
            f"{path} is damaged: {what}. Delete the folder {self.folder} and prepare it again"
        )

    def _split_file(self, name: str) -> SplitFile:
        if name not in SPLITS:
            raise DataError(f"split {name!r} is none of {', '.join(SPLITS)}")
        return getattr(self.manifest.splits, name)

    @property
    def checksums(self) -> dict[str, str]:
        """What identifies the corpus wherever it is: SHA-256 of the vocabulary and each split."""
        return {
            "vocab": self.vocab.hash,
            **{name: self._split_file(name).sha256 for name in SPLITS},
        }

    def n_tokens(self, name: str) -> int:
        """Number of tokens of a split."""
        return self._split_file(name).tokens

    def n_bytes(self, name: str) -> int:
        """Number of bytes of the text of a split."""
        return self._split_file(name).bytes

    def split(self, name: str) -> Integer[np.ndarray, " length"]:
        """Return the tokens of a split, memory-mapped.

        Raises:
            DataError: The split is empty.
        """
        split = self._split_file(name)
        if not split.tokens:
            remedy = "give the training text with --data.path"
            if name != "train":
                remedy = (
                    f"nothing was held out for it; set data.{name}_fraction above 0 or give "
                    f"data.{name}_path"
                )
            raise DataError(f"the corpus has no {name} split: {remedy}")
        return np.memmap(self.folder / split.file, dtype=self.dtype, mode="r")

    def raw(self, name: str, *, last: int = 0) -> bytes:
        """Restore the bytes of a split from its tokens, as input for a compressor.

        Args:
            name: The split.
            last: Only of so many tokens at its end; 0: of all.

        Raises:
            DataError: The split is empty.
            InputError: Its tokens do not determine the text.
        """
        tokens = self.split(name)[-last:]
        if self.vocab.kind == "bytes":
            return tokens.astype(np.uint8).tobytes()
        return self.vocab.decode_bytes(tokens.tolist())

    @property
    def held_out(self) -> str:
        """The split that says how good a model is: test, or valid where there is no test text."""
        return "test" if self.n_tokens("test") > 1 else "valid"

    def verify(self) -> None:
        """Verify the checksum of every token file.

        Raises:
            DataError: A file differs.
        """
        for split in map(self._split_file, SPLITS):
            if checksum(self.folder / split.file) != split.sha256:
                problem = f"its contents do not match the checksum in {MANIFEST}"
                raise self._damage(self.folder / split.file, problem)

    def verify_once(self, say: Say) -> None:
        """Call :meth:`verify` unless the files have not changed since the last time.

        If another process is verifying, this one waits. In a read-only folder, where the result
        cannot be recorded, files are verified each time.

        Raises:
            DataError: A file differs.
        """

        def verify() -> None:
            versions = self._versions()
            self.verify()
            with suppress(OSError):
                replace_file(self.folder / VERIFIED, json.dumps(versions).encode())
                (self.folder / LOCK).unlink(missing_ok=True)

        activity = "another process is verifying checksums"
        once(self.folder, say, activity, find=self._is_verified, make=verify)

    def _versions(self) -> dict[str, list[str | int]]:
        """Return checksum, size and time of change, in nanoseconds, of each token file."""
        files = {x.file: x.sha256 for x in map(self._split_file, SPLITS)}
        stats = {name: (self.folder / name).stat() for name in files}
        return {x: [files[x], stat.st_size, stat.st_mtime_ns] for x, stat in stats.items()}

    def _is_verified(self) -> bool:
        try:
            return json.loads((self.folder / VERIFIED).read_bytes()) == self._versions()
        except (OSError, ValueError):
            return False


def write_corpus(
    folder: Path | str, vocab: Vocab, splits: Mapping[str, Iterable[np.ndarray]], source: str
) -> Corpus:
    """Write a corpus of tokens from elsewhere, such as a pipeline on a cluster.

    Args:
        folder: A new folder, or that of a call that was stopped.
        vocab: The vocabulary.
        splits: By ``train``, ``valid`` and ``test``, the tokens in pieces.
        source: What the text is, for people.

    Raises:
        InputError: There is no such split, a corpus is there, or the tokens are no integers of the
            vocabulary in one dimension.
        OSError: A file cannot be written.
    """
    folder = Path(folder)
    if (folder / MANIFEST).exists() or not {*splits} <= {*SPLITS}:
        raise InputError(
            f"splits={[*splits]} must be of {', '.join(SPLITS)}, and {folder} a new folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    vocab.save(folder)
    abouts = {}
    for name in SPLITS:
        n_bytes = 0

        def checked(name: str = name) -> Iterator[np.ndarray]:
            nonlocal n_bytes
            for piece in map(np.asarray, splits.get(name, ())):
                is_row = piece.ndim == 1 and piece.dtype.kind in "iu"
                if not is_row or (len(piece) and not 0 <= piece.min() <= piece.max() < len(vocab)):
                    raise InputError(
                        f"{name}: a piece of shape {piece.shape} and type {piece.dtype} must be "
                        f"tokens in one dimension, each among the {len(vocab):,} of the vocabulary"
                    )
                sizes = vocab.token_bytes
                n_bytes += (
                    len(vocab.decode(piece).encode()) if sizes is None else sizes[piece].sum()
                )
                yield piece

        about = write_tokens(folder / f"{name}.bin", vocab, checked())
        abouts[name] = about | {"bytes": int(n_bytes)}
    replace_file(folder / MANIFEST, manifest_of(vocab, abouts, {"description": source}))
    return Corpus(folder)


def write_tokens(path: Path, vocab: Vocab, pieces: Iterable[np.ndarray]) -> _Written:
    """Write tokens, 16 or 32 bits each, atomically; return ``file``, ``tokens``, ``sha256``."""
    n_tokens = 0

    def write(temporary: Path) -> None:
        nonlocal n_tokens
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece.astype(token_dtype(vocab)).data)
                n_tokens += len(piece)

    write_atomically(path, write)
    return {"file": path.name, "tokens": n_tokens, "sha256": checksum(path)}


def token_dtype(vocab: Vocab) -> np.dtype:
    """Return the type in which the tokens of a vocabulary are stored."""
    return np.dtype(np.uint16 if len(vocab) <= 1 << 16 else np.uint32)


def manifest_of(
    vocab: Vocab, splits: Mapping[str, object], source: dict[str, str], **others: object
) -> bytes:
    """Return the contents of ``manifest.json``."""
    manifest = {
        "format_version": FORMAT_VERSION,
        "dtype": token_dtype(vocab).name,
        "vocab": {"kind": vocab.kind, "size": len(vocab), "hash": vocab.hash},
        "splits": splits,
        "source": source,
    }
    return json.dumps(manifest | others, indent=2).encode()
