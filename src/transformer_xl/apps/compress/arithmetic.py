r"""Arithmetic coding that is robust to rounding: probabilities are quantized to a grid.

The decoder recomputes the probabilities, one symbol at a time, perhaps on another machine, and gets
the same numbers only up to rounding. A single different digit would corrupt everything after it. So
$-\log p$ is rounded down to a grid of steps of 1/32 bit, and all further computations use integers,
a table, and for counts the basic operations of double precision, which are the same everywhere. To
exclude values so near to a grid point that rounding could move them across it, the
encoder shifts the grid, by one of 64 offsets, until no value of the round is within ``MARGIN`` of a
grid point, and writes the offset. Double precision computes to about 1/10,000 of that margin.

The grid costs $\frac{\ln 2}{2} \cdot \frac{1}{12 \cdot 32^2}$ = 0.00003 bits a symbol.
"""

import math
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64
from torch import Tensor

from transformer_xl.errors import CheckpointError, DataError, SettingsError

STEPS = 32
"""Grid steps in a bit."""
SHIFTS = 64
"""Number of offsets of the grid, equally spaced in a step."""
MARGIN = 1e-8
"""Least distance of a coded value from a grid point, in steps."""
DEEPEST = 24 * STEPS
"""Largest -log2 p in steps; less probable symbols are clamped to it."""

UNSHIFTED, UNCHANGED = 4096.0, 255.0
"""Weights of no offset, beside 1 of each other one, and of the previous choice, beside 1."""
SHIFT_PROBABILITIES = np.array([[UNSHIFTED, *[1.0] * (SHIFTS - 1)]])
"""The distribution of the offset of the grid, unnormalized."""
CHECK_PROBABILITIES = np.ones((4, 256))
"""The distributions of the four bytes of a CRC-32, unnormalized."""


class OtherNumbersError(DataError):
    """The code cannot have been written with the probabilities that are computed here."""


def on_grid(log_probs: Float64[Tensor, "*batch V"], shift: int) -> Int64[Tensor, "*batch V"]:
    """Return -log p of each symbol, quantized to steps of the shifted grid."""
    # Truncation rounds down, as nothing is negative; floor() of MKL would wake its threads.
    return (_in_steps(log_probs) + shift / SHIFTS).clamp(0, DEEPEST).long()


def weights(steps: Int64[Tensor, "*batch V"]) -> Float64[np.ndarray, "*batch V"]:
    """Return the probabilities for coding, unnormalized."""
    return _table()[steps.cpu().numpy()]


def safe_shift(log_probs: Float64[Tensor, "*batch V"]) -> int:
    """Find an offset of the grid with which no value is near a grid point.

    Raises:
        SettingsError: There is none.
        CheckpointError: The probabilities are not finite.
    """
    if log_probs.isnan().any():
        raise CheckpointError("the model's probabilities are not finite: its weights are damaged")
    places = _in_steps(log_probs) * SHIFTS
    nearest = places.round()
    is_near = ((places - nearest).abs() < MARGIN * SHIFTS) & (places < (DEEPEST + 1) * SHIFTS)
    taken = {int(place) for place in (-nearest[is_near]).remainder(SHIFTS).unique()}
    free = next((shift for shift in range(SHIFTS) if shift not in taken), None)
    if free is None:
        raise SettingsError(
            "with every offset of the grid a probability of the round is too near to a grid point: "
            "choose fewer streams or a shorter segment_len"
        )
    return free


def choice_probabilities(before: Bool[np.ndarray, " B"]) -> Float64[np.ndarray, "B 2"]:
    """Return the distributions of a binary choice; the previous one is the most probable."""
    return np.where(before[:, None], [[1.0, UNCHANGED]], [[UNCHANGED, 1.0]])


class Encoder:
    """Encodes symbols, each with its own distribution."""

    def __init__(self) -> None:
        library = coder_library()
        self._coder = library.stream.queue.RangeEncoder()
        self._family = library.stream.model.Categorical(perfect=False)

    def put(
        self, symbols: Sequence[int] | np.ndarray, probabilities: Float64[np.ndarray, "n V"]
    ) -> Int32[np.ndarray, " n"]:
        """Encode a row of symbols, and return them."""
        symbols = np.ascontiguousarray(symbols, dtype=np.int32)
        if len(symbols):
            self._coder.encode(symbols, self._family, probabilities)
        return symbols

    def finish(self) -> bytes:
        """Return the code."""
        return self._coder.get_compressed().astype("<u4").tobytes()


class Decoder:
    """Decodes the code of an :class:`Encoder`, given the same probabilities.

    Raises:
        OtherNumbersError: The code is invalid; :meth:`get` may raise it, too.
    """

    def __init__(self, payload: bytes) -> None:
        if len(payload) % 4:
            raise OtherNumbersError("the size of the code is not a multiple of 4 bytes")
        library = coder_library()
        words = np.frombuffer(payload, "<u4").astype(np.uint32)
        self._coder = library.stream.queue.RangeDecoder(words)
        self._family = library.stream.model.Categorical(perfect=False)

    def get(self, probabilities: Float64[np.ndarray, "n V"]) -> Int32[np.ndarray, " n"]:
        """Decode the next symbols, one for each distribution.

        Args:
            probabilities: A distribution over V symbols in each row, as the encoder had it.

        Raises:
            OtherNumbersError: The code is invalid.
        """
        if not len(probabilities):
            return np.empty(0, dtype=np.int32)
        try:
            return self._coder.decode(self._family, probabilities)
        # Raised by the library for invalid code.
        except (AssertionError, ValueError) as error:
            raise OtherNumbersError(f"the code is invalid ({error})") from error


def _in_steps(log_probs: Tensor) -> Tensor:
    return log_probs * (-STEPS / math.log(2))


@cache
def _table() -> Float64[np.ndarray, " steps"]:
    # Decimal arithmetic has the same result on every machine.
    root = Decimal(2) ** (Decimal(-1) / STEPS)
    return np.array([float(round(root**step * 2**48)) for step in range(DEEPEST + 1)])


def coder_library() -> Any:
    """Return the library for arithmetic coding.

    Raises:
        RuntimeError: It is not installed.
    """
    try:
        import constriction
    except ImportError:
        raise RuntimeError(
            "arithmetic coding needs the library constriction: "
            "pip install 'transformer-xl[compress]'"
        ) from None
    return constriction
