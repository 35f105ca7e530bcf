"""The part of the report on what the memory does: losses by place, and what a prediction looks at.

What ``memory.json`` holds is checked here as a whole: :mod:`transformer_xl.train.seen` writes it,
but anybody may have changed it.
"""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import msgspec

from transformer_xl.train import figures

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Place = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Loss = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1.01)]
_NOT_EMPTY = msgspec.Meta(min_length=1)
_LEVELS = 9
"""Shades of a token, without none at all."""
Row = tuple[list[str], bool]
"""Cells of a table, and whether they stand out."""


class Span(msgspec.Struct):
    """The mean loss of neighbouring places."""

    first: _Place
    last: _Place
    nll: _Loss


class InSegment(msgspec.Struct):
    """The loss by place in the segment, with one length of memory."""

    mem_len: _Count
    spans: Annotated[list[Span], _NOT_EMPTY]


class FromStart(InSegment):
    """The loss by how many tokens a text has already."""

    # None if all completions are in the rest that is shorter than a piece.
    spans: list[Span]
    pieces: _Count


class Shares(msgspec.Struct):
    """How much of each layer's attention is at some distances."""

    first: _Count
    last: _Count
    shares: Annotated[list[_Share], msgspec.Meta(min_length=1, max_length=10_000)]


class Attention(msgspec.Struct):
    """The text before one token, and what its prediction takes of each token."""

    nll: _Loss
    nll_without_memory: _Loss
    texts: list[str]
    predicted: str
    shares: Annotated[list[_Share], _NOT_EMPTY]
    direct: Annotated[list[Shares], _NOT_EMPTY]
    through: Annotated[list[Shares], _NOT_EMPTY]

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.shares):
            raise ValueError(f"{len(self.texts)} texts have {len(self.shares)} shares")
        if len({len(each.shares) for each in (*self.direct, *self.through)}) > 1:
            raise ValueError("not all distances have shares of the same layers")

    def shaded(self) -> Iterator[tuple[int, str]]:
        """Yield the text with its shades; the root of a share, to tell small ones apart."""
        most = max(self.shares) or 1.0
        levels = (round(_LEVELS * (share / most) ** 0.5) for share in self.shares)
        for level, tokens in groupby(zip(levels, self.texts, strict=True), key=itemgetter(0)):
            yield level, "".join(token for _, token in tokens)


class Seen(msgspec.Struct):
    """What ``memory.json`` holds."""

    split: str
    tokens: _Count
    segment_len: _Place
    mem_len: _Count
    in_segment: Annotated[list[InSegment], _NOT_EMPTY]
    from_start: FromStart
    attention: Attention | None


def parse(path: Path) -> Seen:
    """Read ``memory.json``.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Seen)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def figures_of(seen: Seen) -> dict[str, str]:
    """Draw the figures of this part, by name.

    Raises:
        ImportError: matplotlib is missing.
    """
    drawn = {
        "places": figures.as_svg(
            "places",
            "Bits by place in the segment, and by tokens since the start of the text",
            lambda figure: figures.draw_places(figure, seen.in_segment, seen.from_start),
            (7.4, 3.2),
        )
    }
    if seen.attention is None:
        return drawn
    for name, spans, title in (
        ("direct", seen.attention.direct, "each layer's own attention, all predictions"),
        ("through", seen.attention.through, "what comes out of each layer, this prediction"),
    ):
        drawn[name] = figures.as_svg(
            name,
            f"Shares of distances by layer: {title}",
            lambda figure, spans=spans, title=title: figures.draw_attention(
                figure.subplots(), spans, title
            ),
        )
    return drawn


def places(seen: Seen) -> tuple[list[str], list[Row]]:
    """Return head and rows of the table of losses by place."""
    columns = [(f"in the segment, memory {row.mem_len:,}", row.spans) for row in seen.in_segment]
    columns.append((f"from the start, memory {seen.from_start.mem_len:,}", seen.from_start.spans))
    by_place: dict[tuple[int, int], dict[str, str]] = {}
    for name, spans in columns:
        for span in spans:
            by_place.setdefault((span.first, span.last), {})[name] = f"{span.nll:.4f}"
    names, rows = [name for name, _ in columns], []
    for (first, last), cells in sorted(by_place.items()):
        place = f"{first:,} to {last:,}" if last > first else f"{first:,}"
        rows.append(([place, *(cells.get(name, "") for name in names)], False))
    return ["place, nats per token", *names], rows
