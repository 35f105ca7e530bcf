"""Steps on random tokens with a full memory: every one costs as much as one at the end of a run."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from transformer_xl.model import LanguageModel, Memory
from transformer_xl.model.reading import read
from transformer_xl.model.segment import Lengths


def full_memory(model: LanguageModel, B: int, M: int) -> Memory:
    """Return a memory of M random positions for B streams."""
    shape = (B, M, model.config.d_model)
    return Memory([torch.randn(shape, device=model.device) for _ in range(model.config.n_layer)])


def reading_step(
    model: LanguageModel, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"]
) -> Callable[[], object]:
    """Return a function that predicts a segment of each stream and updates the memory."""
    B, T = tokens.shape
    mems = model.keep(full_memory(model, B, model.config.mem_len))
    lengths = Lengths.of(model.config)._replace(segment_len=T)

    def step() -> None:
        nonlocal mems
        (piece,) = read(model, tokens, lengths, mems, targets=targets)
        mems = piece.mems

    return step
