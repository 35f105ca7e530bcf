"""What the compiler makes of the kernels for a GPU: registers, spills, shared memory. Needs none.

    python benchmarks/gpu/resources.py                        # the table of the kernels, for sm_90
    python benchmarks/gpu/resources.py --capability 80 --with_options
    python benchmarks/gpu/resources.py --candidates --dtypes bfloat16 --widths 64

With ``--candidates`` other divisions of the work are compiled as well: which of them spill nothing
is known before a GPU has been asked. Needs Triton (pip install triton), which runs without a GPU as
far as the machine code.
"""

import argparse
import itertools
import re
import subprocess
import tempfile
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
    "queries": (triton_backward, "query_kernel"),
    "keys": (triton_backward, "key_kernel"),
    "distances": (triton_backward, "distance_kernel"),
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
    tensor_core_products: int


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


def compile_kernel(
    kernel: str, dtype: torch.dtype, K: int, with_options: bool = False
) -> Resources:
    """Compile a kernel for heads of width K, with what ``kernels.BLOCKS`` says."""
    B, T, S, H = 2, 512, 1024, 8
    shapes = [(B, T, H, K), (B, S, H, K), (B, S, H, K), (S, H, K), (H, K), (H, K)]
    q, *others = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    options = [None, None, None, S, 0.0]
    if with_options:
        first_key, seed = (torch.empty(n, dtype=torch.int64, device="meta") for n in (B, 1))
        options = [torch.empty(S, H, dtype=dtype, device="meta"), first_key, seed, S, 0.1]
    operands = (q, *others, *options)
    out, norms = kernels._like_attended(*operands)
    back = norms[:, :, 0]
    with stand_in(kernel) as compiled:
        if kernel == "forward":
            kernels._attend._init_fn(*operands)
        elif kernel == "queries":
            kernels._query_gradients._init_fn(out, norms, out, *operands)
        elif kernel == "keys":
            kernels._key_gradients._init_fn(out, norms, back, *operands)
        else:
            kernels._distance_gradients._init_fn(out, norms, back, *operands)
    made = compiled.made
    usage, code = (_disassembled(made.asm["cubin"], flag) for flag in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    products = len(re.findall(r"\bH(?:G)?MMA\.", code))
    return Resources(int(found[1]), int(found[2]), made.metadata.shared / 1024, products)


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
        for queries, keys, warps, stages in itertools.product(sizes, sizes, (4, 8), (1, 2))
        if keys >= queries and queries * keys <= 64 * 128
    ]


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--capability", type=int, default=90, help="80: A100, 90: H100 and H200")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--candidates", action="store_true", help="also other divisions")
    parser.add_argument(
        "--with_options", action="store_true", help="dropout, first keys, biases of distances"
    )
    arguments = parser.parse_args()
    driver.set_active(NoGPU(arguments.capability))
    print(f"sm_{arguments.capability}, Triton {triton.__version__}")
    print(
        "| kernel | dtype | width | queries, keys, warps, stages | registers | spilled bytes ",
        end="",
    )
    print("| shared KB | products on tensor cores |")
    print("|---|---|---|---|---|---|---|---|")
    for kernel, name, K in itertools.product(arguments.kernels, arguments.dtypes, arguments.widths):
        dtype = getattr(torch, name)
        key = (kernel, dtype.itemsize, 64 if K <= 64 else 128)
        standard = kernels.BLOCKS[key]
        for blocks in [standard, *(candidates(dtype) if arguments.candidates else [])]:
            kernels.BLOCKS[key] = blocks
            try:
                found = compile_kernel(kernel, dtype, K, arguments.with_options)
                told = f"{found.registers} | {found.spilled_bytes} | {found.shared_kb:.0f} "
                told += f"| {found.tensor_core_products}"
            except Exception as error:  # noqa: BLE001  (the compiler fails in many ways)
                told = f"{type(error).__name__} | | |"
            print(
                f"| {kernel} | {name} | {K} | {', '.join(map(str, blocks))} | {told} |", flush=True
            )
        kernels.BLOCKS[key] = standard


if __name__ == "__main__":
    main()
