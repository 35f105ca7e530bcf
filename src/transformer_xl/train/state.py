"""Everything that training changes, lengths that vary among it, and how it is saved."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel

from transformer_xl.config import Config, TrainConfig
from transformer_xl.config.distributed import World
from transformer_xl.config.training import Stage
from transformer_xl.data import Segments
from transformer_xl.data.segments import SegmentsState
from transformer_xl.data.tokens import Tokens
from transformer_xl.model import LanguageModel, Memory, TransformerXL
from transformer_xl.train.checkpoint.checkpoints import Checkpoints, empty, read_about, stored
from transformer_xl.train.optim import Optimizer, average_start

DEVIATION = 5
"""Standard deviation of a random length (Merity et al. 2017, arXiv 1708.02182)."""


def stage_at(stages: Sequence[Stage], progress: float) -> int:
    """Return the number of the stage at a point of the training, given as a share of it."""
    return sum(start <= progress for start, _, _ in stages) - 1


def longest_segment(config: TrainConfig) -> int:
    """Return the largest number of tokens that a stream may read in a step."""
    longest = max((segment_len for _, segment_len, _ in config.stages), default=config.segment_len)
    return longest + 3 * DEVIATION if config.random_segment_len else longest


def random_segment_len(segment_len: int, seed: int, step: int) -> int:
    """Draw the length of a segment around ``segment_len``, or in one case of twenty its half.

    A function of the seed and the step, so that a run that goes on draws what it would have drawn.
    What lies three deviations above ``segment_len`` is cut off there, and 5 is the least.
    """
    draw = random.Random(f"{seed} {step}")
    middle = segment_len if draw.random() < 0.95 else segment_len / 2
    length = round(draw.gauss(middle, DEVIATION))
    return min(max(length, min(5, segment_len)), segment_len + 3 * DEVIATION)


class VaryingSegmentsState(SegmentsState):
    """What :meth:`VaryingSegments.state_dict` saves."""

    position: int


class VaryingSegments(Segments):
    """Segments whose length may change between two of them; the streams never break.

    The length of the next one is :attr:`length`; the other arguments are those of
    :class:`~transformer_xl.data.Segments`.

    Args:
        longest: The largest length.
    """

    def __init__(
        self,
        tokens: Tokens,
        batch_size: int,
        longest: int,
        ext_len: int = 0,
        rows: range | None = None,
        roll_seed: int | None = None,
    ) -> None:
        super().__init__(tokens, batch_size, longest, ext_len, rows, roll_seed)
        self.position = 0

    @property
    def tokens_read(self) -> int:
        """How many tokens of each stream were read."""
        return self.position

    def next_segment(self) -> tuple[Int64[Tensor, "B T"], Int64[Tensor, "B predicted"]]:
        """Return the next ``length`` tokens of each stream and the token that follows each."""
        found = super().next_segment()
        self.position += self.length
        return found

    def state_dict(self) -> VaryingSegmentsState:
        """Return the position, and what it was counted in."""
        return {**super().state_dict(), "position": self.position}

    def load_state_dict(self, state: VaryingSegmentsState) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Continue where the state was saved.

        Raises:
            ValueError: The state counts segments of another shape or of another text.
        """
        super().load_state_dict(state)
        self.position = state["position"]


@dataclass
class TrainState:
    """Everything that training changes."""

    model: LanguageModel
    optimizer: Optimizer
    segments: Segments
    mems: list[Memory | None]
    """The memory of the streams of this process, one for each part of an accumulated step."""
    total_steps: int
    corpus: dict[str, str]
    """Checksums of the vocabulary and the tokens."""
    world: World = field(default_factory=World)
    """The processes that train together."""
    step: int = 0
    """Updates made so far; those that were left out count."""
    seconds: float = 0.0
    """Time spent in steps, over all parts of the run."""
    end_is_fixed: bool = True
    """False while a run with a time limit may still move ``total_steps``."""
    cooldown_steps: float | None = None
    """Length of the cooldown, where a time limit decides it."""
    best: float = math.inf
    """Lowest validation loss so far."""
    losses: list[float | Tensor] = field(default_factory=list)
    """Losses since the last line of the log; where they were computed, until they are read."""
    offsets: list[int] = field(default_factory=list)
    """Where the segments of these losses begin, in tokens after the beginning of each stream."""
    usual_loss: float | None = None
    """Running mean of the losses that were read."""
    usual_norm: float | None = None
    """Running mean of the norms of the gradient."""
    skipped: int = 0
    """Updates that were left out."""
    skipped_in_a_row: int = 0
    """Updates that were left out since the last one that was made."""
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
    def shown(self) -> LanguageModel:
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
        """Return the losses as numbers, means over all processes, which all must ask for them.

        This waits for the device; a step does not.
        """
        numbers = self.world.mean([float(loss) for loss in self.losses])
        self.losses = [*numbers]
        return numbers

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that training changes, by name.

        ``model.…``, ``average.…`` and ``optimizer.…`` are the same in all processes, or
        distributed over them. ``mems.…`` are distributed: of all streams in their order, each
        process has its own. ``random.…`` are the states of the random numbers of each process.
        """
        found = {f"model.{name}": x for name, x in self.model.named_parameters()}
        if self.average is not None:
            averaged = self.average.module.named_parameters()
            found |= {f"average.{name}": x for name, x in averaged}
        found |= self.optimizer.tensors()
        mems = [m for m in self.mems if isinstance(m, Memory)]
        if mems:
            for n, parts in enumerate(zip(*(m.states for m in mems), strict=True)):
                found[f"mems.{n}"] = self._of_streams(torch.cat(parts))
            forgotten = [m.forgotten for m in mems if m.forgotten is not None]
            if forgotten:
                found["mems.forgotten"] = self._of_streams(torch.cat(forgotten))
        found[f"random.{self.world.rank}"] = torch.get_rng_state()
        if (device := self.model.device).type == "cuda":
            found[f"random_cuda.{self.world.rank}"] = torch.cuda.get_rng_state(device)
        return found

    def about(self) -> dict[str, Any]:
        """Return all else that training changes, and what the tensors belong to."""
        self.read_losses()
        return {
            "processes": self.world.size,
            "segments": self.segments.state_dict(),
            "corpus": self.corpus,
            "averaged": 0 if self.average is None else int(self.average.n_averaged),
            "shown": "model" if self.shown is self.model else "average",
            **{name: getattr(self, name) for name in sorted(self._NUMBERS)},
        }

    def load(self, checkpoints: Checkpoints, checkpoint: Path) -> None:
        """Go on from a checkpoint, which any number of processes may have written.

        Where their number is another one, dropout draws other numbers than it would have drawn.

        Raises:
            ValueError: The checkpoint belongs to a run on another text.
            RuntimeError: It does not fit the model.
        """
        about, found = read_about(checkpoint), stored(checkpoint)
        if about["corpus"] != self.corpus:
            raise ValueError(
                "the text is not the one that the run began with: its tokens have another "
                "checksum. Give that text, or another --out"
            )
        self.segments.load_state_dict(about["segments"])
        for name in self._NUMBERS:
            setattr(self, name, about[name])
        if self.average is not None:
            self.average.n_averaged.fill_(about["averaged"])
        self.mems = [None] * len(self.mems)
        self.optimizer.make_room(found)
        # All that is there by now is read in place.
        rooms = {name: x for name, x in self.tensors().items() if not name.startswith("random")}
        kinds = ("random", "random_cuda") if self.model.device.type == "cuda" else ("random",)
        own = [f"{kind}.{self.world.rank}" for kind in kinds]
        is_same_world = about["processes"] == self.world.size and set(own) <= found.keys()
        if is_same_world:
            rooms |= {name: empty(name, found) for name in own}
        device = self.model.device
        remembered = [name for name in found if name.startswith("mems.")]
        for name in remembered:
            whole = empty(name, found)
            n_own = len(self.world.rows(len(whole)))
            rooms[name] = self._of_streams(whole.new_empty(n_own, *whole.shape[1:], device=device))
        checkpoints.load(checkpoint, rooms)
        if remembered:
            self._remember({name.removeprefix("mems."): local(rooms[name]) for name in remembered})
        if is_same_world:
            torch.set_rng_state(rooms[own[0]])
            if device.type == "cuda":
                torch.cuda.set_rng_state(rooms[own[1]], device)
        else:
            self.world.seed_apart(self.step)

    def _of_streams(self, own: Tensor) -> Tensor:
        """Return a tensor of the streams of this process as a part of that of all streams."""
        if self.world.size == 1:
            return own
        assert self.world.mesh is not None
        own = own.contiguous()
        shape = torch.Size((len(own) * self.world.size, *own.shape[1:]))
        return DTensor.from_local(
            own, self.world.mesh, [Shard(0)], run_check=False, shape=shape, stride=own.stride()
        )

    def _remember(self, found: dict[str, Tensor]) -> None:
        forgotten = found.pop("forgotten", None)
        states = [found[str(n)] for n in range(len(found))]
        parts = len(self.mems)
        of_parts = zip(*(x.chunk(parts) for x in states), strict=True)
        unseen = [None] * parts if forgotten is None else forgotten.chunk(parts)
        self.mems = [Memory(own, hidden) for own, hidden in zip(of_parts, unseen, strict=True)]

    _NUMBERS = frozenset(
        {
            *("total_steps", "step", "seconds", "end_is_fixed", "best", "losses", "offsets"),
            *("stage", "stage_step", "stage_seconds", "cooldown_steps"),
            *("usual_loss", "usual_norm", "skipped", "skipped_in_a_row"),
        }
    )


def local(x: Tensor) -> Tensor:
    """Return what this process holds of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x
