"""The capabilities of this machine and the choices they lead to; verification of files."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from transformer_xl.config import DataConfig
from transformer_xl.config.device import describe_machine, pick_device, pick_precision
from transformer_xl.config.distributed import World
from transformer_xl.config.files import require_model_place
from transformer_xl.data import load_vocab
from transformer_xl.data.preparing import cache_folder
from transformer_xl.model.language_model import read_model_weights
from transformer_xl.model.pretrained import (
    CONFIG_FILE,
    has_checksum,
    load_config,
    model_folders,
    verified_tensors,
    verify_weights,
    weights_files,
    weights_path,
)
from transformer_xl.ops import choose_backend
from transformer_xl.train.checkpoint.checkpoints import checkpoints_in, first_damaged
from transformer_xl.train.checkpoint.run_folder import CHECKPOINTS

_PACKAGES = (
    "transformer-xl", "torch", "numpy", "safetensors", "tokenizers", "tyro", "msgspec", "rich",
    "matplotlib", "tensorboard", "transformers", "lm-eval", "fastapi", "constriction",
    "onnxruntime", "datasets",
)  # fmt: skip
_VERIFIED, _DAMAGED, _UNREADABLE = "verified", "damaged", "not readable"
_NO_CHECKSUM = "not verified (no checksum); types, shapes and values are valid"
_OPTIONAL = {
    "matplotlib": "figures in report.html: pip install 'transformer-xl[plot]'",
    "tensorboard": "logs for TensorBoard: pip install 'transformer-xl[track]'",
    "transformers": "import transformer_xl.interop.hf: pip install 'transformer-xl[hf]'",
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
    """Verify the files of a model folder or run folder, or one weights file or state file.

    Args:
        path: The folder or file.

    Returns:
        For each model, checkpoint or file a message that begins with ``verified``, ``not
        verified`` (without a checksum only types, shapes and values are checked), ``damaged`` or
        ``not readable``.

    Raises:
        FileNotFoundError: The folder has nothing to verify.
    """
    require_model_place(path)
    found: dict[str, str] = {}

    def note(place: Path, check: Callable[[], str]) -> None:
        try:
            found[str(place)] = check()
        except OSError as error:
            found[str(place)] = f"{_UNREADABLE}: {error}"
        except (RuntimeError, ValueError) as error:
            found[str(place)] = f"{_DAMAGED}: {error}"

    if path.is_file():
        note(path, lambda: _verified(path))
        return found
    for folder in model_folders(path):
        if (folder / CONFIG_FILE).is_file():
            note(folder, partial(_verified_model, folder))
    for checkpoint in checkpoints_in(path / CHECKPOINTS):
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
    files = list(weights_files(path))
    # Only weights have an entry "format"; the states of sessions hold integers, too.
    is_state = path.suffix != ".json" and "format" not in verified_tensors(path)[1]
    if not is_state:
        verify_weights(path)
    return _VERIFIED if all(map(has_checksum, files)) else _NO_CHECKSUM


def _verified_checkpoint(folder: Path) -> str:
    damaged = first_damaged(folder, World())
    return _VERIFIED if damaged is None else f"{_DAMAGED}: {damaged}"


def _devices() -> list[torch.device]:
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", n) for n in range(n_gpus))]


def _attention(device: torch.device) -> str:
    """Name the backend of relative attention on a device, for heads of width 64, and why."""
    dtype = getattr(torch, pick_precision("auto", device))
    backend, reason = choose_backend(device, dtype, 64)
    return f"{backend}: {reason}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"not installed ({_OPTIONAL.get(name, 'pip install ' + name)})"
