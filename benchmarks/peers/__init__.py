"""Language models with a memory, ours and others, behind one interface.

Each module here has a class ``Peer`` derived from the one below. What it imports beyond our
own dependencies lies in a folder of its own, ``.peers/NAME`` at the root of the project, which
``benchmarks/peers/install NAME`` makes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from shapes import Job
from torch import Tensor

ENVIRONMENTS = Path(__file__).parents[2] / ".peers"


class Peer(ABC):
    """A model that reads segments and remembers them."""

    model: Any
    """The module that has the weights."""
    can_be_captured = False
    """Whether it copies what it keeps of a step, which the next replay of a graph overwrites."""
    is_captured = False
    """Whether the steps are replayed."""

    @abstractmethod
    def __init__(self, job: Job, variant: str) -> None:
        """Build the model with random weights."""

    def reduce_weights(self, job: Job) -> None:
        """Quantize the weights, for evaluation and generation."""
        self.model.bfloat16()

    def compile(self, job: Job) -> None:
        """Compile the model; on a GPU the steps of a training are replayed as CUDA graphs."""
        options = None
        if job.device == "cuda" and job.work == "training" and self.can_be_captured:
            # As training compiles a model of ours.
            try:
                from transformer_xl.train.runner import CAPTURED
            except ModuleNotFoundError:
                # A revision from before there was that.
                from transformer_xl.train.step import CAPTURED

            options, self.is_captured = CAPTURED, True
        self.model.compile(options=options)

    @abstractmethod
    def remember(self) -> None:
        """Fill the memory with as many random states as it holds."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Read a segment (B, T) with the memory, which moves on; return the mean loss in nats."""
        return F.cross_entropy(self.read(tokens).flatten(0, 1).float(), targets.flatten())

    def scores(self, tokens: Tensor) -> Tensor:
        """Read a segment with the memory, which moves on; score what follows it, (B, V)."""
        return self.read(tokens)[:, -1]

    def read(self, tokens: Tensor) -> Tensor:
        """Read a segment with the memory, which moves on; return the logits, (B, T, V)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Way:
    """A model to measure."""

    module: str
    """The file here that has it."""
    variant: str = ""
    environment: str | None = None
    """The folder of what it needs beyond our own dependencies."""
    has_positions: bool = True
    """Whether its scores have a position term."""

    @property
    def paths(self) -> list[Path]:
        """Where its modules are looked for first."""
        return [] if self.environment is None else [ENVIRONMENTS / self.environment]

    @property
    def missing(self) -> str | None:
        """The command that installs what it needs; None if that is there."""
        if all(path.is_dir() for path in self.paths):
            return None
        return f"benchmarks/peers/install {self.environment}"

    @property
    def requirement(self) -> str:
        """The package it is, with its version."""
        listed = Path(__file__).with_name(f"{self.environment}.txt").read_text().splitlines()
        return next(line for line in listed if not line.startswith("#"))


WAYS = {
    "ours": Way("ours", "auto"),
    "ours_reference": Way("ours", "reference"),
    "ours_skew": Way("ours", "skew"),
    "ours_triton": Way("ours", "triton"),
    "ours_called": Way("ours", "called"),
    "ours_layers": Way("ours", "layers"),
    "huggingface": Way("huggingface", environment="huggingface"),
    "x_transformers_t5": Way("x_transformers", "t5", "x_transformers", has_positions=False),
    "x_transformers_rotary": Way("x_transformers", "rotary", "x_transformers", has_positions=False),
    "labml": Way("labml", environment="labml"),
    "gpt": Way("gpt", "states", has_positions=False),
    "gpt_kept": Way("gpt", "kept", has_positions=False),
}


def build(way: str, job: Job) -> Peer:
    """Build a model on the device and in the precision of the job, with a full memory."""
    torch.manual_seed(0)
    module = import_module(f"peers.{WAYS[way].module}")
    peer: Peer = module.Peer(job, WAYS[way].variant)
    peer.model.to(job.device).train(job.work == "training")
    if job.precision.endswith("_weights"):
        peer.reduce_weights(job)
    if job.compiled:
        peer.compile(job)
    with torch.no_grad():
        peer.remember()
    return peer
