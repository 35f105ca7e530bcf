"""How a model is trained."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from transformer_xl.config.checks import (
    Count,
    Fraction,
    Length,
    NotNegative,
    Positive,
    Share,
    check,
    no_type_check,
    require,
)
from transformer_xl.config.unused import refuse_unused, unused_in_training

Stage = tuple[Fraction, Count, Length]
"""Where in the training it starts, its segment_len and its mem_len. No named tuple, as the command
line has no way to write several of those."""


@no_type_check
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the model is trained. A step is one update of the weights."""

    steps: Count = 10_000
    """Number of steps."""
    minutes: Positive | None = None
    """Train for so long, in minutes of steps: evaluations and the report come on top. The cooldown
    begins early enough; where its steps turn out slower, it is cut short when the time is over, so
    that the last step ends at most a tenth later. Needs constant_cooldown."""
    batch_size: Count = 32
    """Streams of text read side by side; each keeps its own memory."""
    segment_len: Count = 128
    """Tokens of each stream in a step."""
    stages: tuple[Stage, ...] = ()
    """Lengths that change, as [start, segment_len, mem_len]: the start is a share of the steps (of
    the minutes, where these are the limit). The streams stay, so that longer segments make larger
    steps. The first begins at 0, the last has train.segment_len and model.mem_len."""
    random_segment_len: bool = False
    """Draw the length of each segment: normal around segment_len with deviation 5, one in twenty
    around half of it; the learning rate is scaled with it (Merity et al., arXiv 1708.02182)."""
    roll: bool = False
    """At each pass, turn each stream's part of the text by a random length, so that no two passes
    cut it alike (NVIDIA's --roll). Without it, a stream that is at its end reads the next one's."""
    accumulate: Count = 1
    """Parts into which the streams of a step are divided to save memory, in each process; the sum
    is the same."""
    loss: Literal["full", "half"] = "full"
    """Learn from all tokens of a segment, or from its second half only (Table 6 of the paper)."""
    activation_reg: NotNegative = 0.0
    """Weight of the mean square of the last layer's outputs after dropout, added to the loss (AR,
    Merity et al. 2017)."""
    temporal_activation_reg: NotNegative = 0.0
    """Weight of the mean square of the differences between neighbouring outputs of the last layer,
    before dropout, added to the loss (TAR)."""
    optimizer: Literal["adamw", "muon", "lamb"] = "adamw"
    """AdamW or LAMB for everything, or Muon for the matrices in the layers and AdamW for the
    rest."""
    lr: Positive = 2.5e-4
    """Peak learning rate of AdamW or LAMB."""
    embedding_lr: Positive = 1.0
    """Learning rate of the word embeddings, as a multiple of that of the other weights."""
    muon_lr: Positive = 0.02
    """Peak learning rate of Muon."""
    weight_decay: NotNegative = 0.0
    """How fast matrices shrink without a gradient, as a share of lr (decoupled weight decay)."""
    beta1: Fraction = 0.9
    """AdamW's and LAMB's decay of the mean gradient."""
    beta2: Fraction = 0.999
    """AdamW's and LAMB's decay of the mean squared gradient."""
    eps: Positive = 1e-8
    """AdamW's and LAMB's constant in the denominator."""
    schedule: Literal["cosine", "inverse_sqrt", "constant_cooldown"] = "cosine"
    """Learning rate after the warm-up: half a cosine, step**-0.5, or constant and then linear."""
    warmup_steps: Length = 0
    """Steps of linear rise from zero at the beginning."""
    cooldown_fraction: Share = 0.3
    """Share of the steps in which constant_cooldown falls."""
    min_lr_ratio: Share = 0.0
    """Learning rate at the end (inverse_sqrt: at the least), as a share of the peak."""
    clip_norm: NotNegative = 0.25
    """Largest norm of the gradient; larger ones are scaled down. 0: no clipping."""
    average: Literal["none", "ema", "tail"] = "none"
    """Evaluate and keep the last weights, or their average: an exponential moving one, or the plain
    mean since average_start."""
    average_decay: Fraction = 0.999
    """How much of the exponential moving average a step leaves in place."""
    average_start: Share | None = None
    """Share of the training after which averaging begins; None: ema at once, tail with the
    cooldown, at 1 - cooldown_fraction."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the matrix products; auto: bfloat16 where the hardware has it."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What processes that torchrun started share: gradients (DDP), or also the room for weights,
    gradients and what the optimizer knows of them (FSDP2). The streams are divided either way."""
    recompute: bool = False
    """Compute what is inside the layers once more in the backward pass, instead of keeping it:
    about a third more computing for much less memory."""
    init_from: str | None = None
    """A model or run folder with the weights to begin with, of this network and vocabulary: those
    of another text, or of a converted checkpoint. None: weights are drawn."""
    compile: bool = False
    """Compile the model with torch.compile: slow to begin, meant for long runs on a GPU."""
    seed: int = 1
    """Seed of the initial weights, of dropout, and of lengths that are drawn."""
    max_skips: Length = 10
    """How many updates in a row may be left out, because the gradient is not finite or too long;
    after one more the run stops with an error. They count as steps."""
    skip_norm: NotNegative = 0.0
    """Leave out updates whose gradient is so many times as long as usual; 0: only those that are
    not finite."""
    spike: NotNegative = 1.0
    """Report a loss that is so many nats above the usual one."""
    hang_minutes: Positive = 10.0
    """How long processes that train together wait for one another before that is an error."""
    log_every: Count = 10
    """Steps between two lines of metrics."""
    eval_every: Length = 500
    """Steps between two evaluations on the validation text; 0: only at the end."""
    save_every: Length = 500
    """Steps between two checkpoints; 0: only at the end and when interrupted."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints to keep."""

    def __post_init__(self) -> None:
        check(self, "train")
        require(
            self.batch_size % self.accumulate == 0,
            f"accumulate={self.accumulate} must divide batch_size={self.batch_size}",
        )
        require(
            self.minutes is None
            or (self.schedule == "constant_cooldown" and 0 < self.cooldown_fraction < 1),
            f"minutes={self.minutes} needs schedule=constant_cooldown and a cooldown_fraction "
            "above 0 and below 1: only then can the end be chosen while the training runs",
        )
        require(
            self.warmup_steps <= self.steps,
            f"warmup_steps={self.warmup_steps} is more than steps={self.steps}: lower warmup_steps "
            "or raise steps",
        )
        require(
            not (self.random_segment_len and self.compile),
            "random_segment_len=true with compile=true would compile the model for each length: "
            "choose one",
        )
        require(
            not (self.roll and self.seed < 0),
            f"seed={self.seed} with roll=true must be at least 0",
        )
        self._check_stages()
        refuse_unused(self, unused_in_training(self))

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
        )
        require(
            self.minutes is None or starts[-1] < 1 - self.cooldown_fraction,
            f"stages={stages} with minutes={self.minutes}: the last must start before the "
            f"cooldown, below {1 - self.cooldown_fraction:g}: its speed decides how many steps "
            "are left",
        )
