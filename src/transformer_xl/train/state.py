"""The state of training, including varying segment lengths, and how it is saved."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from transformer_xl.config import Config, TrainConfig, World
from transformer_xl.data import Segments
from transformer_xl.errors import DataError
from transformer_xl.model import LanguageModel, Memory
from transformer_xl.train.checkpoint.checkpoints import (
    allocate,
    read_about,
    read_metadata,
    read_tensors,
)
from transformer_xl.train.checkpoint.run_folder import OF_RAW_TEXT
from transformer_xl.train.optim import Average, Optimizer, lr_scale

DEVIATION = 5
"""Standard deviation of random segment lengths (Merity et al., 2017, arXiv 1708.02182)."""


def stage_at(stages: Sequence[tuple[float, int, int]], progress: float) -> int:
    """Return the index of the stage at a progress between 0 and 1."""
    return sum(start <= progress for start, _, _ in stages) - 1


def longest_segment(config: TrainConfig) -> int:
    """Return the maximum segment length of a training."""
    longest = max((segment_len for _, segment_len, _ in config.stages), default=config.segment_len)
    return longest + 3 * DEVIATION if config.random_segment_len else longest


def random_segment_len(segment_len: int, seed: int, step: int) -> int:
    """Draw a segment length around ``segment_len``, or with probability 0.05 around its half.

    A function of seed and step, so that a resumed run draws the same lengths. Clamped to 5 and to
    three standard deviations above ``segment_len``.
    """
    draw = random.Random(f"{seed} {step}")
    middle = segment_len if draw.random() < 0.95 else segment_len / 2
    length = round(draw.gauss(middle, DEVIATION))
    return min(max(length, min(5, segment_len)), segment_len + 3 * DEVIATION)


_SAVED = (
    *("best", "cooldown_steps", "end_is_fixed", "loss_scale", "losses", "n_finite", "seconds"),
    *("skipped", "skipped_in_a_row", "stage", "stage_seconds", "stage_step", "step"),
    *("total_steps", "validation"),
)
"""Attributes of the state that are saved as JSON; checkpoints of earlier versions lack some."""
INITIAL_LOSS_SCALE = 65_536.0
"""Loss scale of float16 at the start; this and the next one are those of PyTorch's GradScaler."""
GROWS_AFTER = 2_000
"""Updates without overflow after which the loss scale is doubled."""


@dataclass
class TrainState:
    """The state of training: model, optimizer, position in the text, memory and counters."""

    model: LanguageModel
    optimizer: Optimizer
    segments: Segments
    mems: list[Memory | None]
    """The memory of the streams of this process, one for each part of an accumulated step."""
    total_steps: int
    corpus: dict[str, str]
    """Checksums of the vocabulary and the tokens."""
    world: World = field(default_factory=World)
    step: int = 0
    """Number of steps so far, including skipped updates."""
    seconds: float = 0.0
    """Time spent in steps."""
    end_is_fixed: bool = True
    """False while a time limit may still change ``total_steps``."""
    cooldown_steps: float | None = None
    """Length of the cooldown, if a time limit determines it."""
    best: float = math.inf
    """Lowest validation loss so far."""
    validation: dict[str, int | None] = field(default_factory=dict)
    """The settings that a validation loss depends on; those with others cannot be compared."""
    losses: list[float | Tensor] = field(default_factory=list)
    """Losses since the last log record, on the device until they are read."""
    skipped: int = 0
    skipped_in_a_row: int = 0
    loss_scale: float = 1.0
    """Factor of the loss in the backward pass; 1 unless in float16."""
    n_finite: int = 0
    """Updates without overflow since the loss scale changed."""
    tokens: int = 0
    """Tokens read since the last log record, or since the start or resumption."""
    stage: int = 0
    """Index of the current stage."""
    stage_step: int = 0
    stage_seconds: float = 0.0
    """Steps, and time spent in them, before the current stage."""
    average: Average | None = None

    @property
    def shown(self) -> LanguageModel:
        """The model to evaluate and keep: the average once averaging has started."""
        if self.average is None or not self.average.n_averaged:
            return self.model
        return cast("LanguageModel", self.average.module)

    def progress(self, config: TrainConfig) -> float:
        """Return the progress of training, between 0 and 1: of the steps, or of the time limit."""
        done = self.step / self.total_steps
        if self.end_is_fixed or config.minutes is None:
            return done
        return max(done, self.seconds / (60 * config.minutes))

    def lr_scale(self, config: TrainConfig) -> float:
        """Return the learning rate of the next step, as a share of the peak."""
        return lr_scale(config, self.step, self.total_steps, self.cooldown_steps)

    def adapt_loss_scale(self, config: TrainConfig, *, is_finite: bool) -> None:
        """Update the loss scale of float16 after a backward pass."""
        if config.precision != "float16":
            return
        self.n_finite = self.n_finite + 1 if is_finite else 0
        if not is_finite:
            self.loss_scale /= 2
        elif self.n_finite == GROWS_AFTER:
            self.loss_scale, self.n_finite = 2 * self.loss_scale, 0

    def next_lengths(self, config: Config) -> tuple[int, float]:
        """Set the length of the next segment, which varies with stages and random lengths.

        Returns:
            The memory length, and a factor of the learning rates: otherwise tokens of short
            segments would have more weight than those of long ones.
        """
        settings = config.train
        segment_len, mem_len = settings.segment_len, config.model.mem_len
        if settings.stages:
            stage = stage_at(settings.stages, self.progress(settings))
            if stage > self.stage:
                self.stage, self.stage_step, self.stage_seconds = stage, self.step, self.seconds
            _, segment_len, mem_len = settings.stages[self.stage]
        self.segments.length = segment_len
        if settings.random_segment_len:
            self.segments.length = random_segment_len(segment_len, settings.seed, self.step)
        return mem_len, self.segments.length / segment_len

    def add_to_average(self, config: TrainConfig) -> None:
        """Update the average of the weights, if averaging has started."""
        if self.average is None:
            return
        start = config.average_start
        if start is None:
            start = 0.0 if config.average == "ema" else 1 - config.cooldown_fraction
        # Averaging never stops, although the progress may decrease when a time limit moves the end.
        if self.average.n_averaged or self.progress(config) > start:
            self.average.update_parameters(self.model)

    def read_losses(self) -> list[float]:
        """Return the losses, averaged over all processes; synchronizes the device. Collective."""
        losses = self.world.mean([float(loss) for loss in self.losses])
        self.losses = [*losses]
        return losses

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state, by name.

        ``model.…``, ``average.…`` and ``optimizer.…`` are replicated or sharded. ``mems.…`` are
        sharded by stream. ``random.…`` are the random number generator states of each process.
        """
        tensors = {f"model.{name}": x for name, x in self.model.named_parameters()}
        if self.average is not None:
            averaged = self.average.module.named_parameters()
            tensors |= {f"average.{name}": x for name, x in averaged}
        tensors |= self.optimizer.tensors()
        mems = [m for m in self.mems if m is not None]
        for n, parts in enumerate(zip(*(m.states for m in mems), strict=True)):
            tensors[f"mems.{n}"] = self._of_streams(torch.cat(parts))
        if forgotten := [m.forgotten for m in mems if m.forgotten is not None]:
            tensors["mems.forgotten"] = self._of_streams(torch.cat(forgotten))
        tensors[f"random.{self.world.rank}"] = torch.get_rng_state()
        if (device := self.model.device).type == "cuda":
            tensors[f"random_cuda.{self.world.rank}"] = torch.cuda.get_rng_state(device)
        return tensors

    def about(self) -> dict[str, object]:
        """Return the rest of the state, and the corpus that it belongs to, for JSON."""
        self.read_losses()
        return {
            "processes": self.world.size,
            "segments": self.segments.state_dict(),
            "corpus": self.corpus,
            "averaged": 0 if self.average is None else self.average.n_averaged,
            "shown": "model" if self.shown is self.model else "average",
            **{name: getattr(self, name) for name in _SAVED},
        }

    def load(self, checkpoint: Path) -> None:
        """Resume from a checkpoint, written by any number of processes. Collective.

        With another number of processes, the random numbers of dropout differ.

        Raises:
            DataError: The checkpoint belongs to a run on another text.
            CheckpointError: The checkpoint does not fit the model.
        """
        about, metadata = read_about(checkpoint), read_metadata(checkpoint)
        if about["corpus"] != self.corpus:
            raise DataError(
                "the text is not the one that the run began with: its tokens have another "
                f"checksum. Give that text, or another --out; {OF_RAW_TEXT}"
            )
        self.segments.load_state_dict(about["segments"])
        for name in _SAVED:
            setattr(self, name, about.get(name, getattr(self, name)))
        # Earlier versions stored NaN for an update without a target.
        self.losses = [loss for loss in self.losses if not math.isnan(loss)]
        if self.average is not None:
            self.average.n_averaged = about["averaged"]
        self.mems = [None] * len(self.mems)
        self.optimizer.allocate(metadata)
        # Loaded in place.
        buffers, device = self.tensors(), self.model.device
        generators = {name for name in buffers if name.startswith("random")}
        is_same_world = about["processes"] == self.world.size and generators <= metadata.keys()
        if not is_same_world:
            buffers = {name: x for name, x in buffers.items() if name not in generators}
        remembered = [name for name in metadata if name.startswith("mems.")]
        for name in remembered:
            whole = allocate(metadata[name])
            rows = len(self.world.rows(len(whole)))
            buffers[name] = self._of_streams(whole.new_empty(rows, *whole.shape[1:], device=device))
        read_tensors(checkpoint, buffers, self.world)
        if remembered:
            parts = {name: local(buffers[name]).chunk(len(self.mems)) for name in remembered}
            forgotten = parts.pop("mems.forgotten", [None] * len(self.mems))
            states = zip(*(parts[f"mems.{n}"] for n in range(len(parts))), strict=True)
            self.mems = [Memory(*memory) for memory in zip(states, forgotten, strict=True)]
        if not is_same_world:
            self.world.seed_apart(self.step)
            return
        torch.set_rng_state(buffers[f"random.{self.world.rank}"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(buffers[f"random_cuda.{self.world.rank}"], device)

    def _of_streams(self, rows: Tensor) -> Tensor:
        """Return a tensor of the streams of this process as a shard of that of all streams."""
        if self.world.size == 1:
            return rows
        assert self.world.mesh is not None
        rows = rows.contiguous()
        shape = torch.Size((len(rows) * self.world.size, *rows.shape[1:]))
        return DTensor.from_local(
            rows, self.world.mesh, [Shard(0)], run_check=False, shape=shape, stride=rows.stride()
        )


def local(x: Tensor) -> Tensor:
    """Return the local shard of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x
