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

    def __init__(self, package: Path, short: int = SHORT) -> None:
        self.package, self.short = str(package), short
        self.found: set[tuple[str, str]] = set()
        self.is_on = False

    def see(self, frame: FrameType) -> None:
        """Take the function of a frame, if it is one of the package and not short."""
        code, caller = frame.f_code, frame.f_back
        file = self._own(code.co_filename)
        if file is None or NAMES.match(code.co_name) or lines_of(code) <= self.short:
            return
        if file.startswith("ops/"):
            calling = None if caller is None else self._own(caller.f_code.co_filename)
            if calling is None or calling.startswith("ops/"):
                return
        self.found.add((file, code.co_qualname))

    def see_stack(self, frame: FrameType | None) -> None:
        """Take what is on the stack."""
        while frame is not None:
            self.see(frame)
            frame = frame.f_back

    def _own(self, file: str) -> str | None:
        inside = file.startswith(self.package)
        return file[len(self.package) + 1 :] if inside else None


def follow(package: Path, command: list[str], name: str, first: int) -> list[tuple[str, str]]:
    """Run a command; return what is between two returns of a function, and above it.

    Args:
        package: The folder of the package.
        command: The command line, without ``txl``.
        name: The qualified name of the function.
        first: After how many of its returns it begins.
    """
    from transformer_xl.cli import main

    way, returns = Way(package), 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal returns
        if event == "call" and way.is_on:
            way.see(frame)
        elif (
            event == "return"
            and frame.f_code.co_qualname == name
            and frame.f_code.co_filename.startswith(str(package))
        ):
            returns += 1
            way.is_on = returns == first
            if way.is_on:
                way.see_stack(frame.f_back)

    sys.setprofile(profile)
    try:
        code = main(command)
    finally:
        sys.setprofile(None)
    if code or returns <= first:
        raise RuntimeError(f"{command} ended with {code} after {returns} times {name}")
    return sorted(way.found)


def follow_call(package: Path, command: list[str], name: str, number: int) -> list[tuple[str, str]]:
    """Run a command; return what is entered in call number ``number`` of a function."""
    from transformer_xl.cli import main

    way, calls = Way(package, SHORTEST), 0
    inside: FrameType | None = None

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, inside
        if event == "call":
            if frame.f_code.co_qualname == name:
                calls += 1
                if calls == number:
                    inside = frame
            if inside is not None:
                way.see(frame)
        elif event == "return" and frame is inside:
            inside = None

    sys.setprofile(profile)
    try:
        code = main(command)
    finally:
        sys.setprofile(None)
    if code or calls < number:
        raise RuntimeError(f"{command} ended with {code} after {calls} calls of {name}")
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
            words = ["train", "tiny.toml", "--out", "run"]
            loss = follow_call(package, [*words, "--quiet"], "LanguageModel.forward", 3)
            words = ["train", "tiny.toml", "--out", "another", "--quiet"]
            update = follow(package, words, "train_step", 3)
            words = ["generate", "run", "--length", "6", "--prompt", "the cat"]
            # One token is drawn by each call.
            token = follow(package, words, "Sampler.__call__", 3)
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
