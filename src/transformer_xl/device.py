"""Where the model runs and in which precision its products are computed."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]


def pick_device() -> torch.device:
    """Return the accelerator if there is one, else the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
