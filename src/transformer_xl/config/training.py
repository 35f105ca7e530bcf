"""How a model is trained."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from transformer_xl.config.checks import require, require_fraction, require_positive

Stage = tuple[float, int, int]
"""Where in the training it starts, its segment_len and its mem_len. No named tuple, as the command
line has no way to write several of those."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the model is trained. A step is one update of the weights."""

    steps: int = 10_000
    """Number of steps."""
    minutes: float | None = None
    """Train for so long, in minutes of steps: evaluations and the report come on top. The cooldown
    begins early enough; where its steps turn out slower, it is cut short when the time is over, so
    that the last step ends at most a tenth later. Needs constant_cooldown."""
    batch_size: int = 32
    """Streams of text read side by side; each keeps its own memory."""
    segment_len: int = 128
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
    accumulate: int = 1
    """Parts into which the streams of a step are divided to save memory, in each process; the sum
    is the same."""
    loss: Literal["full", "half"] = "full"
    """Learn from all tokens of a segment, or from its second half only (Table 6 of the paper)."""
    activation_reg: float = 0.0
    """Weight of the mean square of the last layer's outputs after dropout, added to the loss (AR,
    Merity et al. 2017)."""
    temporal_activation_reg: float = 0.0
    """Weight of the mean square of the differences between neighbouring outputs of the last layer,
    before dropout, added to the loss (TAR)."""
    optimizer: Literal["adamw", "muon", "lamb"] = "adamw"
    """AdamW or LAMB for everything, or Muon for the matrices in the layers and AdamW for the
    rest."""
    lr: float = 2.5e-4
    """Peak learning rate of AdamW or LAMB."""
    embedding_lr: float = 1.0
    """Learning rate of the word embeddings, as a multiple of that of the other weights."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon."""
    weight_decay: float = 0.0
    """How fast matrices shrink without a gradient, as a share of lr (decoupled weight decay)."""
    beta1: float = 0.9
    """AdamW's and LAMB's decay of the mean gradient."""
    beta2: float = 0.999
    """AdamW's and LAMB's decay of the mean squared gradient."""
    eps: float = 1e-8
    """AdamW's and LAMB's constant in the denominator."""
    schedule: Literal["cosine", "inverse_sqrt", "constant_cooldown"] = "cosine"
    """Learning rate after the warm-up: half a cosine, step**-0.5, or constant and then linear."""
    warmup_steps: int = 0
    """Steps of linear rise from zero at the beginning."""
    cooldown_fraction: float = 0.3
    """Share of the steps in which constant_cooldown falls."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end (inverse_sqrt: at the least), as a share of the peak."""
    clip_norm: float = 0.25
    """Largest norm of the gradient; larger ones are scaled down. 0: no clipping."""
    average: Literal["none", "ema", "tail"] = "none"
    """Evaluate and keep the last weights, or their average: an exponential moving one, or the plain
    mean since average_start."""
    average_decay: float = 0.999
    """How much of the exponential moving average a step leaves in place."""
    average_start: float | None = None
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
    max_skips: int = 10
    """How many updates in a row may be left out, because the gradient is not finite or too long;
    after one more the run stops with an error. They count as steps."""
    skip_norm: float = 0.0
    """Leave out updates whose gradient is so many times as long as usual; 0: only those that are
    not finite."""
    spike: float = 1.0
    """Report a loss that is so many nats above the usual one."""
    hang_minutes: float = 10.0
    """How long processes that train together wait for one another before that is an error."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    eval_every: int = 500
    """Steps between two evaluations on the validation text; 0: only at the end."""
    save_every: int = 500
    """Steps between two checkpoints; 0: only at the end and when interrupted."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "segment_len", "accumulate", "lr", "muon_lr", "eps"):
            require_positive(name, getattr(self, name))
        for name in ("log_every", "keep_checkpoints", "minutes", "embedding_lr", "hang_minutes"):
            require_positive(name, getattr(self, name))
        for name in ("warmup_steps", "eval_every", "save_every", "weight_decay", "clip_norm"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be at least 0")
        for name in (
            "activation_reg",
            "temporal_activation_reg",
            "max_skips",
            "skip_norm",
            "spike",
        ):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be at least 0")
        for name in ("beta1", "beta2", "average_decay"):
            require_fraction(name, getattr(self, name))
        for name in ("cooldown_fraction", "min_lr_ratio", "average_start"):
            value = getattr(self, name)
            is_share = value is None or 0 <= value <= 1
            require(is_share, f"{name}={value} must be between 0 and 1")
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

    def _check_stages(self) -> None:
        if not self.stages:
            return
        stages = [list(stage) for stage in self.stages]
        starts = [start for start, _, _ in self.stages]
        require(
            starts[0] == 0 and starts[-1] < 1 and all(a < b for a, b in pairwise(starts)),
            f"stages={stages}: the starts must rise from 0 to below 1",
        )
        for _, segment_len, mem_len in self.stages:
            require(
                segment_len > 0 and mem_len >= 0,
                f"stages={stages}: segments must be longer than 0 and memories at least 0",
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
