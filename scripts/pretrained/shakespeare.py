"""Write the text of the shipped model `shakespeare`: tiny Shakespeare, and the other plays.

    mkdir plays
    while read -r name commit; do
        git clone https://github.com/standardebooks/$name plays/$name
        git -C plays/$name checkout $commit
    done < scripts/pretrained/plays.txt
    git clone https://github.com/google/snappy     # texts of the Canterbury corpus
    git -C snappy checkout 6281a07b7e08629884ec93a89fea6e05c62e599c
    python scripts/pretrained/shakespeare.py --plays plays --held_out snappy/testdata/asyoulik.txt
    txl train shakespeare --out runs/pretrained/shakespeare/run

The first nine tenths of tiny Shakespeare are read as they are, the last tenth is the validation
text. Plays of Standard Ebooks (CC0) are brought into the same form: names of who speaks, no stage
directions, the same 65 characters. An act, prologue or epilogue that shares 20 words in a row with
tiny Shakespeare or with a held-out file is left out.
"""

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from books import ascii_punctuation, listed, speeches, wrapped
from overlap import without_shared
from text_files import parser_for, require_new_files, write_files

from transformer_xl import DataConfig
from transformer_xl.data.finding import find_text

OUT = Path("runs/pretrained/shakespeare/text")
"""Where the recipe `shakespeare` reads it."""
CACHE = Path("runs/pretrained/downloads")
LISTED = Path(__file__).parent / "plays.txt"
"""A line for each play: the name of its repository and the commit that was read."""
WIDTH = 55
"""Characters of a line of prose, at most."""
_ORDINALS = ("First ", "Second ", "Third ", "Fourth ", "Fifth ")
_SIGNS = str.maketrans({'"': "'"} | dict.fromkeys("()[]"))


def in_form(act: Iterable[tuple[str, list[str]]], known: str) -> str:
    """Return an act in the form of tiny Shakespeare.

    Args:
        act: The speeches, as :func:`books.speeches` yields them.
        known: Text of tiny Shakespeare, which has names such as "Messenger" in small letters.
    """
    pieces: list[str] = []
    for name, paragraphs in act:
        lines = "\n".join(_plain(wrapped(x, WIDTH)) for x in paragraphs)
        name = _plain(" and ".join(name.split("\n")))
        if not name and pieces:
            pieces[-1] += "\n" + lines
        elif name:
            is_small = name.startswith(_ORDINALS) or f"\n{name}:\n" in known
            pieces.append(f"{name if is_small else name.upper()}:\n{lines}")
    # A bill, with its sums in digits, is left out.
    return "".join(f"{x}\n\n" for x in pieces if {*x} <= {*known})


def _plain(text: str) -> str:
    """Return a text without accents, and with the signs of tiny Shakespeare alone."""
    text = unicodedata.normalize("NFKD", ascii_punctuation(text).translate(_SIGNS))
    return "".join(x for x in text if not unicodedata.combining(x)).replace("...", ".")


def tiny_shakespeare(path: str | None) -> tuple[str, str]:
    """Return the first nine tenths and the last tenth of tiny Shakespeare.

    Args:
        path: A copy of it. None: it is downloaded.
    """
    found = find_text(DataConfig(name="tiny-shakespeare", path=path), CACHE, print)
    (file,) = (file for files in found.parts.values() for file in files)
    text = file.read_text("utf-8")
    place = len(text) * 9 // 10
    return text[:place], text[place:]


def acts(play: Path) -> Iterator[Path]:
    """Yield the files of a play that have speeches, in the order of their names.

    Raises:
        FileNotFoundError: There is none.
    """
    found = sorted((play / "src" / "epub" / "text").glob("*.xhtml"))
    with_speeches = [x for x in found if any(speeches(x))]
    if not with_speeches:
        raise FileNotFoundError(f"{play} has no speeches: is it a play of Standard Ebooks?")
    yield from with_speeches


def texts(
    train: str, valid: str, plays: Iterable[Path], held_out: Iterable[Path]
) -> dict[str, bytes]:
    """Return the training and the validation text, and say what was left out.

    Args:
        train: The first part of tiny Shakespeare.
        valid: The rest.
        plays: Work trees of plays.
        held_out: Files of which nothing is in the training text.
    """
    others = [train + valid, *(x.read_text("utf-8", "replace") for x in held_out)]
    read = (in_form(speeches(act), train) for play in plays for act in acts(play))
    rest = without_shared(read, others)
    # The order of the acts does not depend on that of the plays.
    rest.sort(key=lambda x: hashlib.sha256(x.encode()).digest())
    return {"train": "".join([train, "\n\n", *rest]).encode(), "valid": valid.encode()}


def main() -> None:
    """Find the texts, and write."""
    parser = parser_for(__doc__, OUT, "the folder")
    parser.add_argument("--plays", type=Path, required=True, help="a folder of the plays' clones")
    parser.add_argument("--tiny", help="a copy of tiny Shakespeare; without it, it is downloaded")
    parser.add_argument(
        "--held_out", type=Path, nargs="+", required=True, help="files to leave out"
    )
    given = parser.parse_args()
    paths = {part: given.out / f"{part}.txt" for part in ("train", "valid")}
    try:
        require_new_files(paths.values(), force=given.force)
        plays = listed(LISTED, given.plays)
        parts = texts(*tiny_shakespeare(given.tiny), plays, given.held_out)
        write_files({paths[part]: text for part, text in parts.items()})
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
