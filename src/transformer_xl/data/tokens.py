"""Tokens in a store, read in blocks, where they are asked for.

Streams go through a corpus side by side, each through its part. Of a file in a store, a rank that
owns some of the streams reads their parts and nothing else.
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
"""How much is read at once: a stream of a rank holds two such blocks."""
_CONNECTIONS = 16


class StoredTokens:
    """The tokens of a file in a store, as an array that is read where it is indexed.

    It holds the blocks of the last call and those that follow them, which are read ahead. Where
    each of B streams goes through its part, that is two blocks for each, and no byte is read twice.

    Args:
        url: The file.
        dtype: Of a token.
        n_tokens: How many there are.
        block_bytes: How much is read at once.

    Attributes:
        bytes_read: Bytes asked for so far.

    Raises:
        OSError: The file has another size, or its server gives no byte ranges.
    """

    def __init__(
        self, url: str, dtype: np.dtype, n_tokens: int, *, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.dtype = dtype
        self.shape = (n_tokens,)
        self.ndim = 1
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
        """Return tokens: at an index, of a slice, or at an array of places.

        Raises:
            IndexError: There is no such place.
            OSError: The store does not answer.
        """
        if isinstance(places, slice):
            start, stop, step = places.indices(len(self))
            if step != 1:
                return self[np.arange(start, stop, step)]
            return self._read_through(start, max(start, stop))
        places = np.asarray(places)
        if places.size == 0:
            return np.empty(places.shape, self.dtype)
        if places.dtype.kind not in "iu":
            raise IndexError(f"places are integers, not {places.dtype.name}")
        n = len(self)
        if places.min() < -n or places.max() >= n:
            raise IndexError(f"places {places.min()} to {places.max()} of {n:,} tokens")
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
        """Read all of it."""
        return self[:].astype(dtype or self.dtype, copy=False)

    def _expect(self, blocks: list[int]) -> None:
        """Begin to read blocks and those behind them, and forget the others."""
        n_blocks = math.ceil(len(self) / self._per_block)
        wanted = dict.fromkeys([*blocks, *((block + 1) % n_blocks for block in blocks)])
        kept = {}
        for block in wanted:
            task = self._blocks.get(block)
            # What failed is tried again by who needs it now.
            if task is None or (task.done() and task.exception() is not None):
                task = Future()
                self._asked.put((block, task))
            kept[block] = task
        self._blocks = kept
        # Daemons: what they read ahead nobody may ever ask for, and a program must be able to end
        # while they wait for a network. Those of an executor would be waited for.
        with self._counting:
            n_new = min(self._asked.qsize(), _CONNECTIONS - self._n_readers)
            self._n_readers += max(0, n_new)
        for _ in range(n_new):
            threading.Thread(target=self._read_blocks, name="tokens", daemon=True).start()

    def _read_blocks(self) -> None:
        """Read blocks until none is asked for."""
        while True:
            # Together, so that no block comes in between and finds nobody.
            with self._counting:
                try:
                    block, task = self._asked.get_nowait()
                except Empty:
                    self._n_readers -= 1
                    return
            start = block * self._per_block
            try:
                task.set_result(self._read(start, min(start + self._per_block, len(self))))
            except BaseException as error:  # noqa: BLE001  (it is raised where the block is used)
                task.set_exception(error)

    def _read(self, start: int, stop: int) -> np.ndarray:
        size = self.dtype.itemsize
        data = read_range(self._fs, self._path, start * size, stop * size, self._url)
        with self._counting:
            self.bytes_read += len(data)
        return np.frombuffer(data, self.dtype)

    def _read_through(self, start: int, stop: int) -> np.ndarray:
        found = np.empty(stop - start, self.dtype)
        step = RANGE_BYTES // self.dtype.itemsize
        for at in range(start, stop, step):
            end = min(at + step, stop)
            found[at - start : end - start] = self._read(at, end)
        return found


Tokens = Integer[np.ndarray | StoredTokens, " length"]
"""A split in tokens: memory-mapped, or in a store."""
