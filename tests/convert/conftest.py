"""Models with random weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.model import build_model


@pytest.fixture
def save_model() -> Callable[[ModelConfig, Path], dict[str, Tensor]]:
    """Write one of our models with random weights; return its weights."""

    def save(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
        model = build_model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        model.save_pretrained(folder)
        return load_file(folder / "model.safetensors")

    return save
