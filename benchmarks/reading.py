"""Reading a corpus of hundreds of gigabytes: from a disk, and from a store, by one of many ranks.

    python benchmarks/reading.py                         # 200 GB, of which the disk holds nothing
    python benchmarks/reading.py --gigabytes 1 --segments 20

Makes a prepared corpus whose training file is one large hole, so that it takes no room and is read
as zeros. Opens it, and reads the streams of one rank, segment by segment: memory-mapped, and then
through a web server on this machine that gives byte ranges and counts what it sends. Each way has a
process of its own. Times are of this machine: a real store is as far away as it is; bytes are the
same everywhere.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from result_file import write_result_file

sys.path.insert(0, str(Path(__file__).parent))
from turns import circumstances

from transformer_xl.config import DataConfig
from transformer_xl.data.preparing import prepare
from transformer_xl.data.store import BLOCK_BYTES, StoredTokens

TOKEN_BYTES = 4


def make_corpus(folder: Path, n_tokens: int) -> Path:
    """Prepare a short text, and put a hole of so many tokens in the place of its training file."""
    (folder / "text.txt").write_text("not to be: that is the question\n" * 200)
    config = DataConfig(path=str(folder / "text.txt"), cache_dir=str(folder), verify="never")
    place = prepare(config).folder
    manifest = json.loads((place / "manifest.json").read_text())
    for name, about in manifest["splits"].items():
        tokens = np.fromfile(place / f"{name}.bin", manifest["dtype"]).astype(np.uint32)
        tokens.tofile(place / f"{name}.bin")
        if name == "train":
            os.truncate(place / "train.bin", 0)
            os.truncate(place / "train.bin", n_tokens * TOKEN_BYTES)
            about["tokens"] = n_tokens
    manifest["dtype"] = "uint32"
    (place / "manifest.json").write_text(json.dumps(manifest))
    return place


def serve(folder: Path) -> None:
    """Give ranges of the files of a folder, and at /sent how many bytes were given."""
    sent = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(is_get=False)

        def do_GET(self) -> None:
            self._answer(is_get=True)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def _answer(self, *, is_get: bool) -> None:
            nonlocal sent
            path = folder / Path(self.path).name
            if self.path == "/sent" or not path.is_file():
                self.send_response(200 if self.path == "/sent" else 404)
                self.send_header("Content-Length", str(len(str(sent))))
                self.end_headers()
                self.wfile.write(str(sent).encode())
                return
            start, stop = 0, path.stat().st_size
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if wanted:
                start, stop = int(wanted[1]), min(int(wanted[2]) + 1, stop)
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/*")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            if is_get:
                sent += stop - start
                with path.open("rb") as file:
                    file.seek(start)
                    self.wfile.write(file.read(stop - start))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


def read(place: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Open a corpus and read the streams of a rank; return what it took."""
    before = resident("VmRSS")
    began = time.perf_counter()
    config = DataConfig(corpus=place, cache_dir=arguments.cache, verify="never")
    tokens = prepare(config).tokens("train")
    opened = time.perf_counter() - began
    # As Segments does, without its tensors.
    first = arguments.rank * arguments.streams
    starts = np.arange(first, first + arguments.streams) * (len(tokens) // arguments.all_streams)
    offsets = starts[:, None] + np.arange(arguments.segment_len + 1)
    seconds = []
    for n in range(arguments.segments):
        began = time.perf_counter()
        found = tokens[(offsets + n * arguments.segment_len) % len(tokens)]
        seconds.append(time.perf_counter() - began)
        assert not found.any()
    is_stored = isinstance(tokens, StoredTokens)
    return {
        "opening_seconds": opened,
        "first_segment_ms": seconds[0] * 1e3,
        "segment_ms_median": statistics.median(seconds[1:]) * 1e3,
        "segment_ms_largest": max(seconds[1:]) * 1e3,
        "memory_taken_mb": resident("VmHWM") - before,
        **({"block_bytes": BLOCK_BYTES} if is_stored else {}),
    }


def resident(which: str) -> float:
    """Return the MB that this process holds, or held at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError("this system does not tell the memory of a process")


def start(*words: str) -> "subprocess.Popen[str]":
    """Start this program once more."""
    return subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], *words], stdout=subprocess.PIPE, text=True
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=200, help="size of the training file")
    parser.add_argument("--all_streams", type=int, default=256, help="streams of all ranks")
    parser.add_argument("--streams", type=int, default=16, help="streams of the rank")
    parser.add_argument("--rank", type=int, default=11)
    parser.add_argument("--segment_len", type=int, default=512)
    parser.add_argument("--segments", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
    if arguments.read:
        print(json.dumps(read(arguments.read, arguments)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        n_tokens = int(arguments.gigabytes * 1e9) // TOKEN_BYTES
        place = make_corpus(Path(temporary), n_tokens)
        used = (place / "train.bin").stat().st_blocks * 512
        with start("--serve", str(place)) as server:
            try:
                assert server.stdout
                url = f"http://127.0.0.1:{int(server.stdout.readline())}"
                for where in (str(place), url):
                    with start("--read", where, "--cache", f"{temporary}/cache") as reader:
                        out, _ = reader.communicate()
                    if reader.returncode:
                        raise SystemExit(f"the process that read {where} failed, see above")
                    rows.append({"from": "a store" if where == url else "a disk"})
                    rows[-1] |= json.loads(out)
                with urlopen(f"{url}/sent") as answer:
                    rows[-1]["bytes_sent"] = int(answer.read())
            finally:
                server.kill()
    per_stream = (arguments.segments * arguments.segment_len + 1) * TOKEN_BYTES
    shape = {
        **{name: getattr(arguments, name) for name in ("gigabytes", "all_streams", "streams")},
        **{name: getattr(arguments, name) for name in ("rank", "segment_len", "segments")},
        "bytes_on_the_disk": used,
        "bytes_needed": arguments.streams * per_stream,
        "bytes_of_the_rank": n_tokens * TOKEN_BYTES * arguments.streams // arguments.all_streams,
    }
    print(json.dumps(shape))
    for row in rows:
        print(json.dumps(row))
    if arguments.json:
        found = {**circumstances(), "shape": shape, "rows": rows}
        write_result_file(arguments.json, found)


if __name__ == "__main__":
    main()
