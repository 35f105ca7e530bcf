"""How a model is evaluated, and how it generates text."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal

from transformer_xl.config.checks import (
    Count,
    Integer,
    Length,
    NotNegative,
    Positive,
    Range,
    Share,
    Unused,
    check,
    create_from_stored,
    refuse_unused,
    require,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How the model is evaluated: lengths that may differ from those of training.

    The lengths, ``batch_size``, ``max_steps`` and ``window`` hold for the validations of a
    training, for the table at its end and for ``txl eval``. Validation uses the configured memory
    and the model alone: ``mem_lens`` and ``ngram_cache`` add to that table and to ``txl eval``;
    ``dynamic`` and ``split`` are for ``txl eval``.

    Example:
        >>> EvalConfig(mem_len=256).lengths_after(64)["segment_len"]  # as in training
        64
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
    max_steps: Count | None = None
    """Read only this many segments of each part, from its beginning, so that an evaluation of a
    long text takes less time; None: all of it."""
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
    ngram_cache: Literal["read", "training"] | None = None
    """Mix the predictions with counts of what followed the same tokens before: in the text read so
    far, or also in the training text, the last 8 million tokens of it. The loss without them is
    reported, too."""

    def __post_init__(self) -> None:
        check(self, "eval")
        require(
            self.window is None or self.dynamic is None,
            f"window={self.window} and dynamic={self.dynamic!r} are two ways to evaluate: "
            "choose one",
        )
        without = {
            **dict.fromkeys(
                ("mem_lens", "mem_len", "ext_len"),
                "each token is predicted from a window read anew, without any memory",
            ),
            "max_steps": "windows are not divided into segments",
        }
        for name, why in without.items():
            value, off = getattr(self, name), type(self).__dataclass_fields__[name].default
            require(
                self.window is None or value in (off, 0),
                f"{name}={value} with window={self.window}: {why}; leave out one of them",
                self,
                **{name: off},
            )
        require(
            self.split != "train" or self.ngram_cache != "training",
            "split='train' with ngram_cache='training': the text that is evaluated would be "
            "counted; leave out one of them",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """How text is generated.

    Example:
        >>> GenerateConfig(temperature=0.8, top_p=0.95).top_k is None
        True
    """

    MAX_HISTORY = 4_096
    """Tokens of the end of a text that are kept for the penalties of sampling."""

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
    min_p: Share | None = None
    """Sample from the tokens that are at least this share as likely as the likeliest one; None:
    from all."""
    repetition_penalty: Positive = 1.0
    """Divide the positive logits of the last 1,024 tokens by this, multiply the negative ones; 1:
    no penalty."""
    dry_multiplier: NotNegative = 0.0
    """DRY: subtract dry_multiplier * 1.75 ** (n - dry_allowed_length) from the logit of each token
    that would extend a repetition, among the last 1,024 tokens, of the last n tokens; 0: no
    penalty."""
    dry_allowed_length: Annotated[int, Range(gt=0, le=64)] = 2
    """DRY: the length from which on a repetition is penalized."""
    on_loop: Literal["continue", "break"] = "continue"
    """What to do once the generated text loops, that is repeats up to 256 tokens 4 times or more:
    go on, or exclude the token that would continue the loop. The prompt does not count."""
    loop_min_length: Annotated[int, Range(gt=0, le=MAX_HISTORY)] = 200
    """A loop has at least this many tokens, all repetitions together."""
    stop: tuple[str, ...] = ()
    """Stop strings: a text ends before the first of them."""
    seed: Integer = 1
    """Random seed; the same seed generates the same text."""

    def __post_init__(self) -> None:
        check(self, "generate")
        refuse_unused(self, self._unused())
        require(
            all(self.stop),
            "stop: a stop string is empty, so every text would be empty; leave it out",
        )

    def _unused(self) -> Iterator[Unused]:
        """Yield settings that have no effect because of another one."""
        if not self.dry_multiplier:
            yield Unused("dry_allowed_length", "dry_multiplier=0")
        if self.on_loop == "continue":
            yield Unused("loop_min_length", "on_loop='continue'")

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the probabilities."""
        return self.repetition_penalty != 1 or self.dry_multiplier > 0

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings with which a token is sampled, by name.

        Those that are off are left out, except temperature, top_k and top_p.
        """
        used = {"temperature", "top_k", "top_p"}
        if self.dry_multiplier:
            used.add("dry_allowed_length")
        if self.on_loop != "continue":
            used.add("loop_min_length")
        values = {x.name: (getattr(self, x.name), x.default) for x in fields(self)}
        for name in ("prompt", "length", "stop", "seed"):
            del values[name]
        return {name: x for name, (x, off) in values.items() if name in used or x != off}

    def changed(self, **given: object) -> "GenerateConfig":
        """Return the settings with others in their place; what loses its effect is reset.

        Raises:
            ValueError: A given setting is invalid, or has no effect.
        """
        return create_from_stored(GenerateConfig, asdict(self) | given, keep=given)
