"""Weight matrices in 8 or 4 bits, for inference: products of few rows wait for memory.

A :class:`PackedWeight` replaces a matrix: :func:`~transformer_xl.ops.products.linear` multiplies by
it, :meth:`PackedWeight.rows` looks up rows of it, and ``weight[a:b]`` are some of its rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int8, Shaped, UInt8
from torch import Tensor

LARGEST = 127
GROUP = 32
"""Numbers in 4 bits that share a scale."""
_SHARES = torch.linspace(0.8, 1.1, 13)
"""Of the largest number of a group, what its scale may stand for: the best one is taken."""
_Packed = TypeVar("_Packed", bound="PackedWeight")


class PackedWeight(ABC):
    """A matrix (F, E) of integers with scales in bfloat16; its numbers are in bfloat16.

    Attributes:
        values: The integers, a row for each of the matrix.
        scales: The scales.
        columns: E.
    """

    dtype = torch.bfloat16

    def __init__(
        self, values: Shaped[Tensor, "F packed"], scales: Float[Tensor, "F *groups"], columns: int
    ) -> None:
        self.values, self.scales, self.columns = values, scales, columns

    @classmethod
    @abstractmethod
    def of(cls: type[_Packed], weight: Float[Tensor, "F E"]) -> _Packed:
        """Quantize a matrix."""

    @abstractmethod
    def dequantize(self) -> Float[Tensor, "F E"]:
        """Return the numbers, in float32."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns of the matrix."""
        return len(self.values), self.columns

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.values.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self: _Packed, rows: slice) -> _Packed:
        """Return some of the rows, without a copy."""
        return type(self)(self.values[rows], self.scales[rows], self.columns)

    def rows(self, index: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch E"]:
        """Return rows by their index.

        Raises:
            IndexError: There is no such row.
        """
        flat = index.flatten()
        values, scales = (x.index_select(0, flat) for x in (self.values, self.scales))
        found = type(self)(values, scales, self.columns).dequantize().to(self.dtype)
        return found.view(*index.shape, self.columns)

    def product(
        self, x: Float[Tensor, "*batch E"], bias: Float[Tensor, " F"] | None
    ) -> Float[Tensor, "*batch F"]:
        """Return ``x weight^T + bias``, after the matrix was made as a whole: for many rows."""
        return F.linear(x, self.dequantize().to(x.dtype), bias)


class Int8Weight(PackedWeight):
    """A matrix in 8 bits, symmetrically, with a scale for each row: (F, E) and (F,)."""

    @classmethod
    def of(cls, weight: Float[Tensor, "F E"]) -> "Int8Weight":
        """Quantize a matrix; the error of an element is at most half the scale of its row."""
        # In the precision of storage, so that rounding the scale adds no error.
        scales = (weight.abs().amax(1) / LARGEST).to(cls.dtype)
        # A row of zeros has a scale of zero.
        worth = scales.to(weight.dtype).clamp(min=torch.finfo(cls.dtype).tiny)
        values = (weight / worth[:, None]).round().clamp(-LARGEST, LARGEST)
        return cls(values.to(torch.int8).contiguous(), scales, weight.shape[1])

    def dequantize(self) -> Float[Tensor, "F E"]:
        """See :meth:`PackedWeight.dequantize`."""
        values: Int8[Tensor, "F E"] = self.values
        return values.float() * self.scales.float()[:, None]


class Int4Weight(PackedWeight):
    """A matrix in 4 bits, with a scale for each 32 numbers of a row.

    The integers are from -8 to 7. Each is stored 8 larger, the first 16 of a group in the low bits
    of 16 bytes: (F, 16 groups); the last group is filled up with zeros.
    """

    @classmethod
    def of(cls, weight: Float[Tensor, "F E"]) -> "Int4Weight":
        """Quantize a matrix; of each group with the scale that has the least squared error."""
        F_, E = weight.shape
        groups = F.pad(weight.float(), (0, -E % GROUP)).view(F_, -1, GROUP)
        at = groups.abs().argmax(-1, keepdim=True)
        # The largest number may be -8, as there is no 8.
        largest = groups.gather(-1, at)
        best, scales = None, largest
        for share in _SHARES.tolist():
            tried = (largest * share / -8).to(cls.dtype).float()
            error = (_integers(groups, tried) * tried - groups).square().sum(-1, keepdim=True)
            better = error < best if best is not None else torch.ones_like(error, dtype=torch.bool)
            scales = torch.where(better, tried, scales)
            best = error if best is None else torch.where(better, error, best)
        pairs = (_integers(groups, scales) + 8).to(torch.uint8)
        values: UInt8[Tensor, "F packed"] = pairs[..., : GROUP // 2] | pairs[..., GROUP // 2 :] << 4
        return cls(values.flatten(1).contiguous(), scales[..., 0].to(cls.dtype), E)

    def dequantize(self) -> Float[Tensor, "F E"]:
        """See :meth:`PackedWeight.dequantize`."""
        pairs = self.values.unflatten(1, (-1, GROUP // 2))
        integers = torch.cat([pairs & 15, pairs >> 4], -1).float() - 8
        numbers = integers * self.scales.float()[..., None]
        return numbers.flatten(1)[:, : self.columns]


def _integers(groups: Tensor, scales: Tensor) -> Tensor:
    # A group of zeros has a scale of zero.
    worth = torch.where(scales == 0, torch.ones_like(scales), scales)
    return (groups / worth).round().clamp(-8, 7)


PACKINGS: dict[str, tuple[type[PackedWeight], type[PackedWeight]]] = {
    "int8": (Int8Weight, Int8Weight),
    "int4": (Int4Weight, Int8Weight),
}
"""By name: how the matrices of the layers are packed, and the table of the vocabulary."""


def packed_bytes(weights: Sequence[object]) -> int:
    """Return the size of those of some weights that are packed; each counts once."""
    return sum(x.nbytes for x in {*weights} if isinstance(x, PackedWeight))
