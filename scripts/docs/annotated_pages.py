"""The core's files beside the paper's equations, written from the source.

Docstrings and comments stand on the left and code on the right. Symbols of the paper
(``docs/symbols.toml``) link to their lines and back.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from inspect import cleandoc
from pathlib import Path
from typing import Any, NamedTuple

from docstrings import with_math
from mathml import mathml
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.ext.napoleon import Config, GoogleDocstring

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "transformer_xl"
TABLE = ROOT / "docs" / "symbols.toml"


class Symbol(NamedTuple):
    """A symbol of the paper."""

    id: str
    tex: str
    meaning: str
    section: str
    """Of the paper."""
    lines: dict[str, list[int]]
    """By file, the numbers of its lines."""


@dataclass
class Row:
    """Prose, and the code beside it."""

    title: tuple[str, int] | None = None
    """The name of what the row defines, and its depth: 0 of a file, 1 of a class."""
    prose: list[str] = field(default_factory=list)
    """Paragraphs in reStructuredText."""
    code: list[tuple[int, str]] = field(default_factory=list)
    """Lines with their numbers."""


@cache
def table() -> dict[str, Any]:
    """Return the contents of ``docs/symbols.toml``."""
    return tomllib.loads(TABLE.read_text("utf-8"))


def symbols() -> list[Symbol]:
    """Return the symbols with their lines.

    Raises:
        ValueError: A line is not in its file, or more than once.
    """
    found = []
    for entry in table()["symbol"]:
        lines: dict[str, list[int]] = {}
        for place in entry["at"]:
            lines.setdefault(place["file"], []).append(_number(place["file"], place["line"]))
        about = (entry[key] for key in ("id", "tex", "meaning", "section"))
        found.append(Symbol(*about, lines))
    return found


def _number(file: str, line: str) -> int:
    text = (PACKAGE / file).read_text("utf-8")
    numbers = [n for n, own in enumerate(text.splitlines(), 1) if own.strip() == line]
    if len(numbers) != 1:
        raise ValueError(
            f"docs/symbols.toml: {file} has {len(numbers)} lines {line!r} and must have one: "
            "write the line there as it is now"
        )
    return numbers[0]


def page_name(file: str) -> str:
    """Return the path of the page of a file, below ``docs/generated`` and without suffix."""
    return f"annotated/{Path(file).stem}"


def rows(text: str, marked: Sequence[int] = ()) -> list[Row]:
    """Divide a file into rows.

    Args:
        text: The source code.
        marked: Numbers of lines that begin a row.
    """
    tree, lines = ast.parse(text), text.splitlines()
    titles, docstrings = _parts(tree)
    found, skipped = [Row()], 0
    for number, line in enumerate(lines, 1):
        if number <= skipped:
            continue
        if number in docstrings:
            skipped, docstring = docstrings[number]
            found[-1].prose.append(docstring)
            continue
        is_comment = line.lstrip().startswith("#") and not line.lstrip().startswith("# pyright")
        if number in titles:
            found.append(Row(title=titles[number]))
        elif is_comment:
            comment = _escaped(line.lstrip().lstrip("# "))
            if found[-1].prose and not found[-1].code and not found[-1].title:
                found[-1].prose[-1] += f" {comment}"
            else:
                found.append(Row(prose=[comment]))
            continue
        elif number in marked and (found[-1].code or found[-1].title):
            found.append(Row())
        if line.strip() or found[-1].code:
            found[-1].code.append((number, line))
    for row in found:
        while row.code and not row.code[-1][1].strip():
            row.code.pop()
    return [row for row in found if row.prose or row.code]


def _string(node: ast.stmt) -> str | None:
    """Return the text of a statement that is nothing but a string."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value if isinstance(node.value.value, str) else None
    return None


def _escaped(comment: str) -> str:
    """Escape what is no markup in a comment: names with underscores, and asterisks."""
    return re.sub(r"[_*`|]", r"\\\g<0>", comment)


def _parts(tree: ast.Module) -> tuple[dict[int, Any], dict[int, tuple[int, str]]]:
    """Return titles by the line where a definition begins, and docstrings by their first line."""
    titles: dict[int, Any] = {}
    docstrings: dict[int, tuple[int, str]] = {}

    def walk(body: Sequence[ast.stmt], depth: int) -> None:
        before: ast.stmt | None = None
        for n, node in enumerate(body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                if depth < 2:
                    titles[first] = (node.name, depth)
                    walk(node.body, depth + 1 if isinstance(node, ast.ClassDef) else 2)
                else:
                    walk(node.body, depth)
            elif (text := _string(node)) is not None and (n == 0 or before is not None):
                is_own = isinstance(before, ast.Assign | ast.AnnAssign)
                prose = _prose(cleandoc(text), is_plain=is_own)
                docstrings[node.lineno] = (node.end_lineno or node.lineno, prose)
                if is_own and depth == 0 and before is not None:
                    target = before.targets[0] if isinstance(before, ast.Assign) else before.target
                    titles[before.lineno] = (ast.unparse(target), 0)
            before = node

    walk(tree.body, 0)
    return titles, docstrings


def _prose(docstring: str, *, is_plain: bool) -> str:
    text = with_math(docstring)
    if is_plain:
        return text
    settings: Any = Config(napoleon_use_rtype=False)
    return str(GoogleDocstring(text, settings))


def _indented(text: str, by: int = 3) -> list[str]:
    return [f"{' ' * by}{line}".rstrip() for line in text.splitlines()]


def _raw(html: str, by: int = 3) -> list[str]:
    return [*_indented(".. raw:: html", by), "", *_indented(html, by + 3), ""]


def _code(row: Row) -> str:
    """Return the lines of a row as HTML, with an anchor ``L-NUMBER`` each."""
    formatter = HtmlFormatter(
        linenos="inline", linenostart=row.code[0][0], linespans="L", cssclass="highlight"
    )
    text = "\n".join(line for _, line in row.code)
    return highlight(text, PythonLexer(stripnl=False, ensurenl=False), formatter)


def _link(address: str, symbol: Symbol) -> str:
    """Return a link whose text is the symbol, with its meaning for screen readers."""
    formula = mathml(symbol.tex, is_block=False)
    name = f'<span class="visually-hidden">{escape(symbol.meaning)}</span>'
    return f'<a href="{address}">{formula}{name}</a>'


def _page(about: dict[str, Any], known: Sequence[Symbol]) -> str:
    file = about["path"]
    here = [symbol for symbol in known if file in symbol.lines]
    marked = {number: symbol for symbol in here for number in symbol.lines[file]}
    title = f"``{file}``"
    lines = [title, "=" * len(title), "", about["about"], ""]
    for tex in about["equations"]:
        lines += [".. math::", "", f"   {tex}", ""]
    if here:
        links = ", ".join(_link(f"#L-{symbol.lines[file][0]}", symbol) for symbol in here)
        lines += _raw(f'<p class="symbols">On this page: {links}</p>', 0)
    for row in rows((PACKAGE / file).read_text("utf-8"), [*marked]):
        if row.title is not None:
            name, depth = row.title
            lines += [f"``{name}``", "-~"[depth] * (len(name) + 4), ""]
        lines += [".. container:: annotated", ""]
        lines += _row(row, marked)
    return "\n".join(lines)


def _row(row: Row, marked: dict[int, Symbol]) -> list[str]:
    notes = [
        f'<p class="symbol">{_link(f"../symbols.html#symbol-{symbol.id}", symbol)} '
        f"{escape(symbol.meaning)}</p>"
        for number, _ in row.code
        if (symbol := marked.get(number)) is not None
    ]
    lines: list[str] = []
    if row.prose or notes:
        lines += [*_indented(".. container:: prose"), ""]
        for text in row.prose:
            lines += [*_indented(text, 6), ""]
        for note in notes:
            lines += _raw(note, 6)
    return [*lines, *_raw(_code(row))] if row.code else lines


def _symbols_page(known: Sequence[Symbol]) -> str:
    rows_ = []
    for symbol in known:
        places = "<br>".join(
            f'<a href="{page_name(file)}.html#L-{number}">{file}:{number}</a>'
            for file, numbers in symbol.lines.items()
            for number in numbers
        )
        rows_.append(
            f'<tr id="symbol-{symbol.id}"><td>{mathml(symbol.tex, is_block=False)}</td>'
            f"<td>{escape(symbol.meaning)}</td><td>{symbol.section}</td><td>{places}</td></tr>"
        )
    heads = "".join(f'<th scope="col">{x}</th>' for x in ("symbol", "meaning", "paper", "line"))
    html = (
        '<div class="table-wrapper" tabindex="0" role="group" aria-label="symbols">'
        f'<table class="docutils"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows_)}'
        "</tbody></table></div>"
    )
    title = "Symbols of the paper"
    about = (
        "Each symbol of `the paper <https://arxiv.org/abs/1901.02860>`_ (sections 3.2, 3.3 and "
        "4.1, Appendix B) with the lines that compute it. On the page of a file, the symbol beside "
        "a line leads back here."
    )
    return "\n".join([title, "=" * len(title), "", about, "", *_raw(html, 0)])


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path below ``docs/generated`` and the text of each page."""
    known, files = symbols(), table()["file"]
    for about in files:
        yield f"{page_name(about['path'])}.rst", _page(about, known)
    yield "symbols.rst", _symbols_page(known)
    title = "Annotated code"
    about = (
        "The core of the package beside the paper's equations, in reading order: docstrings and "
        "comments on the left, the code on the right. The pages are made from the source."
    )
    entries = [*(f"   {page_name(each['path'])}" for each in files), "   symbols"]
    toctree = [".. toctree::", "   :maxdepth: 1", "", *entries, ""]
    yield "annotated.rst", "\n".join([title, "=" * len(title), "", about, "", *toctree])
