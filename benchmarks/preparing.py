"""Time and memory of preparing a long text, and what a kill leaves.

    python benchmarks/preparing.py                                 # 5 GB, words and bytes
    python benchmarks/preparing.py --megabytes 50 --vocabs words bpe chars

Makes a text by a program: words of a made-up language, whose frequencies fall as in a real one
(Zipf), in lines. ``txl prepare`` cuts it, once undisturbed; once more, killed several times and
started again; and once with another number of processes. All must leave the same files. Memory is
that of all its processes together (proportional set size, sampled); speed is bytes of text by
seconds of the whole command, with splitting, counting and joining.
"""

import argparse
import hashlib
import json
import random
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
from turns import circumstances

from transformer_xl.data.corpus import VERIFIED

N_WORDS = 50_000
WORDS_PER_LINE = 20
BLOCK_WORDS = 200_000
N_BLOCKS = 64
SAMPLED_SECONDS = 0.05


def make_text(path: Path, n_bytes: int) -> None:
    """Write a text of ``n_bytes`` bytes; the same every time."""
    draw, order = np.random.default_rng(0), random.Random(0)
    letters = np.array(list("etaoinshrdlucmfwygpbvk"))
    words = ["".join(draw.choice(letters, size=draw.integers(1, 12))) for _ in range(N_WORDS)]
    frequency = 1 / np.arange(1, N_WORDS + 1)
    blocks = []
    for _ in range(N_BLOCKS):
        drawn = draw.choice(N_WORDS, size=BLOCK_WORDS, p=frequency / frequency.sum()).tolist()
        lines = (drawn[n : n + WORDS_PER_LINE] for n in range(0, BLOCK_WORDS, WORDS_PER_LINE))
        blocks.append("".join(" ".join([words[i] for i in line]) + "\n" for line in lines).encode())
    left = n_bytes
    with path.open("wb") as file:
        while left > 0:
            block = order.choice(blocks)[:left]
            file.write(block)
            left -= len(block)


def start(text: Path, cache: Path, vocab: str, workers: int | None) -> "subprocess.Popen[bytes]":
    """Begin to prepare the text."""
    command = [sys.executable, "-m", "transformer_xl", "prepare", "demo", "--json"]
    settings = {"name": "", "path": text, "vocab": vocab, "split_by": "fraction"}
    settings |= {"valid_fraction": 0.05, "test_fraction": 0.05, "cache_dir": cache}
    settings |= {"workers": workers} if workers else {}
    for name, value in settings.items():
        command += [f"--data.{name}", str(value)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def memory(process: int) -> int:
    """Return the bytes that a process and those it started hold, shared ones by their share."""
    total = 0
    try:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = int(line.split()[1]) * 1024
        for thread in Path(f"/proc/{process}/task").iterdir():
            children = (thread / "children").read_text().split()
            total += sum(memory(int(child)) for child in children)
    except OSError:
        pass  # It has just ended.
    return total


def finish(process: "subprocess.Popen[bytes]") -> tuple[dict[str, Any], int]:
    """Wait for a preparation; return its result and its largest memory."""
    peak, is_over = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not is_over.wait(SAMPLED_SECONDS):
            peak = max(peak, memory(process.pid))

    thread = threading.Thread(target=sample)
    thread.start()
    out, _ = process.communicate()
    is_over.set()
    thread.join()
    if process.returncode:
        raise SystemExit(f"txl prepare ended with {process.returncode}")
    return json.loads(out.splitlines()[-1]), peak


def digests(folder: Path) -> dict[str, str]:
    """Return the checksum of every file of a corpus, but for that which tells when."""
    found = {}
    for path in sorted(path for path in folder.iterdir() if path.name != VERIFIED):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def measure(
    text: Path, folder: Path, vocab: str, kills: int, workers: int | None
) -> dict[str, Any]:
    """Prepare a text undisturbed, killed, and with one process; return what was seen."""
    n_bytes = text.stat().st_size
    began = time.perf_counter()
    result, peak = finish(start(text, folder / "once", vocab, workers))
    seconds = time.perf_counter() - began
    once = digests(Path(result["folder"]))
    shutil.rmtree(folder / "once")

    moments, killed_at = random.Random(1), []
    for n in range(kills):
        process = start(text, folder / "killed", vocab, workers)
        # Spread over the preparation; what is done shortens what follows.
        wait = seconds * (n + moments.random()) / (kills + 1)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed_at.append(round(wait, 2))
        process.communicate()
    resumed_began = time.perf_counter()
    result, resumed_peak = finish(start(text, folder / "killed", vocab, workers))
    resumed_seconds = time.perf_counter() - resumed_began
    killed = digests(Path(result["folder"]))
    shutil.rmtree(folder / "killed")

    result, single_peak = finish(start(text, folder / "other", vocab, 1))
    other = digests(Path(result["folder"]))
    shutil.rmtree(folder / "other")
    return {
        "vocab": vocab,
        "bytes": n_bytes,
        "tokens": sum(result[name] for name in ("train", "valid", "test")),
        "seconds": seconds,
        "mb_per_second": n_bytes / 1e6 / seconds,
        "peak_mb": max(peak, resumed_peak) / 1e6,
        "peak_mb_one_process": single_peak / 1e6,
        "killed_after_seconds": killed_at,
        "seconds_after_the_last_kill": resumed_seconds,
        "same_after_kills": killed == once,
        "same_with_one_process": other == once,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=5000, help="size of the text")
    parser.add_argument("--vocabs", nargs="+", default=["words", "bytes"])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--workers", type=int, help="processes; without it, one for each core")
    parser.add_argument("--folder", type=Path, help="where 4 times the text has room")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        text = Path(folder) / "text.txt"
        make_text(text, int(arguments.megabytes * 1e6))
        rows = []
        for vocab in arguments.vocabs:
            rows.append(measure(text, Path(folder), vocab, arguments.kills, arguments.workers))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        found = {**circumstances(), "rows": rows}
        write_result_file(arguments.json, found)
    if not all(row["same_after_kills"] and row["same_with_one_process"] for row in rows):
        raise SystemExit("the files are not the same")


if __name__ == "__main__":
    main()
