"""Position encodings: sinusoidal, or rows of a learned table."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.ops.constants import cached


class Positions(NamedTuple):
    """The relative positions of one layer."""

    r: Float[Tensor, "S H K"]
    """Keys of the distances, farthest first."""
    content_bias: Float[Tensor, "H K"]
    """The bias ``u``."""
    position_bias: Float[Tensor, "H K"]
    """The bias ``v``."""
    distance_bias: Float[Tensor, "S H"] | None = None
    """Added to the scores of each distance, farthest first; None: nothing."""

    def without(self, n: int) -> "Positions":
        """Return the positions without the ``n`` largest distances."""
        bias = self.distance_bias
        return self._replace(r=self.r[n:], distance_bias=None if bias is None else bias[n:])

    def to(self, where: torch.dtype | torch.device | int | str) -> "Positions":
        """Return the positions in another precision or on another device."""
        return Positions(*(None if x is None else x.to(where) for x in self))  # pyright: ignore[reportArgumentType]


def relative_positions(
    S: int,
    d_model: int,
    clamp_len: int | None,
    dtype: torch.dtype,
    device: torch.device,
    precision: torch.dtype = torch.float32,
) -> Float[Tensor, "S D"]:
    r"""Encode the distances ``S - 1, ..., 1, 0``, farthest first.

    $R_d = [\sin(d w), \cos(d w)]$ with $w_m = 10000^{-2m / D}$, all sines before all cosines
    (section 3.3 of the paper). Distances above ``clamp_len`` are clamped. Frequencies are rounded
    to ``precision``, which is float32 in every published PyTorch checkpoint.

    Example:
        >>> relative_positions(3, 2, None, torch.float32, torch.device("cpu"))
        tensor([[ 0.9093, -0.4161],
                [ 0.8415,  0.5403],
                [ 0.0000,  1.0000]])
    """
    table = _table(S, d_model, dtype, device, precision)
    if clamp_len is None or clamp_len >= S:
        return table[:S].flip(0)
    return table[distances(S, clamp_len, device)]


def rotary(
    S: int,
    d_head: int,
    dtype: torch.dtype,
    device: torch.device,
    precision: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "S half"], Float[Tensor, "S half"]]:
    """Return sine and cosine of the angles of the positions 0 to S - 1, for :func:`rotated`.

    Frequencies are rounded to ``precision``.
    """
    # Not in half precision, in which angles of long contexts would be far off.
    dtype = torch.promote_types(dtype, torch.float32)
    table = _table(S, d_head, dtype, device, precision)[:S]
    sin, cos = table.chunk(2, -1)
    return sin, cos


def rotated(
    x: Float[Tensor, "B S H K"], sin: Float[Tensor, "S half"], cos: Float[Tensor, "S half"]
) -> Float[Tensor, "B S H K"]:
    """Rotate queries or keys by their positions (RoPE; Su et al., 2021, arXiv 2104.09864).

    Products of rotated queries and keys depend on the difference of their positions only. Features
    m and m + K / 2 are a pair.
    """
    first, second = x.chunk(2, -1)
    sin, cos = sin[:, None], cos[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def distances(S: int, largest: int | None, device: torch.device) -> Int[Tensor, " S"]:
    """Return the distances ``S - 1, ..., 1, 0``, those above ``largest`` as ``largest``."""
    distance = torch.arange(S - 1, -1, -1, device=device)
    return distance if largest is None else distance.clamp(max=largest)


def _table(
    S: int, width: int, dtype: torch.dtype, device: torch.device, precision: torch.dtype
) -> Float[Tensor, "more width"]:
    """Return the sinusoids of at least the distances 0 to S - 1."""
    # The size grows in powers of two while a memory fills up. An export bypasses the cache, as its
    # tensors are fake.
    sinusoids: Any = _sinusoids
    if torch.compiler.is_exporting():
        sinusoids = sinusoids.__wrapped__
    # A symbol has no bits to count.
    rows = 1 << (S - 1).bit_length() if isinstance(S, int) else S
    return sinusoids(rows, width, dtype, device, precision)


@cached(32)
def _sinusoids(
    S: int, d_model: int, dtype: torch.dtype, device: torch.device, precision: torch.dtype
) -> Tensor:
    # Angles are in float64, because bfloat16 cannot represent distances above 256.
    frequency = frequencies(d_model, precision).double()
    angle = torch.outer(torch.arange(S, dtype=torch.float64), frequency)
    return torch.cat([angle.sin(), angle.cos()], 1).to(device, dtype)


# Compiled code uses the cached table as a constant. torch.compiler.assume_constant_result does the
# same, but imports the compiler.
setattr(_sinusoids, "_dynamo_marked_constant", True)  # noqa: B010


def frequencies(d_model: int, precision: torch.dtype = torch.float32) -> Float[Tensor, " half"]:
    """Return the frequency of each pair of sine and cosine."""
    return 1 / (10_000 ** (torch.arange(0, d_model, 2, dtype=precision) / d_model))
