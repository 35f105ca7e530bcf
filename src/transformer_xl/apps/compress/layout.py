"""How a text is cut: in parts that are coded side by side, and these in rounds."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32


@dataclass(frozen=True)
class Layout:
    """Parts of a text, equally long but for one symbol; the longer ones come first.

    Raises:
        ValueError: There are more parts than symbols.
    """

    n_tokens: int
    """Symbols of the text."""
    streams: int
    """Parts."""
    segment_len: int
    """Symbols of each part in a round."""

    def __post_init__(self) -> None:
        if not 1 <= self.streams <= self.n_tokens:
            raise ValueError(
                f"streams={self.streams} must be at least 1 and at most the {self.n_tokens:,} "
                "symbols of the text"
            )

    @property
    def length(self) -> int:
        """Symbols of the longest part."""
        return -(-self.n_tokens // self.streams)

    @property
    def n_rounds(self) -> int:
        """How many rounds there are."""
        return -(-self.length // self.segment_len)

    def rounds(self) -> Iterator[slice]:
        """Return the places of each round in every part."""
        for start in range(0, self.length, self.segment_len):
            yield slice(start, min(start + self.segment_len, self.length))

    def is_there(self, places: slice) -> Bool[np.ndarray, "T B"]:
        """Which parts have a symbol at these places. Only at the very last some have none."""
        shorter, n_longer = divmod(self.n_tokens, self.streams)
        lengths = shorter + (np.arange(self.streams) < n_longer)
        return np.arange(places.start, places.stop)[:, None] < lengths

    def cut(self, tokens: Int32[np.ndarray, " n"]) -> Int32[np.ndarray, "B length"]:
        """Cut a text in its parts; where one has no symbol, there is a 0."""
        parts = np.zeros((self.streams, self.length), dtype=np.int32)
        parts[self.is_there(slice(0, self.length)).T] = tokens
        return parts

    def join(self, parts: Int32[np.ndarray, "B length"]) -> Int32[np.ndarray, " n"]:
        """Put the text together again."""
        return parts[self.is_there(slice(0, self.length)).T]
