"""Time and memory of relative attention alone: ours, and other ways to compute the same.

    python benchmarks/attention.py                     # T=M=512, forward, then with backward
    python benchmarks/attention.py --shape generation --dtypes float32
    python benchmarks/attention.py --length 256 --mem_len 256 --batch 32 --device cuda

Queries, keys, values and projected positions are given, in the layout that suits each way:

ours, reference, skew, triton   the backends of ours; ours is the one that ``auto`` chooses
authors      the authors' einsum, pad-and-reshape shift and masked softmax, time first
sdpa_mask    torch's attention, the position term as a mask through a skewed view (no copy)
flex         FlexAttention, compiled, the position term gathered in its score_mod
plain        torch's attention without a position term: the bound

How ways take turns, and what the ceiling is: see training.py. A way that fails is left out. On a
GPU a step is recorded and replayed, so that its kernels are timed and not Python; where that is not
possible a line says so, and ``is_recorded`` in the file.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ceiling
import revision
import torch
import torch.nn.functional as F
from result_file import write_result_file
from torch import Tensor
from turns import circumstances, take_turns, work

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Size:
    """What attends to what."""

    length: int
    mem_len: int
    batch: int
    n_head: int = 8
    d_head: int = 64

    def flops(self, backward: bool, has_positions: bool) -> int:
        """Count operations in products of pairs that see each other; backward twice forward's."""
        seen = self.length * self.mem_len + self.length * (self.length + 1) // 2
        products = 3 if has_positions else 2
        forward = 2 * products * self.batch * seen * self.n_head * self.d_head
        return forward * 3 if backward else forward


SIZES = {
    "base": Size(512, 512, 2),
    "small": Size(128, 128, 16, d_head=32),
    "evaluation": Size(128, 2048, 1),
    "generation": Size(1, 2048, 1),
    "tiny": Size(8, 8, 2, 2, 16),
}
WAYS = ("ours", "reference", "skew", "triton", "authors", "sdpa_mask", "plain", "flex")


@dataclass
class Operands:
    """Random operands, (B, T, H, K) and the like, in the memory layout that a way asks for."""

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    content_bias: Tensor
    position_bias: Tensor

    @classmethod
    def draw(cls, size: Size, dtype: torch.dtype, device: str, layout: str = "BTHK") -> "Operands":
        """Draw operands; ``layout`` orders the dimensions of queries, keys and values."""
        torch.manual_seed(0)
        S, heads = size.mem_len + size.length, (size.n_head, size.d_head)
        shapes = [(size.batch, n, *heads) for n in (size.length, S, S)]
        shapes += [(S, *heads), heads, heads]
        order = ["BTHK".index(letter) for letter in layout]
        made = []
        for shape in shapes:
            x = torch.randn(shape).to(device, dtype)
            made.append(x.permute(order).contiguous() if len(shape) == 4 else x)
        return cls(*made)


def ours(size: Size, given: Operands, backend: Any) -> Step:
    """Return the operation of this project."""
    from transformer_xl.ops import rel_attention, use_backend

    def step() -> Tensor:
        with use_backend("auto" if backend == "ours" else backend):
            return rel_attention(*vars(given).values())

    return step


def authors(size: Size, given: Operands) -> Step:
    """Return the authors' operation, from (T, B, H, K)."""
    T, S = size.length, size.mem_len + size.length
    hidden = torch.ones(T, S, dtype=torch.bool, device=given.q.device).triu(S - T + 1)
    scale = 1 / math.sqrt(size.d_head)

    def step() -> Tensor:
        content = torch.einsum("ibhd,jbhd->ijbh", given.q + given.content_bias, given.k)
        position = torch.einsum("ibhd,jhd->ijbh", given.q + given.position_bias, given.r)
        zeros = position.new_zeros(T, 1, *position.shape[2:])
        padded = torch.cat([zeros, position], 1).view(S + 1, T, *position.shape[2:])
        score = (content + padded[1:].view_as(content)).mul_(scale)
        if T > 1:
            score = score.float().masked_fill(hidden[:, :, None, None], -torch.inf).type_as(score)
        return torch.einsum("ijbh,jbhd->ibhd", score.softmax(1), given.v)

    return step


def sdpa_mask(size: Size, given: Operands) -> Step:
    """Return torch's attention with the position term as a mask, from (B, H, T, K)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    B, T, H, S = size.batch, size.length, size.n_head, size.mem_len + size.length
    is_gpu = given.q.device.type != "cpu"
    if is_gpu and (T % 8 or S % 8):
        sys.exit(f"sdpa_mask: of {T} queries and {S} keys both must be multiples of 8 on a GPU")
    column = torch.arange(S + 1, device=given.q.device)
    row = torch.arange(T, device=given.q.device)[:, None]
    # Read with a row stride of S from T on, these are what a query must not see.
    hidden = column < T - row
    scale = 1 / math.sqrt(size.d_head)
    # The one kernel of a GPU that takes any mask and makes its gradient.
    chosen = [SDPBackend.EFFICIENT_ATTENTION] if is_gpu else [*SDPBackend.__members__.values()]

    def step() -> Tensor:
        position_keys = F.pad(given.r.transpose(0, 1), (0, 0, 1, 0))
        q = (given.q + given.position_bias[:, None]) * scale
        position = (q @ position_keys.mT).masked_fill(hidden, -torch.inf)
        strides = (H * T * (S + 1), T * (S + 1), S, 1)
        mask = position.as_strided((B, H, T, S), strides, T)
        content = given.q + given.content_bias[:, None]
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(content, given.k, given.v, attn_mask=mask)

    return step


def flex(size: Size, given: Operands) -> Step:
    """Return FlexAttention, from (B, H, T, K)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T, M, S = size.length, size.mem_len, size.mem_len + size.length
    mask = create_block_mask(
        lambda b, h, i, j: j <= i + M, None, None, T, S, device=given.q.device.type
    )
    scale = 1 / math.sqrt(size.d_head)
    compiled = torch.compile(flex_attention)

    def step() -> Tensor:
        q = (given.q + given.position_bias[:, None]) * scale
        position = q @ given.r.permute(1, 2, 0)

        def add_position(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # Blocks reach beyond the last query and into the future: masked, but read.
            i = torch.clamp(i, max=T - 1)
            return score + position[b, h, i, torch.clamp(T - 1 - i + j, max=S - 1)]

        content = given.q + given.content_bias[:, None]
        return compiled(content, given.k, given.v, score_mod=add_position, block_mask=mask)

    return step


def plain(size: Size, given: Operands) -> Step:
    """Return torch's attention by content alone, from (B, H, T, K)."""
    T, S = size.length, size.mem_len + size.length
    mask: Tensor | None = None
    if T > 1 and given.q.device.type == "cpu":
        hidden = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
        mask = torch.zeros(T, S, dtype=given.q.dtype).masked_fill(hidden, -torch.inf)
    elif T > 1:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(T, S)
    return lambda: F.scaled_dot_product_attention(given.q, given.k, given.v, attn_mask=mask)


OTHERS = {
    "authors": ("TBHK", authors),
    "sdpa_mask": ("BHTK", sdpa_mask),
    "flex": ("BHTK", flex),
    "plain": ("BHTK", plain),
}


def attend(way: str, size: Size, dtype: torch.dtype, device: str) -> tuple[Operands, Step, str]:
    """Return operands, a function that attends from them, and the layout of what it returns."""
    layout, make = OTHERS.get(way, ("BTHK", lambda size, given: ours(size, given, way)))
    given = Operands.draw(size, dtype, device, layout)
    return given, make(size, given), layout


def prepare(way: str, size: Size, dtype: torch.dtype, device: str, backward: bool) -> Step:
    """Return a function that makes a step."""
    given, forward, _ = attend(way, size, dtype, device)
    if not backward:
        torch.set_grad_enabled(False)
        return forward
    leaves = list(vars(given).values())
    if way == "plain":
        leaves = leaves[:3]
    for leaf in leaves:
        leaf.requires_grad_()
    d_out = torch.randn_like(forward())

    def step() -> Tensor:
        out = forward()
        torch.autograd.grad(out, leaves, d_out)
        return out

    return step


def serve(words: list[str]) -> None:
    """Be one of the processes that take turns."""
    way, text, dtype, device, backward, repeats = words
    precision = getattr(torch, dtype)
    if way == "ceiling":
        step = ceiling.products(precision, device)
    else:
        step = prepare(way, Size(**json.loads(text)), precision, device, backward == "True")
    work(step, repeats=int(repeats), device=device, records=way != "ceiling")


def measure(
    arguments: argparse.Namespace, size: Size, dtype: str, backward: bool, base: list[Path]
) -> dict[str, Any]:
    """Let the ways take turns; return what came out."""
    device = arguments.device
    # The first of ours is what the others are compared with.
    first = next((way for way in arguments.ways if way not in OTHERS), "ours")
    ways = {way: way for way in dict.fromkeys([first, *arguments.ways])}
    if backward and device == "cpu" and ways.pop("flex", None):
        print("flex: PyTorch has no backward pass of it on a processor", file=sys.stderr)
    if base:
        ways[f"ours at {arguments.base}"] = "ours"
    rest = (json.dumps(asdict(size)), dtype, device, str(backward))
    commands = {"ceiling": ["ceiling", *rest, "4"]}
    commands |= {name: [way, *rest, str(arguments.steps)] for name, way in ways.items()}
    found = take_turns(
        __file__,
        commands,
        next(iter(ways)),
        rounds=arguments.rounds,
        warm=1,
        paths={f"ours at {arguments.base}": base},
        warm_together=device != "cpu",
    )
    found, _, peak = ceiling.apart(found, device)
    seconds = found["seconds"]
    flops = {name: size.flops(backward, ways[name] != "plain") for name in seconds}
    shares = {name: x / seconds[name] / peak for name, x in flops.items()}
    return {
        "dtype": dtype,
        "backward": backward,
        **found,
        "ceiling_gflops": peak / 1e9,
        "gflop": {name: x / 1e9 for name, x in flops.items()},
        "share_of_ceiling": shares,
    }


def print_row(row: dict[str, Any]) -> None:
    """Print the measurements of all ways as Markdown."""
    about = f"| {row['dtype']} | {'forward + backward' if row['backward'] else 'forward'} "
    for name, seconds in row["seconds"].items():
        rate = f"{row['gflop'][name] / seconds / 1e3:.3g} | {row['share_of_ceiling'][name]:.1%}"
        print(
            f"{about}| {name} | {seconds * 1e3:.3g} ms | {ceiling.ratio(row, name)} "
            f"| {rate} | {row['mb_taken'][name]:.0f} MB |",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=SIZES, default="base")
    for name in asdict(SIZES["base"]):
        add(f"--{name}", type=int, help="instead of the shape's")
    dtypes = ["float32", "bfloat16"]
    add("--ways", nargs="+", choices=WAYS, metavar="WAY", help=", ".join(WAYS))
    add("--dtypes", nargs="+", choices=[*dtypes, "float16"], default=dtypes)
    add("--rounds", type=int, default=5, help="turns that count")
    add("--steps", type=int, default=5, help="steps in a turn")
    add("--forward", action="store_true", help="without the backward pass")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--base", metavar="REVISION", help="also ours at a git revision")
    add("--json", type=Path, help="also write the measurements to this file")
    add("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments.worker)
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: this PyTorch finds no GPU")
    # What ``ours`` chooses there, or what does not run there.
    unused = ("triton", "skew") if arguments.device == "cpu" else ("triton",)
    arguments.ways = arguments.ways or [way for way in WAYS if way not in unused]
    given = {name: getattr(arguments, name) for name in asdict(SIZES["base"])}
    size = replace(SIZES[arguments.shape], **{k: v for k, v in given.items() if v is not None})
    with ExitStack() as stack:
        base = [stack.enter_context(revision.sources(arguments.base))] if arguments.base else []
        report = circumstances(arguments.device) | {
            "revision": revision.commit(),
            "size": asdict(size),
            "rows": [],
        }
        told = f"{report['processor']}, {report['threads']} threads, torch {report['torch']}"
        print(f"{told}, {size}\n")
        print("| dtype | pass | way | time | x ours (range) | TFLOP/s | share of ceiling | taken |")
        print("|---" * 8 + "|", flush=True)
        for dtype in arguments.dtypes:
            for backward in (False, True)[: 1 if arguments.forward else 2]:
                row = measure(arguments, size, dtype, backward, base)
                report["rows"].append(row)
                print_row(row)
                if arguments.json:
                    write_result_file(arguments.json, report)


if __name__ == "__main__":
    main()
