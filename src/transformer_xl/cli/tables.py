"""Tables in Markdown, made to fit a terminal."""

import textwrap
from collections.abc import Sequence
from itertools import groupby

WIDTH = 100
"""Columns of a terminal that a table takes at most."""


def narrow(text: str, width: int = WIDTH) -> str:
    """Return Markdown with aligned tables of so many columns at most.

    A wider table becomes several, each with the first column; its paragraphs are wrapped.
    """
    parts = []
    for is_table, group in groupby(text.strip().splitlines(), lambda line: line.startswith("|")):
        lines = [*group]
        if is_table:
            parts.append(_tables(lines, width))
        else:
            parts += [textwrap.fill(line, width) for line in lines if line]
    return "\n\n".join(parts) + "\n"


def _tables(lines: Sequence[str], width: int) -> str:
    head, rule, *body = ([x.strip() for x in line.strip("|").split("|")] for line in lines)
    rows = [head, *body]
    widths = [max(len(row[n]) if n < len(row) else 0 for row in rows) for n in range(len(head))]
    groups: list[list[int]] = []
    for n in range(1, len(head)):
        taken = sum(widths[x] + 3 for x in (0, *(groups[-1] if groups else ()), n)) + 1
        if groups and taken <= width:
            groups[-1].append(n)
        else:
            groups.append([n])
    found = []
    for group in groups or [[]]:
        columns = [0, *group]
        # What a baseline does not have is left out where none of it is there.
        kept = [row for row in body if not group or any(n < len(row) and row[n] for n in group)]
        cells = [[row[n] if n < len(row) else "" for n in columns] for row in [head, *kept]]
        right = [rule[n].endswith(":") for n in columns]
        own = [max(map(len, column)) for column in zip(*cells, strict=True)]
        drawn = [
            [x.rjust(w) if r else x.ljust(w) for x, w, r in zip(row, own, right, strict=True)]
            for row in cells
        ]
        drawn.insert(1, ["-" * (w - r) + ":" * r for w, r in zip(own, right, strict=True)])
        found.append("\n".join(f"| {' | '.join(row)} |" for row in drawn))
    return "\n\n".join(found)
