"""Whether scoring a stream that does not end takes memory or time that grows.

    python benchmarks/endless.py runs/demo TEXT                          # 10 million tokens
    python benchmarks/endless.py runs/demo TEXT --tokens 100000 --parts 10 --json endless.json

Repeats a text into ``txl score DIR - --by line``, a process of its own, until so many tokens were
scored. For each part (a tenth, or each million) it says how fast it was and how much memory the
process held: its resident size, sampled while the part was scored. The table ends with how far
the memory of any part is from that of the first, and the speed of any part from the median.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from result_file import write_result_file
from revision import commit
from turns import circumstances

SAMPLED_SECONDS = 0.2


def resident(process: int) -> int:
    """Return the bytes of memory that a process holds."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(process)


def feed(process: "subprocess.Popen[bytes]", text: bytes, is_over: threading.Event) -> None:
    """Write a text into a process again and again, until it is over."""
    assert process.stdin is not None
    try:
        while not is_over.is_set():
            process.stdin.write(text)
        process.stdin.close()
    except BrokenPipeError:
        pass  # It has scored as much as was asked for.


def measure(command: list[str], text: bytes, tokens: int, parts: int) -> list[dict[str, Any]]:
    """Score until all parts are full; return what was seen of each."""
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    is_over = threading.Event()
    feeder = threading.Thread(target=feed, args=(process, text, is_over), daemon=True)
    feeder.start()
    assert process.stdout is not None
    found: list[dict[str, Any]] = []
    samples: list[int] = []
    scored, nll, n_in_part = 0, 0.0, 0
    began = sampled = time.perf_counter()
    for lines, line in enumerate(process.stdout, 1):
        now = time.perf_counter()
        if now - sampled >= SAMPLED_SECONDS or not samples:
            samples.append(resident(process.pid))
            sampled = now
        record = json.loads(line)
        if lines == 1:
            began = now
        scored += record["tokens"]
        n_in_part += record["tokens"]
        nll += record["nll"]
        if scored >= tokens * (len(found) + 1) / parts:
            seconds = time.perf_counter() - began
            found.append(
                {
                    "tokens": scored,
                    "lines": lines,
                    "memory": statistics.median(samples),
                    "most_memory": max(samples),
                    "samples": len(samples),
                    "tokens_per_second": n_in_part / seconds,
                    "nll": nll / n_in_part,
                }
            )
            show(found[-1])
            samples, nll, n_in_part = [], 0.0, 0
            began = time.perf_counter()
            if len(found) == parts:
                break
    is_over.set()
    process.stdout.close()
    process.terminate()
    process.wait()
    feeder.join(timeout=10)
    if len(found) < parts:
        sys.exit(f"txl score ended after {scored:,} tokens with {process.returncode}")
    return found


def show(part: dict[str, Any]) -> None:
    """Print a line of the table."""
    print(
        f"| {part['tokens']:,} | {part['memory'] / 1e6:.1f} | {part['most_memory'] / 1e6:.1f} "
        f"| {part['tokens_per_second']:,.0f} | {part['nll']:.4f} |",
        flush=True,
    )


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", help="a model folder or a run folder")
    parser.add_argument("text", type=Path, help="the text that is repeated")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--parts", type=int, help="default: one for each million, at least ten")
    parser.add_argument("--segment_len", type=int, default=128)
    parser.add_argument("--mem_len", type=int)
    parser.add_argument("--weights", default="float32")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    parts = arguments.parts or max(arguments.tokens // 1_000_000, 10)
    command = [sys.executable, "-m", "transformer_xl", "score", arguments.run, "-", "--by", "line"]
    command += ["--segment_len", str(arguments.segment_len), "--weights", arguments.weights]
    if arguments.mem_len is not None:
        command += ["--mem_len", str(arguments.mem_len)]
    print("| tokens | memory, MB | at most | tokens a second | nats per token |")
    print("|---|---|---|---|---|")
    text = arguments.text.read_bytes()
    # Lines end where the text is repeated, too.
    text += b"\n" * (not text.endswith(b"\n"))
    found = measure(command, text, arguments.tokens, parts)
    memory, speed = ([part[key] for part in found] for key in ("memory", "tokens_per_second"))
    middle = statistics.median(speed)
    result = {
        # Memory of the first part as the measure: what came later must not have grown.
        "memory_deviation": max(abs(each / memory[0] - 1) for each in memory),
        "memory_last_to_first": memory[-1] / memory[0] - 1,
        "speed_deviation": max(abs(each / middle - 1) for each in speed),
        "speed_last_to_first": speed[-1] / speed[0] - 1,
        "tokens_per_second": middle,
    }
    print(
        f"\nmemory: at most {result['memory_deviation']:.2%} from the first part, the last "
        f"{result['memory_last_to_first']:+.2%}\nspeed: median {middle:,.0f} tokens a second, at "
        f"most {result['speed_deviation']:.1%} from it, the last part against the first "
        f"{result['speed_last_to_first']:+.1%}"
    )
    if arguments.json:
        about = {"program": "endless", "commit": commit(), "command": command[1:]}
        about |= {"circumstances": circumstances(), "bytes_of_text": len(text)}
        write_result_file(arguments.json, about | result | {"parts": found})


if __name__ == "__main__":
    main()
