"""Building models of each kind."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch

from transformer_xl.config import ModelConfig

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


def weight_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of the parameters of a model, without allocating them."""
    with torch.device("meta"):
        return {name: x.shape for name, x in build_model(config).named_parameters()}
