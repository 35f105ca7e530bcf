"""The :class:`Sampler` of tokens: penalties, temperature, filters, and the draw."""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.inference.generate.history import History
from transformer_xl.inference.generate.loops import LoopRule
from transformer_xl.inference.generate.sampling import HOTTEST, Sampling
from transformer_xl.model import Predictor, shown

_COLDEST = 1e-30
"""Temperatures are clamped to this and HOTTEST, beyond which float32 under- or overflows."""
_MAX_PENALTY = 1e30
"""Penalties are clamped to this (as a divisor, to its inverse), so that logits stay finite."""
_WINDOW = 1_024
"""How many of the last tokens, prompt included, the repetition penalty and DRY consider."""
_DRY_BASE = 1.75
"""The factor of the penalty of DRY for each further token of a repetition."""
_MAX_EXCESS = 48
"""Tokens beyond ``dry_allowed_length`` after which the penalty of DRY grows no more."""


class Sampler:
    """Samples a token from each of several distributions.

    The settings are applied in the order of transformers: to the logits the repetition penalty,
    DRY and the exclusion of a token that continues a loop; then temperature, ``top_k``, ``top_p``
    and ``min_p``, each on what the one before has left. An adaptive softmax has no logits of the
    whole vocabulary, so the penalties apply to log-probabilities. These are negative, so the
    repetition penalty always multiplies.

    Args:
        sampling: The settings. None: the defaults.
        vocab_size: Size of the vocabulary; a ``top_k`` of so many or more filters nothing.
    """

    def __init__(self, sampling: Sampling | None = None, vocab_size: int | None = None) -> None:
        if not isinstance(sampling, Sampling | None):
            raise InputError(
                f"sampling={shown(sampling)} must be a Sampling: give sampling=Sampling(...)"
            )
        sampling = sampling or Sampling()
        config = self._config = sampling.config
        self.needs_history = config.has_penalties or config.on_loop == "break"
        self._loop = LoopRule(config.loop_min_length)
        self.temperature = config.temperature
        # Normalized to None where nothing is filtered, so that the same tokens are sampled.
        k = config.top_k
        self.top_k = None if k and vocab_size and k >= vocab_size else k
        self.top_p = None if config.top_p == 1 else config.top_p
        self.min_p = config.min_p or None

    @property
    def settings(self) -> dict[str, object]:
        """Temperature, top_k and top_p (None: no filter), and the others that have an effect."""
        settings = self._config.sampling | {"top_k": self.top_k, "top_p": self.top_p}
        if self.min_p is None:
            settings.pop("min_p", None)
        return settings

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """The settings as a key: samplers with the same one can sample as one."""
        return (*self.settings.items(),)

    def __call__(
        self,
        softmax: Predictor,
        hidden: Float[Tensor, "B D"],
        numbers: Float[Tensor, " B"],
        histories: Sequence[History] = (),
    ) -> list[int]:
        """Sample a token for each stream, given a uniform number from [0, 1) for it.

        Args:
            softmax: The distribution.
            hidden: The hidden states.
            numbers: The uniform numbers.
            histories: The tokens so far of each stream; required if ``needs_history``.

        Raises:
            RuntimeError: The probabilities are not finite.
        """
        has_filters = {self.top_k, self.top_p, self.min_p} != {None}
        if self.needs_history:
            values = self._penalized(softmax, hidden, histories)
        else:
            values = softmax.log_probs(hidden)
            if self.temperature == 1 and not has_filters:
                return drawn(values.exp(), numbers).tolist()
        if self.temperature == 0:
            values, best = values.topk(1)
            _require_finite(values)
            return best[:, 0].tolist()
        weights, tokens = self._weights(values)
        places = drawn(weights, numbers)[:, None]
        return (places if tokens is None else tokens.gather(1, places))[:, 0].tolist()

    def _weights(
        self, values: Float[Tensor, "B V"]
    ) -> tuple[Float[Tensor, "B n"], Int[Tensor, "B n"] | None]:
        """Return unnormalized probabilities after all filters, and their tokens; None: all."""
        tokens = None
        if self.top_k is not None:
            values, tokens = values.topk(min(self.top_k, values.shape[-1]))
        # With a maximum of 0, small temperatures do not overflow.
        values = values - values.amax(-1, keepdim=True)
        probs = values.div_(min(max(self.temperature, _COLDEST), HOTTEST)).softmax(-1)
        if self.top_p is not None:
            if tokens is None:
                probs, tokens = _with_probability(self.top_p, probs)
            # A token stays if the likelier ones sum to less than top_p; the first one always, even
            # if top_p rounds to 0 in float32.
            stays = probs.cumsum(-1) - probs < self.top_p
            stays[:, 0] = True
            probs = probs * stays
        if self.min_p is not None:
            probs = probs * (probs >= self.min_p * probs.amax(-1, keepdim=True))
        return probs, tokens

    def _penalized(
        self,
        softmax: Predictor,
        hidden: Float[Tensor, "B D"],
        histories: Sequence[History],
    ) -> Float[Tensor, "B V"]:
        """Return the logits of all texts after the penalties, in float32 at least.

        What is penalized is found in NumPy; the logits of all texts are changed at once.
        """
        logits = softmax.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        config = self._config
        assert len(histories) == len(logits)
        windows = [history.last(_WINDOW) for history in histories]
        if config.repetition_penalty != 1:
            penalty = min(max(config.repetition_penalty, 1 / _MAX_PENALTY), _MAX_PENALTY)
            places = _places([np.unique(window) for window in windows], logits.device)
            values = logits[places]
            logits[places] = torch.where(values < 0, values * penalty, values / penalty)
        if config.dry_multiplier:
            allowed = config.dry_allowed_length
            repeated = [extended(window, allowed) for window in windows]
            excess = np.array([length - allowed for each in repeated for length in each.values()])
            with np.errstate(over="ignore"):
                penalties = config.dry_multiplier * _DRY_BASE ** excess.astype(float)
            places = _places([[*each] for each in repeated], logits.device)
            logits[places] -= torch.from_numpy(penalties.clip(max=_MAX_PENALTY)).to(logits)
        if config.on_loop == "break" and logits.shape[-1] > 1:
            excluded = [self._looping_token(history) for history in histories]
            logits[_places(excluded, logits.device)] = -math.inf
        return logits

    def _looping_token(self, history: History) -> list[int]:
        """Return the token that would continue the loop of a text, if it loops."""
        written = history.sampled()
        period = self._loop.after_breaks(history).period(written)
        if not period:
            return []
        history.add_break()
        return [int(written[-period])]


def _places(
    tokens: Sequence[Sequence[int] | np.ndarray], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of logits, for tokens of each row."""
    rows = np.repeat(np.arange(len(tokens)), [len(each) for each in tokens])
    columns = np.concatenate([np.asarray(each, np.int64) for each in tokens])
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)


def _require_finite(values: Float[Tensor, "*shape"]) -> None:
    """Require what is computed from the probabilities to be finite.

    Raises:
        CheckpointError: It is not.
    """
    # Few numbers: a list is faster than operations.
    if not all(map(math.isfinite, values.flatten().tolist())):
        raise CheckpointError("the model's probabilities are not finite: its weights are damaged")


def extended(tokens: Int32[np.ndarray, " n"], at_least: int) -> dict[int, int]:
    """Return the tokens that would extend a repetition, with its length.

    The length of token x is the largest n for which the last n tokens stand somewhere before,
    followed by x; at most 48 more than ``at_least``. The places where the last token stands are
    compared at once, without a loop over tokens.

    Args:
        tokens: The tokens so far.
        at_least: Lengths below this are left out.
    """
    n = len(tokens)
    longest = min(at_least + _MAX_EXCESS, n - 1)
    if longest < at_least:
        return {}
    (ends,) = np.nonzero(tokens[:-1] == tokens[-1])
    # Places before the first token match nothing.
    padded = np.concatenate([np.full(longest - 1, -1, np.int32), tokens[:-1]])
    spans = np.lib.stride_tricks.sliding_window_view(padded, longest)[ends]
    differs = (spans != tokens[n - longest :])[:, ::-1]
    lengths = np.where(differs.any(1), differs.argmax(1), longest)
    lengths_by_token: dict[int, int] = {}
    is_long = lengths >= at_least
    followers = tokens[ends[is_long] + 1].tolist()
    for token, length in zip(followers, lengths[is_long].tolist(), strict=True):
        lengths_by_token[token] = max(length, lengths_by_token.get(token, 0))
    return lengths_by_token


def drawn(probs: Float[Tensor, "B n"], numbers: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Sample indices by inversion of the cumulative distribution.

    Args:
        probs: Probabilities, or unnormalized weights.
        numbers: Uniform numbers from [0, 1), in float64 for the sake of rare symbols.

    Raises:
        CheckpointError: The probabilities are not finite.
    """
    sums = probs.double().cumsum(-1)
    totals = sums[:, -1:]
    _require_finite(totals)
    points = numbers.to(sums)[:, None] * totals
    places = torch.searchsorted(sums, points, right=True)
    return places[:, 0].clamp_(max=probs.shape[-1] - 1)


def _with_probability(
    top_p: float, probs: Float[Tensor, "B V"]
) -> tuple[Float[Tensor, "B k"], Int[Tensor, "B k"]]:
    """Return the most likely tokens, in descending order, with this total probability or more."""
    k, V = 64, probs.shape[-1]
    while True:
        # A few are nearly always enough, and topk is faster than sorting the vocabulary.
        likeliest, tokens = probs.topk(min(k, V))
        if k >= V or bool((likeliest.sum(-1) >= top_p).all()):
            return likeliest, tokens
        k *= 8
