"""What this machine offers and the package would use of it; whether files are intact."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from transformer_xl.checkpoint.checkpoints import first_damaged
from transformer_xl.checkpoint.run_folder import CHECKPOINTS
from transformer_xl.config import DataConfig
from transformer_xl.data import load_vocab
from transformer_xl.data.corpus import cache_folder
from transformer_xl.device import describe_machine, pick_device, pick_precision
from transformer_xl.distributed import World
from transformer_xl.files import require_model_place
from transformer_xl.nn.pretrained import CONFIG_FILE, load_config, read_model_weights
from transformer_xl.nn.weights import (
    has_checksum,
    verified_tensors,
    weights_files,
    weights_path,
)
from transformer_xl.ops import choose_backend

_PACKAGES = (
    "transformer-xl", "torch", "numpy", "safetensors", "tokenizers", "tyro", "msgspec", "rich",
    "matplotlib", "tensorboard", "transformers", "lm-eval", "fastapi", "constriction",
    "onnxruntime", "datasets",
)  # fmt: skip
_VERIFIED, _NO_CHECKSUM = "verified", "intact as far as can be said: no checksum was recorded"
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


def verify(path: Path) -> dict[str, str]:
    """Verify the files of a model folder or run folder, or one file of weights or of a text.

    Args:
        path: The folder or file.

    Returns:
        For each model, checkpoint or file: ``verified``; ``no checksum``, where only types and
        values could be verified; or what is wrong with it.

    Raises:
        FileNotFoundError: There is nothing that can be verified.
    """
    require_model_place(path)
    found: dict[str, str] = {}

    def note(place: Path, check: Callable[[], str]) -> None:
        try:
            found[str(place)] = check()
        except (OSError, RuntimeError, ValueError) as error:
            found[str(place)] = f"damaged: {error}"

    if path.is_file():
        note(path, lambda: _verified(path))
        return found
    for folder in (path, path / "model" / "best", path / "model" / "last"):
        if (folder / CONFIG_FILE).is_file():
            note(folder, partial(_verified_model, folder))
    for checkpoint in sorted((path / CHECKPOINTS).glob("step_*")):
        note(checkpoint, partial(_verified_checkpoint, checkpoint))
    if not found:
        raise FileNotFoundError(
            f"{path} has neither {CONFIG_FILE} nor a model or a checkpoint of a run: give a model "
            "folder, a run folder or a file"
        )
    return found


def _verified_model(folder: Path) -> str:
    weights = read_model_weights(folder, load_config(folder / CONFIG_FILE))
    with suppress(FileNotFoundError):
        load_vocab(folder)
    has_all = all(has_checksum(file) for file in weights_files(weights_path(folder)))
    return f"{_VERIFIED if has_all else _NO_CHECKSUM} ({len(weights)} tensors)"


def _verified(path: Path) -> str:
    verified_tensors(path)
    return _VERIFIED if has_checksum(path) else _NO_CHECKSUM


def _verified_checkpoint(folder: Path) -> str:
    damaged = first_damaged(folder, World())
    return _VERIFIED if damaged is None else f"damaged: {damaged}"


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
