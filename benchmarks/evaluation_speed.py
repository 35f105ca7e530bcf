"""The paper's Table 9: how many times slower a sliding window evaluates than a memory.

    python benchmarks/evaluation_speed.py --json table-9.json
    python benchmarks/evaluation_speed.py --attn_lens 200 400 --n_layer 4 --d_model 128

A model without memory reads a window again for every token (Al-Rfou et al., 2018) and has absolute
positions; Transformer-XL reads each token once. Both attend to the same number of keys, have the
same shape, that of the paper's 12-layer enwik8 model by default, and random weights. They are timed
alternately; of several batch sizes of windows the fastest counts.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from result_file import write_result_file
from turns import circumstances

from transformer_xl.apps.timing import median_and_range, timed
from transformer_xl.config import ModelConfig
from transformer_xl.config.device import Precision, pick_device, prepare_process
from transformer_xl.model import Memory, TransformerXL
from transformer_xl.model.reading import read
from transformer_xl.model.segment import Lengths

ENWIK8 = ModelConfig(vocab_size=204, clamp_len=820)
"""The paper's model of 12 layers for enwik8."""
SLOWDOWNS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""How many times slower the window was in the paper, on one GPU, by attention length."""


def compared(model: ModelConfig, attn_len: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds per token of both methods at one attention length, in turns.

    Returns:
        Seconds by ``window`` and by ``memory`` with their ranges, how many times slower the window
        is, and the paper's number.
    """
    device = pick_device()
    ways = {B: window_step(model, attn_len, B, device) for B in arguments.windows}
    step = memory_step(model, attn_len, arguments.segment_len, arguments.batch_size, device)
    window: dict[int, list[float]] = {B: [] for B in ways}
    memory: list[float] = []
    for turn in range(arguments.rounds + 1):
        # A step of ours is short compared with a window, so several are measured.
        ours = timed(step, 5, device, warm_up=2 if turn == 0 else 0)["seconds"]
        theirs = {B: timed(way, 1, device, warm_up=0)["seconds"] / B for B, way in ways.items()}
        if turn:
            memory.append(ours / (arguments.segment_len * arguments.batch_size))
            for B, seconds in theirs.items():
                window[B].append(seconds)
    best = min(window, key=lambda B: statistics.median(window[B]))
    by_window, by_memory = median_and_range(window[best]), median_and_range(memory)
    return {
        "attn_len": attn_len,
        "window": by_window | {"batch_size": best},
        "memory": by_memory,
        "slowdown": by_window["seconds"] / by_memory["seconds"],
        "paper": SLOWDOWNS.get(attn_len),
    }


def window_step(
    model: ModelConfig, window: int, B: int, device: torch.device
) -> Callable[[], object]:
    """Return a function that predicts B tokens, each from a window of its own."""
    # The table ends with the window, so no distance is clamped.
    settings = {"attn_type": 3, "n_positions": window, "mem_len": 0, "clamp_len": None}
    reader = TransformerXL(replace(model, **settings)).to(device).eval()
    # The first windows of a text are shorter: only full ones are timed.
    text = torch.randint(model.vocab_size, (window + B,))
    lengths = Lengths.of(reader.config, segment_len=window, mem_len=0)
    windows, targets = text[:-1].unfold(0, window, 1), text[window:, None]
    return lambda: [piece.nll for piece in read(reader, windows, lengths, targets=targets)]


def memory_step(
    model: ModelConfig, attn_len: int, T: int, B: int, device: torch.device
) -> Callable[[], object]:
    """Return a function that predicts a segment of each stream, with a full memory."""
    reader = TransformerXL(replace(model, mem_len=attn_len, attn_len=attn_len)).to(device).eval()
    tokens = torch.randint(model.vocab_size, (B, T + 1), device=device)
    states = torch.randn(B, attn_len, model.d_model, device=device)
    mems, lengths = reader.keep(Memory([states] * model.n_layer)), Lengths.of(reader.config)
    lengths = lengths._replace(segment_len=T)

    def step() -> None:
        nonlocal mems
        (piece,) = read(reader, tokens[:, :-1], lengths, mems, targets=tokens[:, 1:])
        mems = piece.mems

    return step


def main() -> None:
    """Measure, print a table, and write it to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attn_lens", type=int, nargs="+", default=[*SLOWDOWNS],
                        help="keys that each token attends to")  # fmt: skip
    parser.add_argument("--segment_len", type=int, default=128, help="with memory; the authors'")
    parser.add_argument("--batch_size", type=int, default=1, help="streams, with memory")
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 4], help="batch sizes")
    parser.add_argument("--rounds", type=int, default=3, help="turns, after one for warm-up")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    for name in ("n_layer", "d_model", "n_head", "d_inner"):
        parser.add_argument(f"--{name}", type=int, default=getattr(ENWIK8, name))
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("n_layer", "d_model", "n_head", "d_inner")}
    model = replace(ENWIK8, **sizes)
    prepare_process()
    device = pick_device()
    result = circumstances(device.type) | sizes
    result |= {"dtype": Precision(arguments.precision, device).name, "rows": []}
    print(
        "| keys | window, ms/token | batch | memory, ms/token | slowdown | paper |\n"
        + "|--:" * 6
        + "|"
    )
    with torch.no_grad(), Precision(arguments.precision, device).autocast():
        for attn_len in arguments.attn_lens:
            row = compared(model, attn_len, arguments)
            result["rows"].append(row)
            window, memory = (1e3 * row[name]["seconds"] for name in ("window", "memory"))
            batch, paper = row["window"]["batch_size"], row["paper"] or ""
            print(f"| {attn_len:,} | {window:,.2f} | {batch} | {memory:,.4f} | "
                  f"{row['slowdown']:,.0f} | {paper} |", flush=True)  # fmt: skip
            if arguments.json:
                write_result_file(arguments.json, result)


if __name__ == "__main__":
    main()
