"""What this machine offers, and what the package would use of it."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from transformer_xl.config import DataConfig
from transformer_xl.data.corpus import cache_folder
from transformer_xl.device import pick_device, pick_precision
from transformer_xl.ops import chosen_backend

_PACKAGES = (
    "transformer-xl", "torch", "numpy", "safetensors", "tokenizers", "tyro", "msgspec", "rich",
    "matplotlib", "tensorboard",
)  # fmt: skip
_OPTIONAL = {
    "matplotlib": "figures in report.html: pip install 'transformer-xl[plot]'",
    "tensorboard": "logs for TensorBoard: pip install 'transformer-xl[track]'",
}


def diagnose() -> dict[str, Any]:
    """Return versions, hardware, and the choices that depend on them, with their reasons."""
    device = pick_device()
    precision = pick_precision("auto", device)
    has_bfloat16 = precision == "bfloat16"
    backend = chosen_backend()
    reasons = {
        "skew": "the copy-free operation in plain PyTorch, on every device",
        "reference": "chosen by use_backend, or inside torch.compile",
        "triton": "chosen by use_backend: fused kernels for a GPU",
    }
    capabilities = torch.cpu.get_capabilities()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": capabilities.get("cpu_name", platform.processor()),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "precision": f"{precision}: the {device.type} "
        f"{'has' if has_bfloat16 else 'has no'} bfloat16 arithmetic",
        "relative attention": f"{backend}: {reasons[backend]}",
        "cache": str(cache_folder(DataConfig())),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"not installed ({_OPTIONAL.get(name, 'pip install ' + name)})"
