r"""Dynamic evaluation: a gradient step on each scored segment (Krause et al., 2018, 2019).

After each segment the weights $\theta$ take a step against the gradient $g$ of its mean loss, and
decay towards the trained weights $\theta_0$:

$$\theta \leftarrow \theta - \eta\, g / (\sqrt{MS} + \epsilon m)
  + \lambda\, (\theta_0 - \theta) \odot R \quad (rms)$$
$$\theta \leftarrow \theta - \eta\, g + \lambda\, (\theta_0 - \theta) \quad (sgd)$$

$MS$ is the mean of the squared gradients over segments of the training text, computed before
(:func:`gradient_squares`), and $m$ the mean of $\sqrt{MS}$ over all weights. $R = \sqrt{MS} / m$,
clipped so that $\lambda R \le 1$: weights with large gradients decay faster (Krause et al., 2018,
section 4). Two differences from the authors' code for Transformer-XL: $\epsilon$ is in units of
$m$, so that it does not depend on the model size; and they sum over segments instead of taking the
mean, and do not clip $R$, so their hyperparameters do not carry over.

If the model has a ``completion_at``, the mean loss is that of completions, and segments without any
make no step.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_xl.config import EvalConfig, ModelConfig
from transformer_xl.config.checks import (
    Length,
    NotNegative,
    Positive,
    Range,
    Share,
    check,
    no_type_check,
)
from transformer_xl.config.deprecation import warn_deprecated
from transformer_xl.data.completions import in_completion
from transformer_xl.inference.evaluate.streams import Part, as_text, completed_targets
from transformer_xl.model import LanguageModel
from transformer_xl.model.arguments import Text, as_tokens, shown
from transformer_xl.model.compact import CompactTransformerXL
from transformer_xl.model.reading import read
from transformer_xl.model.segment import SEGMENT_LEN, Lengths

DEFAULT_LR = {"rms": 1e-4, "sgd": 0.01}
"""Default learning rates."""

Squares = dict[str, Tensor]
"""Mean squared gradients of each weight, by name."""

AtLeastOne = Annotated[int, Range(ge=1)]

_LENGTHS = ("segment_len", "mem_len", "attn_len", "clamp_len")


@no_type_check
@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Dynamic evaluation in one stream with memory (:class:`DynamicEvaluation`).

    Raises:
        ValueError: A number is out of range, or ``rms`` lacks ``squares``.

    Example:
        >>> Dynamic(rule="sgd", lr=0.01, segment_len=64).decay
        0.0
    """

    rule: Literal["rms", "sgd"] = "rms"
    """Divide gradients by their RMS on the training text, or use them unscaled."""
    lr: NotNegative
    """Learning rate."""
    decay: Share = 0.0
    """Decay towards the trained weights after each segment."""
    eps: Positive = 0.1
    """For ``rms``: epsilon added to the RMS of the gradients, as a multiple of their mean."""
    squares: Squares | None = None
    """For ``rms``: from :func:`gradient_squares`."""
    segment_len: AtLeastOne = SEGMENT_LEN
    """Tokens between two steps."""
    mem_len: Length | None = None
    """Memory length; the memory is not recomputed after a step. None: as configured."""
    attn_len: AtLeastOne | None = None
    """Keys a query sees, counting its own. None: as configured."""
    clamp_len: Length | None = None
    """Distances above it count as it. None: as configured."""
    max_steps: AtLeastOne | None = None
    """Evaluate only this many segments, from the beginning of a text. None: all."""
    batch_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check(self)
        if self.rule == "rms" and self.squares is None:
            raise ValueError(
                "rule='rms' needs the squares of gradients of the training text: gather them with "
                "gradient_squares, or use rule='sgd'"
            )

    def lengths(self, config: ModelConfig) -> Lengths:
        """Resolve the lengths against the settings of a model.

        Raises:
            ValueError: A length has no effect in such a model.
        """
        lengths = {name: getattr(self, name) for name in _LENGTHS}
        # With ext_len, tokens would be trained on twice.
        return Lengths.of(config, **lengths, ext_len=0)

    def nats(self, model: LanguageModel, part: Part, lengths: Lengths) -> float:
        """Return the sum of -log p over the predictions that count."""
        assert part.tokens is not None
        learning = DynamicEvaluation(model, replace(self, mem_len=lengths.mem_len))
        nll = learning.read(part.tokens)
        return float(part.total(nll) + part.total(learning.finish(), start=len(nll)))

    def reported(self) -> dict[str, Any]:
        """Return the fields of a result that describe the strategy."""
        return {
            "dynamic": self.rule,
            "dynamic_lr": self.lr,
            "dynamic_decay": self.decay,
            "dynamic_eps": self.eps if self.rule == "rms" else None,
        }


def plan_dynamic(
    settings: EvalConfig,
    model: LanguageModel,
    training_text: Callable[[], Text],
    *,
    segment_len: int,
) -> Dynamic | None:
    """Return the dynamic evaluation that settings ask for; None: none.

    Args:
        settings: The evaluation settings.
        model: The trained model.
        training_text: Returns the training text; only called for ``rms``, which uses its first
            ``dynamic_tokens``.
        segment_len: Default segment length.
    """
    rule = settings.dynamic
    if rule is None:
        return None
    lengths = settings.lengths_after(segment_len)
    del lengths["ext_len"]
    squares = None
    if rule == "rms":
        squares = gradient_squares(model, training_text()[: settings.dynamic_tokens], **lengths)
    return Dynamic(
        rule=rule,
        lr=DEFAULT_LR[rule] if settings.dynamic_lr is None else settings.dynamic_lr,
        decay=settings.dynamic_decay,
        eps=settings.dynamic_eps,
        squares=squares,
        max_steps=settings.max_steps,
        **lengths,
    )


class DynamicEvaluation:
    """Scores one text, given in pieces of any length, with a gradient step after each segment.

    A segment is computed once it is complete, and boundaries do not depend on the pieces, so
    neither do the results, bit for bit. The model is copied; the original is not modified.

    There is only one stream, as in the paper: with a batch, each part would be scored by weights
    that have seen later parts of the text, and there would be fewer steps.

    Args:
        model: The trained model.
        settings: The update rule, and the lengths with which the text is read. ``max_steps`` is
            ignored.
        deprecated: Lengths, which are now attributes of the settings.

    Raises:
        ValueError: A length has no effect in the model; the model is quantized; ``squares`` are
            those of another model.
    """

    def __init__(self, model: LanguageModel, settings: Dynamic, **deprecated: Any) -> None:
        if deprecated:
            lengths = ", ".join(f"{name}={shown(x)}" for name, x in deprecated.items())
            warn_deprecated(
                f"DynamicEvaluation(model, settings, {lengths}) is deprecated: use "
                f"DynamicEvaluation(model, Dynamic(..., {lengths}))"
            )
            settings = replace(settings, **deprecated)
        self._lengths = settings.lengths(model.config)
        self.settings, self.segment_len = settings, self._lengths.segment_len
        self.model = _learning_copy(model)
        self._updates = _updates(self.model, settings)
        self._mems = self.model.start_memory(1, self._lengths.mem_len)
        self._waiting = torch.empty(0, dtype=torch.int64)
        self._is_completing = False

    def read(self, ids: Text) -> Float[Tensor, " scored"]:
        """Read another piece of the text; return -log p, in nats, of the completed segments.

        Raises:
            ValueError: A token is outside the vocabulary.
        """
        self._waiting = torch.cat([self._waiting, as_tokens(ids, self.model.config)])
        found = [torch.empty(0, device=self.model.device)]
        # The last target of a segment is the first token of the next one.
        while len(self._waiting) > self.segment_len:
            found.append(self._segment(self._waiting[: self.segment_len + 1], learn=True))
            self._waiting = self._waiting[self.segment_len :]
        return torch.cat(found)

    def finish(self) -> Float[Tensor, " scored"]:
        """Score the incomplete last segment and reset the memory, for another text.

        The adapted weights are kept.
        """
        rest, self._waiting = self._waiting, self._waiting[:0]
        found = torch.empty(0, device=self.model.device)
        if len(rest) > 1:
            found = self._segment(rest, learn=False)
        self._mems, self._is_completing = self.model.start_memory(1, self._lengths.mem_len), False
        return found

    def _segment(self, tokens: Tensor, *, learn: bool) -> Tensor:
        given, targets, counted = tokens[None, :-1], tokens[None, 1:], None
        if self.model.config.completion_at is not None:
            found = in_completion(tokens[:-1].numpy(), self.model.config, self._is_completing)
            counted, self._is_completing = torch.from_numpy(found), bool(found[-1])
            learn = learn and bool(counted.any())
        with torch.set_grad_enabled(learn):
            (piece,) = read(self.model, given, self._lengths, self._mems, targets=targets)
            assert piece.nll is not None
            if learn:
                _mean_loss(piece.nll, counted).backward()
                self._learn()
        self._mems = piece.mems
        return piece.nll.detach()[0]

    @torch.no_grad()
    def _learn(self) -> None:
        for weight, trained, divisor, back in self._updates:
            if weight.grad is None:
                continue
            step = -self.settings.lr * weight.grad / divisor
            weight += step if trained is None else step + back * (trained - weight)
            weight.grad = None
        # Autocast caches converted weights, and does not notice in-place updates.
        torch.clear_autocast_cache()


def gradient_squares(model: LanguageModel, ids: Text, **lengths: Any) -> Squares:
    """Return the mean squared gradients of each weight over segments of a training text.

    The text is read as in the evaluation, with memory, without dropout, and with the
    lengths of a :class:`Dynamic`, by name.

    Raises:
        ValueError: The text is shorter than a segment, has a token outside the vocabulary, or no
            completion where the model has a ``completion_at``.
    """
    read_with = Lengths.of(model.config, **lengths, ext_len=0)
    text, counted = segments_to_learn(ids, model.config, read_with.segment_len)
    model = _learning_copy(model)
    sums = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    n_segments = 0
    with torch.enable_grad():
        for piece in read(model, text[None, :-1], read_with, targets=text[None, 1:]):
            assert piece.nll is not None
            own = None if counted is None else counted[piece.start :][: read_with.segment_len]
            if own is not None and not own.any():
                continue
            n_segments += 1
            _mean_loss(piece.nll, own).backward()
            for name, weight in model.named_parameters():
                if weight.grad is not None:
                    sums[name] += weight.grad.detach() ** 2
                    weight.grad = None
    return {name: total / n_segments for name, total in sums.items()}


def segments_to_learn(
    ids: Text, config: ModelConfig, segment_len: int
) -> tuple[Int[Tensor, " read"], Bool[Tensor, " predicted"] | None]:
    """Return the whole segments of a training text, and which targets are completions.

    Raises:
        ValueError: As in :func:`gradient_squares`.
    """
    text = as_text(ids, config)
    n_segments = (len(text) - 1) // segment_len
    if not n_segments:
        raise ValueError(
            f"{len(text)} tokens of training text are less than a segment of {segment_len} tokens "
            "and the one after it: give more (dynamic_tokens), or shorten the segments"
        )
    text = text[: n_segments * segment_len + 1]
    return text, completed_targets(text, config)


def _mean_loss(nll: Float[Tensor, "1 T"], counted: Bool[Tensor, " T"] | None) -> Tensor:
    return (nll if counted is None else nll[:, counted.to(nll.device)]).mean()


def _learning_copy(model: LanguageModel) -> LanguageModel:
    if isinstance(model, CompactTransformerXL):
        raise ValueError("a compact model cannot learn: use the model it was made from")
    learning = copy.deepcopy(model).eval().requires_grad_(True)
    learning.zero_grad(set_to_none=True)
    return learning


_Update = tuple[Tensor, Tensor | None, Tensor | float, Tensor | float]
"""A weight, its trained values (None without decay), the divisor of its gradient, its decay."""


def _updates(model: LanguageModel, settings: Dynamic) -> list[_Update]:
    """Prepare the updates of all weights, before the first one."""
    weights, decay = dict(model.named_parameters()), settings.decay
    # Cloned, as the model is updated in place.
    trained = [x.detach().clone() if decay else None for x in weights.values()]
    if settings.rule == "sgd":
        return [(x, x0, 1.0, decay) for x, x0 in zip(weights.values(), trained, strict=True)]
    squares = settings.squares or {}
    if {name: x.shape for name, x in weights.items()} != {n: x.shape for n, x in squares.items()}:
        raise ValueError(
            "the squares of gradients are those of a model with other weights: gather them anew "
            "with gradient_squares"
        )
    sizes = [squares[name].to(x.device).sqrt() for name, x in weights.items()]
    total = sum(float(size.sum(dtype=torch.float64)) for size in sizes)
    # Without any gradient nothing is updated, so any divisor will do.
    mean = total / sum(size.numel() for size in sizes) or 1.0
    return [
        (x, x0, size + settings.eps * mean, (size * decay / mean).clamp(max=1.0))
        for x, x0, size in zip(weights.values(), trained, sizes, strict=True)
    ]
