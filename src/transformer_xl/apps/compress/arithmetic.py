r"""Arithmetic coding with probabilities that two computations agree on, up to rounding.

Whoever decodes computes the probabilities again, one symbol at a time, perhaps on another machine,
and gets the same numbers but for their last digits. One differing digit would garble everything
behind it. So $-\log p$ is cut down to a grid of steps of 1/32 bit, and from there on there are only
integers and a table. What lies so close to a border of the grid that rounding could carry it across
is excluded: whoever encodes moves the grid, by one of 64 shifts, until nothing in the round lies
within ``MARGIN`` of a border, and writes the shift down. Double precision computes to about
1/10,000 of that margin.

The grid costs $\frac{\ln 2}{2} \cdot \frac{1}{12 \cdot 32^2}$ = 0.00003 bits a symbol.
"""

import math
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64
from torch import Tensor

STEPS = 32
"""Steps of the grid in a bit."""
SHIFTS = 64
"""Places in a step at which its border can be."""
MARGIN = 1e-8
"""In steps: nothing that is coded lies nearer to a border."""
DEEPEST = 24 * STEPS
"""Steps below certainty from which on all symbols count as equally unlikely."""

_UNSHIFTED = 4096.0
_UNCHANGED = 255.0
LEAST_SHIFT = math.log2(1 + (SHIFTS - 1) / _UNSHIFTED)
"""Bits that a shift of the grid costs at the least."""
LEAST_CHOICE = math.log2(1 + 1 / _UNCHANGED)
"""Bits that each stream's way costs at the least."""


class OtherNumbersError(RuntimeError):
    """What is read cannot have been written with the probabilities that come out here."""


def on_grid(log_probs: Float64[Tensor, "*batch V"], shift: int) -> Int64[Tensor, "*batch V"]:
    """Return how many steps below certainty each probability lies."""
    steps = (_in_steps(log_probs) + shift / SHIFTS).floor()
    return steps.clamp(0, DEEPEST).long()


def weights(steps: Int64[Tensor, "*batch V"]) -> Float64[np.ndarray, "*batch V"]:
    """Return the probabilities that are coded with, up to a factor for each distribution."""
    return _table()[steps.cpu().numpy()]


def safe_shift(log_probs: Float64[Tensor, "*batch V"]) -> int:
    """Find a shift of the grid with which no probability lies near a border.

    Raises:
        RuntimeError: There is none, or the probabilities are not finite.
    """
    if log_probs.isnan().any():
        raise RuntimeError("the model's probabilities are not finite: its weights are damaged")
    places = _in_steps(log_probs) * SHIFTS
    nearest = places.round()
    is_near = ((places - nearest).abs() < MARGIN * SHIFTS) & (places < (DEEPEST + 1) * SHIFTS)
    taken = {int(place) for place in (-nearest[is_near]).remainder(SHIFTS).unique()}
    free = next((shift for shift in range(SHIFTS) if shift not in taken), None)
    if free is None:
        raise RuntimeError(
            "the probabilities of a round lie on every grid: choose fewer streams or a shorter "
            "segment_len"
        )
    return free


def least_bits(vocab_size: int) -> float:
    """Return what a symbol costs at the least: no other is ever impossible."""
    return -math.log2(1 - (vocab_size - 1) * 2.0**-24)


class Encoder:
    """Writes symbols with their probabilities."""

    def __init__(self) -> None:
        self._coder = _constriction().stream.queue.RangeEncoder()
        self._family = _family()

    def put(
        self, symbols: Int32[np.ndarray, " n"], probabilities: Float64[np.ndarray, "n V"]
    ) -> None:
        """Write symbols, each with its own distribution."""
        if len(symbols):
            self._coder.encode(np.ascontiguousarray(symbols), self._family, probabilities)

    def put_shift(self, shift: int) -> None:
        """Write a shift of the grid."""
        self.put(np.array([shift], dtype=np.int32), _shift_probabilities())

    def put_choices(self, chosen: Bool[np.ndarray, " B"], before: Bool[np.ndarray, " B"]) -> None:
        """Write for each stream one of two ways, most probably the one that it took before."""
        self.put(chosen.astype(np.int32), _choice_probabilities(before))

    def put_check(self, crc: int) -> None:
        """Write a CRC-32."""
        symbols = np.frombuffer(crc.to_bytes(4, "little"), np.uint8).astype(np.int32)
        self.put(symbols, np.ones((4, 256)))

    def finish(self) -> bytes:
        """Return all that was written."""
        return self._coder.get_compressed().astype("<u4").tobytes()


class Decoder:
    """Reads what an :class:`Encoder` has written, given the same probabilities.

    Every method may raise an :class:`OtherNumbersError`.
    """

    def __init__(self, payload: bytes) -> None:
        if len(payload) % 4:
            raise OtherNumbersError("what was coded is no whole number of words")
        words = np.frombuffer(payload, "<u4").astype(np.uint32)
        self._coder = _constriction().stream.queue.RangeDecoder(words)
        self._family = _family()

    def get(self, probabilities: Float64[np.ndarray, "n V"]) -> Int32[np.ndarray, " n"]:
        """Read as many symbols as there are distributions."""
        if not len(probabilities):
            return np.empty(0, dtype=np.int32)
        try:
            return self._coder.decode(self._family, probabilities)
        # What the library says of words that no symbols lead to.
        except (AssertionError, ValueError) as error:
            raise OtherNumbersError(f"no symbols lead to what was coded ({error})") from error

    def get_shift(self) -> int:
        """Read a shift of the grid."""
        return int(self.get(_shift_probabilities())[0])

    def get_choices(self, before: Bool[np.ndarray, " B"]) -> Bool[np.ndarray, " B"]:
        """Read which way each stream takes."""
        return self.get(_choice_probabilities(before)).astype(bool)

    def get_check(self) -> int:
        """Read a CRC-32."""
        return int.from_bytes(self.get(np.ones((4, 256))).astype(np.uint8).tobytes(), "little")


def _in_steps(log_probs: Tensor) -> Tensor:
    return log_probs * (-STEPS / math.log(2))


@cache
def _table() -> Float64[np.ndarray, " steps"]:
    # Decimal arithmetic is defined to the last digit, on every machine.
    root = Decimal(2) ** (Decimal(-1) / STEPS)
    return np.array([float(round(root**step * 2**48)) for step in range(DEEPEST + 1)])


def _shift_probabilities() -> Float64[np.ndarray, "1 shifts"]:
    return np.array([[_UNSHIFTED, *[1.0] * (SHIFTS - 1)]])


def _choice_probabilities(before: Bool[np.ndarray, " B"]) -> Float64[np.ndarray, "B 2"]:
    return np.where(before[:, None], [[1.0, _UNCHANGED]], [[_UNCHANGED, 1.0]])


def _family() -> Any:
    return _constriction().stream.model.Categorical(perfect=False)


def _constriction() -> Any:
    try:
        import constriction
    except ImportError:
        raise RuntimeError(
            "arithmetic coding needs the library constriction: "
            "pip install 'transformer-xl[compress]'"
        ) from None
    return constriction


def check_installed() -> None:
    """Find the library before any work is done.

    Raises:
        RuntimeError: It is not there.
    """
    _constriction()
