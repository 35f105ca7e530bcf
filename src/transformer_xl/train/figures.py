"""Figures of a run, and the series of numbers that they show.

matplotlib is imported when something is drawn, and not before.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = Sequence[Mapping[str, object]]
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


def number(record: Mapping[str, object], name: str) -> float | None:
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
    pairs = [(x["step"], y) for x in records if (y := number(x, name)) is not None]
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
        axes.plot(steps, bits, "o-", color=_COLORS["valid"], linewidth=1.0, label="validation")
        shown.extend(bits[len(bits) // 10 :])
    margin = 0.08 * (max(shown) - min(shown)) or 0.1
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.legend(loc="upper right")
    axes.set_ylabel("bits per token")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.set_xlabel("step")


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
    lengths = [number(row, "mem_len") or 0.0 for row in curve]
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
        color, label = _COLORS["soft"], "memory in training"
        axes.axvline(trained, color=color, linestyle=":", linewidth=1.2, label=label)
    if unit == "bits_per_byte":
        for name, value in baselines.items():
            color = _COLORS[name.split()[0]]
            axes.axhline(value, color=color, linestyle="--", linewidth=1.2, label=name)
    if trained is not None or baselines:
        axes.legend()
    axes.margins(y=0.14)
    axes.set_xlabel("positions remembered at evaluation")
    axes.set_ylabel(unit.replace("_", " "))


def memory_unit(curve: Records) -> str:
    """Return ``bits_per_byte`` where all results have it, else ``bits_per_token``."""
    has_bytes = all(number(row, "bits_per_byte") is not None for row in curve)
    return "bits_per_byte" if has_bytes else "bits_per_token"


def as_svg(name: str, label: str, draw: Callable[["Figure"], object]) -> str:
    """Draw a figure for a page, to be put into its HTML.

    Args:
        name: A word that keeps the figure's ids apart from those of the others on the page.
        label: What a screen reader says.
        draw: Draws into a figure.

    Raises:
        ImportError: matplotlib is missing.
    """
    svg = rendered("svg", draw).decode()
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
