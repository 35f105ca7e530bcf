"""The capabilities of this machine and the choices they lead to; verification of files."""

from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from transformer_xl.config import (
    SUMS_FILE,
    DataConfig,
    ModelConfig,
    Rounded,
    World,
    autocast,
    check_sums,
    describe_machine,
    locate,
    pick_device,
    pick_precision,
    reason_against_sleeping,
)
from transformer_xl.data import cache_folder, load_vocab
from transformer_xl.model import (
    CONFIG_FILE,
    Lengths,
    Memory,
    MemoryLimitError,
    TransformerXL,
    has_checksum,
    load_config,
    model_folders,
    read,
    read_model_weights,
    verified_tensors,
    verify_weights,
    weights_files,
    weights_path,
)
from transformer_xl.ops import ceiling, choose_backend, native, timed, triton
from transformer_xl.train import CHECKPOINTS, checkpoints_in, first_damaged

_NEEDED = (
    "transformer-xl", "torch", "numpy", "safetensors", "tokenizers", "tyro", "msgspec", "rich",
)  # fmt: skip
_OPTIONAL = {
    "matplotlib": ("figures in report.html", "plot"),
    "transformers": ("import transformer_xl.interop.hf", "hf"),
    "lm-eval": ("lm-evaluation-harness", "eval"),
    "fastapi": ("txl serve", "serve"),
    "constriction": ("txl compress", "compress"),
    "onnxruntime": ("txl export", "onnx"),
    "datasets": ("hf:... as a corpus", "data"),
    "mido": ("MIDI files", "music"),
}
"""Packages by what they are for, and the extra that installs them."""
_VERIFIED, _DAMAGED, _UNREADABLE = "verified", "damaged", "not readable"
_UNEXAMINED = "not examined"
BAD = (_DAMAGED, _UNREADABLE, _UNEXAMINED)
"""How the messages of :func:`verify` begin where a file is not to be used as it is."""
_VOCAB_SIZE, _STREAMS, _SEGMENT_LEN = 4096, 4, 128
"""The model whose speed is measured, and what it reads in one step."""
_NO_CHECKSUM = "not verified (no checksum); types, shapes and values are valid"


def diagnose() -> dict[str, Any]:
    """Return versions, hardware, and the choices that depend on them, with their reasons."""
    device = pick_device()
    precision = pick_precision("auto", device)
    has = "has" if precision == "bfloat16" else "has no"
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cpu"), *(torch.device("cuda", n) for n in range(n_gpus))]
    machine = describe_machine()
    gpu = machine.pop("gpu")
    return {
        **machine,
        "device": gpu or "cpu",
        "precision": f"{precision}: the {device.type} {has} bfloat16 arithmetic",
        **{f"attention on {each}": _attention(each) for each in devices},
        **{f"loss on {each}": _loss(each) for each in devices},
        "decoding on cpu": _decoding(),
        "speed": _speed(device, precision),
        "shared processors": reason_against_sleeping()
        or "threads spin only briefly while others compute",
        "cache": str(cache_folder(DataConfig())),
        "packages": {name: _version(name) for name in (*_NEEDED, *_OPTIONAL)},
    }


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
    checks: dict[Path, Callable[[Path], str]] = {}
    if path.is_file():
        checks[path] = _verified_file
    else:
        models = [each for each in model_folders(path) if (each / CONFIG_FILE).is_file()]
        checks |= dict.fromkeys(models, _verified_model)
        checks |= dict.fromkeys(checkpoints_in(path / CHECKPOINTS), _verified_checkpoint)
    if not checks:
        raise FileNotFoundError(
            f"{path} has neither {CONFIG_FILE} nor a model or a checkpoint of a run: give a model "
            "folder, a run folder or a file"
        )
    found: dict[str, str] = {}
    for place, check in checks.items():
        try:
            found[str(place)] = check(place)
        except OSError as error:
            found[str(place)] = f"{_UNREADABLE}: {error}"
        except (RuntimeError, ValueError) as error:
            found[str(place)] = f"{_DAMAGED}: {error}"
    return found


def _verified_model(folder: Path) -> str:
    config, unexamined = load_config(folder / CONFIG_FILE), ""
    try:
        n_tensors = len(read_model_weights(folder, config))
    except MemoryLimitError as error:
        # Too large for this machine is not damaged; and a folder that is examined may be hostile.
        n_tensors, unexamined = verify_weights(weights_path(folder)), str(error)
    if (folder / SUMS_FILE).is_file():
        check_sums(folder)
    with suppress(FileNotFoundError):
        load_vocab(folder)
    has_all = all(has_checksum(file) for file in weights_files(weights_path(folder)))
    if unexamined:
        files = "have" if has_all else "have no"
        return f"{_UNEXAMINED} whether its files, which {files} valid checksums, fit: {unexamined}"
    return f"{_VERIFIED if has_all else _NO_CHECKSUM} ({n_tensors} tensors)"


def _verified_file(path: Path) -> str:
    files = list(weights_files(path))
    # Only weights have an entry "format"; the states of sessions hold integers, too.
    is_state = path.suffix != ".json" and "format" not in verified_tensors(path)[1]
    if not is_state:
        verify_weights(path)
    return _VERIFIED if all(map(has_checksum, files)) else _NO_CHECKSUM


def _verified_checkpoint(folder: Path) -> str:
    damaged = first_damaged(folder, World())
    return _VERIFIED if damaged is None else f"{_DAMAGED}: {damaged}"


def _speed(device: torch.device, precision: Rounded) -> str:
    """Measure how a model of the size of the recipe demo evaluates segments with a full memory.

    Its operations are counted as two for each weight and token, those of attention not included.
    """
    config = ModelConfig(
        vocab_size=_VOCAB_SIZE, n_layer=4, n_head=4, d_model=192, d_inner=768, mem_len=_SEGMENT_LEN
    )
    model = TransformerXL(config).to(device).eval()
    B, T, D = _STREAMS, _SEGMENT_LEN, config.d_model
    tokens = torch.randint(config.vocab_size, (B, T + 1), device=device)
    states = [torch.randn(B, T, D, device=device) for _ in range(config.n_layer)]
    mems, lengths = model.keep(Memory(states)), Lengths.of(config)._replace(segment_len=T)

    def step() -> None:
        nonlocal mems
        (piece,) = read(model, tokens[:, :-1], lengths, mems, targets=tokens[:, 1:])
        mems = piece.mems

    with torch.no_grad(), autocast(precision, device):
        seconds = timed(step, 5, device)["seconds"]
    n_weights = sum(p.numel() for p in model.parameters())
    rate, limit = 2 * n_weights * B * T / seconds / 1e9, ceiling(precision, device)
    return (
        f"{B * T / seconds:,.0f} tokens/s evaluated, {n_weights / 1e6:.1f} M weights in "
        f"{precision}: {rate / limit:.0%} of the {limit:,.0f} GFLOP/s of a large matrix product"
    )


def _decoding() -> str:
    """Say how tokens are read one by one on the CPU, and why."""
    against = native.reason_against(torch.device("cpu"), torch.float32)
    return f"operations of torch: {against}" if against else f"compiled step, {native.level()}"


def _attention(device: torch.device) -> str:
    """Name the backend of relative attention on a device, for heads of width 64, and why."""
    dtype = getattr(torch, pick_precision("auto", device))
    backend, reason = choose_backend(device, dtype, 64)
    return f"{backend}: {reason}"


def _loss(device: torch.device) -> str:
    """Say what computes the softmax of the loss on a device, and why."""
    dtype = getattr(torch, pick_precision("auto", device))
    against = triton.reason_against(device, dtype, K=0)
    return f"operations of torch: {against}" if against else "fused kernels"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        if name in _NEEDED:
            return f"not installed (pip install {name})"
        purpose, extra = _OPTIONAL[name]
        return f"not installed ({purpose}: pip install 'transformer-xl[{extra}]')"
