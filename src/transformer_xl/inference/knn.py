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

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.config import KnnConfig


class Past:
    """The last positions of one stream: hidden states, and the tokens that followed.

    Args:
        settings: The settings.
        reset_at: The token at which a new text begins, which sees nothing before it. None: none.
    """

    def __init__(self, settings: KnnConfig, reset_at: int | None = None) -> None:
        self._settings, self._reset_at = settings, reset_at
        # Hidden states, the squares of their lengths, and the tokens that followed.
        self._known: list[Tensor] | None = None

    def mixed_nll(
        self,
        nll: Float[Tensor, " T"],
        hidden: Float[Tensor, "T D"],
        following: Int[Tensor, " T"],
    ) -> Float[Tensor, " T"]:
        """Return -log p of the next tokens under the mixture, in nats, and remember them.

        Args:
            nll: -log p of them under the model.
            hidden: Hidden states of the next positions of the stream. Each sees those before it.
            following: The token after each of them.
        """
        settings, T, hidden = self._settings, len(hidden), hidden.float()
        new = [hidden, hidden.square().sum(1), following]
        known = self._known or [x[:0] for x in new]
        M = len(known[0])
        every = [torch.cat(both) for both in zip(known, new, strict=True)]
        states, squares, tokens = (x[:-1] for x in every)
        # The distance up to a constant of each row, which the softmax does not depend on.
        with torch.autocast(hidden.device.type, enabled=False):
            score_TS = torch.addmm(squares, hidden, states.T, beta=-1, alpha=2)
        score_TS /= hidden.shape[1] * settings.temperature
        place = torch.arange(T, device=hidden.device)[:, None]
        age = M + place - torch.arange(M + T - 1, device=hidden.device)
        most, first = torch.full_like(place, settings.window), 0
        if self._reset_at is not None:
            is_reset = following == self._reset_at
            # Where the text of each row begins; -M: in the past, which has no reset within.
            begins = torch.where(is_reset, place[:, 0] + 1, -M).cummax(0).values
            first = M + int(begins[-1])
            before = begins.roll(1)
            before[0] = -M
            most = torch.minimum(most, place - before[:, None])
        score_TS = score_TS.masked_fill_((age < 1) | (age > most), -torch.inf)
        score, nearest = score_TS.topk(min(settings.k, M + T - 1), 1)
        # Without a past all scores are -inf, and their softmax would be NaN.
        probs = score.softmax(1).nan_to_num(0.0)
        self._known = [x[max(first, M + T - settings.window) :] for x in every]
        neighbours = (probs * (tokens[nearest] == following[:, None])).sum(1)
        share = settings.share
        mixed = -torch.logaddexp(-nll + math.log1p(-share), neighbours.log() + math.log(share))
        return torch.where(probs.sum(1) > 0, mixed, nll)
