"""Relative effective context length: its definition (paper, section 4.3), losses and picture.

The losses are those of the same tokens, given exactly c tokens before each, for many c.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.config.files import write_atomically
from transformer_xl.model import LanguageModel
from transformer_xl.model.arguments import Text, as_tokens
from transformer_xl.model.lengths import SEGMENT_LEN, Lengths
from transformer_xl.model.reading import read
from transformer_xl.model.wrapping import evaluating

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


def draw_gains(
    path: Path,
    contexts: Sequence[int],
    results: Mapping[float, Mapping[str, Recl]],
    threshold: float = THRESHOLD,
) -> None:
    """Draw the relative gain of each step over the context it begins at, a panel for each r.

    Args:
        path: The file; its suffix says the format, ``.png`` or ``.svg``.
        contexts: The context lengths.
        results: For each share r of the tokens, the results of the models by name.
        threshold: The smallest gain that counts.

    Raises:
        ImportError: matplotlib is missing.
        OSError: The file cannot be written.
    """
    # Without pyplot nothing here touches the display or another figure of the process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(results), 3.4), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (top, models) in zip(panels, results.items(), strict=True):
        for name, result in models.items():
            line = axes.plot(contexts[:-1], [100 * gain for gain in result.gains], label=name)
            axes.axvline(result.length, color=line[0].get_color(), linestyle=":", linewidth=1)
        axes.axhline(100 * threshold, color="0.5", linestyle="--", linewidth=1)
        axes.set_title(f"the hardest {top:.0%} of the tokens" if top < 1 else "all tokens")
        axes.set_xlabel("context c in tokens; dotted: effective length")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("perplexity gained by a step more, %")
    panels[0].legend(frameon=False)
    form = path.suffix.removeprefix(".") or "png"
    metadata = {"Date": None} if form == "svg" else {}
    write_atomically(
        path,
        lambda temporary: figure.savefig(temporary, format=form, dpi=150, metadata=metadata),
    )


_ROWS = 16


def target_places(n_tokens: int, contexts: range, n_targets: int) -> list[int]:
    """Choose the tokens of a text that are predicted.

    Each has the longest context before it. They lie in rows, spread over the text, in which they
    are as far apart as the contexts grow: so a window serves many of them, as
    :func:`context_losses` says.

    Raises:
        ValueError: The text is too short.
    """
    longest, step = contexts[-1], contexts.step
    room = n_tokens - longest
    if not 0 < n_targets <= room:
        raise ValueError(
            f"{n_targets:,} tokens with {longest:,} before each need a text of "
            f"{longest + n_targets:,} tokens, and this one has {n_tokens:,}; "
            "give more text, a shorter longest context or fewer tokens"
        )
    # At least so many rows, for a text may repeat itself with the step of the contexts.
    n_rows = min(step, n_targets, max(_ROWS, -(-n_targets * step // room)))
    places: list[int] = []
    for row in range(n_rows):
        candidates = range(longest + row * step // n_rows, n_tokens, step)
        n = min(-(-(n_targets - len(places)) // (n_rows - row)), len(candidates))
        first = row * (len(candidates) - n) // max(n_rows - 1, 1)
        places += candidates[first : first + n]
    if len(places) < n_targets:
        others = sorted({*range(longest, n_tokens)} - {*places})
        places += others[: n_targets - len(places)]
    return places


@torch.no_grad()
def context_losses(
    model: LanguageModel,
    ids: Text,
    places: Sequence[int],
    contexts: range,
    *,
    segment_len: int = SEGMENT_LEN,
    mem_len: int | None = None,
    attn_len: int | None = None,
    clamp_len: int | None = None,
    window: int | None = None,
    batch_tokens: int = 16384,
) -> Float[np.ndarray, "contexts tokens"]:
    r"""Measure $l(c, t) = -\log p(x_t \mid x_{t-c}, \dots, x_{t-1})$.

    Attention and memory lengths do not bound what a prediction depends on, since each layer looks
    further back than the one above it; the beginning of the text does. So every window is read
    from nothing: a window that begins at s gives the losses of the tokens s + c for all c at once,
    and where targets are as far apart as contexts, each window serves as many targets as there are
    contexts. Windows are read side by side, in segments with the memory as in evaluation.

    Args:
        model: The model; its mode is restored afterwards.
        ids: The text in tokens.
        places: Which tokens are predicted, as :func:`target_places` chooses.
        contexts: The context lengths.
        segment_len: Tokens read at once.
        mem_len: Remembered positions. None: as the model is configured.
        attn_len: Keys a query sees, counting its own. None: as the model is configured.
        clamp_len: Largest distance told apart. None: as the model is configured.
        window: For a model that cannot read more: of a longer context it reads the last
            ``window`` tokens, all at once. None: no such limit.
        batch_tokens: About how many tokens are read at once, over all windows.

    Raises:
        ValueError: A token is outside the vocabulary, or a target has too little text before it.
    """
    text = as_tokens(ids, model.config)
    if min(places) < contexts[-1] or max(places) >= len(text) or contexts[0] < 1:
        raise ValueError(
            f"tokens {min(places)} to {max(places)} of a text of {len(text)} cannot all have "
            f"contexts of {contexts[0]} to {contexts[-1]} tokens"
        )
    lengths = Lengths.of(
        model.config,
        segment_len=segment_len if window is None else window,
        mem_len=mem_len,
        attn_len=attn_len,
        clamp_len=clamp_len,
        ext_len=0,
    )
    limit = contexts[-1] if window is None else min(window, contexts[-1])
    within = [c for c in contexts if c <= limit]
    found = np.empty((len(contexts), len(places)))
    with evaluating(model):
        for asked in (within, [] if limit in contexts else [limit]):
            pairs = {(place - c, c) for place in places for c in asked}
            losses = _window_losses(model, text, pairs, window, lengths, batch_tokens)
            for row, c in enumerate(contexts):
                if (seen := min(c, limit)) in asked:
                    found[row] = [losses[place - seen, seen] for place in places]
    return found


def _window_losses(
    model: LanguageModel,
    text: Tensor,
    pairs: set[tuple[int, int]],
    window: int | None,
    lengths: Lengths,
    batch_tokens: int,
) -> dict[tuple[int, int], float]:
    """Return the loss of token s + c in the window that begins at s, for each pair (s, c)."""
    found: dict[tuple[int, int], float] = {}
    if not pairs:
        return found
    farthest: dict[int, int] = {}
    for start, c in pairs:
        farthest[start] = max(c, farthest.get(start, 0))
    # Windows of one length beside each other, as few are cut off for the ends of the text.
    starts = sorted(farthest, key=lambda start: (farthest[start], start))
    n_windows = max(1, batch_tokens // min(lengths.segment_len, max(farthest.values())))
    contexts = sorted({c for _, c in pairs})
    for first in range(0, len(starts), n_windows):
        batch = starts[first : first + n_windows]
        longest = max(farthest[start] for start in batch)
        # A whole window, as in training: absolute positions are counted from its end.
        length = window or longest
        for c, losses in _losses_behind(model, text, batch, length, contexts, lengths):
            for start, loss in zip(batch, losses, strict=True):
                if (start, c) in pairs:
                    found[start, c] = loss
    return found


def _losses_behind(
    model: LanguageModel,
    text: Tensor,
    starts: list[int],
    length: int,
    contexts: list[int],
    lengths: Lengths,
) -> Iterator[tuple[int, list[float]]]:
    """Read windows from nothing; yield for each context the losses of the tokens behind it."""
    # What lies behind the end of the text is read by nobody who is asked.
    places = (torch.tensor(starts)[:, None] + torch.arange(length + 1)).clamp(max=len(text) - 1)
    tokens = text[places]
    mems = model.keep(model.start_memory(len(starts), lengths.mem_len))
    for piece in read(model, tokens[:, :-1], lengths, mems):
        first, last = piece.start + 1, piece.start + piece.hidden.shape[1]
        asked = [c for c in contexts if first <= c <= last]
        if asked:
            states = piece.hidden[:, torch.tensor(asked, device=model.device) - first]
            nll = model.head.nll(states, tokens[:, asked].to(model.device))
            yield from zip(asked, nll.double().T.tolist(), strict=True)
