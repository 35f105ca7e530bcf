"""Write the text of the shipped model `english`: WikiText-2 in two forms, and old novels.

    python scripts/pretrained/english.py --wikitext wikitext-2 --books pg19
    txl train english --out runs/pretrained/english/run

Without --wikitext and --books, the texts are downloaded.

WikiText-2 is divided into words by spaces ("@-@" for a hyphen within a word, "<unk>" for a rare
word). So that the model also writes ordinary English, a second copy has ordinary typography; in it,
only sentences without "<unk>" are kept. The novels are books of PG-19's test part, published before
1919 and in the public domain.
"""

# ruff: noqa: RUF001 - punctuation of the text

import argparse
import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pooch

from transformer_xl import DataConfig
from transformer_xl.data.finding import find_text

OUT = Path("runs/pretrained/english/text")
"""Where the recipe `english` reads it."""
CACHE = Path("runs/pretrained/downloads")
BOOKS = (28988, 4047, 9931, 28444, 860)
"""Numbers of the novels at Project Gutenberg."""
BOOK_URL = "https://storage.googleapis.com/deepmind-gutenberg/test/{}.txt"
CHUNK = 60_000
"""Characters of a novel that stay together when all is shuffled."""
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


def paragraphs(book: str) -> Iterator[str]:
    """Yield a novel in chunks that end between paragraphs, with its lines joined."""
    joined = re.sub(r"(?<!\n)\n(?!\n)", " ", book)
    chunk = ""
    for paragraph in re.split(r"\n{2,}", joined):
        chunk += " ".join(paragraph.split()) + "\n\n"
        if len(chunk) >= CHUNK:
            yield chunk
            chunk = ""
    if chunk:
        yield chunk


def write(folder: Path, wikitext: dict[str, Path], books: list[Path]) -> None:
    """Write the three parts; the training text is articles in both forms and chunks of novels."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("valid", "test"):
        shutil.copyfile(wikitext[part], folder / f"{part}.txt")
    found = [*articles(wikitext["train"].read_text(encoding="utf-8"))]
    pieces = [*found, *map(plain, found)]
    for book in books:
        pieces += paragraphs(book.read_text(encoding="utf-8"))
    pieces.sort(key=lambda x: hashlib.sha256(x.encode()).digest())
    (folder / "train.txt").write_text("".join(pieces), encoding="utf-8")


def main() -> None:
    """Find or download the texts, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", default=OUT, help="the folder to write")
    parser.add_argument("--wikitext", help="a copy of WikiText-2; without it, it is downloaded")
    parser.add_argument("--books", type=Path, help="a folder with the novels, NUMBER.txt each")
    given = parser.parse_args()
    texts = find_text(DataConfig(name="wikitext-2", path=given.wikitext), CACHE, print)
    wikitext = {part: files[0] for part, files in texts.parts.items()}
    if given.books:
        books = [given.books / f"{number}.txt" for number in BOOKS]
    else:
        books = [Path(pooch.retrieve(BOOK_URL.format(x), None, path=CACHE)) for x in BOOKS]
    write(given.out, wikitext, books)


if __name__ == "__main__":
    main()
