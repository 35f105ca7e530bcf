"""How much texts repeat themselves after short prompts: with a preface and without.

    python benchmarks/stutter.py english python-code --json stutter.json
    python benchmarks/stutter.py runs/mine --text prompts.txt --set temperature=0.7 min_p=0.05

Each of 40 prompts is continued with 10 seeds for 600 tokens, by the sampling settings of the model,
or with changes (``--set``). ``--text`` has other prompts, one a line. With ``--real FILE``, as many
pieces of that text are measured, too.

* stutter: share of the texts in whose first 30 tokens a token of two letters or more stands twice
  in a row, or a sequence of one to eight tokens that holds a letter three times;
* repeated 4-grams: share of the 4-grams of words that occurred earlier in the same text, where
  words are what blanks divide;
* adjacent equal: share of the words that equal the one before;
* stuck: share of the texts of whose words more than 5 % equal the one before;
* parses (``--python``): share of the texts whose first 15 lines, prompt included, Python's parser
  accepts up to the last complete statement; at their end no string is open for 10 lines.
"""

import argparse
import random
import statistics
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from result_file import write_result_file
from turns import circumstances
from writing import adjacent_equal, collected, parses, repeated

from transformer_xl import from_pretrained, generate_batch
from transformer_xl.config.recipes import generation_of
from transformer_xl.data import Vocab
from transformer_xl.inference.generate import Sampling

FIRST, LONGEST = 30, 8
"""Tokens of a text in which it may stutter, and of a sequence that is repeated."""
MOST_EQUAL = 0.05
"""Share of the words of a text that may equal the one before."""
N_LINES, MOST_OPEN_LINES = 15, 9
"""Lines of a text that must parse, and for how many of them a string at the end may be open."""
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
        'def reverse(items):\n    """', "total = sum(", "@dataclass\nclass Point:\n",
        "for i in range(", "while True:\n", "if not isinstance(", "with open(filename) as f:\n",
        "#!/usr/bin/env python\n", '"""Utilities for', "def __repr__(self):\n", "raise ValueError(",
        "async def read(", "class Cache(dict):\n", "def area(width, height):", "print(",
        "lambda x:", "def is_prime(n):\n", "class Matrix:\n", "try:\n    import",
        "def test_empty():\n", "x = [", "assert ", 'class Server:\n    """',
        "def send(self, message", "names = sorted(", "def _get", "# Copyright",
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


def counted(
    texts: Sequence[Sequence[int]], vocab: Vocab, before: Sequence[str] = ()
) -> dict[str, float]:
    """Return the figures of texts; that of parsing, if what is before each of them is given."""
    first = [[vocab.decode([token]) for token in text[:FIRST]] for text in texts]
    decoded = [vocab.decode(text) for text in texts]
    words = [x.split() for x in decoded]
    equal = [*map(adjacent_equal, words)]
    found = {
        "stutter": statistics.mean(map(stutters, first)),
        "repeated_4grams": statistics.mean(map(repeated, words)),
        "adjacent_equal": statistics.mean(equal),
        "stuck": statistics.mean(share > MOST_EQUAL for share in equal),
    }
    if before:
        whole = map("".join, zip(before, decoded, strict=True))
        heads = ["".join(x.splitlines(keepends=True)[:N_LINES]) for x in whole]
        found["parses"] = statistics.mean(parses(x, MOST_OPEN_LINES) for x in heads)
    return found


def measured(name: str, prompts: Sequence[str], given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a model with its preface, without one, and of real text."""
    model, vocab = from_pretrained(name)
    how = Sampling(**generation_of(name).changed(**tomllib.loads("\n".join(given.set))).sampling)
    encoded, n_texts = [vocab.encode(prompt) for prompt in prompts], len(prompts) * given.seeds
    found: dict[str, Any] = {"texts": n_texts, "preface": len(model.preface)}
    for preface in dict.fromkeys((model.preface, ())):
        model.preface = preface
        texts = []
        for seed in range(given.seeds):
            batch = generate_batch(
                model, encoded, how, length=given.length, seed=seed * len(prompts)
            )
            texts += collected(batch, len(prompts))
        kind = "with" if preface else "without"
        found[kind] = counted(texts, vocab, [*prompts] * given.seeds if given.python else ())
    if given.real is not None:
        ids, draw = vocab.encode(given.real.read_text(encoding="utf-8")), random.Random(1)
        starts = (draw.randrange(len(ids) - given.length) for _ in range(n_texts))
        found["real"] = counted([ids[start : start + given.length] for start in starts], vocab)
    return found


def main() -> None:
    """Print a line for each model, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="+", help="model folders, run folders, or names")
    parser.add_argument("--text", type=Path, help="a file of prompts, one a line")
    parser.add_argument("--python", action="store_true", help="see which texts parse")
    parser.add_argument("--real", type=Path, help="a real text, which is counted, too")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--length", type=int, default=600, help="tokens of a text")
    parser.add_argument("--set", nargs="+", default=[], help="changed settings, NAME=VALUE")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    found = {}
    for name in args.models:
        given = args.text.read_text(encoding="utf-8").splitlines() if args.text else PROMPTS[name]
        found[name] = measured(name, given, args)
        print(name, found[name], flush=True)
    if args.json:
        write_result_file(args.json, {"about": circumstances(), "models": found})


if __name__ == "__main__":
    main()
