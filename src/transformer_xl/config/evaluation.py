"""How a model is evaluated, and how it generates text."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from transformer_xl.config.checks import (
    Count,
    Length,
    NotNegative,
    Positive,
    Range,
    Share,
    check,
    no_type_check,
    require,
)


@no_type_check
@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How the model is evaluated: lengths that may differ from those of training.

    The lengths, ``batch_size`` and ``window`` hold for the validations of a training, for the table
    at its end and for ``txl eval``. Validation uses the configured memory alone: ``mem_lens`` and
    ``dynamic`` add to that table and to ``txl eval``, and ``split`` is for ``txl eval``. What a
    report shows of the memory is measured by segments, with the lengths and without the others.
    """

    split: Literal["train", "valid", "test"] = "valid"
    """Split of the corpus that txl eval reads; validation during training uses valid, the final
    evaluation test."""
    segment_len: Count | None = None
    """Tokens read at once; None: as in training."""
    mem_len: Length | None = None
    """Memory length; None: as configured in the model."""
    attn_len: Count | None = None
    """Attention length: keys a query sees, counting its own; None: as configured in the model. A
    large one: no limit."""
    clamp_len: Length | None = None
    """Relative distances above it count as it; None: as configured in the model. A large one: no
    limit."""
    ext_len: Length | None = None
    """Positions before each segment that are read again with it; None: as configured in the
    model."""
    batch_size: Count = 1
    """Number of parts of the text that are read as a batch, each warmed up on the text before
    it."""
    mem_lens: tuple[Length, ...] = ()
    """Memory lengths to compare at the end of training or with txl eval; validation uses one."""
    window: Count | None = None
    """Sliding window: predict each token from this many tokens before it, read anew, without
    memory."""
    dynamic: Literal["rms", "sgd"] | None = None
    """Dynamic evaluation: a gradient step on each segment after it was scored, in one stream; rms
    divides by the RMS of the training gradients."""
    dynamic_lr: NotNegative | None = None
    """Learning rate of dynamic evaluation; None: 1e-4 for rms, 0.01 for sgd."""
    dynamic_decay: Share = 0.0
    """Decay towards the trained weights after each segment."""
    dynamic_eps: Positive = 0.1
    """For rms: epsilon added to the RMS of the gradients, as a multiple of their mean."""
    dynamic_tokens: Count = 50_000
    """For rms: tokens of the training text from which the RMS of the gradients is estimated."""

    def __post_init__(self) -> None:
        check(self, "eval")
        require(
            self.window is None or self.dynamic is None,
            f"window={self.window} and dynamic={self.dynamic!r} are two ways to evaluate: "
            "choose one",
        )
        for name in ("mem_lens", "mem_len", "ext_len"):
            value = getattr(self, name)
            require(
                self.window is None or not value,
                f"{name}={value} with window={self.window}: each token is predicted from a "
                "window read anew, without any memory; leave out one of them",
            )
        require(
            self.dynamic is None or not self.ext_len,
            f"ext_len={self.ext_len} with dynamic={self.dynamic!r}: what is read again would "
            "be learned from twice; leave out one of them",
        )
        defaults = {field.name: field.default for field in fields(self)}
        for name, rules in _DYNAMIC_RULES.items():
            value = getattr(self, name)
            require(
                self.dynamic in rules or value == defaults[name],
                f"{name}={value} is for dynamic = {' or '.join(map(repr, rules))}, not "
                f"{self.dynamic!r}: set that, or leave it out",
            )

    @property
    def lengths(self) -> dict[str, int | None]:
        """Overrides of the lengths of the model, by name."""
        names = ("mem_len", "attn_len", "clamp_len", "ext_len")
        return {name: getattr(self, name) for name in names}

    def lengths_after(self, segment_len: int) -> dict[str, Any]:
        """Return the lengths with ``segment_len``, whose default is that of training."""
        return {"segment_len": self.segment_len or segment_len, **self.lengths}


_DYNAMIC_RULES = {
    "dynamic_lr": ("rms", "sgd"),
    "dynamic_decay": ("rms", "sgd"),
    "dynamic_eps": ("rms",),
    "dynamic_tokens": ("rms",),
}
"""The values of ``dynamic`` with which a setting has an effect."""


@no_type_check
@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """How text is generated."""

    prompt: str = "\n"
    """Text to continue."""
    length: Length = 500
    """Tokens to generate; 0: without end on the command line, none in the report."""
    temperature: NotNegative = 1.0
    """Sampling temperature; 0: greedy."""
    top_k: Count | None = None
    """Sample from the k most likely tokens; None: from all."""
    top_p: Annotated[float, Range(gt=0, le=1)] | None = None
    """Nucleus sampling: sample from the fewest tokens with this total probability; None: from
    all."""
    seed: int = 1
    """Random seed; the same seed generates the same text."""

    def __post_init__(self) -> None:
        check(self, "generate")
