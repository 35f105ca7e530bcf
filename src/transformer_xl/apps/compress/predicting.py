"""What a model says of the next symbol, in numbers that two computations agree on."""

import copy
import dataclasses
import hashlib
import json

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.model import LanguageModel, Memory
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.pretrained import model_weights
from transformer_xl.model.reading import read

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
