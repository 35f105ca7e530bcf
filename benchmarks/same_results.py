"""Does this revision compute what another one does? Runs both and compares, result by result.

    python benchmarks/same_results.py --base HEAD~1            # prints the differences; exit code 1
    python benchmarks/same_results.py --base v0.1 --json found.json

Rules:

* What is computed is in `outcomes.py`.
* Each revision runs in a process of its own with the same number of threads; the text is the
  source code of the standard library of this Python. Everything is on the CPU.
* Training (200 steps of four shrunken recipes: byte-pair units with Muon, characters in stages,
  words with an adaptive softmax, and an LSTM), evaluation and archives must have the same bits:
  losses, final weights and files are compared exactly. Generation must give the same tokens; the
  outputs of the exported step and the log-probabilities that the server returns beside its tokens
  may differ by 1e-4 in float32. Times and versions are not compared; names that one of the two
  does not have are listed.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import outcomes
import revision
from result_file import write_result_file

TOLERANCE = 1e-4
TIMES = ("seconds", "tokens_per_second")


def differences(ours: Any, theirs: Any, name: str = "") -> Iterator[tuple[str, str, Any, Any]]:
    """Compare two results; yield a kind (different, only here, only there), a name, both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            below = f"{name}/{key}" if name else key
            if key in TIMES:
                continue
            if key not in theirs:
                yield "only here", below, None, None
            elif key not in ours:
                yield "only there", below, None, None
            else:
                yield from differences(ours[key], theirs[key], below)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for n, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(mine, other, f"{name}/{n}")
    elif ours != theirs:
        is_near = (
            name.startswith(("onnx/", "server/"))
            and isinstance(ours, float)
            and isinstance(theirs, float)
            and math.isclose(ours, theirs, rel_tol=TOLERANCE)
        )
        if not is_near:
            yield "different", name, ours, theirs


def _count(value: Any) -> int:
    """Return how many single values a result has."""
    if isinstance(value, dict | list):
        return sum(map(_count, value.values() if isinstance(value, dict) else value))
    return 1


def main() -> None:
    """Run both revisions and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--base", default="HEAD~1", help="the revision to compare with")
    add("--json", type=Path, help="write the numbers compared and the differences here")
    add("--most", type=int, default=40, help="differences to print")
    add("--record", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        with tempfile.TemporaryDirectory() as folder:
            # Some results name files, and the folder is another one each time.
            text = json.dumps(outcomes.record(Path(folder))).replace(folder, "")
            arguments.record.write_text(text)
        return
    with revision.sources(arguments.base) as base, tempfile.TemporaryDirectory() as folder:
        results = []
        for name, src in (("here", revision.ROOT / "src"), (arguments.base, base)):
            print(f"== {name}", file=sys.stderr, flush=True)
            path = Path(folder) / "results.json"
            environment = os.environ | {"PYTHONPATH": str(src), "PYTHONWARNINGS": "ignore"}
            command = [sys.executable, __file__, "--record", str(path)]
            subprocess.run(command, env=environment, check=True)
            results.append(json.loads(path.read_text()))
    here, there = results
    found = list(differences(here, there))
    changed = [each for each in found if each[0] == "different"]
    for kind in ("only here", "only there"):
        names = [name for each, name, _, _ in found if each == kind]
        if names:
            print(f"{kind}: {', '.join(names)}")
    for _, name, mine, other in changed[: arguments.most]:
        print(f"different: {name}: {str(mine)[:80]} here, {str(other)[:80]} there")
    here_is, there_is = revision.commit(), revision.commit(arguments.base)
    print(f"{len(changed)} results differ between {here_is} and {there_is}")
    if arguments.json:
        values = {
            "here": revision.commit(),
            "there": revision.commit(arguments.base),
            "differences": found,
            "compared": {name: _count(value) for name, value in here.items()},
        }
        write_result_file(arguments.json, values)
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
