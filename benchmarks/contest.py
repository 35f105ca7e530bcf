"""Models side by side: what the programs that measure whole steps have in common."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ceiling
import revision
import torch
from peers import WAYS, Peer, build
from result_file import write_result_file
from shapes import SHAPES, Job, read_bytes, step_flops
from turns import circumstances, take_turns, work

Prepare = Callable[[Peer, Job], Callable[[], object]]

DEFAULT_WAYS = (
    "ours", "huggingface", "x_transformers_t5", "x_transformers_rotary", "labml", "gpt"
)  # fmt: skip
COLUMNS = (
    "dtype", "T", "M", "B", "model", "step", "x ours (range)", "per token", "share of ceiling",
    "x reading", "peak memory", "taken",
)  # fmt: skip


def parser(
    description: str, *, precisions: Sequence[str], default: Sequence[str]
) -> argparse.ArgumentParser:
    """Return a parser with the options that all these programs have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--shape", choices=SHAPES, default="base")
    made.add_argument("--ways", nargs="+", choices=WAYS, default=DEFAULT_WAYS, metavar="WAY",
                      help=f"models to measure: {', '.join(WAYS)}")  # fmt: skip
    made.add_argument("--dtypes", nargs="+", choices=precisions, default=list(default),
                      help="bfloat16: products only; bfloat16_weights: everything")  # fmt: skip
    made.add_argument("--rounds", type=int, default=5, help="turns that count")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--compile", action="store_true", help="all models with torch.compile")
    made.add_argument("--base", metavar="REVISION", help="also ours as it was at a git revision")
    made.add_argument("--json", type=Path, help="also write the measurements to this file")
    made.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    return made


def serve(words: Sequence[str], prepare: Prepare) -> None:
    """Be one of the processes that take turns: a model, or what the machine can do at most."""
    way, repeats, text = words
    job = Job.from_json(text)
    if way == "ceiling":
        step = ceiling.products(job.product_dtype, job.device)
    elif way == "reading":
        step = ceiling.reading(read_bytes(job.shape, job.precision), job.device)
    else:
        step = prepare(build(way, job), job)
    # As the commands do, for models of all kinds; revisions from before there was that have none.
    with suppress(ImportError):
        from transformer_xl.config.openmp import adapt_spinning_to_load

        adapt_spinning_to_load()
    work(step, repeats=int(repeats), device=job.device)


def run(program: str, arguments: argparse.Namespace, jobs: Sequence[Job], repeats: int = 1) -> None:
    """Measure all jobs, print a table, and write the measurements to a file if asked to.

    Args:
        program: The file of the program, which calls :func:`serve` after ``--worker``.
        arguments: What the parser returned.
        jobs: What to measure.
        repeats: Steps in a turn.
    """
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: this PyTorch finds no GPU")
    names = []
    # What the others are compared with comes first.
    ours = next((name for name in arguments.ways if WAYS[name].module == "ours"), "ours")
    for name in dict.fromkeys([ours, *arguments.ways]):
        if command := WAYS[name].missing:
            print(f"{name}: not installed: {command}", file=sys.stderr)
        elif SHAPES[arguments.shape].cutoffs and WAYS[name].module != "ours":
            print(f"{name}: has no adaptive softmax, as this shape needs", file=sys.stderr)
        else:
            names.append(name)
    ways = {name: name for name in names}
    paths = {name: WAYS[name].paths for name in names}
    report = circumstances(arguments.device) | {
        "revision": revision.commit(),
        "peers": {name: WAYS[name].requirement for name in names if WAYS[name].environment},
        "shape": {"name": arguments.shape, **asdict(SHAPES[arguments.shape])},
        "rows": [],
    }
    with ExitStack() as stack:
        if arguments.base:
            name = f"{ours} at {arguments.base}"
            ways[name] = ours
            paths[name] = [stack.enter_context(revision.sources(arguments.base))]
            report["base"] = revision.commit(arguments.base)
        print(f"{report['processor']}, {report['threads']} threads, torch {report['torch']}, "
              f"shape {report['shape']['name']}, {report['revision']}\n")  # fmt: skip
        print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
        for job in jobs:
            row = measure(program, job, ways, paths, arguments.rounds, repeats)
            report["rows"].append(row)
            print_row(row)
            if arguments.json:
                write_result_file(arguments.json, report)


def measure(
    program: str,
    job: Job,
    ways: dict[str, str],
    paths: dict[str, list[Path]],
    rounds: int,
    repeats: int,
) -> dict[str, Any]:
    """Let models, products and, for single tokens, reading take turns; return what came out."""
    measures = ["ceiling", *(["reading"] if job.work == "generation" else [])]
    if job.precision == "int8_weights":
        # Ours alone, and only since there is such a thing.
        ways = {name: name for name in ways if name in WAYS and WAYS[name].module == "ours"}
    flops = {
        name: step_flops(job.work, job.shape, has_positions=WAYS[way].has_positions)
        for name, way in ways.items()
    }
    # A mean of a few, as one product alone would be taken on a processor just woken up.
    commands = {name: [name, "4", job.to_json()] for name in measures}
    commands |= {name: [way, str(repeats), job.to_json()] for name, way in ways.items()}
    found = take_turns(
        program,
        commands,
        next(iter(ways)),
        rounds=rounds,
        warm=1,
        paths=paths,
        warm_together=job.device != "cpu",
    )
    found, seconds, peak = ceiling.apart(found, job.device)
    limits = {"ceiling_gflops": peak / 1e9}
    if "reading" in seconds:
        limits["reading_seconds"] = seconds["reading"]
        limits["reading_gb"] = read_bytes(job.shape, job.precision) / 1e9
    seconds = found["seconds"]
    flops = {name: flops[name] for name in seconds}
    sizes = {key: getattr(job.shape, key) for key in ("length", "mem_len", "batch")}
    return {
        "work": job.work,
        "dtype": job.precision,
        **sizes,
        "dropout": job.dropout,
        "compiled": job.compiled,
        **found,
        **limits,
        "gflop": {name: x / 1e9 for name, x in flops.items()},
        "share_of_ceiling": {name: x / seconds[name] / peak for name, x in flops.items()},
        "tokens_per_second": {name: job.shape.tokens / x for name, x in seconds.items()},
    }


def print_row(row: dict[str, Any]) -> None:
    """Print the measurements of a job as Markdown, a line for each model and one for the limits."""
    sizes = [row["dtype"], *(str(row[key]) for key in ("length", "mem_len", "batch"))]
    reading = row.get("reading_seconds")
    for name, seconds in row["seconds"].items():
        cells = [
            *sizes,
            name,
            _time(seconds),
            ceiling.ratio(row, name),
            _time(1 / row["tokens_per_second"][name]),
            f"{row['share_of_ceiling'][name]:.1%}",
            f"{seconds / reading:.2f}" if reading else "",
            f"{row['peak_mb'][name]:.0f} MB",
            f"{row['mb_taken'][name]:.0f} MB",
        ]
        print("| " + " | ".join(cells) + " |")
    limits = [*sizes, f"*products: {row['ceiling_gflops']:.0f} GFLOP/s*"]
    limits += [f"*reading {row['reading_gb']:.3f} GB: {_time(reading)}*"] if reading else [""]
    print("| " + " | ".join(limits + [""] * (len(COLUMNS) - len(limits))) + " |", flush=True)


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
