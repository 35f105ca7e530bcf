"""Weight matrices in int8, for inference: products of few rows are bound by memory bandwidth.

An :class:`Int8Weight` replaces a matrix: :func:`~transformer_xl.ops.products.linear` multiplies by
it, and ``weight[a:b]`` are some of its rows.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor

FEW_ROWS = 8
"""Maximum rows for the int8 kernel; for more, converting the weights once is faster."""
LARGEST = 127
# Bytes of a block that the kernel loads, and its alignment.
_ALIGNMENT = 32


class Int8Weight:
    """A matrix quantized to int8, symmetrically, with a scale for each row.

    Attributes:
        values: Integers from -127 to 127, (F, E).
        scales: Scales of the rows, (F,), in bfloat16.
    """

    dtype = torch.bfloat16

    def __init__(self, values: Int8[Tensor, "F E"], scales: Float[Tensor, " F"]) -> None:
        self.values, self.scales = values, scales

    @classmethod
    def of(cls, weight: Float[Tensor, "F E"]) -> "Int8Weight":
        """Quantize a matrix; the error of an element is at most half the scale of its row."""
        # In the precision of storage, so that rounding the scale adds no error.
        scales = (weight.abs().amax(1) / LARGEST).to(cls.dtype)
        # A row of zeros has a scale of zero.
        worth = scales.to(weight.dtype).clamp(min=torch.finfo(cls.dtype).tiny)
        values = (weight / worth[:, None]).round().clamp(-LARGEST, LARGEST)
        return cls(values.to(torch.int8).contiguous(), scales)

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, rows: slice) -> "Int8Weight":
        """Return some of the rows, without a copy."""
        return Int8Weight(self.values[rows], self.scales[rows])

    def product(
        self, x: Float[Tensor, "*batch E"], bias: Float[Tensor, " F"] | None
    ) -> Float[Tensor, "*batch F"]:
        """Return ``x weight^T + bias``."""
        if self._takes_few(x):
            # Reads each weight once, dequantizes it in registers and accumulates in float32.
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
            # The kernel loads whole blocks.
            and E * x.dtype.itemsize % _ALIGNMENT == 0
        )
