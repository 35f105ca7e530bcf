"""A model with its vocabulary, out of a folder."""

from pathlib import Path

import torch

from transformer_xl.data import Vocab, load_vocab
from transformer_xl.model import LanguageModel, load_model
from transformer_xl.model.compact import Weights, compact
from transformer_xl.model.pretrained import find_model_folder


def open_folder(
    folder: Path | str, device: torch.device | None = None, weights: Weights = "float32"
) -> tuple[LanguageModel, Vocab]:
    """Load the model of a folder, or the best of a run, with its vocabulary.

    Args:
        folder: A model folder or a run folder.
        device: Where the model is to be. None: on the processor.
        weights: Precision of the weights, as for :func:`~transformer_xl.model.compact.compact`.

    Raises:
        FileNotFoundError: There is none.
        RuntimeError: A file is damaged.
        ValueError: The settings are wrong, or model and vocabulary do not belong together.
    """
    folder = find_model_folder(folder)
    model, vocab = load_model(folder), load_vocab(folder)
    if len(vocab) != model.config.vocab_size:
        raise ValueError(
            f"the vocabulary in {folder} has {len(vocab)} symbols and the model "
            f"{model.config.vocab_size}: they do not belong together"
        )
    return compact(model.to(device or torch.device("cpu")), weights), vocab
