"""Relative effective context length (RECL), section 4.3 and Appendix C of the paper.

It compares the losses of the same tokens given exactly c tokens of context, for many c.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.errors import InputError
from transformer_xl.model import LanguageModel, Lengths, Text, as_tokens, evaluating, read

_ROWS = 16
THRESHOLD = 0.01
"""Relative gain below which a longer context does not count (Appendix C)."""
BATCH_TOKENS = 16_384
"""Approximate number of tokens in a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recl:
    """The RECL of a model relative to its group."""

    length: int
    """The context length after which the relative gain falls below the threshold."""
    is_bound: bool
    """Whether ``length`` is a lower bound: the gain at the longest context is still sufficient."""
    gains: tuple[float, ...]
    """Relative gain g(c, c') from each context to the next, as a share of the perplexity."""
    falls: tuple[float, ...]
    """Absolute gain exp f(c, c) - exp f(c, c') in perplexity, as in Figure 3 of the paper."""


def relative_effective_context_length(
    losses: Float[np.ndarray, "models contexts tokens"],
    contexts: Sequence[int],
    *,
    top: float = 1.0,
) -> list[Recl]:
    r"""Compute the RECL of each model of a group.

    With $l_i(c, t)$ the loss of model i at token t given exactly c tokens before it, $b(c, t) =
    \min_i l_i(c, t)$ the baseline with a short context, and $\mathcal{T}$ the tokens with the
    highest baseline loss,

    $$f_i(c, c') = \frac{1}{|\mathcal{T}|} \sum_{t \in \mathcal{T}} \min(b(c, t), l_i(c', t))
    \qquad g_i(c, c') = \frac{\exp f_i(c, c) - \exp f_i(c, c')}{\exp f_i(c, c)}$$

    The length is the first c whose $g_i(c, c')$, with c' the next context, is below 0.01.
    All models share a baseline, so a weak model does not get a large RECL from poor losses at short
    contexts. Because of the minimum, random fluctuations of the losses count as small gains.

    Args:
        losses: -log p in nats, of the same tokens for all models.
        contexts: The context lengths, ascending; equally spaced in the paper.
        top: Share r of the tokens in $\mathcal{T}$.

    Returns:
        One result for each model, in order.

    Raises:
        InputError: A loss is not finite.
    """
    losses = np.asarray(losses, dtype=np.float64)
    if not np.isfinite(losses).all():
        raise InputError("some losses are not finite: a model gives a token no probability at all")
    n_tokens = max(1, round(top * losses.shape[2]))
    baseline = losses.min(0)
    gains = np.empty((len(losses), len(contexts) - 1))
    falls = np.empty_like(gains)
    for n in range(len(contexts) - 1):
        # Stable, for deterministic ties.
        hardest = np.argsort(-baseline[n], kind="stable")[:n_tokens]
        floor = baseline[n][hardest]
        before = np.exp(floor.mean())
        for i, longer in enumerate(losses[:, n + 1]):
            falls[i, n] = before - np.exp(np.minimum(floor, longer[hardest]).mean())
            gains[i, n] = falls[i, n] / before
    result = []
    for each, fall in zip(gains.tolist(), falls.tolist(), strict=True):
        small = [c for c, gain in zip(contexts, each, strict=False) if gain < THRESHOLD]
        length = int(small[0] if small else contexts[-1])
        result.append(Recl(length=length, is_bound=not small, gains=tuple(each), falls=tuple(fall)))
    return result


def target_places(n_tokens: int, contexts: range, n_targets: int) -> list[int]:
    """Choose the target tokens of a text.

    Each has the longest context before it. They form rows, spread over the text, with the spacing
    of the contexts, so that :func:`context_losses` can share windows.

    Raises:
        InputError: The text is too short.
    """
    longest, step = contexts[-1], contexts.step
    available = n_tokens - longest
    if not 0 < n_targets <= available:
        raise InputError(
            f"{n_targets:,} tokens with {longest:,} before each need a text of "
            f"{longest + n_targets:,} tokens, and this one has {n_tokens:,}; "
            "give more text, a shorter longest context or fewer tokens"
        )
    # Several rows, as a text may be periodic in the step of the contexts.
    n_rows = min(step, n_targets, max(_ROWS, -(-n_targets * step // available)))
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
    lengths: Lengths,
    window: int | None = None,
) -> Float[np.ndarray, "contexts tokens"]:
    r"""Measure $l(c, t) = -\log p(x_t \mid x_{t-c}, \dots, x_{t-1})$.

    Attention and memory lengths do not limit the context, which grows with each layer; only the
    start of the text does. So every context is a window read from an initial memory: one that
    starts at s gives the losses of the tokens s + c for all c, and with targets spaced like the
    contexts, windows are shared. They are batched and read in segments with memory, as in an
    evaluation.

    Args:
        model: The model; its mode is restored afterwards.
        ids: The text in tokens.
        places: Indices of the target tokens, from :func:`target_places`.
        contexts: The context lengths.
        lengths: How the text is read; ``ext_len`` is not used.
        window: Limit of the context, read as one segment, for a model without memory. None: no
            limit.

    Raises:
        InputError: A token is outside the vocabulary.
    """
    text = as_tokens(ids, model.config)
    lengths = lengths._replace(segment_len=window or lengths.segment_len, ext_len=0)
    limit = contexts[-1] if window is None else min(window, contexts[-1])
    within = [c for c in contexts if c <= limit]
    result = np.empty((len(contexts), len(places)))
    with evaluating(model):
        for chosen in (within, [] if limit in contexts else [limit]):
            pairs = {(place - c, c) for place in places for c in chosen}
            losses = _window_losses(model, text, pairs, window, lengths)
            for row, c in enumerate(contexts):
                if (context := min(c, limit)) in chosen:
                    result[row] = [losses[place - context, context] for place in places]
    return result


def _window_losses(
    model: LanguageModel,
    text: Tensor,
    pairs: set[tuple[int, int]],
    window: int | None,
    lengths: Lengths,
) -> dict[tuple[int, int], float]:
    """Return the loss of token s + c in the window that begins at s, for each pair (s, c).

    Args:
        model: The model, in evaluation mode.
        text: The text in tokens, of shape (n_tokens,).
        pairs: Starts of windows and lengths of contexts.
        window: Length of all windows, for a model without memory. None: a window is as long as the
            longest context of its start.
        lengths: How windows are read.

    Returns:
        Losses in nats, by pair.
    """
    result: dict[tuple[int, int], float] = {}
    farthest: dict[int, int] = {}
    for start, c in pairs:
        farthest[start] = max(c, farthest.get(start, 0))
    # Sorted by length, so that batches have little padding.
    starts = sorted(farthest, key=lambda start: (farthest[start], start))
    longest = max(farthest.values(), default=1)
    n_windows = max(1, BATCH_TOKENS // min(lengths.segment_len, longest))
    contexts = sorted({c for _, c in pairs})
    for first in range(0, len(starts), n_windows):
        batch = starts[first : first + n_windows]
        # Always a full window, as absolute positions are counted from its end.
        length = window or max(farthest[start] for start in batch)
        # Positions beyond the end of the text repeat its last token; their losses are not used.
        places = torch.tensor(batch)[:, None] + torch.arange(length + 1)
        tokens = text[places.clamp(max=len(text) - 1)]
        mems = model.keep(model.start_memory(len(batch), lengths.mem_len))
        for piece in read(model, tokens[:, :-1], lengths, mems):
            first_c, last_c = piece.start + 1, piece.start + piece.hidden.shape[1]
            chosen = [c for c in contexts if first_c <= c <= last_c]
            if not chosen:
                continue
            states = piece.hidden[:, torch.tensor(chosen, device=model.device) - first_c]
            nll = model.head.nll(states, tokens[:, chosen].to(model.device)).double().tolist()
            for start, losses in zip(batch, nll, strict=True):
                result |= {(start, c): loss for c, loss in zip(chosen, losses, strict=True)}
    return result
