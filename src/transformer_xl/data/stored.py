"""A corpus in a store.

The small files and the held-out splits are fetched to the cache, where the latter are checked. Of
the training split, which may be larger than any disk, blocks are read as streams reach them.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from transformer_xl.config.files import replace_file
from transformer_xl.data.corpus import MANIFEST, Corpus
from transformer_xl.data.fetching import fetch
from transformer_xl.data.store import (
    RANGE_BYTES,
    StoredObject,
    describe,
    open_store,
    read_range,
)
from transformer_xl.data.tokens import StoredTokens, Tokens

_VOCAB = ("tokenizer.json", "vocab.json")
# A manifest names every text; one of a million takes this much.
_LARGEST_MANIFEST = 256 << 20


class StoredCorpus(Corpus):
    """A prepared corpus at a URL.

    Attributes:
        url: The folder in the store.

    Raises:
        FileNotFoundError: There is no corpus.
        RuntimeError: The corpus is damaged or from a newer version.
        OSError: The store does not answer.
    """

    def __init__(self, url: str, downloads: Path, say: Callable[[str], None]) -> None:
        self.url = url.rstrip("/")
        self._say = say
        manifest = self._read_manifest()
        key = hashlib.sha256(json.dumps([self.url, manifest.decode("latin-1")]).encode())
        title = re.sub(r"[^\w.+-]", "_", self.url.rsplit("/", 1)[-1])[-60:]
        folder = downloads / "corpora" / f"{title}-{key.hexdigest()[:16]}"
        if not (folder / MANIFEST).is_file():
            replace_file(folder / MANIFEST, manifest)
        self._bring(folder, *_VOCAB)
        super().__init__(folder)

    def _read_manifest(self) -> bytes:
        about = describe(f"{self.url}/{MANIFEST}")
        if about.size is None or about.size > _LARGEST_MANIFEST:
            raise RuntimeError(f"{about.url} is no manifest of a corpus: {about.size} bytes")
        return read_range(*open_store(about.url), 0, about.size, about.url)

    def _object(self, file: str) -> StoredObject:
        return describe(f"{self.url}/{file}", file)

    def _bring(self, folder: Path, *files: str) -> None:
        if missing := [file for file in files if not (folder / file).is_file()]:
            fetch({folder / file: self._object(file) for file in missing}, folder, self._say)

    def _damage(self, path: Path, what: str) -> str:
        return (
            f"{self.url}/{path.name} is damaged: {what}. Copy the prepared corpus there again, and "
            f"delete the folder {self.folder}"
        )

    def _size(self, file: str) -> int | None:
        if (self.folder / file).is_file():
            return super()._size(file)
        try:
            return self._object(file).size
        except FileNotFoundError:
            return None

    def split(self, name: str) -> Integer[np.ndarray, " length"]:
        """Return the symbols of a split, fetched to the cache, checked, and memory-mapped.

        Raises:
            ValueError: The split is empty.
            RuntimeError: It does not have its checksum.
        """
        about = self._about(name)
        file = self.folder / about["file"]
        if about["tokens"] and not file.is_file():
            known = replace(self._object(file.name), sha256=about["sha256"])
            fetch({file: known}, self.folder, self._say)
        return super().split(name)

    def tokens(self, name: str) -> Tokens:
        """Return the symbols of a split, read in the store, in the places that are asked for.

        Raises:
            ValueError: The split is empty.
            OSError: The store does not answer, or gives no byte ranges.
        """
        about = self._about(name)
        if about["tokens"] == 0 or (self.folder / about["file"]).is_file():
            return self.split(name)
        return StoredTokens(f"{self.url}/{about['file']}", self.dtype, about["tokens"])

    def _digest(self, file: str) -> str:
        if (self.folder / file).is_file():
            return super()._digest(file)
        about = self._object(file)
        fs, path = open_store(about.url)
        digest = hashlib.sha256()
        for start in range(0, about.size or 0, RANGE_BYTES):
            stop = min(start + RANGE_BYTES, about.size or 0)
            digest.update(read_range(fs, path, start, stop, about.url))
        return digest.hexdigest()

    def verify_once(self, say: Callable[[str], None]) -> None:
        """Do nothing: sizes were compared, and what is fetched is checked then."""
