"""Several processes against one with as many threads: the same model, the same batch.

    python benchmarks/ranks.py shakespeare-char-cpu --json ranks.json

Each way trains the recipe for some steps, through the command that people use; the ways take turns.
Told are tokens a second, the median over the steps after the first few, and the efficiency: the
speed of N processes of one thread by that of one process of N threads, and by N times that of one
process of one thread.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_file import write_result_file
from turns import circumstances

from transformer_xl.train.metrics import read_metrics

WARM_UP = 3


def ways(n: int) -> dict[str, tuple[int, int, tuple[str, ...]]]:
    """Return processes, threads of each and options by the name of the way."""
    return {
        "one process, one thread": (1, 1, ()),
        f"one process, {n} threads": (1, n, ()),
        f"{n} processes, ddp": (n, 1, ("--train.parallel", "ddp")),
        f"{n} processes, fsdp": (n, 1, ("--train.parallel", "fsdp")),
    }


def speed(words: list[str], processes: int, threads: int, steps: int) -> float:
    """Train, and return tokens a second."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        launcher += [str(processes)]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, "-m", "transformer_xl", "train", *words]
        command += ["--out", f"{folder}/run", "--train.steps", str(steps)]
        command += ["--train.minutes", "None", "--train.log_every", "1", "--train.eval_every", "0"]
        # All steps alike.
        command += ["--train.warmup_steps", "1", "--train.save_every", "0", "--train.stages"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        records = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    seen = [r["tokens_per_second"] for r in records if r["kind"] == "train"]
    return statistics.median(seen[WARM_UP:])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments, more = parser.parse_known_args()
    n = arguments.processes
    found: dict[str, list[float]] = {name: [] for name in ways(n)}
    for _ in range(arguments.rounds):
        for name, (processes, threads, options) in ways(n).items():
            words = [arguments.recipe, *options, *more]
            found[name].append(speed(words, processes, threads, arguments.steps))
            print(f"{name}: {found[name][-1]:,.0f} tokens a second", flush=True)
    median = {name: statistics.median(values) for name, values in found.items()}
    alone, threaded, *several = median
    rows: dict[str, Any] = {
        name: {
            "tokens_per_second": found[name],
            "of_one_process_with_threads": median[name] / median[threaded],
            "of_as_many_alone": median[name] / (n * median[alone]),
        }
        for name in (threaded, *several)
    }
    for name, row in rows.items():
        shares = (row["of_one_process_with_threads"], row["of_as_many_alone"])
        print(f"{name}: {shares[0]:.2f} of one process with threads, {shares[1]:.2f} of {n} alone")
    if arguments.json:
        about = circumstances() | {"rows": {alone: found[alone]} | rows}
        write_result_file(arguments.json, about)


if __name__ == "__main__":
    main()
