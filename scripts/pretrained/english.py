"""Write the text of the shipped model `english`: WikiText-2 in two forms, and old novels.

    python scripts/pretrained/english.py --wikitext wikitext-2 --books pg19
    txl train english --out runs/pretrained/english/run

Without --wikitext and --books, the texts are downloaded.

WikiText-2 is divided into words by spaces ("@-@" for a hyphen within a word, "<unk>" for a rare
word). So that the model also writes ordinary English, a second copy has ordinary typography; in it,
only sentences without "<unk>" are kept. The novels are books of PG-19's test part, published before
1919 and in the public domain. PG-19's files, which are downloaded, have a header and some words
replaced by "<DW..>"; the shipped model has read copies of Project Gutenberg's text without those.
"""

# ruff: noqa: RUF001 - punctuation of the text

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pooch
from text_files import parser_for, require_new_files, write_files

from transformer_xl import DataConfig
from transformer_xl.config.files import checksum
from transformer_xl.data.finding import find_text

OUT = Path("runs/pretrained/english/text")
"""Where the recipe `english` reads it."""
CACHE = Path("runs/pretrained/downloads")
PUBLISHED = {
    28988: "5ba1eb22b96320155afd942871f76b1f040d4918d9871a1d4b854176c7015567",
    4047: "a1126b6bec29256f9e92fb120c71520623694813d3a9772853c09ad1c5f75f8a",
    9931: "23935eb122717a05d7153e7c6ab95a9000c116139fa5af4b403513ead6f0c61a",
    28444: "f7bd54971caf53bc3ca651cacbaaefae402812b56918f6c4b5dcaeb6a279864f",
    860: "4b52c996d63bfeb3c942fff20b6b2298d3455be8954d44a3350022c3187dd584",
}
"""Numbers of the novels at Project Gutenberg, and SHA-256 of PG-19's files."""
READ = {
    28988: "cd0fa047f30d04f2a653a44201a5fddc972cd0ffd821807aea24e723470bcdeb",
    4047: "c24c974659b8a8b84a7fdc58a3539858592eeafd19f23e63f53f5c0638d0af28",
    9931: "6e3741c760db1001345b80a9337d429997d6d1ca25d1493fee3b3a7a6a120be6",
    28444: "f2acf70c27738cd8edf744f87714f1207e28c9aa4539b32667c847a4ea478a4a",
    860: "db64fcd309c50a37370aa984870624c73bc4d973a49c313fc73e99ff40c42f47",
}
"""SHA-256 of the copies that the shipped model has read."""
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


def texts(wikitext: dict[str, Path], books: list[Path]) -> dict[str, bytes]:
    """Return the three parts; the training text is articles in both forms and chunks of novels."""
    found = [*articles(wikitext["train"].read_text(encoding="utf-8"))]
    pieces = [*found, *map(plain, found)]
    for book in books:
        pieces += paragraphs(book.read_text(encoding="utf-8"))
    pieces.sort(key=lambda x: hashlib.sha256(x.encode()).digest())
    held_out = {part: wikitext[part].read_bytes() for part in ("valid", "test")}
    return {"train": "".join(pieces).encode(), **held_out}


def books_in(folder: Path | None) -> list[Path]:
    """Return the novels in a folder, NUMBER.txt each; None: download PG-19's files.

    Raises:
        FileNotFoundError: One is missing.
        ValueError: One is another text.
    """
    if folder is None:
        known = PUBLISHED.items()
        return [Path(pooch.retrieve(BOOK_URL.format(x), y, path=CACHE)) for x, y in known]
    found = [folder / f"{number}.txt" for number in READ]
    for number, path in zip(READ, found, strict=True):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: leave out --books to download PG-19's")
        if (digest := checksum(path)) not in (READ[number], PUBLISHED[number]):
            raise ValueError(
                f"{path} has the SHA-256 {digest}: it must be PG-19's {PUBLISHED[number]}, or "
                f"{READ[number]}, which the shipped model has read. Leave out --books to download "
                "PG-19's"
            )
    return found


def main() -> None:
    """Find or download the texts, and write."""
    parser = parser_for(__doc__, OUT, "the folder")
    parser.add_argument("--wikitext", help="a copy of WikiText-2; without it, it is downloaded")
    parser.add_argument("--books", type=Path, help="a folder with the novels, NUMBER.txt each")
    given = parser.parse_args()
    paths = {part: given.out / f"{part}.txt" for part in ("train", "valid", "test")}
    try:
        require_new_files(paths.values(), force=given.force)
        books = books_in(given.books)
        found = find_text(DataConfig(name="wikitext-2", path=given.wikitext), CACHE, print)
        wikitext = {part: files[0] for part, files in found.parts.items()}
        write_files({paths[part]: text for part, text in texts(wikitext, books).items()})
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
