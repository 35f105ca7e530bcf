"""The definition of the relative effective context length, on losses (Appendix C of the paper)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

THRESHOLD = 0.01
"""The relative gain below which a longer context is of no use (Appendix C)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recl:
    """How far back a model looks with profit, compared with the others of its group."""

    length: int
    """The context beyond which a step more gains less than the threshold."""
    is_bound: bool
    """The longest measured context still gained enough: the length is this one or more."""
    gains: tuple[float, ...]
    """g(c, c') from each context to the next: the share by which the perplexity falls."""
    falls: tuple[float, ...]
    """exp f(c, c) - exp f(c, c'), the same not divided by exp f(c, c): Figure 3 of the paper."""


def relative_effective_context_length(
    losses: Float[np.ndarray, "models contexts tokens"],
    contexts: Sequence[int],
    *,
    top: float = 1.0,
    threshold: float = THRESHOLD,
) -> list[Recl]:
    r"""Measure how far back each model of a group looks with profit.

    With $l_i(c, t)$ the loss of model i at token t given exactly c tokens before it, $b(c, t) =
    \min_i l_i(c, t)$ the best that any model does with a short context, and $\mathcal{T}$ the
    tokens that are hardest by it,

    $$f_i(c, c') = \frac{1}{|\mathcal{T}|} \sum_{t \in \mathcal{T}} \min(b(c, t), l_i(c', t))
    \qquad g_i(c, c') = \frac{\exp f_i(c, c) - \exp f_i(c, c')}{\exp f_i(c, c)}$$

    From the first context on, c grows to the next one, c', as long as $g_i(c, c')$ reaches the
    threshold; where it does not, c is the length. All models gain over the same baseline, so a
    weak model cannot look far by beginning low. Since a gain counts only where it is one, losses
    that merely fluctuate with the context pass for a small gain.

    Args:
        losses: -log p in nats, of the same tokens for all models.
        contexts: The context lengths, rising; the paper's steps are equal.
        top: Share r of the tokens in $\mathcal{T}$.
        threshold: The smallest gain that counts.

    Returns:
        One result for each model, in order.

    Raises:
        ValueError: The numbers do not fit each other or are not finite.
    """
    losses = np.asarray(losses, dtype=np.float64)
    if losses.ndim != 3 or losses.size == 0 or losses.shape[1] != len(contexts):
        raise ValueError(
            f"losses of shape {losses.shape} must be (models, contexts, tokens) with "
            f"{len(contexts)} contexts, and not empty"
        )
    if list(contexts) != sorted({*contexts}) or len(contexts) < 2:
        raise ValueError(f"contexts={list(contexts)} must be at least two lengths that rise")
    if not 0 < top <= 1:
        raise ValueError(f"top={top} must be above 0 and at most 1: it is a share of the tokens")
    if not np.isfinite(losses).all():
        raise ValueError("some losses are not finite: a model gives a token no probability at all")
    n_tokens = max(1, round(top * losses.shape[2]))
    baseline = losses.min(0)
    found = [([], []) for _ in losses]
    for n in range(len(contexts) - 1):
        # Stable, so that of equally hard tokens always the same are taken.
        hardest = np.argsort(-baseline[n], kind="stable")[:n_tokens]
        floor = baseline[n][hardest]
        before = np.exp(floor.mean())
        for (gains, falls), longer in zip(found, losses[:, n + 1], strict=True):
            after = np.exp(np.minimum(floor, longer[hardest]).mean())
            gains.append(float((before - after) / before))
            falls.append(float(before - after))
    return [_result(contexts, gains, falls, threshold) for gains, falls in found]


def _result(
    contexts: Sequence[int], gains: list[float], falls: list[float], threshold: float
) -> Recl:
    enough = [gain >= threshold for gain in gains]
    n = len(enough) if all(enough) else enough.index(False)
    return Recl(
        length=int(contexts[n]), is_bound=all(enough), gains=tuple(gains), falls=tuple(falls)
    )
