"""How a model is trained."""

from dataclasses import dataclass
from typing import Literal

from transformer_xl.config.checks import require, require_fraction, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the model is trained. A step is one update of the weights."""

    steps: int = 10_000
    """Number of steps."""
    minutes: float | None = None
    """Train no longer than this: the cooldown begins early enough. Needs constant_cooldown."""
    batch_size: int = 32
    """Streams of text read side by side; each keeps its own memory."""
    segment_len: int = 128
    """Tokens of each stream in a step."""
    accumulate: int = 1
    """Parts into which the streams of a step are divided to save memory; the sum is the same."""
    loss: Literal["full", "half"] = "full"
    """Learn from all tokens of a segment, or from its second half only (Table 6 of the paper)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for everything, or Muon for the matrices in the layers and AdamW for the rest."""
    lr: float = 2.5e-4
    """Peak learning rate of AdamW."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon."""
    weight_decay: float = 0.0
    """How fast matrices shrink without a gradient, as a share of lr (decoupled weight decay)."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.999
    """AdamW's decay of the mean squared gradient."""
    eps: float = 1e-8
    """AdamW's constant in the denominator."""
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
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the matrix products; auto: bfloat16 where the hardware has it."""
    compile: bool = False
    """Compile the model with torch.compile: slow to begin, meant for long runs on a GPU."""
    seed: int = 1
    """Seed of the initial weights and of dropout."""
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
        for name in ("log_every", "keep_checkpoints", "minutes"):
            require_positive(name, getattr(self, name))
        for name in ("warmup_steps", "eval_every", "save_every", "weight_decay", "clip_norm"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be at least 0")
        for name in ("beta1", "beta2"):
            require_fraction(name, getattr(self, name))
        for name in ("cooldown_fraction", "min_lr_ratio"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name}={value} must be between 0 and 1")
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
            f"warmup_steps={self.warmup_steps} is more than steps={self.steps}",
        )
