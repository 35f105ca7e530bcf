"""One token of one stream by several engines: the compiled step, and compilers and runtimes.

    python benchmarks/engines.py                                  # shape base, M=2048
    python benchmarks/engines.py --shape demo                     # M=256
    python benchmarks/engines.py --ways ours aot --keep built     # what is there is not built again
    OMP_NUM_THREADS=1 python benchmarks/engines.py --greedy 10000 --model runs/demo
    OMP_NUM_THREADS=1 python benchmarks/engines.py --greedy 10000 --shape demo   # random weights
    OMP_NUM_THREADS=1 python benchmarks/engines.py --greedy 10000 --model runs/demo --text FILE

`ours` is the compiled step (``ops/native.cpp``), `eager` the same with TXL_NATIVE=0. The others run
the step of ``ring_step.py``, which copies no memory: `compiled` by torch.compile, `compiled_frozen`
with inductor's `freezing`, which packs the weights, `aot` as a package of AOTInductor, `onnx_1` and
`onnx_2` by ONNX Runtime with so many threads and bound inputs and outputs. `onnx_txl_1` and
`onnx_txl_2` are the program of `txl export`, which returns the memory shifted by a token.
`ours_int8`, `onnx_int8_1` and `onnx_int8_2` (`quantize_dynamic`) have weights in int8.

Each is first built, then loaded again, alone and in processes of its own. **built** is the time to
trace, compile and write; for `compiled` that to the end of the first step with an empty cache.
**loaded** is the time to the end of the first step with what was built there. Imports of torch do
not count, those of its compiler and of other runtimes do. **size** is that of what was built.
**off** is the largest difference of log-probabilities from the model in float32, called for 8
tokens. Then all take turns (``turns.py``) with the memory full, five by default.

With ``--greedy N`` nothing is timed: the compiled step and the operations of torch write N times
the likeliest token, each reading its own, and what is printed is where they first differ. Greedy
text may fall into a loop; with ``--text FILE`` both read that file instead, token by token.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import generation
import greedy
import revision
import torch
from peers import build as build_peer
from result_file import write_result_file
from ring_step import RingStep, Scores, example, onnx_scores, ring_scores
from shapes import SHAPES, Job, Shape
from turns import circumstances, take_turns, work

WAYS = (
    "ours", "eager", "compiled", "compiled_frozen", "aot", "onnx_1", "onnx_2", "onnx_txl_1",
    "onnx_txl_2", "ours_int8", "onnx_int8_1", "onnx_int8_2",
)  # fmt: skip
MEM_LENS = {"base": 2048}
COLUMNS = "engine", "step (range)", "x ours (range)", "off", "built", "loaded", "size"
STEPS = {"base": 16}
"""Steps of a turn, for other shapes 256: much longer than threads of the last turn still spin."""


def kind_of(way: str) -> str:
    """Return the name of what is built, which does not depend on the number of threads."""
    return way.removesuffix("_1").removesuffix("_2")


def is_built(kind: str) -> bool:
    """Whether an engine needs more than the weights."""
    return not kind.startswith(("ours", "eager"))


def build(kind: str, peer: Any, folder: Path) -> None:
    """Write the files of an engine into a new folder."""
    memory = [torch.stack([*x]) for x in peer.mems.by_name()]
    if kind == "onnx_txl":
        from transformer_xl.interop.export import export

        with tempfile.TemporaryDirectory() as source:
            peer.model.save_pretrained(source)
            export(source, folder, mem_len=memory[0].shape[3])
        return
    folder.mkdir(exist_ok=True)
    if kind == "onnx_int8":
        from onnxruntime.quantization import quantize_dynamic

        # Weights alone: products of queries and keys stay in float32.
        options = {"MatMulConstBOnly": True}
        source = folder.parent / "onnx" / "step.onnx"
        if not source.exists():
            build("onnx", peer, source.parent)
        quantize_dynamic(source, folder / "step.onnx", extra_options=options)
        return
    traced = torch.export.export(
        RingStep(peer.model, memory[0].shape[3]), example(memory), strict=False
    )
    if kind == "onnx":
        inputs, outputs = ["tokens", "number", "keys", "values"], ["log_probs", "k", "v"]
        program: Any = torch.onnx.export(
            traced, dynamo=True, input_names=inputs, output_names=outputs, verbose=False
        )
        program.save(folder / "step.onnx", external_data=False)
    else:
        from torch._inductor import aoti_compile_and_package

        aoti_compile_and_package(traced, package_path=str(folder / "step.pt2"))


def load(way: str, peer: Any, folder: Path) -> Scores:
    """Load what was built."""
    kind = kind_of(way)
    if not is_built(kind):
        if (peer.decoder.kind == "eager") != (kind == "eager"):
            raise RuntimeError(f"{way} has a step that is {peer.decoder.kind}")
        return peer.scores
    memory = [torch.stack([*x]) for x in peer.mems.by_name()]
    if kind.startswith("onnx"):
        return onnx_scores(folder / "step.onnx", int(way[-1]), memory, peer.job.shape.vocab)
    if kind == "aot":
        from torch._inductor import aoti_load_package

        return ring_scores(aoti_load_package(str(folder / "step.pt2")), memory)
    from torch._inductor import config

    config.freezing = kind == "compiled_frozen"
    return ring_scores(torch.compile(RingStep(peer.model, memory[0].shape[3])), memory)


def serve(way: str, task: str, folder: Path, job: Job, steps: int) -> None:
    """Be a process that builds an engine, loads and checks it, or takes turns with the others."""
    kind = kind_of(way)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / ("cache" if kind == "aot" else kind))
    os.environ["TXL_NATIVE"] = "0" if way == "eager" else "1"
    torch.set_grad_enabled(False)
    peer: Any = build_peer("ours", job)
    peer.model.requires_grad_(False)
    text = (torch.arange(8) * 7 % job.shape.vocab)[:, None, None]
    found, began = [], time.perf_counter()
    if task == "build" and not kind.startswith("compiled"):
        build(kind, peer, folder / kind)
    else:
        peer.scores = load(way, peer, folder / kind)
        if task == "turns":
            work(generation.prepare(peer, job), repeats=steps)
            return
        found.append(peer.scores(text[0]).clone())
    said = {"seconds": time.perf_counter() - began}
    if task == "load":
        found += [peer.scores(token).clone() for token in text[1:]]
        model = build_peer("ours_called", replace(job, precision="float32"))
        right = torch.cat([model.scores(token) for token in text])
        said["off"] = float((torch.cat(found) - right).abs().max())
    print(json.dumps(said))


def built(way: str, folder: Path, words: Sequence[str]) -> dict[str, Any] | None:
    """Build an engine and load it, unless that was done; if it fails, print why, return None."""
    kind, said = kind_of(way), {}
    for task, name in (("build", kind), ("load", way)):
        about = folder / f"{name}.{task}.json"
        if task == "build" and not is_built(kind):
            continue
        if not about.exists():
            command = [sys.executable, __file__, "--worker", way, task, *words]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                print(f"{way} is left out, {task} failed: {last}", file=sys.stderr, flush=True)
                (folder / f"{name}.{task}.log").write_text(done.stderr)
                return None
            found = json.loads(done.stdout.splitlines()[-1])
            found[f"{task}_seconds"] = found.pop("seconds")
            if task == "build":
                files = [path for path in (folder / kind).rglob("*") if path.is_file()]
                found["mb"] = sum(path.stat().st_size for path in files) / 1e6
            about.write_text(json.dumps(found))
        said |= json.loads(about.read_text())
    return said


def shape_of(arguments: argparse.Namespace) -> Shape:
    """Return the shape that is asked for, with one token of one stream."""
    mem_len = arguments.mem_len or MEM_LENS.get(arguments.shape, 256)
    return replace(SHAPES[arguments.shape], length=1, mem_len=mem_len, batch=1)


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Build all, let them take turns, and print a table."""
    shape = shape_of(arguments)
    folder = folder / f"{arguments.shape}-{shape.mem_len}"
    folder.mkdir(parents=True, exist_ok=True)
    report = circumstances() | {"revision": revision.commit(), "shape": asdict(shape)}
    print(f"{report['processor']}, {report['threads']} threads, torch {report['torch']}, "
          f"shape {arguments.shape}, M={shape.mem_len}, {report['revision']}\n")  # fmt: skip
    ways, engines = {}, {}
    for way in dict.fromkeys(["ours", *arguments.ways]):
        is_int8 = kind_of(way) == "ours_int8"
        job = Job("generation", shape, "int8_weights" if is_int8 else "float32")
        words = [str(folder), job.to_json(), str(STEPS.get(arguments.shape, 256))]
        if (said := built(way, folder, words)) is not None:
            ways[way], engines[way] = [way, "turns", *words], said
    if arguments.build:
        print(json.dumps(engines, indent=2))
        return
    found = take_turns(__file__, ways, "ours", rounds=arguments.rounds, warm=1)
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for way, seconds in found["seconds"].items():
        said, (low, high) = engines[way], found["seconds_range"][way]
        cells = [way, f"{seconds * 1e3:.3g} ms ({low * 1e3:.3g} to {high * 1e3:.3g})", ""]
        if way in found["ratio"]:
            low, high = found["ratio_range"][way]
            cells[-1] = f"{found['ratio'][way]:.2f} ({low:.2f} to {high:.2f})"
        cells += [f"{said['off']:.1e}", "", f"{said['load_seconds']:.2f} s", ""]
        if "mb" in said:
            cells[4], cells[6] = f"{said['build_seconds']:.1f} s", f"{said['mb']:.0f} MB"
        print("| " + " | ".join(cells) + " |")
    if arguments.json:
        report |= {"engines": engines, **found}
        write_result_file(arguments.json, report)


def main() -> None:
    """Measure, or compare texts, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--mem_len", type=int, help="default: 2048 for base, 256 for others")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count")
    parser.add_argument("--keep", type=Path, help="folder for what is built; default: temporary")
    parser.add_argument("--build", action="store_true", help="build and load only")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("--greedy", type=int, metavar="N", help="compare N greedy tokens instead")
    parser.add_argument("--model", type=Path, help="for that; default: random weights of the shape")
    parser.add_argument("--text", type=Path, help="for that: both read this, not what they write")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        way, task, folder, job, steps = arguments.worker
        serve(way, task, Path(folder), Job.from_json(job), int(steps))
    elif arguments.greedy:
        greedy.compare(arguments.model or shape_of(arguments), arguments.greedy, arguments.text)
    elif arguments.keep:
        measure(arguments, arguments.keep.absolute())
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(arguments, Path(folder))


if __name__ == "__main__":
    main()
