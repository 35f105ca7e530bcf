"""Building models of each kind, and loading them from model folders."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.model.limits import require_loading
from transformer_xl.model.pretrained import (
    CONFIG_FILE,
    find_model_folder,
    is_preface,
    load_config,
    read_config,
    read_weights,
    weights_path,
)

if TYPE_CHECKING:
    from transformer_xl.model.language_model import LanguageModel

BUILDERS: dict[str, "str | Callable[[ModelConfig], LanguageModel]"] = {
    "transformer_xl": "transformer_xl.model.transformer_xl:TransformerXL",
    "gpt": "transformer_xl.studies.models.gpt:GPT",
    "lstm": "transformer_xl.studies.models.lstm:LSTMModel",
}
"""What builds the models of each kind: a function, or where it is, to be imported when needed."""


def register_model(
    kind: str, build: Callable[[ModelConfig], "LanguageModel"], settings_of: str = "transformer_xl"
) -> None:
    """Have :func:`build_model`, and all that loads models, build those of a kind.

    Args:
        kind: The name of the kind, of ``ModelConfig.kind``.
        build: Builds a model, given its settings; a class whose attribute ``kind`` is that name.
        settings_of: The kind of this package whose settings such models have.

    Raises:
        InputError: ``kind`` is one of this package, or ``settings_of`` is none.

    Example:
        >>> from transformer_xl import ModelConfig, TransformerXL
        >>> class Mine(TransformerXL):
        ...     kind = "mine"
        >>> register_model("mine", Mine)
        >>> type(build_model(ModelConfig(kind="mine", vocab_size=10, n_layer=1))).__name__
        'Mine'
    """
    ModelConfig.register(kind, settings_of)
    BUILDERS[kind] = build


def builder(kind: str) -> Callable[[ModelConfig], "LanguageModel"]:
    """Return what builds the models of a kind."""
    build = BUILDERS[kind]
    return resolve_name(build) if isinstance(build, str) else build


def build_model(config: ModelConfig) -> "LanguageModel":
    """Build a model of ``config.kind`` with initial weights.

    Raises:
        SettingsError: The size of the vocabulary is not set.

    Example:
        >>> type(build_model(ModelConfig(kind="lstm", vocab_size=10))).__name__
        'LSTMModel'
    """
    return builder(config.kind)(config)


def load_model(name: Path | str) -> "LanguageModel":
    """Load a model of any kind in float32, in evaluation mode.

    Args:
        name: A model folder, a run folder, of which the best model is loaded, or the name of a
            shipped model.

    Raises:
        FileNotFoundError: There is no such model, or the folder holds none.
        CheckpointError: A file is damaged.
        InputError: The settings are invalid.
    """
    return loaded(name, build_model)


def loaded(name: Path | str, build: Callable[[ModelConfig], "LanguageModel"]) -> "LanguageModel":
    """As :func:`load_model`, with another function that builds the model of its settings."""
    folder = find_model_folder(name)
    path = folder / CONFIG_FILE
    config, stored = load_config(path), read_config(path)
    weights = read_model_weights(folder, config)
    model = build(config)
    if {name for name, _ in model.named_parameters()} != weights.keys():
        raise InputError(
            f"{type(model).__name__} has other parameters than the model in {folder}: build it "
            "with its config, and load what they share with load_state_dict(..., strict=False)"
        )
    copy_weights(model, weights)
    preface = stored.get("preface") or []
    if not is_preface(preface, config.vocab_size):
        raise CheckpointError(
            f"{path} is damaged: its preface must be a list of tokens below {config.vocab_size}; "
            "remove it, or restore the file from a copy"
        )
    model.preface = tuple(preface)
    settings = json.loads(json.dumps(asdict(config)))
    model.left_out = {
        name: value for name, value in stored.items() if value != settings.get(name, value)
    }
    return model.eval()


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model, by name."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def read_model_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Load and verify the weights of a model folder, by name.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: A file is damaged, or the names or shapes do not match ``config``.
        MemoryLimitError: As :func:`require_loading`.
    """

    def expected(n_tensors: int) -> dict[str, torch.Size]:
        # Checked before shapes are computed: a hostile n_layer would exhaust time and memory.
        require_loading(config, n_tensors, path)
        return weight_shapes(config)

    path = weights_path(folder)
    return read_weights(path, expected, CONFIG_FILE)


def weight_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of the parameters of a model, without allocating them."""
    with torch.device("meta"):
        return {name: x.shape for name, x in build_model(config).named_parameters()}


def require_own_weights(names: Iterable[str], config: ModelConfig) -> None:
    """Require exactly the parameters that ``config`` implies, as a model folder holds them.

    Raises:
        InputError: A parameter is missing or unexpected.
    """
    expected, names = weight_shapes(config).keys(), set(names)
    for other, what in ((names - expected, "has"), (expected - names, "lacks")):
        if other:
            raise InputError(
                f"the model {what} {min(other)}, as a part of it was wrapped or replaced: no model "
                "folder can hold that. Save the adapter alone (the save_pretrained of PEFT's "
                "model), or merge it first (model.merge_and_unload())"
            )
