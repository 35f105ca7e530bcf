"""`txl prepare` beside the same work done with Hugging Face `datasets`.

    python benchmarks/datasets_text.py --megabytes 200

A text made by a program (`preparing.py`) is tokenized with the same byte-pair tokenizer and two
processes, by `txl prepare` and by `load_dataset("text")`, `map` and a loop that writes the tokens
to a file. Each is run once undisturbed; once more it is killed after half of that time and
started again. Both read whole lines, and the tokens must be the same. Memory is that of all
processes together, disk what lies in the cache at the end, beside the text.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from result_file import write_result_file

sys.path.insert(0, str(Path(__file__).parent))
from preparing import SAMPLED_SECONDS, make_text, memory
from turns import circumstances

WORKERS = 2
N_LEARNED = 2_000_000
"""Bytes of the text from which the tokenizer is learned."""


def with_datasets(text: Path, vocab: Path, cache: Path) -> None:
    """Tokenize a text with `datasets`."""
    import datasets
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(vocab / "tokenizer.json"))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"tokens": [x.ids for x in tokenizer.encode_batch(batch["text"])]}

    datasets.disable_progress_bars()
    rows = datasets.load_dataset(
        "text", data_files=str(text), split="train", keep_linebreaks=True, cache_dir=str(cache)
    )
    rows = rows.map(encode, batched=True, num_proc=WORKERS, remove_columns=["text"])
    with (cache / "train.bin").open("wb") as file:
        for batch in rows.with_format("arrow").iter(10_000):
            values = batch["tokens"].combine_chunks().flatten()
            file.write(values.to_numpy().astype(np.uint16).tobytes())


def with_txl(text: Path, vocab: Path, cache: Path) -> None:
    """Tokenize a text with `txl prepare`."""
    from transformer_xl.config import DataConfig
    from transformer_xl.data import prepare

    shares = {"split_by": "fraction", "valid_fraction": 0.0, "test_fraction": 0.0}
    places = {"path": str(text), "tokenizer": str(vocab), "cache_dir": str(cache)}
    prepare(DataConfig(workers=WORKERS, **places, **shares))


WAYS = {"txl prepare": with_txl, "datasets": with_datasets}


def run(way: str, text: Path, vocab: Path, cache: Path, limit: float | None) -> dict[str, float]:
    """Run a way in processes of its own, killed after `limit` seconds; return what it took."""
    cache.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--way", way, str(text), str(vocab), str(cache)]
    peak, began = 0, time.perf_counter()
    # A tokenizer of `datasets` has threads of its own in each process.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    timer = threading.Timer(limit or 1e6, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    while process.poll() is None:
        peak = max(peak, memory(process.pid))
        time.sleep(SAMPLED_SECONDS)
    timer.cancel()
    if process.returncode and limit is None:
        raise SystemExit(f"{way} ended with {process.returncode}")
    disk = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak_mb": peak / 1e6, "disk_mb": disk / 1e6}


def tokens(cache: Path) -> np.ndarray:
    """Return the tokens that a way left in its cache."""
    (file,) = cache.rglob("train.bin")
    return np.memmap(file, dtype=np.uint16, mode="r")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=200, help="size of the text")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--way", nargs=4, metavar=("WAY", "TEXT", "VOCAB", "CACHE"))
    arguments = parser.parse_args()
    if arguments.way:
        way, *paths = arguments.way
        return WAYS[way](*map(Path, paths))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        text, short = root / "text.txt", root / "short.txt"
        make_text(text, int(arguments.megabytes * 1e6))
        make_text(short, N_LEARNED)
        vocab = _learned(short, root / "vocab")
        left, first = {}, 0.0
        for way in WAYS:
            cache = root / way.replace(" ", "-")
            once = run(way, text, vocab, cache, None)
            left[way] = np.array(tokens(cache))
            shutil.rmtree(cache)
            run(way, text, vocab, cache, once["seconds"] / 2)
            again = run(way, text, vocab, cache, None)["seconds"]
            same = np.array_equal(tokens(cache), left[way])
            shutil.rmtree(cache)
            first = first or once["seconds"]
            rows.append(
                {
                    "way": way,
                    "seconds_relative": round(once["seconds"] / first, 2),
                    "peak_mb": round(once["peak_mb"]),
                    "disk_mb": round(once["disk_mb"]),
                    "after_kill_relative": round(again / once["seconds"], 2),
                    "same_after_kill": same,
                }
            )
        same_tokens = np.array_equal(*left.values())
    for row in rows:
        print(json.dumps(row))
    print(f"the same tokens: {same_tokens}")
    if arguments.json:
        found = {**circumstances(), "megabytes": arguments.megabytes, "same_tokens": same_tokens}
        write_result_file(arguments.json, {**found, "rows": rows})
    return None


def _learned(text: Path, folder: Path) -> Path:
    """Learn a byte-pair tokenizer; return the folder that holds it."""
    from transformer_xl.config import DataConfig
    from transformer_xl.data import prepare

    config = DataConfig(path=str(text), vocab="bpe", vocab_size=4096, cache_dir=str(folder))
    corpus = prepare(config)
    return corpus.folder


if __name__ == "__main__":
    main()
