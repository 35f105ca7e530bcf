"""How many functions, in how many files, lie on the way to a loss, an update and a token?

    python benchmarks/ways.py
    python benchmarks/ways.py --base c1f4c10 --list

A tiny model is trained by `txl train` and writes by `txl generate`, both in the process of this
program, once for each revision in a process of its own. Rules:

* The way to a weight update is what is on the stack while the loop runs, from `main` downward, and
  what is entered between the end of one training step and the end of the next, the third and the
  fourth of the run, in which nothing is logged, evaluated or saved.
* The way to the loss is what is entered from `LanguageModel.forward` on until it returns, with what
  it calls, in the third call of a training: from `model(tokens, mems, targets)` to the loss, as a
  reader opens it. Short functions count here, too, but those that are two lines or less.
* The way to a token is what is on the stack while tokens are written, and what is entered from the
  third token that is drawn to the fourth.
* Counted are the functions and methods of the package, each once, in whose body more than five
  lines compute something: a shorter one is read where it is called. Not counted are lambdas and
  comprehensions; what Python or a library computes between them (a dataclass, a compiled graph);
  and functions whose name asks a question or states a requirement (is, has, require, check), which
  are answered by it.
* Of `ops`, which can be used alone, those functions are counted that others of the package call;
  how they compute is not followed further.
* The files are those in which these functions stand.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import revision
from result_file import write_result_file

RECIPE = """\
# A tiny model of bytes.
[model]
n_layer = 2
n_head = 2
d_model = 16
d_inner = 32
mem_len = 8
[data]
path = "text.txt"
vocab = "bytes"
[train]
steps = 6
batch_size = 2
segment_len = 8
eval_every = 1000
log_every = 1000
save_every = 1000
"""


NAMES = re.compile("<|_?(is|has|require|check|checked)_")
"""Functions of these names are not counted."""
SHORT = 5
"""Functions with no more lines than these are read where they are called."""
SHORTEST = 2
"""The same, on the way to the loss."""


def lines_of(code: CodeType) -> int:
    """Count the lines in the body of a function that compute something."""
    return len({line for *_, line in code.co_lines() if line and line > code.co_firstlineno})


class Way:
    """The functions of the package that are entered while this is on."""

    def __init__(self, package: Path, short: int) -> None:
        self.package, self.short = str(package), short
        self.found: set[tuple[str, str]] = set()
        self.is_on = False

    def see(self, frame: FrameType) -> None:
        """Take the function of a frame, if it is one of the package and not short."""
        file = self._own(frame)
        code = frame.f_code
        if file is None or NAMES.match(code.co_name) or lines_of(code) <= self.short:
            return
        caller = frame.f_back and self._own(frame.f_back)
        if file.startswith("ops/") and (caller is None or caller.startswith("ops/")):
            return
        self.found.add((file, code.co_qualname))

    def see_stack(self, frame: FrameType | None) -> None:
        """Take what is on the stack."""
        while frame is not None:
            self.see(frame)
            frame = frame.f_back

    def _own(self, frame: FrameType) -> str | None:
        file = frame.f_code.co_filename
        return file[len(self.package) + 1 :] if file.startswith(self.package) else None


def follow(
    package: Path, command: list[str], name: str, number: int, *, between: bool
) -> list[tuple[str, str]]:
    """Run a command; return which functions are entered on a part of its way.

    Args:
        package: The folder of the package.
        command: The command line, without ``txl``.
        name: The qualified name of a function of the package.
        number: Which of its calls.
        between: What is between the end of that call and the end of the next one, and what is above
            it on the stack. If not, what is entered within that call.
    """
    from transformer_xl.cli import main

    way, n_ends = Way(package, SHORT if between else SHORTEST), 0
    n_calls, inside = 0, None

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal n_calls, n_ends, inside
        code = frame.f_code
        is_named = code.co_qualname == name and code.co_filename.startswith(str(package))
        if event == "call":
            n_calls += is_named
            if not between and is_named and n_calls == number:
                way.is_on, inside = True, frame
            if way.is_on:
                way.see(frame)
        elif event == "return" and frame is inside:
            way.is_on, inside = False, None
        elif event == "return" and between and is_named:
            n_ends += 1
            way.is_on = n_ends == number
            if way.is_on:
                way.see_stack(frame.f_back)

    sys.setprofile(profile)
    try:
        code = main(command)
    finally:
        sys.setprofile(None)
    if code or n_calls <= number - (not between):
        raise RuntimeError(f"{command} ended with {code} after {n_calls} calls of {name}")
    return sorted(way.found)


def work() -> None:
    """Follow the ways in this process; print what was found."""
    import transformer_xl

    package = Path(transformer_xl.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("text.txt").write_text("the cat sat on the mat\n" * 400)
        Path("tiny.toml").write_text(RECIPE)
        quiet = os.dup(1), os.dup(2)
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123  (a descriptor is needed)
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            words = ["train", "tiny.toml", "--quiet", "--out"]
            loss = follow(package, [*words, "run"], "LanguageModel.forward", 3, between=False)
            update = follow(package, [*words, "another"], "train_step", 3, between=True)
            words = ["generate", "run", "--length", "6", "--prompt", "the cat"]
            # One token is drawn by each call.
            token = follow(package, words, "Sampler.__call__", 3, between=True)
            sys.stdout.flush()
            os.dup2(quiet[0], 1)
            os.dup2(quiet[1], 2)
    print(json.dumps({"loss": loss, "update": update, "token": token}))


def measure(source: Path) -> dict[str, list[list[str]]]:
    """Follow the ways of a revision whose sources are there."""
    environment = os.environ | {"PYTHONPATH": f"{source}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Follow and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", help="also at this git revision")
    parser.add_argument("--list", action="store_true", help="name the functions")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    found = {revision.commit(): measure(revision.ROOT / "src")}
    if arguments.base:
        with revision.sources(arguments.base) as source:
            found[revision.commit(arguments.base)] = measure(source)
    for name, ways in found.items():
        for way, functions in ways.items():
            files = {file for file, _ in functions}
            print(f"{name}: to {way}: {len(functions)} functions in {len(files)} files")
            if arguments.list:
                for file, function in functions:
                    print(f"    {file}: {function}")
    if arguments.json:
        write_result_file(arguments.json, found)


if __name__ == "__main__":
    main()
