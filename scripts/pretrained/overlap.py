"""What two texts share: windows of words that stand in both.

    python scripts/pretrained/overlap.py TRAINING_TEXT HELD_OUT_FILE...

counts the windows of 20 words of each held-out file that the training text has, without regard to
capitals, line breaks, and signs. It exits with 1 if a file shares more than one in a thousand.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

WINDOW = 20
"""Words in a window."""
_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def windows_of(words: Sequence[str | bytes], n_words: int) -> np.ndarray:
    """Return the hashes of all windows of words, shape (words - n_words + 1,), for one process."""
    n = max(len(words) - n_words + 1, 0)
    hashed = np.array([hash(word) & 0xFFFFFFFFFFFFFFFF for word in words], np.uint64)
    total = np.zeros(n, np.uint64)
    for i in range(n_words if n else 0):
        total = total * _MULTIPLIER + hashed[i : n + i]
    return total


def windows(text: str) -> np.ndarray:
    """Return the hashes of all windows of :data:`WINDOW` words of a text."""
    return windows_of(_WORD.findall(text.lower()), WINDOW)


def shared(text: str, others: np.ndarray) -> int:
    """Return how many windows of a text are among those of other texts, which are sorted."""
    found = windows(text)
    return int((others.take(np.searchsorted(others, found), mode="clip") == found).sum())


def without_shared(texts: Iterable[str], held_out: Iterable[str]) -> list[str]:
    """Return the texts that share no window with held-out ones, and print how many are left out."""
    texts, others = list(texts), np.unique(np.concatenate([windows(x) for x in held_out]))
    rest = [x for x in texts if not shared(x, others)]
    print(f"{len(texts) - len(rest)} of {len(texts)} left out: they share {WINDOW} words in a row")
    return rest


def main() -> None:
    """Count, and print a line for each file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("training", type=Path)
    parser.add_argument("held_out", type=Path, nargs="+")
    given = parser.parse_args()
    training = np.unique(windows(given.training.read_text("utf-8", "replace")))
    failed = False
    for path in given.held_out:
        text = path.read_text("utf-8", "replace")
        n, total = shared(text, training), len(windows(text))
        failed |= n > total / 1000
        print(f"{path}: {n:,} of {total:,} windows of {WINDOW} words are in the training text")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
