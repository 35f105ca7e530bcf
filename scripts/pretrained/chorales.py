"""Write the text of the shipped model `chorales`: Bach's chorales, transposed to many keys.

    python scripts/pretrained/chorales.py
    python scripts/pretrained/chorales.py chorales.json --path jsb-chorales --rounds 24
    txl train chorales --out runs/pretrained/chorales/run

It reads the corpus `jsb-chorales` as `txl prepare` does, downloading it unless --path names a copy.
The training text has rounds: each holds all chorales in random order, each in one of the keys in
which no voice leaves the range that it has in the training text. A chorale takes its keys in random
order and begins again when it has had all of them. So every chorale is read equally often, and
never twice within a round. What is held out stays as it is.
"""

import json
from pathlib import Path

from text_files import parser_for, require_new_files, write_files

from transformer_xl import DataConfig, prepare
from transformer_xl.tasks.music import pieces_of
from transformer_xl.tasks.music.transposing import Pieces, rounds_of

OUT = Path("runs/pretrained/chorales/text/chorales.json")
"""Where the recipe `chorales` reads it."""
VOICES = 4
SEED = 1


def write_text(out: Path, path: str | None, n_rounds: int, seed: int) -> dict[str, Pieces]:
    """Write the JSON file, and return what is in it."""
    corpus = prepare(DataConfig(name="jsb-chorales", vocab="integers", path=path), print)
    parts = {
        part: pieces_of(corpus.vocab.decode(corpus.split(part)), VOICES)
        for part in ("train", "valid", "test")
    }
    parts["train"] = rounds_of(parts["train"], n_rounds, seed)
    write_files({out: (json.dumps(parts, separators=(",", ":")) + "\n").encode()})
    return parts


def main() -> None:
    """Read the chorales, write the text."""
    parser = parser_for(__doc__, OUT, "the JSON file")
    parser.add_argument("--path", help="a copy of the corpus; without it, it is downloaded")
    parser.add_argument("--rounds", type=int, default=12, help="times that each chorale is read")
    parser.add_argument("--seed", type=int, default=SEED, help="of the orders and the keys")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds} must be at least 1")
    try:
        require_new_files([given.out], force=given.force)
        parts = write_text(given.out, given.path, given.rounds, given.seed)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    for part, pieces in parts.items():
        print(f"{part:6} {len(pieces):6,} chorales, {sum(map(len, pieces)):9,} steps")


if __name__ == "__main__":
    main()
