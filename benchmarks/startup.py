"""How long the package and the command need before they do anything.

    python benchmarks/startup.py

Each command is started several times as a process of its own; the median is reported, and what a
bare interpreter needs is shown beside it.
"""

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import transformer_xl": ["-c", "import transformer_xl"],
    "txl --help": ["-m", "transformer_xl", "--help"],
    "txl train --help": ["-m", "transformer_xl", "train", "--help"],
    "import torch": ["-c", "import torch"],
    "import torch; TransformerXL": ["-c", "import torch, transformer_xl as t; t.TransformerXL"],
}
ROUNDS = 11


def seconds(arguments: list[str]) -> float:
    """Return how long a command takes."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Measure in turns and print."""
    turns = [{name: seconds(x) for name, x in COMMANDS.items()} for _ in range(ROUNDS + 1)][1:]
    print("| command | median | least | most |\n|---|---|---|---|")
    for name in COMMANDS:
        times = sorted(turn[name] for turn in turns)
        print(f"| `{name}` | {statistics.median(times):.3f} s | {times[0]:.3f} | {times[-1]:.3f} |")


if __name__ == "__main__":
    main()
