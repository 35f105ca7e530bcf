"""Read books of Standard Ebooks: XHTML chapters as plain text."""

# ruff: noqa: RUF001 - punctuation of the text

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

LISTED = Path(__file__).parent / "books.txt"
"""A line for each book: the name of its repository and the commit that was read."""
_WITHOUT_TEXT = ("titlepage", "imprint", "halftitlepage", "colophon", "uncopyright", "loi")
_XHTML = "{http://www.w3.org/1999/xhtml}"
_TYPE = "{http://www.idpf.org/2007/ops}type"
_PLAIN = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "...", "æ": "ae", "œ": "oe"}
)
_INVISIBLE = {ord(x): None for x in "\u2060\ufeff\u00ad"} | {
    ord(x): " " for x in "\u00a0\u200a\u202f"
}


def listed(names: Path, folder: Path) -> list[Path]:
    """Return the work trees of listed books.

    Args:
        names: A file with a line for each, which begins with the name of its repository.
        folder: Where they are.

    Raises:
        FileNotFoundError: One is missing.
    """
    found = [folder / line.split()[0] for line in names.read_text("utf-8").splitlines()]
    for book in found:
        if not (book / "src" / "epub").is_dir():
            raise FileNotFoundError(f"{book} is missing: clone it, as --help shows")
    return found


def chapters(book: Path) -> Iterator[list[str]]:
    """Yield the chapters of a book, each as its paragraphs.

    Args:
        book: The work tree of the book's repository.

    Raises:
        OSError: It is not one.
    """
    epub = book / "src" / "epub"
    spine = ElementTree.parse(epub / "content.opf").iterfind(".//{*}itemref")
    for name in (x.attrib["idref"] for x in spine):
        if not name.startswith(_WITHOUT_TEXT):
            body = ElementTree.parse(epub / "text" / name).find(f"{_XHTML}body")
            assert body is not None
            yield [x for x in _paragraphs(body) if x]


def _paragraphs(parent: ElementTree.Element) -> Iterator[str]:
    """Yield the paragraphs below an element; the speeches of a play are rows of a table."""
    for child in parent:
        tag = child.tag.removeprefix(_XHTML)
        if tag in (
            "section",
            "div",
            "blockquote",
            "header",
            "footer",
            "article",
            "table",
            "tbody",
            "ol",
            "ul",
            "dl",
            "body",
            "figure",
            "hgroup",
        ):
            yield from _paragraphs(child)
        elif tag == "tr":
            cells = [" ".join(_paragraphs_of_cell(x)) for x in child]
            yield "\t".join(cells).rstrip() if len(cells) > 1 else "".join(cells)
        elif tag not in ("hr", "img", "nav"):
            yield _text(child)


def _paragraphs_of_cell(cell: ElementTree.Element) -> Iterator[str]:
    has_blocks = any(x.tag in (f"{_XHTML}p", f"{_XHTML}blockquote") for x in cell)
    found = _paragraphs(cell) if has_blocks else iter([_text(cell)])
    is_name = "persona" in cell.get(_TYPE, "")
    for x in found:
        yield x.upper() if is_name else x.replace("\n", "\n\t")


def speeches(act: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the speeches of an act: who speaks, and the paragraphs, without stage directions.

    A row without a name goes on with the speech before; then the name is empty.
    """
    for row in ElementTree.parse(act).iter(f"{_XHTML}tr"):
        name, *cells = row
        paragraphs = [x for cell in cells for x in (*cell.iter(f"{_XHTML}p"),) or (cell,)]
        texts = [_text(x, without=("noteref", "z3998:stage-direction")) for x in paragraphs]
        if found := [x for x in texts if x]:
            yield _text(name), found


def _text(element: ElementTree.Element, without: Sequence[str] = ("noteref",)) -> str:
    """Return the text of a paragraph: line breaks where it has them, else none."""
    pieces: list[str] = []

    def add(x: ElementTree.Element) -> None:
        if x.get(_TYPE) in without:
            return
        pieces.append(" ".join((x.text or "").split("\n")))
        for child in x:
            if child.tag == f"{_XHTML}br":
                pieces.append("\n")
            else:
                add(child)
            pieces.append((child.tail or "").replace("\n", " "))

    add(element)
    text = "".join(pieces).translate(_INVISIBLE)
    return "\n".join(re.sub(r"[ \t]+", " ", line).strip() for line in text.split("\n")).strip()


def ascii_punctuation(text: str) -> str:
    """Write quotation marks, dashes and ligatures as a typewriter does."""
    return text.translate(_PLAIN)


def wrapped(paragraph: str, width: int) -> str:
    """Break the lines of a paragraph of prose; verse and speeches keep theirs."""
    if "\n" in paragraph or "\t" in paragraph:
        return paragraph
    return re.sub(rf"(.{{1,{width}}})(?: +|$)", r"\1\n", paragraph).rstrip("\n")
