"""What a model writes: repetition, syntax and copying, beside real text of the same length.

    python benchmarks/writing.py python-code --text test.txt --training train.txt --python
    python benchmarks/writing.py runs/demo --text test.txt --set temperature=0.8 top_p=0.95 \
        --set temperature=1.0 min_p=0.05

Prompts of --prompt_tokens are taken from the text, at places spread over it, and continued as a
batch for --length tokens, once for each --set of sampling settings (none: those of the model's
recipe). With --carried the texts are written one after another, each with the memory that those
before it left. The real text is cut at the same places into pieces of the same length, and measured
likewise.

* mean length: tokens of a piece;
* repeated 4-grams: share of the 4-grams of tokens that occurred earlier in the same piece;
* most repeated: the same of the piece where it is largest;
* adjacent equal: share of the tokens that equal the one before;
* longest repeat: tokens in the longest sequence that occurs twice in a piece, mean over the pieces;
* parses: share of the pieces that Python's parser accepts up to the last statement that is
  complete, and in which no string is open for more than 40 lines, for --python;
* copied: share of the bytes that lie in a window of 50 bytes that the training text has, too.
"""

import argparse
import codeop
import io
import re
import statistics
import tokenize
import tomllib
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_file import write_result_file
from turns import circumstances

from transformer_xl.cli.loading import load
from transformer_xl.config.recipes import generation_of
from transformer_xl.data import Vocab
from transformer_xl.inference.generate import Sampling, generate, generate_batch
from transformer_xl.model import LanguageModel

WINDOW = 50
"""Bytes of a window that counts as copied."""
MOST_OPEN_LINES = 40
"""Lines for which a string at the end of a text may be open."""
_COUNTS = ("mean_length", "longest_repeat")
"""Figures that are no shares."""
_DEFINITION = re.compile(r"(?m)^(?:def|class|import|from) ")
_BASE = np.uint64(0x100000001B3)


def repeated(tokens: Sequence[int], n: int = 4) -> float:
    """Return the share of the n-grams that occurred before in the sequence; 0 if it has none."""
    grams = [*zip(*(tokens[i:] for i in range(n)), strict=False)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def adjacent_equal(tokens: Sequence[int]) -> float:
    """Return the share of the tokens that equal the one before."""
    return sum(a == b for a, b in pairwise(tokens)) / max(len(tokens) - 1, 1)


def longest_repeat(tokens: Sequence[int]) -> int:
    """Return the length of the longest sequence that occurs twice; occurrences may overlap."""
    low, high = 0, len(tokens) - 1
    # If one of length n occurs twice, so do its beginnings.
    while low < high:
        n = (low + high + 1) // 2
        grams = [*zip(*(tokens[i:] for i in range(n)), strict=False)]
        low, high = (n, high) if len(set(grams)) < len(grams) else (low, n - 1)
    return low


def parses(text: str, most_open_lines: int = MOST_OPEN_LINES) -> bool:
    """Whether Python's parser accepts a text up to the last statement that is complete.

    The last line may be cut off and is left out; a statement that needs more lines is no error, but
    a string is that is open for more lines than given, as everything after it would be accepted.
    """
    complete = text.rpartition("\n")[0] + "\n"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            codeop.compile_command(complete, symbol="exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return False
    return _open_lines(complete) <= most_open_lines


def _open_lines(text: str) -> int:
    """Return for how many lines a string at the end is open; 0: none is."""
    try:
        for _ in tokenize.generate_tokens(io.StringIO(text).readline):
            pass
    except tokenize.TokenError as error:
        # Python 3.11 says multi-line string, and later versions triple-quoted.
        message, (line, _) = error.args
        if "multi-line string" in message or "triple-quoted" in message:
            return text.count("\n") - line + 1
    except SyntaxError:
        # Of an incomplete statement.
        pass
    return 0


class TrainingText:
    """Finds windows of bytes that a training text has.

    Args:
        text: The text.
    """

    def __init__(self, text: bytes) -> None:
        self._text = text

    def copied(self, pieces: Sequence[bytes]) -> float:
        """Return the share of the bytes that lie in a window that the training text has."""
        hashes = [_hashes(piece) for piece in pieces]
        wanted = np.unique(np.concatenate(hashes))
        if not len(wanted):
            # All pieces are shorter than a window.
            return 0.0
        found = np.zeros(len(wanted), bool)
        step = 1 << 22
        for start in range(0, len(self._text), step):
            own = _hashes(self._text[start : start + step + WINDOW - 1])
            places = np.searchsorted(wanted, own).clip(max=len(wanted) - 1)
            found[places[wanted[places] == own]] = True
        inside = total = 0
        for piece, own in zip(pieces, hashes, strict=True):
            is_copied = np.zeros(len(piece), bool)
            for place in np.flatnonzero(found[np.searchsorted(wanted, own)]):
                is_copied[place : place + WINDOW] = True
            inside, total = inside + int(is_copied.sum()), total + len(piece)
        return inside / total


def _hashes(text: bytes) -> np.ndarray:
    """Return a hash of 64 bits for each window of a text."""
    read = np.frombuffer(text, np.uint8).astype(np.uint64) + np.uint64(1)
    n = max(len(read) - WINDOW + 1, 0)
    found = np.zeros(n, np.uint64)
    for i in range(WINDOW):
        found = found * _BASE + read[i : i + n]
    return found


def measure(
    pieces: Sequence[Sequence[int]],
    vocab: Vocab,
    prompts: Sequence[Sequence[int]],
    training: TrainingText | None,
    is_python: bool,
) -> dict[str, float]:
    """Measure pieces of text, without their prompts."""
    texts = [vocab.decode([*piece]) for piece in pieces]
    found = {
        "mean_length": statistics.fmean(len(x) for x in pieces),
        "repeated_4grams": statistics.fmean(repeated(x) for x in pieces),
        "adjacent_equal": statistics.fmean(adjacent_equal(x) for x in pieces),
        "longest_repeat": statistics.fmean(longest_repeat(x) for x in pieces),
        "most_repeated": max(repeated(x) for x in pieces),
    }
    if is_python:
        whole = [vocab.decode([*a, *b]) for a, b in zip(prompts, pieces, strict=True)]
        found["parses"] = statistics.fmean(parses(x) for x in whole)
    if training is not None:
        found["copied"] = training.copied([x.encode() for x in texts])
    return found


def places(text: str, n: int, is_python: bool) -> list[int]:
    """Return places spread over a text: for Python, where a definition at the margin begins.

    Raises:
        ValueError: There is no definition.
    """
    wanted = [len(text) * i // n for i in range(n)]
    if not is_python:
        return wanted
    begins = [x.start() for x in _DEFINITION.finditer(text)]
    if not begins:
        raise ValueError("no line of the text begins with def, class, import or from")
    return [begins[min(bisect_left(begins, x), len(begins) - 1)] for x in wanted]


def collected(batch: Iterable[Mapping[int, int]], n: int) -> list[list[int]]:
    """Return the tokens of each of n texts that are written as a batch."""
    pieces: list[list[int]] = [[] for _ in range(n)]
    for tokens in batch:
        for text, token in tokens.items():
            pieces[text].append(token)
    return pieces


def write(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    sampling: Sampling,
    carried: bool,
) -> list[list[int]]:
    """Continue prompts: as one batch, or one after another with the memory carried."""
    how = {"sampling": sampling, "length": length}
    if not carried:
        return collected(generate_batch(model, prompts, seed=1, **how), len(prompts))
    pieces, state = [], None
    for n, prompt in enumerate(prompts):
        written = generate(model, prompt, seed=1 + n, state=state, **how)
        pieces.append([*written])
        state = written.state
    return pieces


def sampling_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of sampling that are given as NAME=VALUE.

    Raises:
        TypeError: One is no setting of sampling.
        ValueError: One is invalid.
    """
    # Each as a line of TOML.
    return Sampling(**tomllib.loads("\n".join(words))).config.sampling


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--training", type=Path, help="training text, to look for copies in")
    parser.add_argument("--set", nargs="+", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--prompt_tokens", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--length", type=int, default=2000, help="tokens of a piece")
    parser.add_argument("--carried", action="store_true")
    parser.add_argument("--python", action="store_true", help="the text is Python source")
    parser.add_argument("--show", type=int, default=0, help="characters of the first piece to show")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model, vocab = load(arguments.model)
    text = arguments.text.read_text(encoding="utf-8")
    training = arguments.training and TrainingText(arguments.training.read_bytes())
    n_prompt = arguments.prompt_tokens
    if n_prompt < 1:
        parser.error(f"--prompt_tokens {n_prompt} must be at least 1")
    most = n_prompt + arguments.length
    # A token has at least one byte and seldom more than eight.
    try:
        starts = places(text[: -8 * most], arguments.prompts, arguments.python)
        named = [(" ".join(x), sampling_of(x)) for x in arguments.set]
    except ValueError as error:
        parser.error(str(error))
    cut = [vocab.encode(text[x : x + 8 * most])[:most] for x in starts]
    if len(text) <= 8 * most or any(len(x) < most for x in cut):
        parser.error(f"{arguments.text} is too short for pieces of {most} tokens")
    prompts = [x[:n_prompt] for x in cut]
    real = [x[n_prompt:] for x in cut]
    rows: dict[str, dict[str, float]] = {
        "real text": measure(real, vocab, prompts, training, arguments.python)
    }
    print("real text", _shown(rows["real text"]), flush=True)
    own = generation_of(arguments.model).sampling
    for name, settings in named or [("recipe", own)]:
        how = Sampling(**settings)
        with torch.inference_mode():
            pieces = write(model, prompts, arguments.length, how, arguments.carried)
        rows[name] = measure(pieces, vocab, prompts, training, arguments.python)
        print(name, _shown(rows[name]), flush=True)
        if arguments.show:
            print(vocab.decode([*prompts[0], *pieces[0]])[: arguments.show])
    if arguments.json:
        names = ("prompts", "prompt_tokens", "length", "carried")
        about = {"circumstances": circumstances()} | {x: getattr(arguments, x) for x in names}
        write_result_file(arguments.json, about | {"rows": rows})


def _shown(row: dict[str, float]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.1f}"
        if name in _COUNTS
        else f"{name.replace('_', ' ')} {100 * value:.1f} %"
        for name, value in row.items()
    )


if __name__ == "__main__":
    main()
