"""How a model is evaluated, and how it writes."""

from dataclasses import dataclass
from typing import Literal

from transformer_xl.config.checks import require, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How the model is evaluated: lengths that may differ from those of training."""

    split: Literal["train", "valid", "test"] = "valid"
    """Which part of the corpus."""
    segment_len: int | None = None
    """Tokens read at once; None: as in training."""
    mem_len: int | None = None
    """Remembered positions; None: as the model was trained."""
    attn_len: int | None = None
    """How far back a token looks, itself included; None: as trained. A large one: no limit."""
    clamp_len: int | None = None
    """Distances above it count as it; None: as the model was trained. A large one: no limit."""
    ext_len: int | None = None
    """Positions before each segment that are read again with it; None: as the model was trained."""
    batch_size: int = 1
    """Parts of the text read side by side, each warmed up on the text before it."""
    mem_lens: tuple[int, ...] = ()
    """Memory lengths of the table at the end of training."""
    window: int | None = None
    """Predict each token from a window of so many before it, read anew: without any memory."""
    dynamic: Literal["rms", "sgd"] | None = None
    """Learn from each segment after its score, in one stream; rms divides by usual gradients."""
    dynamic_lr: float | None = None
    """Learning rate of dynamic evaluation; None: 1e-4 for rms, 0.01 for sgd."""
    dynamic_decay: float = 0.0
    """Share of the way back to the trained weights, gone after each segment."""
    dynamic_eps: float = 0.1
    """For rms: added to the usual size of a gradient, in units of the mean of all."""
    dynamic_tokens: int = 50_000
    """Tokens of the training text from which rms learns how large gradients usually are."""

    def __post_init__(self) -> None:
        for name in ("segment_len", "attn_len", "batch_size", "window", "dynamic_tokens"):
            require_positive(name, getattr(self, name))
        self._check_dynamic()
        for name in ("mem_len", "clamp_len", "ext_len"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"{name}={value} must be at least 0")
        for length in self.mem_lens:
            require(length >= 0, f"mem_lens holds {length}; each must be at least 0")

    def _check_dynamic(self) -> None:
        require(
            self.window is None or self.dynamic is None,
            f"window={self.window} and dynamic={self.dynamic!r} are two ways to evaluate: "
            "choose one",
        )
        lr = self.dynamic_lr
        require(lr is None or lr >= 0, f"dynamic_lr={lr} must be at least 0")
        require_positive("dynamic_eps", self.dynamic_eps)
        require(
            0 <= self.dynamic_decay <= 1,
            f"dynamic_decay={self.dynamic_decay} must be from 0 to 1",
        )

    @property
    def lengths(self) -> dict[str, int | None]:
        """What overrides the lengths of the model, by name."""
        names = ("mem_len", "attn_len", "clamp_len", "ext_len")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """How text is drawn from the model."""

    prompt: str = "\n"
    """Text to continue."""
    length: int = 500
    """Tokens to write; 0: without end on the command line, none in the report."""
    temperature: float = 1.0
    """Below 1 safer, above 1 wilder; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only; None: from all."""
    top_p: float | None = None
    """Draw from the fewest tokens that together have this probability; None: from all."""
    seed: int = 1
    """Seed of the draw: the same seed writes the same text."""

    def __post_init__(self) -> None:
        require(self.length >= 0, f"length={self.length} must be at least 0")
        require(self.temperature >= 0, f"temperature={self.temperature} must be at least 0")
        require_positive("top_k", self.top_k)
        require(
            self.top_p is None or 0 < self.top_p <= 1,
            f"top_p={self.top_p} must be above 0 and at most 1",
        )
