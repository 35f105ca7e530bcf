"""A model as a folder: ``config.json`` and ``model.safetensors``."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from transformer_xl.config import FORMAT_VERSION, ModelConfig
from transformer_xl.files import replace_file, write_atomically

if TYPE_CHECKING:
    from transformer_xl.nn.model import TransformerXL

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_TYPE = "transformer-xl"


def find_model_folder(path: Path | str) -> Path:
    """Return the model folder at ``path``: itself, or the best or last model of a run folder.

    Raises:
        FileNotFoundError: There is none.
    """
    path = Path(path)
    for folder in (path, path / "model" / "best", path / "model" / "last"):
        if (folder / CONFIG_FILE).is_file() and (folder / WEIGHTS_FILE).is_file():
            return folder
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give a model folder or a run folder")
    raise FileNotFoundError(
        f"{path} is neither a model folder ({CONFIG_FILE} and {WEIGHTS_FILE}) nor a run folder "
        "with a finished evaluation or checkpoint"
    )


def save_weights(model: "TransformerXL", path: Path) -> None:
    """Write the weights, each once, to a safetensors file, atomically."""
    # named_parameters leaves out the second name of a tied weight.
    weights = {name: x.detach().cpu().contiguous() for name, x in model.named_parameters()}
    write_atomically(path, lambda temporary: save_file(weights, temporary, {"format": "pt"}))


def load_weights(model: "TransformerXL", path: Path) -> None:
    """Read weights into a model.

    Raises:
        RuntimeError: The file is damaged, or its weights are not those of the model.
    """
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise RuntimeError(f"{path} is damaged or no safetensors file: {error}") from error
    expected = dict(model.named_parameters())
    wrong = sorted(expected.keys() ^ weights.keys()) or [
        f"{name} of shape {tuple(weights[name].shape)} instead of {tuple(x.shape)}"
        for name, x in expected.items()
        if weights[name].shape != x.shape
    ]
    if wrong:
        raise RuntimeError(
            f"{path} does not fit {CONFIG_FILE}: {', '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}"
        )
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(weights[name])


def save_model(model: "TransformerXL", folder: Path) -> None:
    """Write a model folder; each file is replaced atomically, the weights last."""
    config = {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION}
    config |= dataclasses.asdict(model.config)
    replace_file(folder / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
    save_weights(model, folder / WEIGHTS_FILE)


def load_config(path: Path) -> ModelConfig:
    """Read the settings of a model.

    Raises:
        RuntimeError: The file is damaged, of another kind of model or of a newer version.
        ValueError: A setting is unknown, of a wrong type or out of range.
    """
    # Only needed here, and not by those who build a model themselves.
    import msgspec

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kind, version = values.pop("model_type"), values.pop("format_version")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RuntimeError(f"{path} is no settings file of a model: {error!r}") from error
    if kind != MODEL_TYPE:
        raise RuntimeError(f"{path} describes a model of type {kind!r}, not {MODEL_TYPE!r}")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise RuntimeError(
            f"{path} has format {version!r}; this version reads up to {FORMAT_VERSION}: "
            "update transformer_xl"
        )
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{path} has unknown settings: {', '.join(unknown)}")
    try:
        return msgspec.convert(values, ModelConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} has a setting that cannot be: {error}") from error
