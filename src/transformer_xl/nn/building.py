"""The kinds of models: which class a configuration stands for."""

import json
from dataclasses import asdict
from pathlib import Path

from transformer_xl.config import ModelConfig
from transformer_xl.nn.language_model import LanguageModel
from transformer_xl.nn.model import TransformerXL
from transformer_xl.nn.pretrained import (
    CONFIG_FILE,
    copy_weights,
    find_model_folder,
    load_config,
    read_config,
    read_model_weights,
)


def build_model(config: ModelConfig) -> LanguageModel:
    """Build the model that a configuration describes, with initial weights.

    Raises:
        ValueError: The size of the vocabulary is not set.
    """
    if config.kind == "lstm":
        from transformer_xl.nn.lstm import LSTMModel

        return LSTMModel(config)
    return TransformerXL(config)


def load_model(folder: Path | str) -> LanguageModel:
    """Read a model folder of any kind, or the best model of a run folder; in evaluation mode.

    Raises:
        FileNotFoundError: There is no model.
        RuntimeError: A file is damaged.
        ValueError: The settings are wrong.
    """
    folder = find_model_folder(folder)
    config = load_config(folder / CONFIG_FILE)
    weights = read_model_weights(folder, config)
    model = build_model(config)
    copy_weights(model, weights)
    settings = json.loads(json.dumps(asdict(config)))
    model.left_out = {
        name: value
        for name, value in read_config(folder / CONFIG_FILE).items()
        if name in settings and value != settings[name]
    }
    return model.eval()
