"""Write the text of the shipped model `tang-poems`: the Quan Tang Shi, a title and its lines each.

    git clone https://github.com/chinese-poetry/chinese-poetry
    git -C chinese-poetry checkout 99ebbef7e1345c0985c44b9fd96a3f9e776f117b
    python scripts/pretrained/tang_poems.py --poems chinese-poetry
    txl train tang-poems --out runs/pretrained/tang-poems/run

The source is the public repository chinese-poetry/chinese-poetry, a clone of which is given; its
files are under the MIT licence, the poems are from before 1000. Only poems whose lines all have
five characters, or all seven, are taken. Left out are those with notes, gaps or other signs, very
short and very long ones, and repeated ones; then, once, those with a character that stands in few
of the rest, so that the vocabulary stays small. As that removes poems with other characters, too, a
few characters are left that stand in fewer.
"""

# ruff: noqa: RUF001 - punctuation of the text

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

from text_files import parser_for, require_new_files, write_files

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
    lines = [x for x in re.split(r"\W+", poem) if x]
    return bool(lines) and {*map(len, lines)} in ({5}, {7})


def poems(root: Path) -> list[str]:
    """Read the poems, in a fixed order that mixes authors."""
    files = sorted((root / FOLDER).glob("poet.tang.*.json"))
    if not files:
        raise FileNotFoundError(f"{root} holds no {FOLDER}/poet.tang.*.json: clone chinese-poetry")
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
    counted = Counter(x for poem in found.values() for x in set(poem))
    kept = [x for x in found.values() if min(counted[c] for c in set(x)) >= LEAST_POEMS]
    return sorted(kept, key=lambda x: hashlib.sha256(x.encode()).digest())


def main() -> None:
    """Write train.txt, valid.txt and test.txt."""
    parser = parser_for(__doc__, OUT, "the folder")
    parser.add_argument("--poems", type=Path, required=True, help="a clone of chinese-poetry")
    given = parser.parse_args()
    paths = {part: given.out / f"{part}.txt" for part in ("valid", "test", "train")}
    try:
        require_new_files(paths.values(), force=given.force)
        found = poems(given.poems)
        n = len(found) * HELD_OUT_PERCENT // 100
        parts = {"valid": found[:n], "test": found[n : 2 * n], "train": found[2 * n :]}
        write_files({paths[part]: "".join(texts).encode() for part, texts in parts.items()})
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    for part, texts in parts.items():
        text = "".join(texts)
        print(f"{part}: {len(texts):,} poems, {len(text):,} characters, {len(set(text)):,} symbols")


if __name__ == "__main__":
    main()
