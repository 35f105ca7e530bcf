"""Tables that a program writes into a page of Markdown.

Each stands between the comments ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

_PLACE = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->", re.S)


def table(columns: str, rows: Iterable[str], n_texts: int = 0) -> str:
    """Return a table.

    Args:
        columns: The titles, separated by bars.
        rows: The lines, as :func:`row` makes them.
        n_texts: How many of the first columns hold text; the others are aligned to the right.
    """
    names = columns.split("|")
    rule = "".join("---|" if i < n_texts else "--:|" for i in range(len(names)))
    return "\n".join([f"| {' | '.join(names)} |", f"|{rule}", *rows])


def row(*cells: object) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def page(text: str, found: Mapping[str, str]) -> str:
    """Return the text of a page with its tables renewed.

    Raises:
        SystemExit: The page has no place for a table, or one for a table that is unknown.
    """
    places = _PLACE.findall(text)
    if sorted(places) != sorted(found):
        sys.exit(f"the page has places for {places}, and there are {list(found)}")
    return _PLACE.sub(lambda x: f"<!-- table: {x[1]} -->\n{found[x[1]]}\n<!-- end -->", text)


def main(path: Path, found: Mapping[str, str], program: str) -> None:
    """Write the page with ``--write``; without it, end with an error if the page is old."""
    parser = argparse.ArgumentParser(description=f"Write the tables of docs/{path.name}.")
    parser.add_argument("--write", action="store_true")
    text = path.read_text("utf-8")
    new = page(text, found)
    if parser.parse_args().write:
        path.write_text(new, "utf-8")
    elif new != text:
        sys.exit(f"{path.name} is old: run python benchmarks/{program} --write")
