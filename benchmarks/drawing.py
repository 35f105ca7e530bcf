"""Lines as SVG, drawn by hand, so that they are the same everywhere."""

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM = 560, 240, 52, 30
NAMES = 160
"""How wide the names are, where they need a column of their own."""
FEW = 2
"""So many lines have their names among them."""
MARKED = 30
"""A line of no more points shows each."""
COLORS = (
    "#2463b8", "#c4501b", "#2e8b57", "#8b3fa8", "#b8860b",
    "#008b9b", "#c2185b", "#5d6d7e", "#222222",
)  # fmt: skip


def lines_svg(
    lines: Mapping[str, Sequence[Sequence[float]]],
    *,
    after: float = 0.0,
    low: float | None = None,
    digits: int = 3,
) -> str:
    """Draw lines over a common axis that begins at 0.

    Args:
        lines: The points of each, by name.
        after: The range of the values is that of the points behind this share of the axis; what is
            above it is cut off.
        low: Where the axis of the values begins. None: a little below the least.
        digits: Of the values beside that axis, behind the point.
    """
    width = WIDTH + NAMES * (len(lines) > FEW)
    points = [point for line in lines.values() for point in line]
    last = max(x for x, _ in points) or 1
    late = [y for x, y in points if x >= last * after]
    margin = 0.05 * (max(late) - min(late)) or 0.1
    low, high = min(late) - margin if low is None else low, max(late) + margin

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 10) * x / last
        return across, 10 + (HEIGHT - BOTTOM - 10) * (high - y) / (high - low)

    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i in range(5):
        value = low + (high - low) * i / 4
        _, y = place(0, value)
        found += [
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - 10}" stroke="#dfe3e7"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.{digits}f}</text>',
        ]
    for i, anchor in ((0, "start"), (2, "middle"), (4, "end")):
        x, _ = place(last * i / 4, high)
        found.append(
            f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}">{last * i / 4:,.0f}</text>'
        )
    for n, (name, line) in enumerate(lines.items()):
        color = COLORS[n % len(COLORS)]
        shown = [place(x, y) for x, y in line if y <= high]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        found.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(line) <= MARKED:
            found += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}"/>' for x, y in shown]
        at = f'x="{width - 14}" y="{24 + 15 * n}" text-anchor="end"'
        found.append(f'<text {at} fill="{color}">{name}</text>')
    return "\n".join([*found, "</svg>", ""])
