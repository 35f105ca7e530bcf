"""What the readers of old files do with files that are damaged or made to do harm.

    python tests/fuzzing/fuzzing.py [--mutants 1500] [--readers convert ...] [FILE ...]

Small files are made (both formats of torch.save, pickled vocabularies, a checkpoint of TensorFlow)
or given (model.pt, vocab.pkl, model.ckpt.index), changed at random, and read in processes of their
own. So are folders of all kinds, one file of each changed, by ``convert`` and ``read_vocab``, by a
model that is loaded and writes, as sessions of a server, recipes, archives and chat templates. A
mutant is a violation if reading it

* ends in anything but a value or ``UnreadableFile``, or kills its process (folders may also end in
  ``RuntimeError``, ``ValueError``, ``TxlError``, ``FileNotFoundError``, ``ArchiveError``);
* runs, imports or opens anything (an audit hook watches; of ``convert``, which writes, only
  programs and connections), or leaves the file that attacks make;
* takes more than 10 seconds, or 64 MB beyond the size of the files and of what was there before
  (with a vocabulary to make, 512 MB).

Mutants that are read are no violation, and are counted: a flip in a weight cannot be noticed where
there is no checksum (older files of torch.save, numbers of TensorFlow), nor one in a word.
Exits with 1 after a violation.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from folders import FOLDER_READERS, folder_mutations, folder_seeds, is_permitted, seal
from mutations import MARKER, mutations, seeds

from transformer_xl.apps.serve import chat_rendering
from transformer_xl.config.device import describe_machine
from transformer_xl.interop.convert.pickles import Instance, UnreadableFile
from transformer_xl.interop.convert.tf_files import read_tensorflow
from transformer_xl.interop.convert.torch_files import module_tensors, read_pickle, read_torch

SECONDS = 10
MEMORY = 64 << 20
# Threads reserve addresses and do not use them.
MEMORY_OF_FOLDERS = 512 << 20
READERS = {"torch": read_torch, "pickle": read_pickle, "tensorflow": read_tensorflow}
READERS |= FOLDER_READERS
WATCHED = (
    "os.",
    "subprocess.",
    "socket.",
    "exec",
    "compile",
    "import",
    "open",
    "ctypes.",
    "pickle.",
)
WATCHED_OF_FOLDERS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "socket.")
CHILDREN = (chat_rendering.COMMAND,)
CONTEXT = multiprocessing.get_context("fork")
HARMLESS = ("os.listdir", "os.scandir")


def given(path: Path) -> tuple[str, Path]:
    """Return the reader of a file that was given."""
    kind = {".pkl": "pickle", ".index": "tensorflow"}.get(path.suffix, "torch")
    return kind, path


class Watch:
    """Notes what Python does that reading does not need."""

    def __init__(self, watched: tuple[str, ...]) -> None:
        self._watched = watched
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple) -> None:
        if not self.is_on or not event.startswith(self._watched) or event in HARMLESS:
            return
        if event == "open" and args[1] in ("r", "rb", None) and not args[2] & 3:
            return
        if event == "import" and str(args[0]).startswith("encodings"):
            return
        # Templates are rendered in child processes of ours.
        if event == "subprocess.Popen" and list(args[1]) in CHILDREN:
            return
        self.seen.append(f"{event} {str(args)[:100]}")


def touch(value: Any) -> None:
    """Read every number, so that one outside of the file would be noticed."""
    if isinstance(value, Instance) and isinstance(value.state, dict) and "_modules" in value.state:
        module_tensors(value)
    waiting, seen = [value], set()
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            x.clone()
        elif isinstance(x, np.ndarray):
            x.copy()
        elif isinstance(x, Instance):
            waiting += [x.state, x.args]
        elif isinstance(x, dict):
            waiting += x.values()
        elif isinstance(x, list | tuple):
            waiting += x


def outcome(reader: str, path: Path, watch: Watch) -> str:
    """Read a mutant and say how it ended."""
    watch.seen.clear()
    watch.is_on = True
    began = time.perf_counter()
    try:
        touch(READERS[reader](path))
        found = "read"
    except UnreadableFile as error:
        cause = error.__cause__
        is_memory = isinstance(cause, MemoryError) or "allocate memory" in str(cause)
        found = "VIOLATION: memory" if is_memory else "refused"
    except FileNotFoundError:
        found = "refused"
    except Exception as error:  # noqa: BLE001
        is_fine = reader in FOLDER_READERS and is_permitted(error)
        found = "refused" if is_fine else f"VIOLATION: {type(error).__name__}: {str(error)[:100]}"
    watch.is_on = False
    if watch.seen:
        found = f"VIOLATION: {watch.seen[0]}"
    elif Path(MARKER).exists():
        found = "VIOLATION: executed"
    return found if time.perf_counter() - began < SECONDS else "VIOLATION: slow"


def work(pipe: Connection, seed: tuple[str, Path], folder: Path, numbers: range, salt: int) -> None:
    """Read mutants in a process of its own; report each."""
    os.chdir(folder)
    reader, path = seed
    content = path.read_bytes()
    is_folder = reader in FOLDER_READERS
    kinds = folder_mutations(path, content) if is_folder else mutations(reader, content)
    target = folder / path.name
    place = target
    if reader == "tensorflow":
        for data in path.parent.glob(f"{path.stem}.data-*"):
            (folder / data.name).write_bytes(data.read_bytes())
        place = folder / path.stem
    if is_folder:
        place = folder / "source"
        shutil.copytree(path.parent, place)
        target = place / path.name
    watch = Watch(WATCHED_OF_FOLDERS if is_folder else WATCHED)
    # What is imported and taken once.
    for encoding in ("cp437", "raw-unicode-escape", "latin-1", "ascii"):
        b"a".decode(encoding)
    target.write_bytes(content)
    touch(READERS[reader](place))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = (
        pages * resource.getpagesize() + len(content) + (MEMORY_OF_FOLDERS if is_folder else MEMORY)
    )
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for i in numbers:
        kind = kinds[i % len(kinds)]
        draw = random.Random(f"{salt} {path.name} {i}")
        target.write_bytes(kind(draw, content) or b"?")
        if is_folder:
            seal(place, draw)
        began = time.perf_counter()
        found = outcome(reader, place, watch)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pipe.send((i, kind.__name__, found, time.perf_counter() - began, peak))
    pipe.close()


def read_all(seed: tuple[str, Path], folder: Path, n: int, salt: int) -> dict[str, Any]:
    """Read mutants of a file in as many processes as there are cores."""
    began = time.perf_counter()
    counts: dict[str, Counter[str]] = {}
    violations: list[str] = []
    slowest, peaks = 0.0, {}
    n_workers = os.cpu_count() or 1
    waiting = {i: _start(seed, folder, range(i, n, n_workers), salt) for i in range(n_workers)}
    while waiting:
        for i, (process, pipe, numbers) in list(waiting.items()):
            try:
                # A process that says nothing for so long hangs.
                if not pipe.poll(2 * SECONDS):
                    process.kill()
                number, kind, found, seconds, peak = pipe.recv()
                numbers = numbers[numbers.index(number) + 1 :]
                slowest = max(slowest, seconds)
                first, _ = peaks.get(process.pid, (peak, peak))
                peaks[process.pid] = first, peak
                waiting[i] = process, pipe, numbers
            except EOFError:
                process.join()
                del waiting[i]
                if not numbers:
                    continue
                number, kind = numbers[0], "?"
                found = f"VIOLATION: the process ended with {process.exitcode}"
                waiting[i] = _start(seed, folder, numbers[1:], salt)
            counts.setdefault(kind, Counter())[found] += 1
            if found.startswith("VIOLATION"):
                violations.append(f"{number}: {kind}: {found}")
    return {
        "reader": seed[0],
        "file": f"{seed[1].parent.name}/{seed[1].name}"
        if seed[0] in FOLDER_READERS
        else seed[1].name,
        "read": sum(count["read"] for count in counts.values()),
        "refused": sum(count["refused"] for count in counts.values()),
        "violations": violations,
        "seconds": round(time.perf_counter() - began, 1),
        "slowest_seconds": round(slowest, 3),
        "most_memory_mb": round(
            max((last - first for first, last in peaks.values()), default=0) / 1024, 1
        ),
        "mutations": len(counts),
    }


def _start(seed: tuple[str, Path], folder: Path, numbers: range, salt: int) -> tuple:
    ours, theirs = CONTEXT.Pipe(duplex=False)
    own = Path(tempfile.mkdtemp(dir=folder))
    process = CONTEXT.Process(target=work, args=(theirs, seed, own, numbers, salt))
    process.start()
    # Only then does its end show when it dies.
    theirs.close()
    return process, ours, numbers


def main() -> None:
    """Read mutants of every file; print counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="instead of small files made here")
    parser.add_argument("--mutants", type=int, default=1500, help="of each file")
    parser.add_argument("--readers", nargs="+", choices=READERS, help="files of these readers only")
    parser.add_argument("--salt", type=int, default=0, help="another one makes other mutants")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        files = [given(path.resolve()) for path in args.files]
        if not files:
            files = [*seeds(Path(temporary)), *folder_seeds(Path(temporary))]
        report = []
        for seed in files:
            if args.readers and seed[0] not in args.readers:
                continue
            report.append(read_all(seed, Path(temporary), args.mutants, args.salt))
            # What is known if it is stopped.
            sys.stderr.write(json.dumps(report[-1]) + "\n")
            sys.stderr.flush()
    about = {"date": str(date.today()), "command": shlex.join(["python", *sys.argv])}
    about |= describe_machine()
    n_violations = sum(len(part["violations"]) for part in report)
    result = {"files": report, "violations": n_violations, "seconds": time.perf_counter() - began}
    sys.stdout.write(json.dumps(about | result, indent=1) + "\n")
    sys.exit(bool(n_violations))


if __name__ == "__main__":
    main()
