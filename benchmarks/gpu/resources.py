"""What the compiler makes of the kernels for a GPU: registers, spills, instructions. Needs none.

    python benchmarks/gpu/resources.py                        # the table of the kernels, for sm_90
    python benchmarks/gpu/resources.py --capability 80 --with_options
    python benchmarks/gpu/resources.py --candidates --dtypes bfloat16 --widths 64

The last two columns are the cycles of a multiprocessor that 1,024 pairs of query and key take at
least: to issue the instructions of the loop over tiles (one for each of four schedulers in a
cycle; the masks of the tiles at the edges, which the others jump over, are counted, too), and on
the tensor cores (4,096 operations of bfloat16 in a cycle of an H100). The larger is a bound from
below, which a GPU with few threads at a time does not reach.

With ``--candidates`` other divisions of the work are compiled as well: which of them are bad is
known before a GPU has been asked. Needs Triton (pip install triton), which runs without a GPU as
far as the machine code.
"""

import argparse
import itertools
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from transformer_xl.ops import triton as kernels
from transformer_xl.ops import triton_backward, triton_forward

KERNELS = {
    "forward": (triton_forward, "attention_kernel"),
    "backward": (triton_backward, "gradient_kernel"),
}


@dataclass
class NoGPU:
    """A driver that knows which GPU to compile for, and cannot launch anything."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        """Name the architecture."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Name the device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Name the stream."""
        return 0


class Compiled:
    """Stands in for a kernel: compiles what is launched, and launches nothing."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.made: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return what is called with the arguments."""

        def launch(*arguments: Any, **options: Any) -> None:
            self.made = self._kernel.warmup(*arguments, grid=grid, **options)

        return launch


class Resources(NamedTuple):
    """What a kernel takes of a multiprocessor."""

    registers: int
    spilled_bytes: int
    shared_kb: float
    issue_cycles: float
    tensor_cycles: float


@contextmanager
def stand_in(kernel: str) -> Iterator[Compiled]:
    """Compile a kernel instead of launching it, inside a ``with`` block."""
    module, name = KERNELS[kernel]
    real = getattr(module, name)
    check = kernels._check
    compiled = Compiled(real)
    setattr(module, name, compiled)
    kernels._check = lambda *operands: None
    try:
        yield compiled
    finally:
        setattr(module, name, real)
        kernels._check = check


class Shape(NamedTuple):
    """What attends to what."""

    streams: int
    queries: int
    remembered: int
    heads: int


def compile_kernel(
    kernel: str,
    dtype: torch.dtype,
    K: int,
    with_options: bool = False,
    shape: Shape = Shape(2, 512, 512, 8),  # noqa: B008
) -> Resources:
    """Compile a kernel for heads of width K, with what ``kernels.BLOCKS`` says.

    Which of its numbers are 1 or divisible by 16 the compiler makes use of, so another shape may
    ask for another compilation.
    """
    B, T, M, H = shape
    S = M + T
    shapes = [(B, H, T, K), (H, B, T, K), (B, S, H, K), (B, S, H, K), (S, H, K)]
    operands = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    options = [None, None, None, S, 0.0]
    if with_options:
        sizes = (B, T), (1,)
        first_key, seed = (torch.empty(x, dtype=torch.int64, device="meta") for x in sizes)
        options = [torch.empty(S, H, dtype=dtype, device="meta"), first_key, seed, S, 0.1]
    operands = (*operands, *options)
    out, norms = kernels._like_attended(*operands)
    with stand_in(kernel) as compiled:
        if kernel == "forward":
            kernels._attend._init_fn(*operands)
        else:
            kernels._gradients_of._init_fn(out, norms, out, *operands)
    made = compiled.made
    usage, code = (_disassembled(made.asm["cubin"], flag) for flag in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    blocks = kernels.BLOCKS[kernel, dtype.itemsize, 64 if K <= 64 else 128]
    tiles = 1024 / (blocks.queries * blocks.keys) * blocks.warps
    loop = main_loop(code)
    operations = sum(2 * n * _size_of_product(x) for x, n in Counter(loop).items())
    return Resources(
        int(found[1]),
        int(found[2]),
        made.metadata.shared / 1024,
        len(loop) / 4 * tiles,
        operations / 4096 * tiles,
    )


def main_loop(code: str) -> list[str]:
    """Return the instructions of the longest loop of a disassembled kernel."""
    line = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)(.*?);")
    found = [(int(place, 16), name, rest) for place, name, rest in line.findall(code)]
    index = {place: n for n, (place, *_) in enumerate(found)}
    loops = [[]]
    for n, (place, name, rest) in enumerate(found):
        target = re.search(r"0x([0-9a-f]+)", rest)
        if name == "BRA" and target and int(target[1], 16) < place:
            loops.append([name for _, name, _ in found[index[int(target[1], 16)] : n + 1]])
    return max(loops, key=len)


def _size_of_product(instruction: str) -> float:
    """Return the multiplications of a warp's share of a product on tensor cores, else 0."""
    if shape := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", instruction):
        # Four warps make it together.
        return math.prod(map(int, shape.groups())) / 4
    shape = re.match(r"HMMA\.(\d\d)(\d)(\d+)", instruction)
    return math.prod(map(int, shape.groups())) if shape else 0


def _disassembled(code: bytes, flag: str) -> str:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([program, flag, file.name], capture_output=True, text=True).stdout


def candidates(dtype: torch.dtype) -> list[kernels.Blocks]:
    """List ways to divide the work that are worth a look."""
    sizes = (16, 32, 64) if dtype == torch.float32 else (32, 64, 128)
    return [
        kernels.Blocks(queries, keys, warps, stages)
        for queries, keys, warps, stages in itertools.product(sizes, sizes, (4, 8), (1, 2, 3))
        if keys >= queries and queries * keys <= 64 * 128
    ]


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--capability", type=int, default=90, help="80: A100, 90: H100 and H200")
    add("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    add("--dtypes", nargs="+", default=["bfloat16", "float32"])
    add("--widths", nargs="+", type=int, default=[64, 128])
    add("--candidates", action="store_true", help="also other divisions")
    add("--with_options", action="store_true", help="dropout, first keys, biases of distances")
    arguments = parser.parse_args()
    driver.set_active(NoGPU(arguments.capability))
    if arguments.capability < 90:
        kernels.BLOCKS.update(kernels.BEFORE_HOPPER)
    print(f"sm_{arguments.capability}, Triton {triton.__version__}")
    print("| kernel | dtype | width | queries, keys, warps, stages | registers", end=" | ")
    print("spilled bytes | shared KB | issue cycles | tensor cycles |\n" + "|---" * 9 + "|")
    for kernel, name, K in itertools.product(arguments.kernels, arguments.dtypes, arguments.widths):
        dtype = getattr(torch, name)
        key = (kernel, dtype.itemsize, 64 if K <= 64 else 128)
        standard = kernels.BLOCKS[key]
        for blocks in [standard, *(candidates(dtype) if arguments.candidates else [])]:
            kernels.BLOCKS[key] = blocks
            try:
                found = compile_kernel(kernel, dtype, K, arguments.with_options)
                told = f"{found.registers} | {found.spilled_bytes} | {found.shared_kb:.0f} "
                told += f"| {found.issue_cycles:.0f} | {found.tensor_cycles:.0f}"
            except Exception as error:  # noqa: BLE001  (the compiler fails in many ways)
                told = f"{type(error).__name__} | | | |"
            division = ", ".join(map(str, blocks))
            print(f"| {kernel} | {name} | {K} | {division} | {told} |", flush=True)
        kernels.BLOCKS[key] = standard


if __name__ == "__main__":
    main()
