"""Tables in Markdown, made to fit a terminal; files of results and plots."""

import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from json import dumps
from pathlib import Path
from typing import Any

from transformer_xl.cli.printing import say
from transformer_xl.config import replace_file

WIDTH = 100
"""Columns of a terminal that a table takes at most."""


def write_results(path: Path, result: Mapping[str, Any], table: str) -> None:
    """Write results to ``path`` with the suffix .json, and their table with .md."""
    replace_file(path.with_suffix(".json"), (dumps(result, indent=2) + "\n").encode())
    replace_file(path.with_suffix(".md"), table.encode())


def can_plot() -> bool:
    """Whether matplotlib is installed; say if it is not."""
    if not find_spec("matplotlib"):
        say("no plot: it requires pip install 'transformer-xl[plot]'")
    return bool(find_spec("matplotlib"))


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
    parts = []
    for group in groups or [[]]:
        columns = [0, *group]
        # What a baseline does not have is left out where none of it is there.
        filled = [row for row in body if not group or any(n < len(row) and row[n] for n in group)]
        cells = [[row[n] if n < len(row) else "" for n in columns] for row in [head, *filled]]
        right = [rule[n].endswith(":") for n in columns]
        fitted = [max(map(len, column)) for column in zip(*cells, strict=True)]
        drawn = [
            [x.rjust(w) if r else x.ljust(w) for x, w, r in zip(row, fitted, right, strict=True)]
            for row in cells
        ]
        drawn.insert(1, ["-" * (w - r) + ":" * r for w, r in zip(fitted, right, strict=True)])
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in drawn))
    return "\n\n".join(parts)
