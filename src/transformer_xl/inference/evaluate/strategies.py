"""How a text is evaluated: what each token is predicted from.

A strategy is a value with the settings of one kind of evaluation. Each has:

* ``lengths(config)``: the segment, memory and attention lengths with a model of these settings;
* ``nats(model, part, lengths)``: the sum of -log p over the predictions that count;
* ``reported()``: what a :class:`~transformer_xl.inference.evaluate.Result` says of it;
* ``batch_size`` and ``max_steps``, constant where a strategy has no such setting.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch

from transformer_xl.config import ModelConfig
from transformer_xl.config.checks import Length, check, no_type_check
from transformer_xl.config.knn import KnnConfig
from transformer_xl.inference.evaluate.dynamic import AtLeastOne, Dynamic
from transformer_xl.inference.evaluate.streams import Part, read_parts, window_nll
from transformer_xl.inference.knn import knn_nll
from transformer_xl.model import LanguageModel
from transformer_xl.model.segment import SEGMENT_LEN, Lengths


@no_type_check
@dataclass(frozen=True, kw_only=True, slots=True)
class WithMemory:
    """Evaluation by segments with memory, as in the paper.

    With ``batch_size`` B the text is divided into B parts, read as a batch. The memory of each part
    is warmed up on the ``mem_len`` tokens before it.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> WithMemory(mem_len=1024, batch_size=8).segment_len
        128
    """

    segment_len: AtLeastOne = SEGMENT_LEN
    """Segment length. With enough memory it only affects the speed."""
    mem_len: Length | None = None
    """Memory length. None: as configured."""
    attn_len: AtLeastOne | None = None
    """Keys a query sees, counting its own. None: as configured."""
    clamp_len: Length | None = None
    """Distances above it count as it. None: as configured."""
    ext_len: Length | None = None
    """Tokens before each segment that are read again with it instead of being kept in memory; the
    first segment of a part has none. None: as configured."""
    batch_size: AtLeastOne = 1
    """Number of parts in a batch."""
    max_steps: AtLeastOne | None = None
    """Read only this many segments of each part, from its beginning. None: all."""

    def __post_init__(self) -> None:
        check(self)

    def lengths(self, config: ModelConfig) -> Lengths:
        """Resolve the lengths against the settings of a model.

        Raises:
            ValueError: A length has no effect in such a model.
        """
        return Lengths.of(config, **{name: getattr(self, name) for name in Lengths._fields})

    def nats(self, model: LanguageModel, part: Part, lengths: Lengths) -> float:
        """Return the sum of -log p over the predictions that count."""
        segments = read_parts(
            model,
            part.source,
            lengths=lengths,
            batch_size=part.batch_size,
            max_steps=self.max_steps,
        )
        # Accumulated on the device, which is synchronized once at the end.
        return float(sum((nll.double() * counted).sum() for nll, counted in segments))

    def reported(self) -> dict[str, Any]:
        """Return the fields of a result that describe the strategy: none."""
        return {}


@no_type_check
@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow:
    """Evaluation by sliding windows, without memory (:func:`window_nll`).

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> SlidingWindow(window=256).batch_size
        1
    """

    window: AtLeastOne
    """Each token is predicted from this many tokens before it, read anew."""
    attn_len: AtLeastOne | None = None
    """Keys a query sees, counting its own. None: as configured."""
    clamp_len: Length | None = None
    """Distances above it count as it. None: as configured."""
    batch_size: AtLeastOne = 1
    """Number of windows in a batch."""
    max_steps: ClassVar[None] = None

    def __post_init__(self) -> None:
        check(self)

    def lengths(self, config: ModelConfig) -> Lengths:
        """Resolve the lengths as :meth:`WithMemory.lengths` does; a window is a segment."""
        reach: dict[str, Any] = {"attn_len": self.attn_len, "clamp_len": self.clamp_len}
        return Lengths.of(config, segment_len=self.window, mem_len=0, ext_len=0, **reach)

    def nats(self, model: LanguageModel, part: Part, lengths: Lengths) -> float:
        """Return the sum of -log p over the predictions that count."""
        assert part.tokens is not None
        nll = window_nll(
            model,
            part.tokens,
            self.window,
            batch_size=part.batch_size,
            attn_len=self.attn_len,
            clamp_len=self.clamp_len,
        )
        return float(part.total(nll))

    def reported(self) -> dict[str, Any]:
        """Return the fields of a result that describe the strategy."""
        return {"window": self.window}


@no_type_check
@dataclass(frozen=True, kw_only=True, slots=True)
class WithNeighbours:
    """Evaluation with memory in one stream, mixed with the nearest past positions (kNN-LM).

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> WithNeighbours(mem_len=256).knn.k
        64
    """

    knn: KnnConfig = field(default_factory=KnnConfig)
    """How the nearest past positions of the text are mixed with the distribution of the model."""
    segment_len: AtLeastOne = SEGMENT_LEN
    """Segment length."""
    mem_len: Length | None = None
    """Memory length. None: as configured."""
    attn_len: AtLeastOne | None = None
    """Keys a query sees, counting its own. None: as configured."""
    clamp_len: Length | None = None
    """Distances above it count as it. None: as configured."""
    ext_len: Length | None = None
    """Tokens before each segment that are read again with it instead of being kept in memory.
    None: as configured."""
    max_steps: AtLeastOne | None = None
    """Read only this many segments, from the beginning of the text. None: all."""
    batch_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check(self)

    def lengths(self, config: ModelConfig) -> Lengths:
        """Resolve the lengths as :meth:`WithMemory.lengths` does."""
        return Lengths.of(config, **{name: getattr(self, name) for name in Lengths._fields})

    def nats(self, model: LanguageModel, part: Part, lengths: Lengths) -> float:
        """Return the sum of -log p over the predictions that count."""
        assert part.tokens is not None
        return float(part.total(torch.cat([*knn_nll(model, part.tokens, lengths, self.knn)])))

    def reported(self) -> dict[str, Any]:
        """Return the fields of a result that describe the strategy."""
        return {f"knn_{name}": value for name, value in asdict(self.knn).items()}


Strategy = WithMemory | SlidingWindow | Dynamic | WithNeighbours
"""How a text is evaluated."""
