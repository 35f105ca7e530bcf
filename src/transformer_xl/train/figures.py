"""Figures of a run, and the series of numbers that they show.

matplotlib is imported when something is drawn, and not before.
"""

import math
import re
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from transformer_xl.train.report import LossCurve, Shares

Records = Sequence[dict[str, Any]]
"""Records of ``metrics.jsonl`` or evaluation results, in order."""

# In a page each color stands for the CSS variable of its name, so that figures go dark with it.
_COLORS = {
    "ink": "#1f2429",
    "soft": "#5b6570",
    "line": "#dfe3e7",
    "train": "#2463b8",
    "valid": "#c4501b",
    "memory": "#0f7b6c",
    "gzip": "#8a5a00",
    "xz": "#7b3fa0",
}
_STYLE = Path(__file__).with_name("report.mplstyle")
SIZE = (5.2, 3.5)
"""Width and height of a figure, in inches."""
_POINTS = 800


def number(record: dict[str, Any], name: str) -> float | None:
    """Return a finite number of a record, or None.

    Older runs call ``bits_per_token`` ``bits``, or ``bpc`` whatever their tokens are.
    """
    value = record.get(name)
    if name == "bits_per_token" and value is None:
        bits, nats = number(record, "bits"), number(record, "nll")
        if bits is not None:
            return bits
        return number(record, "bpc") if nats is None else nats / math.log(2)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # Not isfinite: it fails on an int beyond the floats, which JSON can hold.
    return float(value) if -1e300 < value < 1e300 else None


def series(records: Records, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a number, where it is finite."""
    pairs = [(x["step"], value) for x in records if (value := number(x, name)) is not None]
    return np.array([step for step, _ in pairs]), np.array([value for _, value in pairs])


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the mean over the neighbors of each value: 4 % of the series, fewer at its ends."""
    n = len(values)
    index = np.arange(n)
    # Both sides shrink at the start, where the loss is steep, but only one at the noisy end.
    before = np.minimum(index, max(1, n // 50))
    after = np.minimum(before, n - 1 - index)
    total = np.concatenate([[0.0], np.cumsum(values)])
    return (total[index + after + 1] - total[index - before]) / (before + after + 1)


def thinned(n: int, most: int) -> np.ndarray:
    """Return indices of at most ``most`` of ``n`` items, evenly spread, the last one included."""
    return np.unique(np.linspace(n - 1, 0, min(n, most)).round().astype(int))


def draw_loss(figure: "Figure", train: Records, valid: Records) -> None:
    """Draw bits per token over the steps: each record faint, their mean, the validation."""
    axes, shown = figure.subplots(), []
    steps, bits = series(train, "bits_per_token")
    if len(bits):
        mean, few = smoothed(bits), thinned(len(bits), _POINTS)
        axes.plot(steps[few], bits[few], color=_COLORS["train"], alpha=0.3, linewidth=0.8)
        axes.plot(steps[few], mean[few], color=_COLORS["train"], label="training")
        # The first steps fall from so high that the rest would be a flat line below them.
        shown.extend(mean[len(mean) // 40 :])
    steps, bits = series(valid, "bits_per_token")
    if len(bits):
        style: dict[str, Any] = {"marker": "o", "linewidth": 1.0, "label": "validation"}
        axes.plot(steps, bits, color=_COLORS["valid"], **style)
        shown.extend(bits[len(bits) // 10 :])
    margin = 0.08 * (max(shown) - min(shown)) or 0.1
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.legend(loc="upper right")
    axes.set_ylabel("bits per token")
    _label_steps(axes)


def draw_pace(figure: "Figure", train: Records) -> None:
    """Draw learning rate and tokens per second over the steps, one above the other."""
    names = {"lr": "learning rate", "tokens_per_second": "tokens per second"}
    curves = [
        (words, *curve) for name, words in names.items() if len((curve := series(train, name))[0])
    ]
    panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (words, steps, values) in zip(panels, curves, strict=True):
        few = thinned(len(values), _POINTS)
        axes.plot(steps[few], values[few], color=_COLORS["train"])
        axes.set_ylabel(words)
        axes.set_ylim(0, (values.max() * 1.08) or 1.0)
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.locator_params(axis="y", nbins=5)
        _label_steps(axes, is_last=axes is panels[-1])


def draw_memory(
    figure: "Figure", curve: Records, baselines: dict[str, float], trained: float | None
) -> None:
    """Draw bits over the memory length at evaluation.

    Args:
        figure: Where to draw.
        curve: Evaluation results with growing ``mem_len``.
        baselines: Bits per byte of compressors, by name; drawn where the results have bytes too.
        trained: Memory length in training, if known.
    """
    axes, unit = figure.subplots(), memory_unit(curve)
    lengths = [row["mem_len"] for row in curve]
    bits = np.array([number(row, unit) for row in curve], dtype=float)
    axes.plot(lengths, bits, color=_COLORS["memory"], marker="o", clip_on=False, zorder=3)
    ticks = sorted({*lengths, trained} - {None})
    if positive := [length for length in ticks if length > 0]:
        # Logarithmic, with space for no memory at all.
        axes.set_xscale("symlog", base=2, linthresh=positive[0], linscale=1)
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", labelrotation=45 if len(ticks) > 6 else 0)
    if trained is not None:
        color = _COLORS["soft"]
        axes.axvline(trained, color=color, linestyle=":", linewidth=1.2)
        # Beside the line, on the side where there is space.
        side, shift = ("left", 4) if trained < ticks[len(ticks) // 2] else ("right", -4)
        beside: dict[str, Any] = {"xytext": (shift, 0), "textcoords": "offset points", "ha": side}
        beside |= {"xycoords": axes.get_xaxis_transform(), "va": "top", "color": color}
        axes.annotate("memory in training", (trained, 0.985), **beside)
    for name, value in baselines.items() if unit == "bits_per_byte" else ():
        color = _COLORS[name.split()[0]]
        axes.axhline(value, color=color, linestyle="--", linewidth=1.2)
        beside = {"xytext": (0, 2), "textcoords": "offset points", "va": "bottom", "color": color}
        axes.annotate(name, (0.01, value), xycoords=axes.get_yaxis_transform(), **beside)
    axes.margins(y=0.14)
    axes.set_xlabel("positions remembered at evaluation")
    axes.set_ylabel(unit.replace("_", " "))


def draw_places(
    figure: "Figure", in_segment: "Sequence[LossCurve]", from_start: "LossCurve"
) -> None:
    """Draw bits by place in the segment, and by how many tokens a text has already."""
    left, right = figure.subplots(1, 2, sharey=True)
    # No memory, and that of the model.
    curves = [
        (left, row, color) for row, color in zip(in_segment, ("valid", "memory"), strict=False)
    ]
    for axes, row, color in (*curves, (right, from_start, "memory")):
        middles = [math.sqrt(span.first * span.last) for span in row.spans]
        bits = [span.nll / math.log(2) for span in row.spans]
        label = f"memory {row.mem_len:,}" if row.mem_len else "no memory"
        axes.plot(middles, bits, color=_COLORS[color], marker="o", markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    left.legend(loc="upper right")
    left.set_xlabel("place in the segment")
    left.set_ylabel("bits per token")
    right.set_xlabel("tokens since the start of the text")


def draw_attention(figure: "Figure", spans: "Sequence[Shares]", title: str) -> None:
    """Draw how much of each layer's attention lies at which distance: the more, the darker."""
    axes, n_layer = figure.subplots(), len(spans[0].shares)
    # Shares of one distance, or far ones would look large for being many.
    widths = np.array([math.log((x.last + 2) / (x.first + 1)) for x in spans])
    for layer in range(n_layer):
        density = np.array([x.shares[layer] for x in spans]) / widths
        alphas = np.maximum(density / (density.max() or 1.0), 0.02) * (density > 0)
        colors = [(_COLORS["memory"], float(alpha)) for alpha in alphas.round(3)]
        style: dict[str, Any] = {"color": colors, "linewidth": 0, "antialiased": False}
        axes.bar(range(len(spans)), 1, 1, layer + 0.5, **style)
    axes.set_xlim(-0.5, len(spans) - 0.5)
    axes.set_ylim(0.5, n_layer + 0.5)
    few = thinned(len(spans), 7)
    axes.set_xticks(few, [f"{spans[x].first:,}" for x in few])
    axes.locator_params(axis="y", nbins=8, integer=True, min_n_ticks=1)
    axes.grid(visible=False)
    axes.set_title(title, fontsize=9, color=_COLORS["soft"])
    axes.set_xlabel("tokens back")
    axes.set_ylabel("layer")


def memory_unit(curve: Records) -> str:
    """Return ``bits_per_byte`` where all results have it, else ``bits_per_token``."""
    has_bytes = all(number(row, "bits_per_byte") is not None for row in curve)
    return "bits_per_byte" if has_bytes else "bits_per_token"


def as_svg(
    name: str, label: str, draw: Callable[["Figure"], object], size: tuple[float, float] = SIZE
) -> str:
    """Draw a figure for a page, to be put into its HTML.

    Args:
        name: A word that keeps the figure's ids apart from those of the others on the page.
        label: What a screen reader says.
        draw: Draws into a figure.
        size: Width and height, in inches.

    Raises:
        ImportError: matplotlib is missing.
    """
    svg = rendered("svg", draw, size).decode()
    svg = svg[svg.index("<svg") :]
    for color, value in _COLORS.items():
        svg = svg.replace(value, f"var(--{color})")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def rendered(
    form: str, draw: Callable[["Figure"], object], size: tuple[float, float] = SIZE
) -> bytes:
    """Draw a figure as ``svg`` or ``png``.

    Raises:
        ImportError: matplotlib is missing.
    """
    # Without pyplot nothing here touches the display or another figure of the process.
    import matplotlib.style
    from matplotlib.figure import Figure

    picture = BytesIO()
    metadata = dict.fromkeys(["Date", "Creator", "Format", "Type"]) if form == "svg" else {}
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(picture, format=form, dpi=160, transparent=form == "svg", metadata=metadata)
    return picture.getvalue()


def _label_steps(axes: Any, is_last: bool = True) -> None:
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", integer=True, nbins=6)
    if is_last:
        axes.set_xlabel("step")
