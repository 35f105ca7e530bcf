"""Lengths of segments that change while a run goes on: in stages, or drawn at random."""

import random
from collections.abc import Sequence

from jaxtyping import Int64
from torch import Tensor

from transformer_xl.config import TrainConfig
from transformer_xl.config.training import Stage
from transformer_xl.data import Segments
from transformer_xl.data.segments import SegmentsState
from transformer_xl.data.tokens import Tokens

DEVIATION = 5
"""Standard deviation of a random length (Merity et al. 2017, arXiv 1708.02182)."""


def stage_at(stages: Sequence[Stage], progress: float) -> int:
    """Return the number of the stage at a point of the training, given as a share of it."""
    return sum(start <= progress for start, _, _ in stages) - 1


def longest_segment(config: TrainConfig) -> int:
    """Return the largest number of tokens that a stream may read in a step."""
    longest = max((segment_len for _, segment_len, _ in config.stages), default=config.segment_len)
    return longest + 3 * DEVIATION if config.random_segment_len else longest


def random_segment_len(segment_len: int, seed: int, step: int) -> int:
    """Draw the length of a segment around ``segment_len``, or in one case of twenty its half.

    A function of the seed and the step, so that a run that goes on draws what it would have drawn.
    What lies three deviations above ``segment_len`` is cut off there, and 5 is the least.
    """
    draw = random.Random(f"{seed} {step}")
    middle = segment_len if draw.random() < 0.95 else segment_len / 2
    length = round(draw.gauss(middle, DEVIATION))
    return min(max(length, min(5, segment_len)), segment_len + 3 * DEVIATION)


class VaryingSegmentsState(SegmentsState):
    """What :meth:`VaryingSegments.state_dict` saves."""

    position: int


class VaryingSegments(Segments):
    """Segments whose length may change between two of them; the streams never break.

    The length of the next one is :attr:`length`; the other arguments are those of
    :class:`~transformer_xl.data.Segments`.

    Args:
        longest: The largest length.
    """

    def __init__(
        self,
        tokens: Tokens,
        batch_size: int,
        longest: int,
        ext_len: int = 0,
        rows: range | None = None,
        roll_seed: int | None = None,
    ) -> None:
        super().__init__(tokens, batch_size, longest, ext_len, rows, roll_seed)
        self.position = 0

    @property
    def tokens_read(self) -> int:
        """How many tokens of each stream were read."""
        return self.position

    def next_segment(self) -> tuple[Int64[Tensor, "B T"], Int64[Tensor, "B predicted"]]:
        """Return the next ``length`` tokens of each stream and the token that follows each."""
        found = super().next_segment()
        self.position += self.length
        return found

    def state_dict(self) -> VaryingSegmentsState:
        """Return the position, and what it was counted in."""
        return {**super().state_dict(), "position": self.position}

    def load_state_dict(self, state: VaryingSegmentsState) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Continue where the state was saved.

        Raises:
            ValueError: The state counts segments of another shape or of another text.
        """
        super().load_state_dict(state)
        self.position = state["position"]
