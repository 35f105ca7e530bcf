"""Bytes and seconds of txl compress, beside xz, zstd and bzip2, on the same files.

    python benchmarks/compressing.py --files enwik8 text8 --bytes 100000 --model runs/enwik8-cpu
    python benchmarks/compressing.py --files enwik8 --bytes 1000000 --model runs/enwik8-cpu --learn
    python benchmarks/compressing.py --files enwik8 --bytes 1000000 --fresh --out results.json
    python benchmarks/compressing.py --files enwik8 --bytes 1000000 --skip 2000000 --model DIR

Of each file, so many bytes behind --skip. What the model was trained on must not be among them:
with the first megabytes of enwik8 as training text, skip these. All that is compressed is restored
and compared. `overhead` is what the file takes beyond the sum of -log2 p, header included; `loss`
is that sum as a plain evaluation computes it, in float32, whole segments at once. Seconds are those
of one process; the others run on one thread, ours on as many as torch has.
"""

import argparse
import bz2
import json
import lzma
import math
import platform
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from result_file import write_result_file

from transformer_xl.apps.compress import Settings, compress, decompress
from transformer_xl.apps.compress.contents import to_tokens
from transformer_xl.apps.compress.header import unpack
from transformer_xl.apps.compress.predicting import AT_ONCE, lengths, start_symbol
from transformer_xl.config.device import pick_device
from transformer_xl.data import Vocab, load_vocab
from transformer_xl.model import LanguageModel, load_model
from transformer_xl.model.pretrained import find_model_folder
from transformer_xl.model.reading import read
from transformer_xl.studies.baselines import compress as compress_by

Pair = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def others() -> dict[str, Pair]:
    """Return ways to compress and to restore that are not ours."""
    found: dict[str, Pair] = {
        "xz -9e": (partial(compress_by, "xz -9e"), lzma.decompress),
        "bzip2 -9": (partial(compress_by, "bzip2 -9"), bz2.decompress),
    }
    try:
        import zstandard
    except ImportError:
        print("zstd is left out: pip install zstandard")
        return found
    restore = zstandard.ZstdDecompressor().decompress
    found["zstd -19"] = (partial(compress_by, "zstd -19"), restore)
    return found


def measured(name: str, data: bytes, ways: Pair) -> dict[str, Any]:
    """Compress and restore; return bytes and seconds.

    Raises:
        SystemExit: What comes back is something else.
    """
    pack, restore = ways
    started = time.perf_counter()
    packed = pack(data)
    between = time.perf_counter()
    if restore(packed) != data:
        raise SystemExit(f"{name} restored something else")
    ended = time.perf_counter()
    return {
        "name": name,
        "bytes": len(packed),
        "bits_per_byte": 8 * len(packed) / len(data),
        "compress_seconds": between - started,
        "decompress_seconds": ended - between,
    }


def ours(
    name: str,
    data: bytes,
    model: LanguageModel | None,
    vocab: Vocab | None,
    settings: Settings,
) -> dict[str, Any]:
    """The same of ours, with its overhead and the loss that it should amount to."""
    reports: list[dict[str, Any]] = []

    def pack(data: bytes) -> bytes:
        found = compress(data, model, vocab, settings)
        reports.append(found.report())
        return found.content

    packed: list[bytes] = []

    def restore(content: bytes) -> bytes:
        packed.append(content)
        return decompress(content, model, vocab)

    found = measured(name, data, (pack, restore))
    for key in ("model_bits_per_byte", "overhead_percent", "plain_tokens", "streams"):
        found[key] = reports[0][key]
    if model is not None and not settings.learn:
        found["loss_bits_per_byte"] = loss(packed[0], data, model, vocab)
    return found


@torch.no_grad()
def loss(packed: bytes, data: bytes, model: LanguageModel, vocab: Vocab | None) -> float | None:
    """Return the loss of a model on a file cut as it was compressed, in bits a byte."""
    coding = unpack(packed)[0].model_coding
    if coding is None:
        return None
    columns = torch.from_numpy(coding.cut(to_tokens(data, vocab), start_symbol(model))).long()
    before, parts = columns[:, :-1], columns[:, 1:]
    mems, total = model.keep(model.start_memory(len(parts), coding.mem_len)), 0.0
    # A round is one segment.
    whole = lengths(model, coding.mem_len)._replace(segment_len=AT_ONCE)
    for places in coding.rounds():
        is_there = torch.from_numpy(coding.is_there(places).T)
        tokens, targets = (x[:, places] for x in (before, parts))
        (piece,) = read(model, tokens, whole, mems, targets=targets)
        mems = piece.mems
        assert piece.nll is not None
        total += float((piece.nll.cpu().double() * is_there).sum())
    return total / math.log(2) / len(data)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        "| file | | bytes | bits/byte | overhead | kB/s in | kB/s out |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        overhead = row.get("overhead_percent")
        lines.append(
            f"| {row['file']} | {row['name']} | {row['bytes']:,} | {row['bits_per_byte']:.3f} "
            f"| {'' if overhead is None else f'{overhead:.3f} %'} "
            f"| {row['size'] / row['compress_seconds'] / 1e3:,.1f} "
            f"| {row['size'] / row['decompress_seconds'] / 1e3:,.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", nargs="+", type=Path, required=True)
    parser.add_argument("--bytes", nargs="+", type=int, default=[100_000], help="of each file")
    parser.add_argument("--skip", type=int, default=0, help="bytes at the start of each file")
    parser.add_argument("--model", type=Path, help="a model folder or run folder")
    parser.add_argument("--learn", action="store_true", help="the model also learns on the way")
    parser.add_argument("--fresh", action="store_true", help="also a fresh model that learns")
    parser.add_argument("--lr", type=float, help="largest learning rate")
    parser.add_argument("--streams", type=int, help="parts side by side")
    parser.add_argument("--segment_len", type=int)
    parser.add_argument("--mem_len", type=int)
    parser.add_argument("--only_ours", action="store_true")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    cut = {name: getattr(arguments, name) for name in ("streams", "segment_len", "mem_len")}
    model = vocab = None
    if arguments.model:
        folder = find_model_folder(arguments.model)
        model, vocab = load_model(folder).to(pick_device()), load_vocab(folder)
    rows: list[dict[str, Any]] = []
    for path in arguments.files:
        for size in arguments.bytes:
            data = path.read_bytes()[arguments.skip :][:size]
            about = {"file": path.name, "skip": arguments.skip, "size": len(data)}
            if not arguments.only_ours:
                for name, ways in others().items():
                    rows.append(about | measured(name, data, ways))
            if model is not None:
                rows.append(about | ours("txl", data, model, vocab, Settings(**cut)))
            learning = Settings(learn=True, lr=arguments.lr, **cut)
            if model is not None and arguments.learn:
                rows.append(about | ours("txl --learn", data, model, vocab, learning))
            if arguments.fresh:
                rows.append(about | ours("txl --learn, fresh", data, None, None, learning))
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if arguments.out:
        libraries = ("torch", "constriction", "numpy")
        machine = {
            "processor": str(torch.cpu.get_capabilities().get("cpu_name") or platform.machine()),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            **{name: version(name) for name in libraries},
        }
        content = {"format_version": 1, "machine": machine, "rows": rows}
        write_result_file(arguments.out, content)


if __name__ == "__main__":
    main()
