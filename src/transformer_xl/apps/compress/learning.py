"""A model that learns from what was coded, on both sides alike.

Here nothing may differ by a digit, for what is learned feeds on itself: so both sides compute in
the same shapes, in float32, on as many threads of the same kind of processor. Learning has a memory
of its own; what is predicted takes up weights and memory anew after every round.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from transformer_xl.apps.compress.predicting import AT_ONCE, lengths
from transformer_xl.config import ModelConfig, TrainConfig
from transformer_xl.model import LanguageModel, build_model
from transformer_xl.model.reading import read
from transformer_xl.train.optim import Optimizer

FRESH = ModelConfig(
    vocab_size=256,
    n_layer=4,
    n_head=4,
    d_model=128,
    d_inner=512,
    mem_len=128,
    norm_first=True,
    final_norm=True,
    dropout=0.0,
)
"""The model that begins to learn without a trained one: bytes, 0.8 M weights."""
FRESH_LR = 5e-3
"""Its largest learning rate."""
TRAINED_LR = 5e-4
"""That of a trained model."""

_MUON_LR = 7.0
"""Muon's rate, in units of AdamW's."""


class Learner:
    """Takes a step after every round.

    Args:
        model: What learns is a copy of it.
        streams: Parts that are coded side by side.
        mem_len: Remembered positions.
        lr: Largest learning rate.
        n_rounds: How many rounds there will be.
    """

    def __init__(
        self, model: LanguageModel, *, streams: int, mem_len: int, lr: float, n_rounds: int
    ) -> None:
        # In evaluation mode: nothing is dropped, and no softmax is sampled.
        self.model = copy.deepcopy(model).float().eval().requires_grad_(True)
        self.mems = self.model.start_memory(streams, mem_len)
        # A round is one segment, as it was read.
        self._lengths = lengths(model, mem_len)._replace(segment_len=AT_ONCE)
        self._n_rounds, self._step = n_rounds, 0
        settings = TrainConfig(
            steps=max(n_rounds, 1),
            optimizer="muon",
            lr=lr,
            muon_lr=_MUON_LR * lr,
            beta2=0.98,
            weight_decay=0.0,
            schedule="constant_cooldown",
            cooldown_fraction=0.8,
            min_lr_ratio=0.1,
            warmup_steps=min(20, n_rounds),
            precision="float32",
        )
        self._optimizer = Optimizer(self.model, settings)

    def learn(self, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"]) -> None:
        """Read a round once more, with the symbols that follow, and move the weights."""
        (piece,) = read(self.model, tokens, self._lengths, self.mems, targets=targets)
        assert piece.nll is not None
        piece.nll.mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step(self._step, max(self._n_rounds, 1))
        self._step += 1
        self.mems = piece.mems


def fresh_model(seed: int) -> LanguageModel:
    """Draw the model that begins without any training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(FRESH).eval()


@contextmanager
def reproducible(threads: int) -> Iterator[None]:
    """Compute the same digits each time inside a ``with`` block."""
    # Asked by the library that multiplies on a GPU, before its first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    n_threads = torch.get_num_threads()
    was_on = torch.are_deterministic_algorithms_enabled()
    details: Any = torch.utils.deterministic
    was_filling = details.fill_uninitialized_memory
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # All is written before it is read; to fill it first would only take time.
    details.fill_uninitialized_memory = False
    try:
        yield
    finally:
        details.fill_uninitialized_memory = was_filling
        torch.use_deterministic_algorithms(was_on)
        torch.set_num_threads(n_threads)
