"""How a text is evaluated: what each token is predicted from.

A :class:`Strategy` is a value with the settings of one kind of evaluation.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Interval
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.config import Length, ModelConfig, check
from transformer_xl.inference.evaluate.ngram_cache import NGramMixture
from transformer_xl.inference.evaluate.streams import Losses, Passage, read_parts
from transformer_xl.model import SEGMENT_LEN, LanguageModel, Lengths, read

AtLeastOne = Annotated[int, Interval(ge=1)]


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """How a text is evaluated: one of the classes below.

    Raises:
        ValueError: A value is out of range.
    """

    attn_len: AtLeastOne | None = None
    """Keys a query sees, counting its own. None: as configured."""
    clamp_len: Length | None = None
    """Distances above it count as it. None: as configured."""
    ngram_cache: NGramMixture | None = None
    """Counts that the predictions are mixed with, for a second loss. None: no such loss."""
    batch_size: int = field(default=1, init=False, repr=False)
    max_steps: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check(self)

    def lengths(self, config: ModelConfig) -> Lengths:
        """Resolve the lengths against the settings of a model.

        Raises:
            ValueError: A length has no effect in such a model.
        """
        # A strategy without a setting reads nothing again.
        values: dict[str, Any] = {name: getattr(self, name, 0) for name in Lengths._fields}
        return Lengths.of(config, **values)

    @abstractmethod
    def losses(self, model: LanguageModel, passage: Passage, lengths: Lengths) -> Iterator[Losses]:
        """Yield -log p of the targets; the caller sets the mode and disables gradients."""

    def reported(self) -> dict[str, object]:
        """Return the fields of a result that describe the strategy."""
        return {}


@dataclass(frozen=True, kw_only=True)
class InSegments(Strategy):
    """Evaluation by segments with memory."""

    segment_len: AtLeastOne = SEGMENT_LEN
    """Segment length. With enough memory it only affects the speed."""
    mem_len: Length | None = None
    """Memory length. None: as configured."""
    max_steps: AtLeastOne | None = None
    """Read only this many segments of each part, from its beginning. None: all."""

    def part_of(self, passage: Passage, lengths: Lengths) -> Int[Tensor, " read"]:
        """Return the part of a text that a single stream reads."""
        assert passage.text is not None
        steps = self.max_steps
        return passage.text[: None if steps is None else steps * lengths.segment_len + 1]


def in_order(nll: Float[Tensor, " T"], start: int = 0) -> Losses:
    """Return the losses of consecutive targets from the one with index ``start`` on."""
    return nll[None], torch.arange(start, start + len(nll))[None]


@dataclass(frozen=True, kw_only=True)
class WithMemory(InSegments):
    """Evaluation by segments with memory, as in the paper.

    With ``batch_size`` B the text is divided into B parts, read as a batch. The memory of each part
    is warmed up on the ``mem_len`` tokens before it.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> WithMemory(mem_len=1024, batch_size=8).segment_len
        128
    """

    ext_len: Length | None = None
    """Tokens before each segment that are read again with it instead of being kept in memory; the
    first segment of a part has none. None: as configured."""
    batch_size: AtLeastOne = 1
    """Number of parts in a batch."""

    def losses(self, model: LanguageModel, passage: Passage, lengths: Lengths) -> Iterator[Losses]:
        """See :meth:`Strategy.losses`."""
        return read_parts(model, passage, lengths, self.batch_size, self.max_steps)


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Strategy):
    """Evaluation by sliding windows, without memory (Al-Rfou et al., 2018).

    Each token is predicted from the ``window`` tokens before it, read anew: the baseline of Table
    9 of the paper.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> SlidingWindow(window=256).batch_size
        1
    """

    window: AtLeastOne
    """Length of a window in tokens."""
    batch_size: AtLeastOne = 1
    """Number of windows in a batch."""

    @property
    def segment_len(self) -> int:
        """A window is a segment."""
        return self.window

    def losses(self, model: LanguageModel, passage: Passage, lengths: Lengths) -> Iterator[Losses]:
        """See :meth:`Strategy.losses`."""
        text, window = passage.text, self.window
        assert text is not None
        n = len(text) - 1
        # The first tokens have shorter windows, read one by one.
        for i in range(1, min(window, n + 1)):
            (piece,) = read(model, text[None, :i], lengths, targets=text[None, i : i + 1])
            assert piece.nll is not None
            yield in_order(piece.nll[:, 0], i - 1)
        # The softmax is computed for the last position of a window only.
        windows = text[:-1].unfold(0, window, 1) if window <= n else text[:0]
        for i in range(0, len(windows), self.batch_size):
            rows = slice(i, i + self.batch_size)
            (piece,) = read(model, windows[rows], lengths, targets=text[window:, None][rows])
            assert piece.nll is not None
            yield in_order(piece.nll[:, 0], window - 1 + i)

    def reported(self) -> dict[str, object]:
        """See :meth:`Strategy.reported`."""
        return {"window": self.window}
