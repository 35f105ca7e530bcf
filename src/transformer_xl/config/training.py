"""Settings of training."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

from transformer_xl.config.checks import (
    Count,
    Fraction,
    Integer,
    Length,
    NotNegative,
    Positive,
    Share,
    Unused,
    check,
    refuse_unused,
    require,
)

Stage = tuple[Fraction, Count, Length]
"""Where in the training it starts, its segment_len and its mem_len. No named tuple, as the command
line has no way to write several of those."""

_WITHOUT = {
    "adamw": ("muon_lr", "momentum"),
    "lamb": ("muon_lr", "momentum"),
    "muon": ("momentum",),
    "sgd": ("muon_lr", "beta1", "beta2", "eps"),
}
"""The settings that an optimizer does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the model is trained. A step is one update of the weights.

    Example:
        >>> TrainConfig(steps=1000, batch_size=16, segment_len=128).optimizer
        'adamw'
    """

    steps: Count = 10_000
    """Number of steps (updates of the weights)."""
    minutes: Positive | None = None
    """Time limit in minutes spent in steps; evaluations and the report come on top. The cooldown
    starts early enough; if its steps turn out slower, it is shortened, so that the last step ends
    at most 10 % late. Needs constant_cooldown."""
    batch_size: Count = 32
    """Number of streams in a batch; each keeps its own memory."""
    segment_len: Count = 128
    """Tokens of each stream in a step."""
    stages: tuple[Stage, ...] = ()
    """Curriculum of lengths, as [start, segment_len, mem_len]: the start is a share of the steps
    (with a time limit: of the minutes). The number of streams stays, so longer segments make larger
    batches. The first starts at 0; the last has train.segment_len and model.mem_len."""
    random_segment_len: bool = False
    """Draw the length of each segment at random: normal around segment_len with standard deviation
    5, one in twenty around half of it; the learning rate is scaled with it (Merity et al., arXiv
    1708.02182)."""
    random_mem_len: Count | None = None
    """Read only the newest part of the memory, of a random length in each step: mem_len, its half,
    quarter and so on down to this number, each as often. All of it is kept (SWAX, arXiv 2509.24552,
    draws windows instead). None: all is read."""
    roll: bool = False
    """In each epoch, rotate the text of each stream by a random offset, so that segment boundaries
    differ (NVIDIA's --roll). Without it, a stream that is at its end goes on with the next one's
    text."""
    accumulate: Count = 1
    """Gradient accumulation: number of parts in which each process computes the streams of a step
    to save memory; the gradient is the same."""
    loss: Literal["full", "half"] = "full"
    """Train on all tokens of a segment, or on its second half only (Table 6 of the paper)."""
    activation_reg: NotNegative = 0.0
    """Activation regularization (AR; Merity et al., 2017): weight of the mean square of the last
    layer's output after dropout."""
    temporal_activation_reg: NotNegative = 0.0
    """Temporal activation regularization (TAR): weight of the mean squared difference between
    consecutive outputs of the last layer before dropout."""
    prompt_loss_weight: Share = 0.0
    """With data.completion_at: weight in the loss of the tokens outside of completions, which have
    weight 1."""
    reset_memory: Fraction = 0.0
    """Probability that the memory of a stream is reset before a segment, so that a model also
    learns short contexts; otherwise only the first segment of the training and data.reset_at have
    them. The logged loss of the training includes these segments, and is higher."""
    optimizer: Literal["adamw", "muon", "lamb", "sgd"] = "adamw"
    """AdamW, LAMB or SGD for all weights, or Muon for the matrices inside the layers and
    AdamW for the rest."""
    lr: Positive = 2.5e-4
    """Peak learning rate of all optimizers but Muon."""
    embedding_lr: Positive = 1.0
    """Learning rate of the token embeddings, as a multiple of that of the other weights."""
    muon_lr: Positive = 0.02
    """Peak learning rate of Muon."""
    momentum: Fraction = 0.0
    """Momentum of SGD."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of the matrices."""
    beta1: Fraction = 0.9
    """beta1 of AdamW and LAMB."""
    beta2: Fraction = 0.999
    """beta2 of AdamW and LAMB."""
    eps: Positive = 1e-8
    """Epsilon of AdamW and LAMB."""
    schedule: Literal["cosine", "inverse_sqrt", "constant_cooldown"] = "cosine"
    """Learning rate schedule after the warmup: cosine, inverse square root, or constant with a
    linear cooldown."""
    warmup_steps: Length = 0
    """Steps of linear warmup."""
    cooldown_fraction: Share = 0.3
    """Share of the steps in the cooldown of constant_cooldown."""
    min_lr_ratio: Share = 0.0
    """Final learning rate (inverse_sqrt: the lowest), as a share of the peak."""
    clip_norm: NotNegative = 0.25
    """Gradient clipping: largest norm of the gradient. 0: no clipping."""
    average: Literal["none", "ema", "tail"] = "none"
    """Which weights to evaluate and keep: the last ones, an exponential moving average (ema), or
    the mean since average_start (tail)."""
    average_decay: Fraction = 0.999
    """Decay of the exponential moving average per step."""
    average_start: Share | None = None
    """Share of the training after which averaging begins; None: at once for ema, with the cooldown
    (1 - cooldown_fraction) for tail."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of matrix products (autocast); auto: bfloat16 where the hardware supports it. With
    float16 the loss is scaled in the backward pass, so that small gradients are not rounded to
    zero: by 65,536, halved when a gradient overflows, doubled after 2,000 updates without
    overflow."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What the processes that torchrun started share: gradients (DDP), or also weights and
    optimizer state (FSDP2). The batch is divided either way."""
    recompute: bool = False
    """Activation checkpointing: compute the activations inside the layers again in the backward
    pass; about a third more compute for much less memory."""
    init_from: str | None = None
    """Fine-tuning: the model with the initial weights, by its folder or name, of the same
    architecture and vocabulary. None: random initialization."""
    compile: bool | Literal["layers"] = False
    """Compile the model with torch.compile: slow to start, meant for long runs on a GPU. ``layers``
    compiles one layer and uses its code for all, which takes a fraction of the time if the model is
    deep. One GPU replays steps as CUDA graphs, with ``accumulate`` 1; with ``layers`` neither those
    of an adaptive softmax, nor of documents, real-valued inputs, ``reset_memory`` or
    ``recompute``."""
    seed: Integer = 1
    """Random seed of the initial weights, of dropout, of random lengths and of resets."""
    max_skips: Length = 10
    """How many updates in a row may be skipped because the gradient is not finite; after one more,
    the run stops with an error. Skipped updates count as steps."""
    hang_minutes: Positive = 10.0
    """Timeout of distributed training: how long processes wait for one another."""
    log_every: Count = 10
    """Steps between two records of metrics."""
    eval_every: Length = 500
    """Steps between two evaluations on the validation text; 0: only at the end."""
    save_every: Length = 500
    """Steps between two checkpoints; 0: only at the end and when interrupted."""
    keep_checkpoints: Count = 2
    """Number of most recent checkpoints to keep."""

    def __post_init__(self) -> None:
        check(self, "train")
        require(
            self.batch_size % self.accumulate == 0,
            f"accumulate={self.accumulate} must divide batch_size={self.batch_size}",
            self,
            accumulate=math.gcd(self.accumulate, self.batch_size),
        )
        require(
            self.minutes is None
            or (self.schedule == "constant_cooldown" and 0 < self.cooldown_fraction < 1),
            f"minutes={self.minutes} needs schedule=constant_cooldown and a cooldown_fraction "
            "above 0 and below 1: only then can the end be chosen while the training runs; or set "
            "minutes to None, and steps",
            self,
            schedule="constant_cooldown",
        )
        require(
            self.warmup_steps <= self.steps,
            f"warmup_steps={self.warmup_steps} is more than steps={self.steps}: lower warmup_steps "
            "or raise steps",
            self,
            warmup_steps=self.steps // 10,
        )
        for name in ("random_segment_len", "random_mem_len"):
            value = str(getattr(self, name)).lower()
            require(
                not (getattr(self, name) and self.compile),
                f"{name}={value} with compile={str(self.compile).lower()} would compile the "
                "model for each length: choose one",
                self,
                compile=False,
            )
        for name in ("roll", "reset_memory", "random_mem_len"):
            value = getattr(self, name)
            require(
                not value or self.seed >= 0,
                f"seed={self.seed} with {name}={str(value).lower()} must be at least 0",
            )
        self._check_stages()
        refuse_unused(self, self.unused())

    def mem_lens(self, mem_len: int) -> tuple[int, ...]:
        """Return the memory lengths that steps read, given that of the stage."""
        n = 1
        while self.random_mem_len and mem_len >> n >= self.random_mem_len:
            n += 1
        return tuple(mem_len >> i for i in range(n))

    def fitted_stages(self, segment_len: int, mem_len: int | None = None) -> tuple[Stage, ...]:
        """Return the stages so that they end with these lengths and have none above them.

        Stages that are then alike are joined, and a single one is no curriculum.

        Args:
            segment_len: The segment length of the last.
            mem_len: Its memory length; None: as it is.
        """
        *before, (last, _, last_mem_len) = self.stages
        most = last_mem_len if mem_len is None else mem_len
        lower = [(start, min(x, segment_len), min(m, most)) for start, x, m in before]
        alike = groupby([*lower, (last, segment_len, most)], key=lambda stage: stage[1:])
        stages = tuple(next(group) for _, group in alike)
        return stages if len(stages) > 1 else ()

    def unused(self) -> Iterator[Unused]:
        """Yield the settings without effect."""
        without = _WITHOUT[self.optimizer]
        yield from (Unused(name, f"optimizer={self.optimizer!r}") for name in without)
        starts_with_cooldown = self.average == "tail" and self.average_start is None
        if starts_with_cooldown and not self.cooldown_fraction:
            yield Unused("average", "cooldown_fraction=0: averaging begins with the cooldown")
        if self.average_start == 1:
            yield Unused("average", "average_start=1: averaging begins after the last step")
        if self.schedule != "constant_cooldown" and not starts_with_cooldown:
            yield Unused("cooldown_fraction", f"schedule={self.schedule!r}")
        if self.average == "none":
            yield Unused("average_start", "average='none'")
        if self.average != "ema":
            yield Unused("average_decay", f"average={self.average!r}")

    def _check_stages(self) -> None:
        if not self.stages:
            return
        stages = [list(stage) for stage in self.stages]
        starts = [start for start, _, _ in self.stages]
        require(
            starts[0] == 0 and all(a < b for a, b in pairwise(starts)),
            f"stages={stages}: the starts must rise from 0 to below 1",
        )
        require(
            self.stages[-1][1] == self.segment_len,
            f"stages={stages} must end with segment_len={self.segment_len}; for one length from "
            "the beginning, stages is empty: --train.stages with nothing behind it",
            self,
            stages=self.fitted_stages(self.segment_len),
        )
        require(
            self.minutes is None or starts[-1] < 1 - self.cooldown_fraction,
            f"stages={stages} with minutes={self.minutes}: the last must start before the "
            f"cooldown, below {1 - self.cooldown_fraction:g}: its speed decides how many steps "
            "are left",
            self,
            stages=(),
        )
