"""Write the text of the shipped model `shakespeare`: tiny Shakespeare, and the other plays.

    mkdir plays
    while read -r name commit; do
        git clone https://github.com/standardebooks/$name plays/$name
        git -C plays/$name checkout $commit
    done < scripts/pretrained/plays.txt
    git clone https://github.com/google/snappy     # texts of the Canterbury corpus
    python scripts/pretrained/shakespeare.py --plays plays --held_out snappy/testdata/asyoulik.txt
    txl train shakespeare --out runs/pretrained/shakespeare/run

The first nine tenths of tiny Shakespeare are read as they are, the last tenth is the validation
text. Plays of Standard Ebooks (CC0) are brought into the same form: names of who speaks, no stage
directions, the same 65 characters. An act that shares 20 words in a row with tiny Shakespeare or
with a held-out file is left out.
"""

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from books import ascii_punctuation, listed, speeches, wrapped
from overlap import shared, windows
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


def texts(tiny: str, plays: Iterable[Path], held_out: Iterable[Path]) -> dict[str, bytes]:
    """Return the training and the validation text, and say what was left out.

    Args:
        tiny: Tiny Shakespeare.
        plays: Work trees of plays.
        held_out: Files of which nothing is in the training text.
    """
    place = len(tiny) * 9 // 10
    others = [tiny, *(x.read_text("utf-8", "replace") for x in held_out)]
    unread = np.unique(np.concatenate([windows(x) for x in others]))
    acts = [in_form(speeches(act), tiny) for play in plays for act in _acts(play)]
    kept = [x for x in acts if not shared(x, unread)]
    print(f"{len(acts) - len(kept)} of {len(acts)} acts left out: they share 20 words")
    # The order of the acts does not depend on that of the plays.
    kept.sort(key=lambda x: hashlib.sha256(x.encode()).digest())
    train = "".join([tiny[:place], "\n\n", *kept])
    return {"train": train.encode(), "valid": tiny[place:].encode()}


def _acts(play: Path) -> Iterator[Path]:
    return iter(sorted((play / "src" / "epub" / "text").glob("act-*.xhtml")))


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
        found = find_text(DataConfig(name="tiny-shakespeare", path=given.tiny), CACHE, print)
        (tiny,) = (file for files in found.parts.values() for file in files)
        parts = texts(tiny.read_text("utf-8"), plays, given.held_out)
        write_files({paths[part]: text for part, text in parts.items()})
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
