"""What this machine offers, and what the package would use of it."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from transformer_xl.config import DataConfig
from transformer_xl.data.corpus import cache_folder
from transformer_xl.device import describe_machine, pick_device, pick_precision
from transformer_xl.ops import choose_backend

_PACKAGES = (
    "transformer-xl", "torch", "numpy", "safetensors", "tokenizers", "tyro", "msgspec", "rich",
    "matplotlib", "tensorboard", "transformers", "lm-eval", "fastapi", "constriction",
    "onnxruntime", "datasets",
)  # fmt: skip
_OPTIONAL = {
    "matplotlib": "figures in report.html: pip install 'transformer-xl[plot]'",
    "tensorboard": "logs for TensorBoard: pip install 'transformer-xl[track]'",
    "transformers": "import transformer_xl.hf: pip install 'transformer-xl[hf]'",
    "lm-eval": "lm-evaluation-harness: pip install 'transformer-xl[eval]'",
    "fastapi": "txl serve: pip install 'transformer-xl[serve]'",
    "constriction": "txl compress: pip install 'transformer-xl[compress]'",
    "onnxruntime": "txl export: pip install 'transformer-xl[onnx]'",
    "datasets": "hf:... as a corpus: pip install 'transformer-xl[data]'",
}


def diagnose() -> dict[str, Any]:
    """Return versions, hardware, and the choices that depend on them, with their reasons."""
    device = pick_device()
    precision = pick_precision("auto", device)
    has_bfloat16 = precision == "bfloat16"
    machine = describe_machine()
    gpu = machine.pop("gpu")
    return {
        **machine,
        "device": gpu or "cpu",
        "precision": f"{precision}: the {device.type} "
        f"{'has' if has_bfloat16 else 'has no'} bfloat16 arithmetic",
        **{f"attention on {each}": _attention(each) for each in _devices()},
        "cache": str(cache_folder(DataConfig())),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _devices() -> list[torch.device]:
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", n) for n in range(n_gpus))]


def _attention(device: torch.device) -> str:
    """Name the way to compute relative attention there, for heads of the usual width, and why."""
    dtype = getattr(torch, pick_precision("auto", device))
    backend, reason = choose_backend(device, dtype, 64)
    return f"{backend}: {reason}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"not installed ({_OPTIONAL.get(name, 'pip install ' + name)})"
