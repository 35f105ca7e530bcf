"""Tokenizing with datatrove, killed and resumed, beside one process of `txl prepare`.

    pip install datatrove
    python benchmarks/distributed_tokenizing.py --megabytes 2000

A text made by a program (`preparing.py`) is tokenized by `examples/tokenize_with_datatrove.py` with
two workers, which is killed with all its processes once some tasks have been completed, and run
again; and by one process of `prepare` with the same settings. Every file of the two corpora must be
the same.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from result_file import write_result_file

sys.path.insert(0, str(Path(__file__).parent))
from preparing import digests, make_text
from turns import circumstances

EXAMPLE = Path(__file__).parents[1] / "examples" / "tokenize_with_datatrove.py"
ONE_PROCESS = """
import sys
from transformer_xl.config import DataConfig
from transformer_xl.data import prepare
text, cache, vocab, size = sys.argv[1:]
given = {"path": text, "cache_dir": cache, "vocab": vocab, "vocab_size": int(size), "workers": 1}
prepare(DataConfig(**given))
"""


def corpus(cache: Path) -> Path:
    """Return the folder of the only corpus in a cache."""
    (manifest,) = cache.glob("*/manifest.json")
    return manifest.parent


def completed(cache: Path) -> int:
    """Return how many parts have been tokenized."""
    return len(list(cache.glob(".building-*/parts/*/*.json")))


def run_one(text: Path, cache: Path, vocab: list[str]) -> float:
    """Tokenize in one process; return the seconds."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", ONE_PROCESS, str(text), str(cache), *vocab], check=True)
    return time.perf_counter() - began


def run_datatrove(text: Path, folder: Path, vocab: list[str], kill_after: int | None) -> float:
    """Tokenize with datatrove and two workers; return the seconds.

    Args:
        text: The text.
        folder: Where the cache and the logs are.
        vocab: Kind and size of the vocabulary.
        kill_after: Kill all processes when so many parts have been tokenized. None: never.
    """
    cache = folder / "cache"
    command = [sys.executable, str(EXAMPLE), str(text), "--cache", str(cache), "--workers", "2"]
    command += ["--vocab", vocab[0], "--vocab-size", vocab[1], "--logs", str(folder / "logs")]
    began = time.perf_counter()
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            command, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            if kill_after is not None and completed(cache) >= kill_after:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.1)
    if process.returncode != (0 if kill_after is None else -signal.SIGKILL):
        raise SystemExit(f"failed with code {process.returncode}: see {folder / 'output.txt'}")
    return time.perf_counter() - began


def measure(n_bytes: int, vocab: list[str], folder: Path) -> dict[str, Any]:
    """Tokenize a text in each way; return seconds and whether the files are the same."""
    text = folder / "text.txt"
    make_text(text, n_bytes)
    found: dict[str, Any] = {"bytes": n_bytes, "vocab": vocab}
    found["one process, seconds"] = round(run_one(text, folder / "one", vocab), 1)
    expected = digests(corpus(folder / "one"))
    shutil.rmtree(folder / "one")
    n_parts = n_bytes // (16 << 20)
    seconds = run_datatrove(text, folder, vocab, kill_after=max(1, n_parts // 2))
    found["datatrove until killed, seconds"] = round(seconds, 1)
    found["parts completed when killed"] = completed(folder / "cache")
    found["parts"] = n_parts
    found["datatrove resumed, seconds"] = round(run_datatrove(text, folder, vocab, None), 1)
    resumed = digests(corpus(folder / "cache"))
    found["files"] = sorted(expected)
    found["files that differ"] = sorted(
        name for name in expected | resumed if expected.get(name) != resumed.get(name)
    )
    return found


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--vocab", nargs=2, default=["bpe", "8000"], metavar=("KIND", "SIZE"))
    parser.add_argument("--folder", help="where the files are made; some five times the text")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(given.megabytes * 1_000_000, given.vocab, Path(folder))
    found |= circumstances() | {"datatrove": version("datatrove")}
    print(json.dumps(found, indent=2))
    if given.json:
        write_result_file(given.json, found)
    if found["files that differ"]:
        raise SystemExit("the corpora differ")


if __name__ == "__main__":
    main()
