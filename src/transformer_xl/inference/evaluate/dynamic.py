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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval
from jaxtyping import Bool, Float
from torch import Tensor

from transformer_xl.config import EvalConfig, require
from transformer_xl.errors import InputError
from transformer_xl.inference.evaluate.strategies import InSegments, in_order
from transformer_xl.inference.evaluate.streams import Losses, Passage, as_text
from transformer_xl.model import LanguageModel, Lengths, Text, read

DEFAULT_LR = {"rms": 1e-4, "sgd": 0.01}
"""Default learning rates."""

Squares = dict[str, Tensor]
"""Mean squared gradients of each weight, by name."""


@dataclass(frozen=True, kw_only=True)
class Dynamic(InSegments):
    """Dynamic evaluation in one stream with memory.

    A copy of the model learns; the original is not modified. There is only one stream, as in the
    paper: with a batch, each part would be scored by weights that have seen later parts of the
    text, and there would be fewer steps. The memory is not recomputed after a step.

    Raises:
        ValueError: A number is out of range, or ``rms`` lacks ``squares``.

    Example:
        >>> Dynamic(rule="sgd", lr=0.01, segment_len=64).decay
        0.0
    """

    rule: Literal["rms", "sgd"] = "rms"
    """Divide gradients by their RMS on the training text, or use them unscaled."""
    lr: Annotated[float, Interval(ge=0)]
    """Learning rate."""
    decay: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Decay towards the trained weights after each segment."""
    eps: Annotated[float, Interval(gt=0)] = 0.1
    """For ``rms``: epsilon added to the RMS of the gradients, as a multiple of their mean."""
    squares: Squares | None = None
    """For ``rms``: from :func:`gradient_squares`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.rule == "sgd" or self.squares is not None,
            "rule='rms' needs the squares of gradients of the training text: gather them with "
            "gradient_squares, or use rule='sgd'",
        )

    def losses(self, model: LanguageModel, passage: Passage, lengths: Lengths) -> Iterator[Losses]:
        """See :meth:`Strategy.losses`."""
        model = _learning_copy(model)
        updates = self._updates(model)
        mems = model.start_memory(1, lengths.mem_len)
        text = self.part_of(passage, lengths)
        for start in range(0, len(text) - 1, lengths.segment_len):
            stop = start + lengths.segment_len
            tokens, counted = text[None, start : stop + 1], passage.counted
            counted = None if counted is None else counted[start:stop]
            # No step on an incomplete last segment, as nothing follows it.
            learns = stop < len(text) and (counted is None or bool(counted.any()))
            with torch.set_grad_enabled(learns):
                (piece,) = read(model, tokens[:, :-1], lengths, mems, targets=tokens[:, 1:])
                assert piece.nll is not None
                if learns:
                    _mean_loss(piece.nll, counted).backward()
                    self._step(updates)
            mems = piece.mems
            yield in_order(piece.nll.detach()[0], start)

    def reported(self) -> dict[str, object]:
        """See :meth:`Strategy.reported`."""
        return {
            "dynamic": self.rule,
            "dynamic_lr": self.lr,
            "dynamic_decay": self.decay,
            "dynamic_eps": self.eps if self.rule == "rms" else None,
        }

    def _updates(self, model: LanguageModel) -> "list[_Update]":
        """Prepare the updates of all weights, before the first one."""
        weights, decay = dict(model.named_parameters()), self.decay
        # Cloned, as the model is updated in place.
        trained = [x.detach().clone() if decay else None for x in weights.values()]
        if self.rule == "sgd":
            return [(x, x0, 1.0, decay) for x, x0 in zip(weights.values(), trained, strict=True)]
        squares = self.squares or {}
        shapes, others = ({n: x.shape for n, x in each.items()} for each in (weights, squares))
        if shapes != others:
            raise InputError(
                "the squares of gradients are those of a model with other weights: gather them "
                "anew with gradient_squares"
            )
        sizes = [squares[name].to(x.device).sqrt() for name, x in weights.items()]
        total = sum(float(size.sum(dtype=torch.float64)) for size in sizes)
        # Without any gradient nothing is updated, so any divisor will do.
        mean = total / sum(size.numel() for size in sizes) or 1.0
        return [
            (x, x0, size + self.eps * mean, (size * decay / mean).clamp(max=1.0))
            for x, x0, size in zip(weights.values(), trained, sizes, strict=True)
        ]

    @torch.no_grad()
    def _step(self, updates: "list[_Update]") -> None:
        for weight, trained, divisor, back in updates:
            if weight.grad is None:
                continue
            step = -self.lr * weight.grad / divisor
            weight += step if trained is None else step + back * (trained - weight)
            weight.grad = None
        # Autocast caches converted weights, and does not notice in-place updates.
        torch.clear_autocast_cache()


_Update = tuple[Tensor, Tensor | None, Tensor | float, Tensor | float]
"""A weight, its trained values (None without decay), the divisor of its gradient, its decay."""


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
    lr = DEFAULT_LR[rule] if settings.dynamic_lr is None else settings.dynamic_lr
    return Dynamic(
        rule=rule,
        lr=lr,
        decay=settings.dynamic_decay,
        eps=settings.dynamic_eps,
        squares=squares,
        max_steps=settings.max_steps,
        **lengths,
    )


def gradient_squares(model: LanguageModel, ids: Text, **lengths: Any) -> Squares:
    """Return the mean squared gradients of each weight over segments of a training text.

    The text is read as in the evaluation, with memory, without dropout, and with the
    lengths of a :class:`Dynamic`, by name.

    Raises:
        ValueError: The text is shorter than a segment, has a token outside the vocabulary, or no
            completion where the model has a ``completion_at``.
    """
    read_with = Lengths.of(model.config, **lengths, ext_len=0)
    text, segment_len = as_text(ids, model.config), read_with.segment_len
    n = (len(text) - 1) // segment_len * segment_len
    if not n:
        raise InputError(
            f"{len(text)} tokens of training text are less than a segment of {segment_len} tokens "
            "and the one after it: give more (dynamic_tokens), or shorten the segments"
        )
    text = text[: n + 1]
    completed = Passage.of(text, model.config).counted
    model = _learning_copy(model)
    sums = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    n_segments = 0
    with torch.enable_grad():
        for piece in read(model, text[None, :-1], read_with, targets=text[None, 1:]):
            assert piece.nll is not None
            counted = None if completed is None else completed[piece.start :][:segment_len]
            if counted is not None and not counted.any():
                continue
            n_segments += 1
            _mean_loss(piece.nll, counted).backward()
            for name, weight in model.named_parameters():
                if weight.grad is not None:
                    sums[name] += weight.grad.detach() ** 2
                    weight.grad = None
    return {name: total / n_segments for name, total in sums.items()}


def _mean_loss(nll: Float[Tensor, "1 T"], counted: Bool[Tensor, " T"] | None) -> Tensor:
    return (nll if counted is None else nll[:, counted.to(nll.device)]).mean()


def _learning_copy(model: LanguageModel) -> LanguageModel:
    model.require_trainable()
    learning = copy.deepcopy(model).eval().requires_grad_(True)
    learning.zero_grad(set_to_none=True)
    return learning
