"""Everything that training changes, and how it is saved."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from transformer_xl.config import Config, TrainConfig
from transformer_xl.data import Segments
from transformer_xl.nn import KeptMemory, Memory, TransformerXL
from transformer_xl.train.averaging import average_start
from transformer_xl.train.lengths import VaryingSegments, random_segment_len, stage_at
from transformer_xl.train.optim import Optimizer


@dataclass
class TrainState:
    """Everything that training changes."""

    model: TransformerXL
    optimizer: Optimizer
    segments: Segments
    mems: list[Memory | KeptMemory | None]
    """The memory of the streams, one for each part of an accumulated step."""
    total_steps: int
    corpus: dict[str, str]
    """Checksums of the vocabulary and the tokens."""
    step: int = 0
    """Updates made so far."""
    seconds: float = 0.0
    """Time spent in steps, over all parts of the run."""
    end_is_fixed: bool = True
    """False while a run with a time limit may still move ``total_steps``."""
    cooldown_steps: int | None = None
    """Length of the cooldown, where a time limit decides it."""
    best: float = math.inf
    """Lowest validation loss so far."""
    losses: list[float | Tensor] = field(default_factory=list)
    """Losses since the last line of the log; where they were computed, until they are read."""
    tokens: int = 0
    """Tokens read since the last line of the log or the beginning of this part of the run."""
    stage: int = 0
    """Which of ``stages`` it is in."""
    stage_step: int = 0
    """Updates made before the stage began."""
    stage_seconds: float = 0.0
    """Time spent in steps before the stage began."""
    average: AveragedModel | None = None
    """The average of the weights, if one is kept."""

    @property
    def shown(self) -> TransformerXL:
        """The model that is evaluated and kept: the average, once it has begun."""
        if self.average is None or not self.average.n_averaged:
            return self.model
        # Its class, which torch does not know.
        assert isinstance(self.average.module, TransformerXL)
        return self.average.module

    def progress(self, config: TrainConfig) -> float:
        """Return the share of the training that is done: of the steps, or of the minutes."""
        done = self.step / self.total_steps
        if self.end_is_fixed or config.minutes is None:
            return done
        return max(done, self.seconds / (60 * config.minutes))

    def next_lengths(self, config: Config) -> tuple[int, int]:
        """Return how many tokens a stream reads in the next step, and how many it remembers."""
        settings = config.train
        segment_len, mem_len = settings.segment_len, config.model.mem_len
        if settings.stages:
            stage = stage_at(settings.stages, self.progress(settings))
            if stage > self.stage:
                self.stage, self.stage_step, self.stage_seconds = stage, self.step, self.seconds
            _, segment_len, mem_len = settings.stages[self.stage]
        if settings.random_segment_len:
            segment_len = random_segment_len(segment_len, settings.seed, self.step)
        if isinstance(self.segments, VaryingSegments):
            self.segments.length = segment_len
        return segment_len, mem_len

    def add_to_average(self, config: TrainConfig) -> None:
        """Take the present weights into the average, where one is kept and has begun."""
        if self.average is None:
            return
        # Once begun it goes on, also where a corrected end moves the share of what is done.
        if self.average.n_averaged or self.progress(config) > average_start(config):
            self.average.update_parameters(self.model)

    def read_losses(self) -> list[float]:
        """Return the losses as numbers: this waits for the device, a step does not."""
        numbers = [float(loss) for loss in self.losses]
        self.losses = [*numbers]
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Return all but the weights, as tensors and numbers."""
        self.read_losses()
        device = self.model.device
        return {
            "optimizer": self.optimizer.state_dict(),
            "segments": self.segments.state_dict(),
            "mems": [None if m is None else m.state_dict() for m in self.mems],
            "average": None if self.average is None else self.average.state_dict(),
            "corpus": self.corpus,
            "random": torch.get_rng_state(),
            "random_cuda": None if device.type == "cpu" else torch.cuda.get_rng_state(device),
            **{name: getattr(self, name) for name in sorted(self._NUMBERS)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: The state belongs to a run on another text.
        """
        device = self.model.device
        if state["corpus"] != self.corpus:
            raise ValueError(
                "the text is not the one that the run began with: its tokens have another "
                "checksum. Give that text, or another --out"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.segments.load_state_dict(state["segments"])
        self.mems = [
            None if m is None else Memory.from_state_dict(m).to(device) for m in state["mems"]
        ]
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None and device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"], device)
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        # Checkpoints of earlier versions know fewer.
        for name in self._NUMBERS & state.keys():
            setattr(self, name, state[name])

    _NUMBERS = frozenset(
        {
            *("total_steps", "step", "seconds", "end_is_fixed", "best", "losses"),
            *("stage", "stage_step", "stage_seconds", "cooldown_steps"),
        }
    )
