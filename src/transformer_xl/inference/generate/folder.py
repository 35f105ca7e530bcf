"""Loading a model with its vocabulary."""

from pathlib import Path

import torch

from transformer_xl.data import Vocab, load_vocab
from transformer_xl.model import LanguageModel, load_model
from transformer_xl.model.compact import Weights, compact
from transformer_xl.model.pretrained import find_model_folder


def open_folder(
    folder: Path | str, device: torch.device | None = None, weights: Weights = "float32"
) -> tuple[LanguageModel, Vocab]:
    """Load a model with its vocabulary.

    Args:
        folder: A model folder, or a run folder, of which the best model is loaded.
        device: Device of the model. None: the CPU.
        weights: Precision of the weights, as for :func:`~transformer_xl.model.compact.compact`.

    Raises:
        FileNotFoundError: The folder holds no model.
        RuntimeError: A file is damaged.
        ValueError: The settings are invalid, or the vocabulary has another size than the model's.
    """
    folder = find_model_folder(folder)
    model, vocab = load_model(folder), load_vocab(folder)
    if len(vocab) != model.config.vocab_size:
        raise ValueError(
            f"the vocabulary in {folder} has {len(vocab)} symbols and the model "
            f"{model.config.vocab_size}: they do not belong together"
        )
    return compact(model.to(device or torch.device("cpu")), weights), vocab
