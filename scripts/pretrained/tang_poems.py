"""Write the text of the shipped model `tang-poems`: the Quan Tang Shi, a title and its lines each.

    git clone https://github.com/chinese-poetry/chinese-poetry
    git -C chinese-poetry checkout 99ebbef7e1345c0985c44b9fd96a3f9e776f117b
    pip install opencc-python-reimplemented==0.1.7
    python scripts/pretrained/tang_poems.py --poems chinese-poetry
    txl train tang-poems --out runs/pretrained/tang-poems/run

The source is the public repository chinese-poetry/chinese-poetry, a clone of which is given; its
files are under the MIT licence, the poems are from before 1000. Only poems whose lines all have
five characters, or all seven, are taken. Left out are those with notes, gaps or other signs, very
short and very long ones, and repeated ones; then, once, those with a character that stands in few
of the rest, so that the vocabulary stays small. As that removes poems with other characters, too, a
few characters are left that stand in fewer.

The training text has each poem in traditional and in simplified characters, so that the model goes
on with either, twice; and once Song poems in form, of the characters that the others have.
"""

# ruff: noqa: RUF001 - punctuation of the text

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from text_files import parser_for, require_new_files, shuffled, write_files

OUT = Path("runs/pretrained/tang-poems/text")
"""Where the recipe `tang-poems` reads it."""
FOLDER = "全唐诗"
LEAST_POEMS = 12
"""A poem is left out if it has a character that fewer poems than this have, before this filter."""
LEAST_CHARACTERS, MOST_CHARACTERS = 20, 400
HELD_OUT_PERCENT = 4
"""Of validation and of test text each."""
POEM_END = "\n\n"
_HAN = r"㐀-䶿一-鿿"
_LINE = re.compile(rf"(?:[{_HAN}]+[，。？！；、])+")
_TITLE = re.compile(rf"[{_HAN}]+(?: [{_HAN}]+)*")


def is_in_form(poem: str) -> bool:
    """Whether all lines of a poem, as punctuation divides them, have 5 characters, or all 7."""
    return {*map(len, lines_of(poem))} in ({5}, {7})


def lines_of(poem: str) -> list[str]:
    """Return the lines of a poem without its title, as punctuation divides them."""
    return [x for x in re.split(r"\W+", poem) if x]


def verses(text: str) -> list[str]:
    """Return the lines of a poem with its title."""
    return lines_of(text.partition("\n")[2])


def poems(root: Path, dynasty: str) -> dict[str, str]:
    """Read the poems in form of a dynasty, with their titles, by their lines."""
    files = sorted((root / FOLDER).glob(f"poet.{dynasty}.*.json"))
    if not files:
        raise FileNotFoundError(
            f"{root} holds no {FOLDER}/poet.{dynasty}.*.json: clone chinese-poetry"
        )
    found = {}
    for file in files:
        for poem in json.loads(file.read_text(encoding="utf-8")):
            title, lines = poem["title"].strip(), [x.strip() for x in poem["paragraphs"]]
            body = "\n".join(lines)
            if (
                LEAST_CHARACTERS <= len(body) <= MOST_CHARACTERS
                and len(title) <= 30
                and _TITLE.fullmatch(title)
                and all(map(_LINE.fullmatch, lines))
                and is_in_form(body)
            ):
                found.setdefault(body, f"{title}\n{body}{POEM_END}")
    return found


def in_order(found: Iterable[str]) -> list[str]:
    """Return poems in a fixed order that mixes authors."""
    return sorted(found, key=lambda x: hashlib.sha256(x.encode()).digest())


def parts_of(
    tang: dict[str, str], song: dict[str, str], simplified: Callable[[str], str]
) -> dict[str, list[str]]:
    """Return the three parts."""
    counted = Counter(x for poem in tang.values() for x in set(poem))
    kept = in_order(x for x in tang.values() if min(counted[c] for c in set(x)) >= LEAST_POEMS)
    n = len(kept) * HELD_OUT_PERCENT // 100
    valid, test, train = kept[:n], kept[n : 2 * n], kept[2 * n :]
    known = {*"".join(train)}
    # Poems are handed down in several versions: none with a line of a held-out poem is read.
    held_out = {line for x in valid + test for line in verses(x)}
    train = [x for x in train if held_out.isdisjoint(verses(x))]
    of_song = [poem for body, poem in song.items() if body not in tang]
    more = [x for x in of_song if known >= {*x} and held_out.isdisjoint(verses(x))]
    # Some poems are the same in both scripts.
    copies = dict.fromkeys(more, 1) | dict.fromkeys([*train, *map(simplified, train)], 2)
    return {"valid": valid, "test": test, "train": shuffled(copies)}


def main() -> None:
    """Write train.txt, valid.txt and test.txt."""
    parser = parser_for(__doc__, OUT, "the folder")
    parser.add_argument("--poems", type=Path, required=True, help="a clone of chinese-poetry")
    given = parser.parse_args()
    from opencc import OpenCC

    simplified = OpenCC("t2s").convert
    paths = {part: given.out / f"{part}.txt" for part in ("valid", "test", "train")}
    try:
        require_new_files(paths.values(), force=given.force)
        parts = parts_of(poems(given.poems, "tang"), poems(given.poems, "song"), simplified)
        write_files({paths[part]: "".join(texts).encode() for part, texts in parts.items()})
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    for part, texts in parts.items():
        text = "".join(texts)
        print(f"{part}: {len(texts):,} poems, {len(text):,} characters, {len(set(text)):,} symbols")


if __name__ == "__main__":
    main()
