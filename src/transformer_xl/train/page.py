"""Pieces of a page: text, figures, tables, parts that unfold."""

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

# HTML has no way to write these; a lone surrogate has no UTF-8 either.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def text(value: object) -> str:
    """Write anything so that it is read as it is."""
    return escape(_UNWRITABLE.sub("\ufffd", str(value)))


def figure(svg: str | None, caption: str) -> str:
    """Put a caption below a figure; nothing without a figure."""
    return f"<figure>{svg}<figcaption>{text(caption)}</figcaption></figure>" if svg else ""


def table(head: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]], marks: str) -> str:
    """Make a table of cells; rows that are marked stand out, and below is what it means."""
    rows = list(rows)
    lines = ["".join(f"<th>{text(cell)}</th>" for cell in head)]
    lines = [f"<table><thead><tr>{lines[0]}</tr></thead><tbody>"]
    for cells, marked in rows:
        line = "".join(f"<td>{text(cell)}</td>" for cell in cells)
        opening = '<tr class="marked">' if marked else "<tr>"
        lines.append(f"{opening}{line}</tr>")
    lines.append("</tbody></table>")
    if any(marked for _, marked in rows):
        lines.append(f'<p class="note">Bold: {text(marks)}.</p>')
    return "\n".join(lines)


def listed(record: dict[str, Any]) -> str:
    """Show a record as JSON."""
    return f"<pre>{text(json.dumps(record, indent=2, ensure_ascii=False))}</pre>"


def folded(title: str, body: str, content: object, opened: bool = False) -> str:
    """Make a part that unfolds; nothing where there is no content."""
    if not content:
        return ""
    return f"<details{' open' if opened else ''}><summary>{text(title)}</summary>{body}</details>"
