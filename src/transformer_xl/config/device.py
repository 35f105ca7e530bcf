"""Device and precision of computations."""

import ctypes
import os
import platform
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path

import torch

from transformer_xl.config.openmp import adapt_spinning_to_load


def pick_device() -> torch.device:
    """Return the CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@lru_cache(maxsize=8)
def total_memory(device: torch.device) -> int | None:
    """Return the memory of a device in bytes, swap included; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or not Path("/proc/meminfo").is_file():
        return None
    words = [line.split() for line in Path("/proc/meminfo").read_text("utf-8").splitlines()]
    kilobytes = {name: int(value) for name, value, *_ in words}
    most = 1024 * kilobytes["MemTotal:"]
    # The limit of a container; "max" is no limit.
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            most = min(most, int(Path("/sys/fs/cgroup", limit).read_text("utf-8")))
    return most + 1024 * kilobytes.get("SwapTotal:", 0)


def describe_machine() -> dict[str, str | int | None]:
    """Return versions and hardware, for the record; ``gpu`` is None without one."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
        # "AVX2", "AVX512" and the like: what the kernels of torch use.
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def prepare_process() -> None:
    """Prepare for large tensors on a machine that may be shared, as the commands do."""
    keep_freed_memory()
    adapt_spinning_to_load()


def keep_freed_memory() -> None:
    """Let glibc's malloc reuse freed memory instead of returning it to the system.

    By default it returns the memory of large tensors after each step, and page faults slow down the
    next one. No effect on other systems.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, at their maxima.
        mallopt(-1, 2**31 - 1)
        mallopt(-3, 32 << 20)


class Precision:
    """The precision of matrix products on a device.

    Args:
        setting: A setting ``train.precision``. ``auto`` is bfloat16 with hardware support, else
            float32, as emulated bfloat16 is several times slower.
        device: The device.

    Attributes:
        name: ``float32``, ``bfloat16`` or ``float16``.
    """

    def __init__(self, setting: str, device: torch.device) -> None:
        automatic = "bfloat16" if _has_bfloat16(device) else "float32"
        self.name = automatic if setting == "auto" else setting
        self._device = device

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context for autocast; weights stay in float32."""
        if self.name == "float32":
            return nullcontext()
        return torch.autocast(self._device.type, getattr(torch, self.name))


def _has_bfloat16(device: torch.device) -> bool:
    """Return whether a device computes in bfloat16 itself, and torch lets it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    has_instructions = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    # Not with ONEDNN_MAX_CPU_ISA=AVX2, for example.
    return bool(has_instructions and torch.ops.mkldnn._is_mkldnn_bf16_supported())
