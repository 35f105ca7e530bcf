"""Two programs at once on one machine: how much they do together, beside one alone.

    python benchmarks/sharing.py
    python benchmarks/sharing.py --shape small --seconds 20 --rounds 5
    python benchmarks/sharing.py --works evaluation+evaluation generation+training

Each program has a process of its own, with as many threads as torch takes, and works for so many
seconds. A share is what a program does beside the other one, as part of what it does alone; the sum
of both shares is 1 if nothing is lost. Measured with threads that follow the load, as those of the
commands do, and with those of the system's OpenMP as it is.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import peers
import torch
from revision import commit
from shapes import SHAPES, Job

from transformer_xl.config.openmp import follow_load

WORKS = ("evaluation+evaluation", "training+training", "generation+training")


def steps_a_second(work: str, shape: str, seconds: float, start: float, follows: bool) -> float:
    """Work for some seconds from a time on; return the steps a second."""
    import evaluation
    import generation
    import training

    torch.manual_seed(0)
    torch.ones(1 << 20).add_(1)
    if follows:
        follow_load()
    job = Job(work, SHAPES[shape], "float32")  # pyright: ignore[reportArgumentType]
    peer = peers.build("ours", job)
    peer.remember()
    prepare = {"evaluation": evaluation, "generation": generation, "training": training}[work]
    step = prepare.prepare(peer, job)
    step()
    if time.time() > start:
        sys.exit("a program needs longer to start than the other one waits")
    time.sleep(start - time.time())
    n, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        step()
        n += 1
    return n / (time.perf_counter() - began)


def run(works: list[str], shape: str, seconds: float, follows: bool) -> list[float]:
    """Let programs work at the same time; return the steps a second of each."""
    # Long enough for two to import torch and to make a first step.
    start = time.time() + 10
    common = [shape, str(seconds), str(start), str(int(follows))]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", work, *common],
            stdout=subprocess.PIPE,
            text=True,
        )
        for work in works
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a program failed; see above")
    return [float(output.split()[-1]) for output in outputs]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", default=WORKS, metavar="WORK+WORK")
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work, shape, seconds, start, follows = arguments.worker
        rate = steps_a_second(work, shape, float(seconds), float(start), follows == "1")
        print(rate)
        return
    processor = torch.cpu.get_capabilities().get("cpu_name")
    print(
        f"{processor}, {os.cpu_count()} processors, {torch.get_num_threads()} threads each, "
        f"torch {torch.__version__}, shape {arguments.shape}, {commit()}\n"
    )
    print("| programs | threads | shares (medians) | together (range) | alone, steps/s |")
    print("|---|---|---|---|---|")
    for pair in arguments.works:
        works = pair.split("+")
        for follows in (True, False):
            alone: dict[str, list[float]] = {work: [] for work in works}
            shares: list[list[float]] = []
            for _ in range(arguments.rounds):
                for work in alone:
                    alone[work] += run([work], arguments.shape, arguments.seconds, follows)
                both = run(works, arguments.shape, arguments.seconds, follows)
                pairs = zip(both, works, strict=True)
                shares.append([rate / alone[work][-1] for rate, work in pairs])
            each = ", ".join(f"{statistics.median(x):.2f}" for x in zip(*shares, strict=True))
            sums = [sum(x) for x in shares]
            together = f"{statistics.median(sums):.2f} ({min(sums):.2f} to {max(sums):.2f})"
            rates = ", ".join(f"{statistics.median(x):.3g}" for x in alone.values())
            name = "follow the load" if follows else "as they are"
            print(f"| {pair} | {name} | {each} | {together} | {rates} |", flush=True)


if __name__ == "__main__":
    main()
