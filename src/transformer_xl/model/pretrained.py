"""A model as a folder: ``config.json`` and ``model.safetensors``."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from transformer_xl.config import FORMAT_VERSION, EvalConfig, ModelConfig
from transformer_xl.config.checks import read_settings
from transformer_xl.config.files import replace_file, require_model_place
from transformer_xl.config.unused import unused_in_model, without_unused
from transformer_xl.model.weights import (
    WEIGHTS_FILE,
    require_storable,
    weights_path,
    write_weights,
)

CONFIG_FILE = "config.json"
MODEL_TYPE = "transformer-xl"
# What the file may hold besides the settings: the last three are for Hugging Face transformers.
_ABOUT = ("origin", "eval", "architectures", "auto_map", "transformers")


@runtime_checkable
class SavesItself(Protocol):
    """A vocabulary, as far as the network needs to know it."""

    def save(self, folder: Path) -> None:
        """Write itself into a folder."""
        ...


def model_folders(path: Path) -> tuple[Path, ...]:
    """Return where models may be: the folder itself, and the best and last model of a run."""
    return path, path / "model" / "best", path / "model" / "last"


def find_model_folder(path: Path | str) -> Path:
    """Return the model folder at ``path``: itself, or the best or last model of a run folder.

    Raises:
        FileNotFoundError: There is none.
    """
    path = Path(path)
    for folder in model_folders(path):
        if (folder / CONFIG_FILE).is_file() and weights_path(folder).is_file():
            return folder
    require_model_place(path)
    raise FileNotFoundError(
        f"{path} is neither a model folder ({CONFIG_FILE} and {WEIGHTS_FILE}) nor a run folder "
        "with a finished evaluation or checkpoint"
    )


def model_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights by name, each once."""
    # named_parameters leaves out the second name of a tied weight.
    return {name: x.detach().cpu().contiguous() for name, x in model.named_parameters()}


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a model the weights of these names."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def write_model(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    folder: Path,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write settings and weights as a model folder.

    Args:
        config: The settings.
        weights: The weights by name, each once.
        folder: The folder.
        about: What else is known of the model: ``origin``, and ``eval``, how it is evaluated.

    Raises:
        OSError: A file cannot be written.
        ValueError: The weights would not load again; nothing was written.
    """
    require_storable(weights)
    content = {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION}
    content |= dataclasses.asdict(config) | dict(about or {})
    replace_file(folder / CONFIG_FILE, (json.dumps(content, indent=2) + "\n").encode())
    write_weights(weights, folder / WEIGHTS_FILE)


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings file of a model as it is.

    Raises:
        RuntimeError: The file is damaged, of another kind of model or of a newer version.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kind, version = values.pop("model_type"), values.pop("format_version")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise RuntimeError(f"{path} is no settings file of a model: {error!r}") from error
    if kind != MODEL_TYPE:
        raise RuntimeError(f"{path} describes a model of type {kind!r}, not {MODEL_TYPE!r}")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise RuntimeError(
            f"{path} has format {version!r}; this version reads up to {FORMAT_VERSION}: "
            "update transformer_xl"
        )
    return values


def load_config(path: Path) -> ModelConfig:
    """Read the settings of a model.

    Raises:
        RuntimeError: The file is damaged, of another kind of model or of a newer version.
        ValueError: A setting is unknown, of a wrong type or out of range.
    """
    values = read_config(path)
    for name in _ABOUT:
        values.pop(name, None)
    # Earlier versions wrote settings that change nothing beside others.
    values = without_unused(ModelConfig, values, unused_in_model)
    return read_settings(ModelConfig, values, str(path), "model")


def load_eval_config(path: Path) -> EvalConfig | None:
    """Read how a model is evaluated from its settings file; None where it does not say.

    Raises:
        RuntimeError: The file is damaged, of another kind of model or of a newer version.
        ValueError: A setting is of a wrong type or out of range.
    """
    values = read_config(path).get("eval")
    return None if values is None else read_settings(EvalConfig, values, str(path), "eval")
