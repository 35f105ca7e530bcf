"""What a model says of the next symbol, in numbers that two computations agree on.

A model that learns from what was coded does so on both sides alike, and nothing may differ by a
digit, for what is learned feeds on itself: both sides compute in the same shapes, in float32, on as
many threads of the same kind of processor. Learning has a memory of its own; what is predicted
takes up weights and memory anew after every round.
"""

import copy
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from transformer_xl.config import ModelConfig, TrainConfig
from transformer_xl.model import LanguageModel, Memory, build_model
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.pretrained import model_weights
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


_EXACT = "exact_frequencies"
AT_ONCE = 1 << 31
"""Symbols read at once, at most: a round of coding is one segment, whatever its length."""


class Predictor:
    """Reads several texts side by side, in pieces of any length, and predicts every next symbol.

    Each symbol is predicted from itself and the ``mem_len`` before it, wherever the pieces are cut:
    so a segment read at once and the same symbols read one by one give the same numbers, but for
    rounding. It computes in double precision, in which rounding is far below what coding sees.

    Args:
        model: The model; what computes here is a copy.
        streams: How many texts.
        mem_len: Remembered positions.
        exact_frequencies: Compute the frequencies of positions in double precision, too. Rounded
            to single precision, they differ in the last digit from one kind of processor to the
            next, which is far more than coding bears.
    """

    def __init__(
        self,
        model: LanguageModel,
        streams: int,
        mem_len: int,
        *,
        exact_frequencies: bool = True,
    ) -> None:
        self.model = copy.deepcopy(model).double().eval().requires_grad_(False)
        config = model.config
        has_sinusoids = config.kind != "lstm" and config.attn_type in (0, 2)
        if exact_frequencies and has_sinusoids and _EXACT not in config.quirks:
            self.model.config = dataclasses.replace(config, quirks=(*config.quirks, _EXACT))
        self.lengths = lengths(model, mem_len)
        self._mems = self.model.keep(self.model.start_memory(streams, mem_len))

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "B T"]) -> Float64[Tensor, "B T V"]:
        """Read another piece; return, after each symbol, log p of every next one."""
        hidden = []
        for piece in read(self.model, tokens, self.lengths, self._mems):
            self._mems = piece.mems
            hidden.append(piece.hidden)
        return self.model.head.log_probs(torch.cat(hidden, 1))

    @torch.no_grad()
    def follow(self, model: LanguageModel, mems: Memory) -> None:
        """Go on with the weights and the memory of another model of the same settings."""
        for own, other in zip(self.model.parameters(), model.parameters(), strict=True):
            own.copy_(other)
        self._mems = self.model.keep(mems.to(self.model.device, torch.float64))


def lengths(model: LanguageModel, mem_len: int) -> Lengths:
    """Return the lengths with which each symbol sees equally many before it.

    Absolute positions count from the start of what is read at once, and an enhanced memory holds
    what the segment did not attend to: there, symbols are read one by one.
    """
    at_once = 1 if model.depends_on_segments else AT_ONCE
    return Lengths.of(model.config, segment_len=at_once, mem_len=mem_len, ext_len=0).windowed()


def start_symbol(model: LanguageModel) -> int:
    """Return the symbol that is read before each part of a text: a line break, among bytes."""
    newline = ord("\n")
    return newline if newline < model.config.vocab_size else 0


def fingerprint(model: LanguageModel, vocab_hash: str) -> bytes:
    """Return 16 bytes that two models have in common only if they predict the same."""
    digest = hashlib.blake2b(vocab_hash.encode(), digest_size=16)
    # Settings that later versions add have defaults that change nothing.
    default = dataclasses.asdict(ModelConfig())
    settings = dataclasses.asdict(model.config) | dict(model.left_out)
    changed = {name: x for name, x in settings.items() if x != default.get(name)}
    digest.update(json.dumps(changed, sort_keys=True).encode())
    for name, weight in sorted(model_weights(model).items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.flatten().view(torch.uint8).numpy().data)
    return digest.digest()
