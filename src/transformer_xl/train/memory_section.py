"""The part of the report on what the memory does: losses by place, and what a prediction looks at.

What ``memory.json`` holds is checked here as a whole: :mod:`transformer_xl.train.seen` writes it,
but anybody may have changed it.
"""

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec

from transformer_xl.train import figures, page

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Place = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Loss = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1.01)]
_LEVELS = 9
"""Shades of a token, without none at all."""
_WIDE = (7.4, 3.2)


class Span(msgspec.Struct):
    """The mean loss of neighbouring places."""

    first: _Place
    last: _Place
    nll: _Loss


_Spans = Annotated[list[Span], msgspec.Meta(min_length=1)]


class InSegment(msgspec.Struct):
    """The loss by place in the segment, with one length of memory."""

    mem_len: _Count
    spans: _Spans


class FromStart(msgspec.Struct):
    """The loss by how many tokens a text has already."""

    mem_len: _Count
    pieces: _Count
    spans: _Spans


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
    shares: Annotated[list[_Share], msgspec.Meta(min_length=1)]
    direct: Annotated[list[Shares], msgspec.Meta(min_length=1)]
    through: Annotated[list[Shares], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.shares):
            raise ValueError(f"{len(self.texts)} texts have {len(self.shares)} shares")
        if len({len(each.shares) for each in (*self.direct, *self.through)}) > 1:
            raise ValueError("not all distances have shares of the same layers")


class Seen(msgspec.Struct):
    """What ``memory.json`` holds."""

    split: str
    tokens: _Count
    segment_len: _Place
    mem_len: _Count
    in_segment: Annotated[list[InSegment], msgspec.Meta(min_length=1)]
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
    built = msgspec.to_builtins(seen)
    drawn = {
        "places": figures.as_svg(
            "places",
            "Bits by place in the segment, and by tokens since the start of the text",
            partial(
                figures.draw_places,
                in_segment=built["in_segment"],
                from_start=built["from_start"],
            ),
            _WIDE,
        )
    }
    for name, title in (
        ("direct", "each layer's own attention, all predictions"),
        ("through", "what comes out of each layer, this prediction"),
    ):
        if seen.attention:
            spans = built["attention"][name]
            drawn[name] = figures.as_svg(
                name,
                f"Shares of distances by layer: {title}",
                lambda figure, spans=spans, title=title: figures.draw_attention(
                    figure.subplots(), spans, title
                ),
            )
    return drawn


def shown(seen: Seen, drawn: dict[str, str]) -> str:
    """Write this part of the page."""
    lengths = f"segments of {seen.segment_len:,} tokens"
    caption = (
        f"The first {seen.tokens:,} tokens of the {seen.split} text, in {lengths}. Left: without "
        "memory each segment begins blind. Right: the memory is empty at the start of a text and "
        f"fills up to {seen.from_start.mem_len:,}; the mean of {seen.from_start.pieces:,} pieces."
    )
    parts = ["<h2>What the memory does</h2>", page.figure(drawn.get("places"), caption)]
    parts.append(_numbers(seen, opened=not drawn))
    if seen.attention:
        parts.append(_attention(seen.attention, drawn))
    return "\n".join(parts)


def _numbers(seen: Seen, opened: bool) -> str:
    columns = [(f"in the segment, memory {row.mem_len:,}", row.spans) for row in seen.in_segment]
    columns.append((f"from the start, memory {seen.from_start.mem_len:,}", seen.from_start.spans))
    by_place: dict[tuple[int, int], dict[str, str]] = {}
    for name, spans in columns:
        for span in spans:
            by_place.setdefault((span.first, span.last), {})[name] = f"{span.nll:.4f}"
    names = [name for name, _ in columns]
    rows = [
        (
            [
                f"{first:,}" + f" to {last:,}" * (last > first),
                *(cells.get(name, "") for name in names),
            ],
            False,
        )
        for (first, last), cells in sorted(by_place.items())
    ]
    table = page.table(["place, nats per token", *names], rows, marks="")
    return page.folded("Numbers by place", f"<div>{table}</div>", rows, opened)


def _attention(seen: Attention, drawn: dict[str, str]) -> str:
    about = (
        # Quoted: a newline or a space would not be seen.
        f"Before the bold token, {seen.predicted!r}: each token as dark as its share in "
        "what comes out of the top layer, followed from layer to layer and through the memory. "
        f"The memory lowers the loss of this token from {seen.nll_without_memory:.2f} to "
        f"{seen.nll:.2f} nats; it was chosen for that."
    )
    pair = "".join(
        (
            page.figure(
                drawn.get("direct"),
                "Where each layer looks, the mean of its heads: the share of a distance against "
                "the layer's largest, on a scale where distances double.",
            ),
            page.figure(
                drawn.get("through"),
                "Layer by layer the reach grows by one memory: a remembered state knows what it "
                "has attended to itself. Half of each layer is taken as what goes past attention.",
            ),
        )
    )
    strip = f"{_strip(seen)}<b>{page.text(seen.predicted)}</b>"
    return (
        "<h2>What a prediction looks at</h2>\n"
        f"<p>{page.text(about)}</p>\n"
        f'<pre class="box sample last"><span>{strip}</span></pre>\n'
        + (f'<div class="pair spaced">{pair}</div>' if pair else "")
    )


def _strip(seen: Attention) -> str:
    """Shade the text by its shares; the root of a share, so that small ones are told apart."""
    most = max(seen.shares) or 1.0
    levels = [round(_LEVELS * (share / most) ** 0.5) for share in seen.shares]
    parts = []
    for level, tokens in groupby(zip(levels, seen.texts, strict=True), key=lambda pair: pair[0]):
        words = page.text("".join(token for _, token in tokens))
        parts.append(f'<span class="share{level}">{words}</span>' if level else words)
    return "".join(parts)


__all__ = [
    "Attention",
    "FromStart",
    "InSegment",
    "Seen",
    "Shares",
    "Span",
    "figures_of",
    "parse",
    "shown",
]
