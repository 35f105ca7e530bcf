"""A corpus: text as numbers on disk, read without loading it.

A corpus folder holds ``tokenizer.json`` and ``vocab.json`` (the vocabulary), ``train.bin``,
``valid.bin`` and ``test.bin`` (the symbols, 16 or 32 bits each) and ``manifest.json`` (what is
there, with checksums, and where it came from). It is written once, under a temporary name, and
renamed when it is whole (`building`). Text passes through in blocks; no part is ever in memory
as a whole. ``verified.json`` remembers that the checksums were right, until a file changes.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from transformer_xl.config import FORMAT_VERSION
from transformer_xl.config.files import checksum, replace_file
from transformer_xl.data.locking import LOCK, locked
from transformer_xl.data.text import SPLITS
from transformer_xl.data.tokens import Tokens
from transformer_xl.data.vocab import Vocab
from transformer_xl.data.vocab_files import load_vocab

MANIFEST = "manifest.json"
VERIFIED = "verified.json"
"""Which token files were compared with their checksums, and their sizes and times then."""
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
