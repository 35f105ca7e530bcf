"""Where the model runs and in which precision its products are computed."""

import ctypes
import os
import platform
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]


def pick_device() -> torch.device:
    """Return the accelerator if there is one, else the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@lru_cache(maxsize=8)
def total_memory(device: torch.device) -> int | None:
    """Return how many bytes a device has, swap included; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or not Path("/proc/meminfo").is_file():
        return None
    words = [line.split() for line in Path("/proc/meminfo").read_text("utf-8").splitlines()]
    kilobytes = {name: int(value) for name, value, *_ in words}
    most = 1024 * kilobytes["MemTotal:"]
    # What a container may take of it; "max" is no limit.
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            most = min(most, int(Path("/sys/fs/cgroup", limit).read_text("utf-8")))
    return most + 1024 * kilobytes.get("SwapTotal:", 0)


def describe_machine() -> dict[str, Any]:
    """Return what stands beside results: versions and names, ``gpu`` None where there is none."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def keep_freed_memory() -> None:
    """Let this process keep the memory of tensors that are freed, for those that come next.

    The allocator of glibc gives it back to the system at the end of each step and asks for it
    again in the next one, page by page. Other systems' allocators are left as they are. The
    commands call this; a program of one's own decides for itself.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, each as large as it can be.
        mallopt(-1, 2**31 - 1)
        mallopt(-3, 32 << 20)


def pick_precision(precision: Precision, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Resolve ``auto``: bfloat16 where the hardware computes it, else float32.

    A processor without bfloat16 instructions emulates it, several times slower than float32.
    """
    if precision != "auto":
        return precision
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        has_bfloat16 = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return "bfloat16" if has_bfloat16 else "float32"


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager:
    """Compute products in the given precision inside a ``with`` block; weights stay float32."""
    if pick_precision(precision, device) == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
