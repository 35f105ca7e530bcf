"""Tokens in an object store, read in blocks on demand.

Each of the batched streams reads its part of a corpus. A rank that owns some of the streams
downloads their parts only.
"""

import math
import threading
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from jaxtyping import Integer

from transformer_xl.data.store import RANGE_BYTES, describe, has_ranges, open_store, read_range

BLOCK_BYTES = 1 << 20
"""Bytes of a block; each stream holds two blocks."""
_CONNECTIONS = 16


class StoredTokens:
    """The tokens of a file in a store, as an array that is read where it is indexed.

    It holds the blocks of the last call and prefetches those that follow. With B sequential
    streams these are two blocks each, and no byte is read twice.

    Attributes:
        bytes_read: Bytes requested so far.

    Raises:
        OSError: The file has another size, or its server gives no byte ranges.
    """

    def __init__(
        self, url: str, dtype: np.dtype, n_tokens: int, *, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.dtype, self.shape, self.ndim = dtype, (n_tokens,), 1
        self.bytes_read = 0
        self._url = url
        self._per_block = max(1, block_bytes // dtype.itemsize)
        self._fs, self._path = open_store(url)
        n_bytes = n_tokens * dtype.itemsize
        if (found := describe(url).size) != n_bytes:
            raise OSError(f"{url} has {found} bytes instead of {n_bytes}")
        if not has_ranges(self._fs, self._path, n_bytes):
            raise OSError(
                f"the server of {url} gives no byte ranges, without which it cannot be read in "
                "parts: copy the corpus to a disk or to another store"
            )
        self._counting = threading.Lock()
        self._n_readers = 0
        self._blocks: dict[int, Future[np.ndarray]] = {}
        self._asked: SimpleQueue[tuple[int, Future[np.ndarray]]] = SimpleQueue()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, places: Any) -> Any:
        """Return tokens at an index, of a slice, or at an array of positions."""
        if isinstance(places, slice):
            start, stop, step = places.indices(len(self))
            if step != 1:
                return self[np.arange(start, stop, step)]
            found = np.empty(max(0, stop - start), self.dtype)
            per_read = RANGE_BYTES // self.dtype.itemsize
            for at in range(0, len(found), per_read):
                part = found[at : at + per_read]
                part[:] = self._read(start + at, start + at + len(part))
            return found
        places = np.asarray(places)
        if places.size == 0:
            return np.empty(places.shape, self.dtype)
        if places.dtype.kind not in "iu":
            raise IndexError(f"positions must be integers, not {places.dtype.name}")
        n = len(self)
        if places.min() < -n or places.max() >= n:
            raise IndexError(f"positions {places.min()} to {places.max()} of {n:,} tokens")
        flat = places.ravel() % n
        found = np.empty(flat.shape, self.dtype)
        blocks, where = np.unique(flat // self._per_block, return_inverse=True)
        self._expect(blocks.tolist())
        order = np.argsort(where, kind="stable")
        ends = np.cumsum(np.bincount(where))
        for block, chosen in zip(blocks.tolist(), np.split(order, ends[:-1]), strict=True):
            tokens = self._blocks[block].result()
            found[chosen] = tokens[flat[chosen] - block * self._per_block]
        return found.reshape(places.shape)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read all tokens."""
        return self[:].astype(dtype or self.dtype, copy=False)

    def _expect(self, blocks: list[int]) -> None:
        """Start reading blocks and their successors, and drop all others."""
        n_blocks = math.ceil(len(self) / self._per_block)
        kept = {}
        for block in dict.fromkeys([*blocks, *((block + 1) % n_blocks for block in blocks)]):
            task = self._blocks.get(block)
            # A failed block is tried again when it is needed.
            if task is None or (task.done() and task.exception() is not None):
                task = Future()
                self._asked.put((block, task))
            kept[block] = task
        self._blocks = kept
        # Daemon threads, unlike those of an executor, do not delay the exit of the program while
        # they wait for the network.
        with self._counting:
            n_new = min(self._asked.qsize(), _CONNECTIONS - self._n_readers)
            self._n_readers += max(0, n_new)
        for _ in range(n_new):
            threading.Thread(target=self._read_blocks, name="tokens", daemon=True).start()

    def _read_blocks(self) -> None:
        """Read blocks until none is requested."""
        while True:
            # Under one lock, so that no request is missed.
            with self._counting:
                try:
                    block, task = self._asked.get_nowait()
                except Empty:
                    self._n_readers -= 1
                    return
            start = block * self._per_block
            try:
                task.set_result(self._read(start, min(start + self._per_block, len(self))))
            except BaseException as error:  # noqa: BLE001  (raised where the block is used)
                task.set_exception(error)

    def _read(self, start: int, stop: int) -> np.ndarray:
        size = self.dtype.itemsize
        data = read_range(self._fs, self._path, start * size, stop * size, self._url)
        with self._counting:
            self.bytes_read += len(data)
        return np.frombuffer(data, self.dtype)


Tokens = Integer[np.ndarray | StoredTokens, " length"]
"""A split in tokens: memory-mapped, or in a store."""
