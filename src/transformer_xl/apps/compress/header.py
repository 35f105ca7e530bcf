"""The file format: a prefix with version and checksum, a header, and the payload.

    TXLZ  version  length  CRC-32  header  payload
    4     1        2       4       length  the rest

Numbers are little-endian; the CRC-32 is that of the header, which is a msgpack array.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
import numpy as np
from jaxtyping import Bool, Int32

from transformer_xl.apps.compress.transforms import TRANSFORMS
from transformer_xl.errors import DataError

MAGIC = b"TXLZ"
VERSION = 5
"""Incremented whenever the coding changes."""
READABLE = (1, 2, 3, 4, 5)
"""Versions that can be read."""
XZ: Literal["xz"] = "xz"
_WITHOUT_MODEL = {XZ: 4, None: 3}
"""What older versions of the package read, too."""

_PREFIX = struct.Struct("<4sBHI")
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class ArchiveError(DataError):
    """A file is not an archive, is damaged, has another version, or cannot be decoded here."""


class Learning(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How the model learned while coding."""

    fresh: bool
    """Whether it started from random weights instead of a trained model's."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    """Seed of random weights: 0, but in older archives."""
    lr: Annotated[float, msgspec.Meta(gt=0, le=1e3)]
    """Peak learning rate."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
    """The rounding of sums depends on it."""
    device: Literal["cpu", "cuda"]
    optimizer: Literal["muon", "adamw"] = "muon"
    """Archives up to version 4 learned by Muon."""


class Coding(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How the content is split into streams, predicted and coded.

    The lengths of the streams differ by at most 1; the longer ones come first.
    """

    model: _Digest
    """Hash of the initial weights, the settings and the vocabulary."""
    n_tokens: _Count
    streams: Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
    segment_len: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    """Symbols of each stream in a round."""
    mem_len: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    learning: Learning | None
    """None: the weights are fixed."""
    exact_frequencies: bool = False
    """Whether the frequencies of the sinusoids are in double precision. In single precision, as in
    version 1, their last digit depends on the processor."""
    exact_rotary: bool = False
    """The same for rotary positions (kind gpt), whose frequencies versions 1 and 2 round."""
    counted: _Count = 0
    """Counts are mixed into the model's predictions: as many as so many symbols have at most; from
    version 5. 0: none."""
    transforms: Annotated[int, msgspec.Meta(ge=0, lt=1 << len(TRANSFORMS))] = 0
    """Which transforms were applied to the content, a bit for each; from version 5."""

    @property
    def length(self) -> int:
        """Symbols of the longest stream."""
        return -(-self.n_tokens // self.streams)

    @property
    def n_rounds(self) -> int:
        """Number of rounds, each of ``segment_len`` symbols of every stream."""
        return -(-self.length // self.segment_len)

    def rounds(self) -> Iterator[slice]:
        """Yield the positions of each round in the streams."""
        for start in range(0, self.length, self.segment_len):
            yield slice(start, min(start + self.segment_len, self.length))

    def is_there(self, places: slice) -> Bool[np.ndarray, "T B"]:
        """Which streams have a symbol at these positions; only at the last one some have none."""
        shorter, n_longer = divmod(self.n_tokens, self.streams)
        lengths = shorter + (np.arange(self.streams) < n_longer)
        return np.arange(places.start, places.stop)[:, None] < lengths

    def cut(self, tokens: Int32[np.ndarray, " n"], start: int) -> Int32[np.ndarray, "B columns"]:
        """Split a text into streams, each after the symbol ``start``, and padded with 0."""
        parts = np.zeros((self.streams, 1 + self.length), dtype=np.int32)
        parts[:, 0] = start
        parts[:, 1:][self.is_there(slice(0, self.length)).T] = tokens
        return parts

    def join(self, parts: Int32[np.ndarray, "B columns"]) -> Int32[np.ndarray, " n"]:
        """Join the streams that :meth:`cut` returned."""
        return parts[:, 1:][self.is_there(slice(0, self.length)).T]


class Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The header of a file."""

    size: _Count
    """Bytes of the content."""
    digest: _Digest
    """Hash of the content."""
    payload_crc: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
    made_by: Annotated[str, msgspec.Meta(max_length=200)]
    """Versions and processor, for the message when the file cannot be decoded."""
    coding: Coding | Literal["xz"] | None
    """How a model codes the content. None: it is stored as it is."""

    @property
    def model_coding(self) -> Coding | None:
        """How a model codes the content. None: without a model."""
        return self.coding if isinstance(self.coding, Coding) else None


def pack(header: Header, payload: bytes) -> bytes:
    """Return the whole file."""
    packed = msgspec.msgpack.encode(header)
    version = VERSION if header.model_coding else _WITHOUT_MODEL[header.coding]
    prefix = _PREFIX.pack(MAGIC, version, len(packed), zlib.crc32(packed))
    return prefix + packed + payload


def unpack(content: bytes) -> tuple[Header, bytes]:
    """Return header and payload of a whole file, checked against accidental damage.

    Raises:
        ArchiveError: It is not an archive, has a newer version, or is damaged.
    """
    if content[: len(MAGIC)] != MAGIC or len(content) < _PREFIX.size:
        raise ArchiveError("it is not a file of txl compress, or ends within its first bytes")
    _, version, length, crc = _PREFIX.unpack_from(content)
    if version not in READABLE:
        raise ArchiveError(
            f"it has format {version} and this version of transformer_xl reads the formats "
            f"{', '.join(map(str, READABLE))}: read it with the version that made it"
        )
    packed = content[_PREFIX.size : _PREFIX.size + length]
    payload = content[_PREFIX.size + length :]
    if len(packed) < length or zlib.crc32(packed) != crc:
        raise ArchiveError("it is damaged: its header does not match its checksum")
    try:
        header = msgspec.msgpack.decode(packed, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ArchiveError(f"it is damaged: its header is invalid ({error})") from error
    if zlib.crc32(payload) != header.payload_crc:
        raise ArchiveError(
            "it is damaged or truncated: its payload does not match its checksum; "
            "restore it from a copy"
        )
    if header.coding is None and len(payload) != header.size:
        raise ArchiveError(
            f"it is damaged: it stores {len(payload):,} bytes and its header says {header.size:,}"
        )
    return header, payload
