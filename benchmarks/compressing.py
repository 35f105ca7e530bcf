"""How small files become, beside xz -9e: prose, code, and files of a dozen kinds.

    git clone https://github.com/google/snappy
    python benchmarks/compressing.py --canterbury snappy/testdata --json compressing.json
    python benchmarks/compressing.py --canterbury snappy/testdata --learn

* Four texts of the Canterbury corpus, in bits per byte: alice29, asyoulik, lcet10, plrabn12.
* Three files of networkx, which `python-code` has not read, as a share of what xz makes of them.
* Files of many kinds, the first 64 kB of each, as that share.

Each is compressed as by `txl compress FILE`, restored, and compared; with `--learn` by a model that
learns: `english` for the texts and `python-code` for networkx.
"""

import argparse
import json
import lzma
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from result_file import rounded, write_result_file
from turns import circumstances

from transformer_xl import from_pretrained
from transformer_xl.apps.compress import (
    Settings,
    compress,
    compress_best,
    decompress,
    find,
    needs_model,
)

ROOT = Path(__file__).parents[1]
TEXTS = ("alice29", "asyoulik", "lcet10", "plrabn12")
UNSEEN = ("drawing/nx_pylab.py", "utils/backends.py", "algorithms/shortest_paths/weighted.py")
"""Files of the package networkx, of about 100 kB each."""
MOST = 1 << 16
"""Bytes of a file of a kind."""


def kinds(testdata: Path) -> dict[str, bytes]:
    """Return files of many kinds."""
    draw = np.random.default_rng(0)
    prose = (testdata / "lcet10.txt").read_bytes().replace(b"\r\n", b"\n")
    python = b"".join(x.read_bytes() for x in sorted((ROOT / "tests" / "serve").glob("*.py")))
    numbers = draw.normal(size=(2000, 4)).cumsum(0)
    rows = [f"{n},{a:.3f},{b:.3f},{c:.2f},{d:.1f}" for n, (a, b, c, d) in enumerate(numbers)]
    events = [
        f"2026-03-{1 + n // 700:02} {n % 24:02}:{draw.integers(60):02}:{draw.integers(60):02} "
        f"{draw.choice(['INFO', 'WARN', 'ERROR'])} worker-{draw.integers(8)} "
        f"request {draw.integers(10**6):06} took {draw.integers(2000)} ms"
        for n in range(1500)
    ]
    records = [{"id": n, "name": f"item {n % 37}", "tags": ["a", "b"][: n % 3]} for n in range(900)]
    files = {
        "prose": prose,
        "prose with CR LF": prose.replace(b"\n", b"\r\n"),
        "prose in capitals": prose.upper(),
        "Python": python,
        "Python indented with tabs": python.replace(b"    ", b"\t"),
        "C++": (ROOT / "src/transformer_xl/ops/native.cpp").read_bytes(),
        "log": "\n".join(events).encode(),
        "CSV": "\n".join(rows).encode(),
        "JSON": json.dumps(records, indent=1).encode(),
        "Chinese": (ROOT / "docs" / "zh" / "how-it-works.md").read_bytes(),
        "HTML": (testdata / "html").read_bytes(),
        "URLs": (testdata / "urls.10K").read_bytes(),
        "protocol buffers": (testdata / "geo.protodata").read_bytes(),
        "JPEG": (testdata / "fireworks.jpeg").read_bytes(),
        "program": Path(sys.executable).resolve().read_bytes(),
        "random": draw.bytes(MOST),
        "zeros": bytes(MOST),
        "one line": b"The quick brown fox jumps over the lazy dog.\n",
    }
    return {name: x[:MOST] for name, x in files.items()}


def measured(data: bytes, learner: str | None) -> dict[str, Any]:
    """Compress, restore, compare; return sizes and times."""
    began = time.perf_counter()
    if learner is None:
        found, _ = compress_best(data)
    else:
        found = compress(data, *from_pretrained(learner), Settings(learn=True))
    packed = time.perf_counter()
    model = find(found.content)[1:] if needs_model(found.content) else ()
    if decompress(found.content, *model) != data:
        raise AssertionError("what is restored is another file")
    restored = time.perf_counter()
    xz = len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    return {
        "bytes": len(data),
        "compressed": len(found.content),
        "xz": xz,
        "method": found.model or found.method,
        "bits_per_byte": 8 * len(found.content) / len(data),
        "of_xz": len(found.content) / xz,
        "seconds": packed - began,
        "seconds_restored": restored - packed,
    }


def report(files: Mapping[str, bytes], by: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
    """Measure files, and print a line for each."""
    found = {}
    for name, data in files.items():
        x = found[name] = by(data)
        print(
            f"{name:26} {x['bytes']:9,} {x['compressed']:9,} {x['bits_per_byte']:6.3f} bits/byte "
            f"{x['of_xz']:6.3f} of xz  {x['method']:14} {x['seconds']:6.1f} s, restored in "
            f"{x['seconds_restored']:.1f} s",
            flush=True,
        )
    return found


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--canterbury", type=Path, required=True, help="the folder of the texts")
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--only", choices=("texts", "networkx", "kinds"), help="one group alone")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    import networkx

    root = Path(networkx.__file__).parent
    groups: dict[str, tuple[dict[str, bytes], str | None]] = {
        "texts": ({x: (given.canterbury / f"{x}.txt").read_bytes() for x in TEXTS}, "english"),
        "networkx": ({x: (root / x).read_bytes() for x in UNSEEN}, "python-code"),
    }
    if not given.learn:
        groups["kinds"] = (kinds(given.canterbury), None)
    result: dict[str, Any] = {}
    for name in [given.only] if given.only else groups:
        files, learner = groups[name]
        found = report(files, partial(measured, learner=learner if given.learn else None))
        bits = sum(x["bits_per_byte"] for x in found.values()) / len(found)
        share = sum(x["compressed"] for x in found.values()) / sum(x["xz"] for x in found.values())
        larger = [kind for kind, x in found.items() if x["of_xz"] > 1.01]
        print(f"{name}: mean {bits:.3f} bits per byte; in all {share:.3f} of xz; larger: {larger}")
        result[name] = found
    if given.json:
        write_result_file(given.json, rounded(circumstances() | {"learn": given.learn} | result))


if __name__ == "__main__":
    main()
