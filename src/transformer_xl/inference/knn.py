r"""kNN-LM over the past of a text (Khandelwal et al., 2020, arXiv 1911.00172).

The output $h_i$ of the layers at each past position is remembered with the token $x_{i+1}$ that
followed. The distribution of the next token is a mixture, with the k nearest positions $N_t$ and
the width $D$ of the model:

$$p(w) = (1 - \lambda)\, p_\mathrm{model}(w) + \lambda \sum_{i \in N_t} [x_{i+1} = w]\,
  \mathrm{softmax}_i(-\lVert h_t - h_i \rVert^2 / (D \tau))$$

The paper's datastore is the training text; here it is the text itself, as in the neural cache
(Grave et al., 2017, arXiv 1612.04426), which takes all positions of a window and $h_t \cdot h_i$
in place of the distance. Nothing is trained. docs/longer-memories.md has measurements.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.config import KnnConfig
from transformer_xl.model import Predictor

_LEAST_CAPACITY = 64


class Past:
    """The last positions of one stream: hidden states, and the tokens that followed.

    Immutable: buffers have spare capacity, and :meth:`extended` writes behind the last position.
    Of two continuations of a past, which share these buffers, only the latest is valid; unless it
    is that of a :meth:`copy`.

    Args:
        settings: The settings.
        reset_at: The token at which a new text begins, which sees nothing before it. None: none.
    """

    def __init__(self, settings: KnnConfig, reset_at: int | None = None) -> None:
        self.settings, self._reset_at = settings, reset_at
        self._start = self._stop = 0
        # Hidden states, the squares of their lengths, tokens; made when the width is known.
        self._buffers: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return self._stop - self._start

    def nearest(
        self, hidden: Float[Tensor, "T D"], following: Int[Tensor, " T"] | None = None
    ) -> tuple[Float[Tensor, "T k"], Int[Tensor, "T k"]]:
        """Return the tokens that followed the nearest positions, and their probabilities.

        Args:
            hidden: Hidden states of the next positions of the stream. Each sees those before it.
            following: The token after each of them; None: of a single position, whose next token
                is unknown.

        Returns:
            Probabilities, which sum to one, or are all zero for a position without a past; and
            tokens, with repetition.
        """
        M, T = len(self), len(hidden)
        hidden = hidden.float()
        if following is None:
            following = hidden.new_zeros(T, dtype=torch.int64)
        known = [x[self._start : self._stop] for x in self._buffers]
        if T > 1 or not known:
            new = [x[:-1] for x in _stored(hidden, following)]
            known = [torch.cat(both) for both in zip(known, new, strict=True)] if known else new
        states, squares, tokens = known
        # The distance up to a constant of each row, which the softmax does not depend on.
        with torch.autocast(hidden.device.type, enabled=False):
            score_TS = torch.addmm(squares, hidden, states.T, beta=-1, alpha=2)
        score_TS /= hidden.shape[1] * self.settings.temperature
        place = torch.arange(T, device=hidden.device)[:, None]
        age = M + place - torch.arange(M + T - 1, device=hidden.device)
        most = torch.full_like(place, self.settings.window)
        if self._reset_at is not None:
            # Where the text of each row begins; -M: in the past, which has no reset within.
            begins = torch.where(following == self._reset_at, place[:, 0] + 1, -M)
            before = begins.cummax(0).values.roll(1)
            before[0] = -M
            most = torch.minimum(most, place - before[:, None])
        score_TS = score_TS.masked_fill_((age < 1) | (age > most), -torch.inf)
        score, place = score_TS.topk(min(self.settings.k, M + T - 1), 1)
        # Without a past all scores are -inf, and their softmax would be NaN.
        return score.softmax(1).nan_to_num(0.0), tokens[place]

    def extended(self, hidden: Float[Tensor, "T D"], following: Int[Tensor, " T"]) -> "Past":
        """Return the past after more positions."""
        T, window, new = len(hidden), self.settings.window, _stored(hidden, following)
        start, stop, buffers = self._start, self._stop, self._buffers
        if not buffers or stop + T > len(buffers[0]):
            first = max(start, stop - window)
            known = [x[first:stop] for x in buffers]
            start, stop = 0, stop - first
            capacity = max(_LEAST_CAPACITY, 2 * (stop + T))
            buffers = tuple(x.new_empty(capacity, *x.shape[1:]) for x in new)
            for buffer, x in zip(buffers, known, strict=bool(known)):
                buffer[:stop] = x
        for buffer, x in zip(buffers, new, strict=True):
            buffer[stop : stop + T] = x
        if self._reset_at is not None:
            resets = (following == self._reset_at).nonzero()
            start = stop + int(resets[-1]) + 1 if len(resets) else start
        return self._with(buffers, max(start, stop + T - window), stop + T)

    def copy(self) -> "Past":
        """Return an independent copy."""
        return self._with(tuple(x.clone() for x in self._buffers), self._start, self._stop)

    def _with(self, buffers: tuple[Tensor, ...], start: int, stop: int) -> "Past":
        other = Past(self.settings, self._reset_at)
        other._buffers, other._start, other._stop = buffers, start, stop
        return other

    def mixed_nll(
        self,
        nll: Float[Tensor, " T"],
        hidden: Float[Tensor, "T D"],
        targets: Int[Tensor, " T"],
    ) -> Float[Tensor, " T"]:
        """Return -log p of targets under the mixture, given those under the model, in nats."""
        probs, tokens = self.nearest(hidden, targets)
        neighbours = (probs * (tokens == targets[:, None])).sum(1)
        mixed = -self._mixed(-nll, neighbours)
        return torch.where(probs.sum(1) > 0, mixed, nll)

    def mixed_log_probs(
        self, log_probs: Float[Tensor, " V"], hidden: Float[Tensor, " D"]
    ) -> Float[Tensor, " V"]:
        """Return the log-probabilities of the mixture, given those of the model."""
        probs, tokens = self.nearest(hidden[None])
        if not probs.sum() > 0:
            return log_probs
        neighbours = torch.zeros_like(log_probs).index_add_(
            0, tokens[0], probs[0].to(log_probs.dtype)
        )
        return self._mixed(log_probs, neighbours)

    def _mixed(self, log_probs: Tensor, neighbours: Tensor) -> Tensor:
        share = self.settings.share
        return torch.logaddexp(log_probs + math.log1p(-share), neighbours.log() + math.log(share))


def _stored(hidden: Tensor, following: Tensor) -> tuple[Tensor, ...]:
    """Return hidden states, the squares of their lengths, and tokens."""
    hidden = hidden.float()
    return hidden, hidden.square().sum(1), following


def remembered(
    pasts: Sequence[Past | None], hidden: Float[Tensor, "B T D"], following: Int[Tensor, "B known"]
) -> list[Past | None]:
    """Return the past of each stream after positions; what follows the last may be unknown."""
    following = following.to(hidden.device)
    known = hidden[:, : following.shape[1]]
    return [
        None if past is None else past.extended(*row)
        for past, *row in zip(pasts, known, following, strict=True)
    ]


class KnnSoftmax(Predictor):
    """The distribution of a model, mixed for each stream with the nearest positions of its past.

    Args:
        softmax: The distribution of the model.
        pasts: The past of each stream.
    """

    training, n_samples = False, 0

    def __init__(self, softmax: Any, pasts: Sequence[Past]) -> None:
        self._softmax, self._pasts = softmax, pasts

    def logits(self, hidden: Float[Tensor, "B D"]) -> Float[Tensor, "B V"]:
        """Return the log-probabilities."""
        rows = zip(self._pasts, self._softmax.log_probs(hidden), hidden, strict=True)
        return torch.stack([past.mixed_log_probs(*row) for past, *row in rows])
