"""Baselines of a corpus: bits per byte of compressors, n-grams and frequencies, as a table.

    python benchmarks/baselines.py demo --vocab bytes
    python benchmarks/baselines.py ptb-char-cpu --path ../shared/data/ptb --out baselines.json

The data are those of a recipe; what each row is given is said by
`transformer_xl.studies.baselines.baselines`. It needs `pip install 'transformer-xl[compare]'`.
"""

import argparse
import platform
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from result_file import write_result_file

from transformer_xl.config.recipes import load_recipe
from transformer_xl.data import prepare
from transformer_xl.studies.baselines import BASELINES, baselines, baselines_table


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="the recipe whose data are read")
    parser.add_argument("--path", help="instead of its data.path")
    parser.add_argument("--vocab", help="instead of its data.vocab and data.vocab_size")
    parser.add_argument("--split", default="test", choices=("test", "valid"))
    parser.add_argument("--names", nargs="+", default=BASELINES, choices=BASELINES)
    parser.add_argument("--order", type=int, help="highest order of n-grams")
    parser.add_argument("--out", type=Path, help="write the rows to this file as JSON")
    given = parser.parse_args()
    data = load_recipe(given.recipe).data
    if given.path is not None:
        data = replace(data, path=given.path)
    if given.vocab is not None:
        data = replace(data, vocab=given.vocab, vocab_size=None)
    corpus = prepare(data)
    rows = baselines(
        corpus,
        given.split,
        names=given.names,
        order=given.order,
        each=lambda row: print(f"{row.name}: {row.seconds:.1f} s", file=sys.stderr),
    )
    print(
        f"{given.recipe}, {data.vocab}: {corpus.n_tokens('train'):,} tokens of training text, "
        f"{corpus.n_tokens(given.split):,} of {given.split} text\n"
    )
    print(baselines_table(rows))
    if given.out is not None:
        about = {
            "command": " ".join(["python benchmarks/baselines.py", *sys.argv[1:]]),
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "packages": {name: version(name) for name in ("numpy", "pyppmd", "zstandard")},
            "rows": [asdict(row) for row in rows],
        }
        write_result_file(given.out, about)


if __name__ == "__main__":
    main()
