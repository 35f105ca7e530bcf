"""Weight matrices in fewer bits, for reading only: a product of few rows waits for the memory.

A :class:`CompactWeight` stands where a matrix stood: :func:`~transformer_xl.ops.products.linear`
multiplies by it, and ``weight[a:b]`` are some of its rows.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor

FEW_ROWS = 8
"""Up to here int8 weights are read as they are; for more rows one conversion serves them all."""
LARGEST = 127
# Bytes of a block that the kernel loads, which must begin at a multiple of as many.
_ALIGNMENT = 32


class CompactWeight(ABC):
    """A matrix (F, E) that does not change; what it multiplies is in bfloat16."""

    dtype = torch.bfloat16

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it is."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Its size in memory."""

    @abstractmethod
    def __getitem__(self, rows: slice) -> "CompactWeight | Float[Tensor, 'rows E']":
        """Return some of the rows, in a form that can be multiplied by, too."""

    @abstractmethod
    def product(
        self, x: Float[Tensor, "*batch E"], bias: Float[Tensor, " F"] | None
    ) -> Float[Tensor, "*batch F"]:
        """Return ``x weight^T + bias``."""


class PackedWeight(CompactWeight):
    """A matrix in bfloat16, in the order in which oneDNN reads it.

    A plain matrix is brought into that order for each product, which takes as long as the product
    with a few rows.
    """

    def __init__(self, weight: Float[Tensor, "F E"]) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(self.dtype), 1)

    @staticmethod
    def is_possible(device: torch.device) -> bool:
        """Whether oneDNN has products in bfloat16 there."""
        is_built = device.type == "cpu" and torch.backends.mkldnn.is_available()
        return is_built and torch.ops.mkldnn._is_mkldnn_bf16_supported()

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._packed.device

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return self._packed.numel() * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> Float[Tensor, "rows E"]:
        """Return some of the rows as a plain matrix."""
        return self._packed.to_dense()[rows]

    def product(
        self, x: Float[Tensor, "*batch E"], bias: Float[Tensor, " F"] | None
    ) -> Float[Tensor, "*batch F"]:
        """Return ``x weight^T + bias``."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


class Int8Weight(CompactWeight):
    """A matrix of integers from -127 to 127, and for each row the number that one of them is worth.

    Attributes:
        values: The integers, (F, E).
        scales: What one is worth, (F,).
    """

    def __init__(self, values: Int8[Tensor, "F E"], scales: Float[Tensor, " F"]) -> None:
        self.values, self.scales = values, scales

    @classmethod
    def of(cls, weight: Float[Tensor, "F E"]) -> "Int8Weight":
        """Round a matrix: a number moves by half of what an integer is worth in its row at most."""
        # In the precision in which it is kept, so that rounding it later adds no error.
        scales = (weight.abs().amax(1) / LARGEST).to(cls.dtype)
        # A row of zeros has no scale.
        worth = scales.to(weight.dtype).clamp(min=torch.finfo(cls.dtype).tiny)
        values = (weight / worth[:, None]).round().clamp(-LARGEST, LARGEST)
        return cls(values.to(torch.int8).contiguous(), scales)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, rows: slice) -> "Int8Weight":
        """Return some of the rows, without a copy."""
        return Int8Weight(self.values[rows], self.scales[rows])

    def product(
        self, x: Float[Tensor, "*batch E"], bias: Float[Tensor, " F"] | None
    ) -> Float[Tensor, "*batch F"]:
        """Return ``x weight^T + bias``."""
        if self._takes_few(x):
            # Reads each integer once, makes it a number in a register and adds up in float32.
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            if rows.data_ptr() % _ALIGNMENT:
                rows = rows.clone()
            out = torch.ops.aten._weight_int8pack_mm(rows, self.values, self.scales)
            out = out.view(*x.shape[:-1], -1)
        else:
            out = F.linear(x, self.values.to(x.dtype)) * self.scales
        return out if bias is None else out + bias

    def _takes_few(self, x: Tensor) -> bool:
        E = x.shape[-1]
        return (
            0 < x.numel() <= FEW_ROWS * E
            and x.dtype == self.dtype
            and x.device.type == "cpu"
            # The kernel loads whole blocks of these.
            and E * x.dtype.itemsize % _ALIGNMENT == 0
        )
