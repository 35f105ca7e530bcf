"""What the readers of old files do with files that are damaged or made to do harm.

    python tests/fuzzing/fuzzing.py [--mutants 1500] [--readers convert ...]

Small files are made (both formats of torch.save, pickled vocabularies, a checkpoint of TensorFlow),
changed at random, and read in processes of their own. So are folders of all kinds, one file of each
changed, by ``convert`` and ``read_vocab``, and by a model that is loaded and writes. A mutant is a
violation if reading it

* ends in anything but a value or ``CheckpointError``, or kills its process (folders may also end in
  ``RuntimeError``, ``ValueError`` and ``FileNotFoundError``);
* runs, imports or opens anything (an audit hook watches; of folders, only programs and
  connections), or leaves the file that attacks make;
* takes more than 10 seconds, or 64 MB beyond the size of the files and of what was there before
  (folders, whose vocabularies are made, 512 MB).

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
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from folders import FOLDER_READERS, folder_mutations, folder_seeds, is_permitted, seal
from mutations import MARKER, mutations, seeds

from transformer_xl.errors import CheckpointError
from transformer_xl.interop.convert import closed_unpickler
from transformer_xl.interop.convert.tf_files import read_tensorflow
from transformer_xl.interop.convert.torch_files import Instance, module_tensors, read_pickled

SECONDS = 10
MEMORY = 64 << 20
# Threads reserve addresses and do not use them.
MEMORY_OF_FOLDERS = 512 << 20
WATCHED = ("os.", "subprocess.", "socket.", "exec", "compile", "import", "open", "ctypes.")
WATCHED += ("pickle.",)
WATCHED_OF_FOLDERS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "socket.")
HARMLESS = ("os.listdir", "os.scandir")


def read_watched(path: Path) -> Any:
    """Read a pickle in this process, which is watched, and then as a user does, in a child."""
    with suppress(Exception):
        closed_unpickler.read(path)
    return read_pickled(path)


READERS = {"torch": read_watched, "pickle": read_watched, "tensorflow": read_tensorflow}
READERS |= FOLDER_READERS


class Watch:
    """Notes what Python does that reading does not need."""

    def __init__(self, watched: tuple[str, ...]) -> None:
        self._watched = watched
        self.is_on = False
        self.events: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple) -> None:
        if not self.is_on or not event.startswith(self._watched) or event in HARMLESS:
            return
        is_reading = event == "open" and args[1] in ("r", "rb", None) and not args[2] & 3
        is_encoding = event == "import" and str(args[0]).startswith("encodings")
        # Tokenizers are tried and pickles read in child processes of ours.
        is_ours = event == "subprocess.Popen" and args[1][0] == sys.executable
        if not (is_reading or is_encoding or is_ours or args[0] == os.devnull):
            self.events.append(f"{event} {str(args)[:100]}")


def touch(value: Any) -> None:
    """Read every number, so that one outside of the file would be noticed."""
    if isinstance(value, Instance) and isinstance(value.state, dict) and "_modules" in value.state:
        module_tensors(value)
    waiting, touched = [value], set()
    while waiting:
        x = waiting.pop()
        if id(x) in touched:
            continue
        touched.add(id(x))
        if isinstance(x, torch.Tensor):
            x.clone()
        elif isinstance(x, Instance):
            waiting.append(x.state)
        elif isinstance(x, dict):
            waiting += x.values()
        elif isinstance(x, list | tuple):
            waiting += x


def outcome(reader: str, path: Path, watch: Watch) -> str:
    """Read a mutant and say how it ended."""
    watch.events.clear()
    watch.is_on = True
    began = time.perf_counter()
    try:
        touch(READERS[reader](path))
        found = "read"
    except CheckpointError as error:
        cause = error.__cause__
        is_memory = isinstance(cause, MemoryError) or "allocate memory" in str(cause)
        found = "VIOLATION: memory" if is_memory else "refused"
    except FileNotFoundError:
        found = "refused"
    except Exception as error:  # noqa: BLE001
        is_fine = reader in FOLDER_READERS and is_permitted(error)
        found = "refused" if is_fine else f"VIOLATION: {type(error).__name__}: {str(error)[:100]}"
    watch.is_on = False
    if watch.events:
        found = f"VIOLATION: {watch.events[0]}"
    elif Path(MARKER).exists():
        found = "VIOLATION: executed"
    return found if time.perf_counter() - began < SECONDS else "VIOLATION: slow"


def work(reader: str, path: Path, folder: Path, numbers: range, salt: int) -> None:
    """Read mutants in a process of its own; write the outcome of each into its folder."""
    os.chdir(folder)
    content = path.read_bytes()
    is_folder = reader in FOLDER_READERS
    kinds = folder_mutations(path, content) if is_folder else mutations(reader, content)
    place = folder / "source"
    shutil.copytree(path.parent, place)
    target = place / path.name
    if not is_folder:
        place = target
    watch = Watch(WATCHED_OF_FOLDERS if is_folder else WATCHED)
    # What is imported and taken once.
    for encoding in ("cp437", "raw-unicode-escape", "latin-1", "ascii"):
        b"a".decode(encoding)
    touch(READERS[reader](place))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + len(content)
    limit += MEMORY_OF_FOLDERS if is_folder else MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with (folder / "outcomes").open("w") as outcomes:
        for i in numbers:
            # A process that says nothing for so long is ended.
            signal.alarm(2 * SECONDS)
            draw = random.Random(f"{salt} {path.name} {i}")
            target.write_bytes(kinds[i % len(kinds)](draw, content) or b"?")
            if is_folder:
                seal(place, draw)
            outcomes.write(outcome(reader, place, watch).replace("\n", " ") + "\n")
            outcomes.flush()


def read_all(reader: str, path: Path, n: int, salt: int) -> dict[str, Any]:
    """Read mutants of a file, in another process after one that ended."""
    began, context = time.perf_counter(), multiprocessing.get_context("fork")
    found: list[str] = []
    while len(found) < n:
        with tempfile.TemporaryDirectory() as folder:
            numbers = range(len(found), n)
            process = context.Process(target=work, args=(reader, path, Path(folder), numbers, salt))
            process.start()
            process.join()
            outcomes = Path(folder, "outcomes")
            found += outcomes.read_text().splitlines() if outcomes.exists() else []
            if process.exitcode:
                found.append(f"VIOLATION: the process ended with {process.exitcode}")
    counts = Counter(found)
    return {
        "reader": reader,
        "file": f"{path.parent.name}/{path.name}",
        "read": counts["read"],
        "refused": counts["refused"],
        "violations": [f"{i}: {x}" for i, x in enumerate(found) if x.startswith("VIOLATION")],
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Read mutants of every file; print counts as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutants", type=int, default=1500, help="of each file")
    parser.add_argument("--readers", nargs="+", choices=READERS, help="files of these readers only")
    parser.add_argument("--salt", type=int, default=0, help="another one makes other mutants")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    report = []
    with tempfile.TemporaryDirectory() as temporary:
        for reader, path in [*seeds(Path(temporary)), *folder_seeds(Path(temporary))]:
            if not args.readers or reader in args.readers:
                report.append(read_all(reader, path, args.mutants, args.salt))
                # What is known if it is stopped.
                sys.stderr.write(json.dumps(report[-1]) + "\n")
    n_violations = sum(len(part["violations"]) for part in report)
    sys.stdout.write(json.dumps({"files": report, "violations": n_violations}, indent=1) + "\n")
    sys.exit(bool(n_violations))


if __name__ == "__main__":
    main()
