"""The capabilities of this machine and the choices they lead to; verification of files."""

from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

import torch

from transformer_xl import WithMemory, evaluate
from transformer_xl.apps.timing import ceiling
from transformer_xl.config import (
    DataConfig,
    ModelConfig,
    Precision,
    ShippedModel,
    describe_machine,
    locate,
    pick_device,
)
from transformer_xl.data import load_vocab
from transformer_xl.model import (
    MemoryLimitError,
    ModelFolder,
    TransformerXL,
    WeightsFiles,
    read_tensors,
)
from transformer_xl.ops import choose_backend, native, triton
from transformer_xl.train import RunFolder, first_damaged

_PACKAGES = (
    *("transformer-xl", "torch", "numpy", "safetensors", "tokenizers", "matplotlib", "lm_eval"),
    *("transformers", "fastapi", "constriction", "onnxruntime", "datasets", "mido"),
)
"""Packages whose versions are listed, if they are installed."""
BAD = ("damaged", "not readable", "not examined")
"""How the messages of :func:`verify` begin where a file is not to be used as it is."""


def diagnose() -> dict[str, object]:
    """Return versions, hardware, and the choices that depend on them, with their reasons."""
    device, machine = pick_device(), describe_machine()
    precision = Precision("auto", device)
    has = "has" if precision.name == "bfloat16" else "has no"
    dtype = getattr(torch, precision.name)
    attention = ": ".join(choose_backend(device, dtype, 64))
    no_kernels = triton.reason_against(device, dtype, K=0)
    no_step = native.reason_against(torch.device("cpu"), torch.float32)
    return {
        "device": machine.pop("gpu") or "cpu",
        **machine,
        "precision": f"{precision.name}: the {device.type} {has} bfloat16 arithmetic",
        f"attention on {device}": attention,
        f"loss on {device}": f"operations of torch: {no_kernels}" if no_kernels else "kernels",
        "decoding on cpu": f"operations of torch: {no_step}" if no_step else native.level(),
        "speed": _speed(device, precision),
        "cache": str(DataConfig().cache_folder),
        "packages": {x.name: x.version for x in distributions() if x.name in _PACKAGES},
    }


def _speed(device: torch.device, precision: Precision) -> str:
    """Measure how a model of about the size of the recipe demo evaluates a text.

    Its operations are counted as two for each weight and token, those of attention not included.
    """
    sizes = {"n_layer": 4, "n_head": 4, "d_model": 192, "d_inner": 768, "mem_len": 128}
    model = TransformerXL(ModelConfig(vocab_size=4096, **sizes)).to(device)
    text = torch.randint(4096, (1 + 4 * 2 * 128,))
    with precision.autocast():
        how = WithMemory(segment_len=128, batch_size=4)
        rate = max(evaluate(model, text, how).tokens_per_second for _ in range(3))
    n_weights = sum(p.numel() for p in model.parameters())
    limit = ceiling(precision.name, device)
    return (
        f"{rate:,.0f} tokens/s evaluated, {n_weights / 1e6:.1f} M weights in {precision.name}: "
        f"{2e-9 * n_weights * rate / limit:.0%} of the {limit:,.0f} GFLOP/s of a large matrix "
        "product"
    )


def verify(name: Path | str) -> dict[str, str]:
    """Verify the files of a model folder or run folder, or one weights file or state file.

    Args:
        name: The folder, the file, or the name of a model.

    Returns:
        For each model, checkpoint or file a message that begins with ``verified``, ``not
        verified`` (without a checksum only types, shapes and values are checked), ``damaged``,
        ``not readable`` or, of a model above the limit on loading, ``not examined``.

    Raises:
        FileNotFoundError: The folder has nothing to verify.
    """
    path = locate(name).path
    checks: dict[Path, Callable[[Path], str]] = {path: _verified_file} if path.is_file() else {}
    for folder in () if checks else ModelFolder.candidates(path):
        if folder.config_file.is_file():
            checks[folder.path] = _verified_model
    checks |= dict.fromkeys(RunFolder(path).checkpoints, _verified_checkpoint)
    if not checks:
        raise FileNotFoundError(f"{path} has no config.json, no model and no checkpoint of a run")
    messages: dict[str, str] = {}
    for place, check in checks.items():
        try:
            messages[str(place)] = check(place)
        except OSError as error:
            messages[str(place)] = f"not readable: {error}"
        except (RuntimeError, ValueError) as error:
            messages[str(place)] = f"damaged: {error}"
    return messages


def _verified_model(path: Path) -> str:
    ShippedModel.verify(path)
    with suppress(FileNotFoundError):
        load_vocab(path)
    folder = ModelFolder(path)
    try:
        folder.read_weights(folder.read_config())
    except MemoryLimitError as error:
        # Too large for this machine is not damaged.
        folder.weights.verify()
        return f"not examined whether its weights fit: {error}"
    return _checksums_of(folder.weights)


def _verified_file(path: Path) -> str:
    # Only weights have an entry "format"; the states of sessions hold integers, too.
    weights = WeightsFiles(path)
    if path.suffix == ".json" or "format" in read_tensors(path)[1]:
        weights.verify()
    return _checksums_of(weights)


def _checksums_of(weights: WeightsFiles) -> str:
    if weights.has_checksums:
        return "verified"
    return "not verified (no checksum); types, shapes and values are valid"


def _verified_checkpoint(folder: Path) -> str:
    damaged = first_damaged(folder)
    return "verified" if damaged is None else f"damaged: {damaged}"
