"""Predictions of the next symbol that encoder and decoder reproduce.

A model that learns from the coded symbols does so in the encoder and in the decoder, bit for bit,
because differences would accumulate: both compute in the same shapes, in float32, with the same
number of threads on the same kind of processor. The learner has its own memory; the predictor
takes over its weights and memory after every round.
"""

import copy
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from transformer_xl.apps.compress.header import Coding, Learning
from transformer_xl.config import ModelConfig, TrainConfig
from transformer_xl.model import Decoder, LanguageModel, Lengths, Memory, build_model, read
from transformer_xl.train import Optimizer, lr_scale

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
"""The untrained model that is used where none is given: bytes, 0.8 M weights."""
FRESH_LR, TRAINED_LR = 3e-3, 1e-3
"""The peak learning rates of the untrained model and of a trained one."""
AT_ONCE = 1 << 31
"""Segment length beyond any round: a round of coding is always one segment."""

_MUON_LR = 7.0
"""Muon's learning rate, as a multiple of AdamW's."""


class Learner:
    """Updates a copy of the model after every round."""

    def __init__(self, model: LanguageModel, coding: Coding, learning: Learning) -> None:
        # In evaluation mode: no dropout, no sampled softmax.
        self.model = copy.deepcopy(model).float().eval().requires_grad_(True)
        self.mems = self.model.start_memory(coding.streams, coding.mem_len)
        # A round is one segment, as in the predictor.
        self._lengths = lengths(model, coding.mem_len)._replace(segment_len=AT_ONCE)
        self._step = 0
        muon: dict[str, Any] = {}
        if learning.optimizer == "muon":
            muon = {"muon_lr": _MUON_LR * learning.lr}
        settings = self._settings = TrainConfig(
            steps=coding.n_rounds,
            lr=learning.lr,
            beta2=0.98,
            weight_decay=0.0,
            schedule="constant_cooldown",
            cooldown_fraction=0.8,
            min_lr_ratio=0.1,
            warmup_steps=min(20, coding.n_rounds),
            precision="float32",
            optimizer=learning.optimizer,
            **muon,
        )
        self._optimizer = Optimizer(self.model, settings)

    def learn(self, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"]) -> None:
        """Read a round again, with its targets, and update the weights."""
        (piece,) = read(self.model, tokens, self._lengths, self.mems, targets=targets)
        assert piece.nll is not None
        piece.nll.mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step(lr_scale(self._settings, self._step, self._settings.steps))
        self._step += 1
        self.mems = piece.mems


def fresh_model(seed: int = 0) -> LanguageModel:
    """Initialize the untrained model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(FRESH).eval()


@contextmanager
def reproducible(threads: int) -> Iterator[None]:
    """Compute with deterministic algorithms and a fixed number of threads in a ``with`` block.

    The settings are those of the process, and are restored afterwards.

    Args:
        threads: Number of threads of an operator; results depend on it.
    """
    # cuBLAS reads it before its first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    n_threads, details = torch.get_num_threads(), cast(Any, torch.utils.deterministic)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_filling = details.fill_uninitialized_memory
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # No uninitialized memory is read here, and filling it takes time.
    details.fill_uninitialized_memory = False
    try:
        yield
    finally:
        details.fill_uninitialized_memory = was_filling
        torch.use_deterministic_algorithms(was_deterministic)
        torch.set_num_threads(n_threads)


class Predictor:
    """Reads a batch of streams in chunks of any length and predicts every next symbol.

    A prediction uses the last symbol and the ``mem_len`` before it, however the stream is split
    into chunks, up to rounding. A copy of the model computes in double precision, whose rounding is
    far below the tolerance of the coder; with ``exact_frequencies`` that of the frequencies of its
    positions, too.
    """

    def __init__(
        self, model: LanguageModel, streams: int, mem_len: int, *, exact_frequencies: bool = True
    ) -> None:
        self.model = copy.deepcopy(model).double().eval().requires_grad_(False)
        if exact_frequencies:
            self.model.frequency_precision = torch.float64
        self.lengths = lengths(model, mem_len)
        self._at: Memory | Decoder
        self._at = self.model.keep(self.model.start_memory(streams, mem_len))

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "B T"]) -> Float64[Tensor, "B T V"]:
        """Read the next chunk; return, for each position, log p of every next symbol."""
        if tokens.shape[1] == 1:
            if isinstance(self._at, Memory):
                self._at = Decoder.of(self.model, self.lengths, self._at)
            return self.model.head.log_probs(self._at(tokens[:, 0])[:, None])
        if isinstance(self._at, Decoder):
            self._at = self._at.memory()
        hidden = []
        for piece in read(self.model, tokens, self.lengths, self._at):
            self._at = piece.mems
            hidden.append(piece.hidden)
        return self.model.head.log_probs(torch.cat(hidden, 1))

    @torch.no_grad()
    def follow(self, model: LanguageModel, mems: Memory) -> None:
        """Take over the weights and the memory of another model with the same settings."""
        for weight, other in zip(self.model.parameters(), model.parameters(), strict=True):
            weight.copy_(other)
        self._at = self.model.keep(mems.to(self.model.device, torch.float64))


def lengths(model: LanguageModel, mem_len: int) -> Lengths:
    """Return lengths with which each symbol attends to the same number of symbols before it.

    Where results depend on the bounds of segments (absolute positions count from the start of a
    segment, an enhanced memory holds other states, a recurrence of the inputs without memory ends
    with its segment), symbols are read one by one.
    """
    ends_with_segment = model.config.input_recurrence and not mem_len
    at_once = 1 if model.depends_on_segments or ends_with_segment else AT_ONCE
    read = Lengths.of(model.config, segment_len=at_once, mem_len=mem_len, ext_len=0)
    return read.windowed(model.config)


def start_symbol(model: LanguageModel) -> int:
    """Return the symbol that is read before each stream: a line break, if the model has it."""
    return ord("\n") if ord("\n") < model.config.vocab_size else 0


def fingerprint(model: LanguageModel, vocab_hash: str) -> bytes:
    """Return a hash of 16 bytes of the weights, the settings and the vocabulary."""
    digest = hashlib.blake2b(vocab_hash.encode(), digest_size=16)
    # Only settings that are not defaults, so that settings added by later versions do not matter.
    default = dataclasses.asdict(ModelConfig())
    settings = dataclasses.asdict(model.config) | dict(model.left_out)
    changed = {name: x for name, x in settings.items() if x != default.get(name)}
    digest.update(json.dumps(changed, sort_keys=True).encode())
    for name, weight in sorted(model.named_weights().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.flatten().view(torch.uint8).numpy().data)
    return digest.digest()
