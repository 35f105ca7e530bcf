"""How often texts stutter at their beginning, after short prompts: with a preface and without.

    python benchmarks/stutter.py english python-code --json stutter.json
    python benchmarks/stutter.py runs/mine --text prompts.txt

Each of 40 prompts is continued with 10 seeds, by the sampling settings of the model. A text
stutters if, within its first 30 tokens, a token of two letters or more stands twice in a row, or a
sequence of one to eight tokens that holds a letter three times. ``--text`` has other prompts, one a
line. With ``--real FILE``, as many pieces of that text are counted, too.
"""

import argparse
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from result_file import write_result_file
from turns import circumstances
from writing import adjacent_equal, collected

from transformer_xl import from_pretrained, generate_batch
from transformer_xl.config.recipes import generation_of
from transformer_xl.data import Vocab
from transformer_xl.inference.generate import Sampling

FIRST, LONGEST = 30, 8
"""Tokens of a text that count, and of a sequence that is repeated."""
PROMPTS = {
    "english": (
        "The history of", "The church", "In the spring of 1864,", "He was the son of", "He said",
        "The island", "The bird", "After the battle,", "It is a", "Many of the", "The album",
        "Before her marriage", "Her father", "We", "The second season", "On the evening of",
        "Engineers", "The castle", "I", "At the", "The bridge was built", "King Henry",
        '"Come in,"', "The ship left", "Although the film", "According to", "The mountain",
        "Born in Paris,", "The company", "There were", "Music", "The largest",
        "She wrote her first", "London", "The army of", "When the train", "A small",
        "The trial began", "Water", "His last letter",
    ),
    "python-code": (
        "class Stack:", "class Stack:\n", "def load(path):", "def save(self, path):\n",
        "import sys\n", "import re\nimport os\n", "from typing import",
        "from pathlib import Path\n", "def main(", "def parse(text):\n",
        "class Account:\n    def __init__(self, owner):\n", "class TestCase(", "def add(a, b):\n",
        'def reverse(items):\n    """', "    return", "@dataclass\nclass Point:\n",
        "for i in range(", "while True:\n", "if not isinstance(", "with open(filename) as f:\n",
        "#!/usr/bin/env python\n", '"""Utilities for', "def __repr__(self):\n", "raise ValueError(",
        "async def read(", "class Cache(dict):\n", "def area(width, height):", "print(",
        "lambda x:", "def is_prime(n):\n", "class Matrix:\n", "try:\n    import",
        "def test_empty():\n", "x = [", "assert ", 'class Server:\n    """',
        "def send(self, message", "return sorted(", "def _get", "# Copyright",
    ),
}  # fmt: skip


def stutters(texts: Sequence[str]) -> bool:
    """Whether a text stutters, given the texts of its first tokens.

    That is, if a token of two letters or more stands twice in a row, or a sequence of one to eight
    tokens that holds a letter three times: not numbers, lines of dashes, or double letters.
    """
    first = list(texts[:FIRST])
    if any(a == b and len(a.strip()) > 1 and a.strip().isalpha() for a, b in pairwise(first)):
        return True
    return any(
        (part := first[i : i + n]) == first[i + n : i + 2 * n] == first[i + 2 * n : i + 3 * n]
        and any(map(str.isalpha, "".join(part)))
        for n in range(1, LONGEST + 1)
        for i in range(len(first) - 3 * n + 1)
    )


def counted(texts: Sequence[Sequence[int]], vocab: Vocab) -> dict[str, float]:
    """Return the share of the texts that stutter, and of the neighbouring tokens that are equal."""
    pieces = [[vocab.decode([token]) for token in text] for text in texts]
    equal = sum(adjacent_equal(text[:FIRST]) for text in texts)
    return {
        "stutter": sum(map(stutters, pieces)) / len(texts),
        "adjacent_equal": equal / len(texts),
    }


def measured(name: str, prompts: Sequence[str], n_seeds: int, real: Path | None) -> dict[str, Any]:
    """Return the figures of a model with its preface, without one, and of real text."""
    model, vocab = from_pretrained(name)
    how = Sampling.of(generation_of(name), vocab)
    encoded = [vocab.encode(prompt) for prompt in prompts]
    found: dict[str, Any] = {"texts": len(prompts) * n_seeds, "preface": len(model.preface)}
    for preface in dict.fromkeys(((), model.preface)):
        model.preface = preface
        texts = []
        for seed in range(n_seeds):
            batch = generate_batch(model, encoded, how, length=FIRST, seed=seed * len(prompts))
            texts += collected(batch, len(prompts))
        found["with" if preface else "without"] = counted(texts, vocab)
    if real is not None:
        ids, draw = vocab.encode(real.read_text(encoding="utf-8")), random.Random(1)
        starts = (draw.randrange(len(ids) - FIRST) for _ in range(found["texts"]))
        found["real"] = counted([ids[start : start + FIRST] for start in starts], vocab)
    return found


def main() -> None:
    """Print a line for each model, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="+", help="model folders, run folders, or names")
    parser.add_argument("--text", type=Path, help="a file of prompts, one a line")
    parser.add_argument("--real", type=Path, help="a real text, which is counted, too")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    found = {}
    for name in args.models:
        given = args.text.read_text(encoding="utf-8").splitlines() if args.text else PROMPTS[name]
        found[name] = measured(name, given, args.seeds, args.real)
        print(name, found[name], flush=True)
    if args.json:
        write_result_file(args.json, {"about": circumstances(), "models": found})


if __name__ == "__main__":
    main()
