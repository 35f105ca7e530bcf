"""The :class:`Sampler` of tokens: penalties, temperature, filters, and the draw."""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from transformer_xl.config import GenerateConfig, require
from transformer_xl.data import Vocab
from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.inference.generate.history import History
from transformer_xl.inference.generate.loops import LoopRule
from transformer_xl.inference.generate.sampling import HOTTEST, Sampling
from transformer_xl.model import Predictor, drawn, shown

_COLDEST = 1e-30
"""Temperatures are clamped to this and HOTTEST, beyond which float32 under- or overflows."""
_MAX_PENALTY = 1e30
"""Penalties are clamped to this (as a divisor, to its inverse), so that logits stay finite."""
_MAX_EXCESS = 48
"""Tokens beyond ``dry_allowed_length`` after which the penalty of DRY grows no more."""


class Sampler:
    """Samples a token from each of several distributions.

    The settings are applied in the order of transformers: to the logits the repetition penalty, the
    presence and frequency penalties, DRY and the exclusion of a token that continues a loop; then
    temperature, ``top_k``, ``top_p``, ``min_p`` and ``typical_p``, each on what the one before has
    left. An adaptive softmax has no logits of the whole vocabulary, so the penalties apply to
    log-probabilities. These are negative, so the repetition penalty always multiplies.

    Args:
        sampling: The settings. None: the defaults.
        vocab_size: Size of the vocabulary; a ``top_k`` of so many or more filters nothing.
        vocab: The vocabulary, for sequence breakers that are texts.

    Raises:
        ValueError: A sequence breaker is not in the vocabulary.
    """

    def __init__(
        self,
        sampling: Sampling | None = None,
        vocab_size: int | None = None,
        vocab: Vocab | None = None,
    ) -> None:
        if not isinstance(sampling, Sampling | None):
            raise InputError(
                f"sampling={shown(sampling)} must be a Sampling: give sampling=Sampling(...)"
            )
        sampling = sampling or Sampling()
        config = self._config = sampling.config
        # As they were given: texts or tokens.
        self._shown_breakers, breakers = _breakers_of(sampling, vocab_size, vocab)
        self._breakers = frozenset(breakers)
        self.needs_history = config.has_penalties or config.on_loop != "continue"
        self.ends_loops = config.on_loop == "end"
        self._changes_logits = config.has_penalties or config.on_loop == "break"
        self._loop = LoopRule(config.loop_max_period, config.loop_min_count, config.loop_min_length)
        self.temperature = config.temperature
        # Normalized to None where nothing is filtered, so that the same tokens are sampled.
        k = config.top_k
        self.top_k = None if k and vocab_size and k >= vocab_size else k
        self.top_p = None if config.top_p == 1 else config.top_p
        self.min_p = config.min_p or None
        self.typical_p = None if config.typical_p == 1 else config.typical_p
        self._others = {"min_p": self.min_p, "typical_p": self.typical_p}
        self._has_filters = {self.top_k, self.top_p, *self._others.values()} != {None}

    @property
    def settings(self) -> dict[str, Any]:
        """Temperature, top_k and top_p (None: no filter), and the others that have an effect."""
        settings = self._config.sampling | {"top_k": self.top_k, "top_p": self.top_p}
        for name in (name for name, x in self._others.items() if x is None):
            settings.pop(name, None)
        if "dry_sequence_breakers" in settings:
            settings["dry_sequence_breakers"] = self._shown_breakers
        return settings

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """The settings as a key: samplers with the same one can sample as one."""
        return tuple(self.settings.items())

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
        logits = self._penalized(softmax, hidden, histories) if self._changes_logits else None
        if self.temperature == 0:
            values, best = softmax.top_k(hidden, 1) if logits is None else logits.topk(1)
            require_finite(values)
            return best[:, 0].tolist()
        if self.temperature == 1 and logits is None and not self._has_filters:
            # An adaptive softmax usually skips its rarer clusters.
            return softmax.draw(hidden, numbers).tolist()
        weights, tokens = self._weights(softmax, hidden, logits)
        places = drawn(weights, numbers)[0][:, None]
        return (places if tokens is None else tokens.gather(1, places))[:, 0].tolist()

    def ends(self, history: History) -> bool:
        """Whether a text ends because what was sampled loops."""
        return self.ends_loops and self._loop.period(history.sampled()) > 0

    def _weights(
        self,
        softmax: Predictor,
        hidden: Float[Tensor, "B D"],
        logits: Float[Tensor, "B V"] | None,
    ) -> tuple[Float[Tensor, "B n"], Int[Tensor, "B n"] | None]:
        """Return unnormalized probabilities after all filters, and their tokens; None: all.

        Args:
            softmax: The distribution.
            hidden: The hidden states.
            logits: The logits after penalties. None: those of the model.
        """
        if self.top_k is None:
            values, tokens = softmax.log_probs(hidden) if logits is None else logits, None
        elif logits is None:
            values, tokens = softmax.top_k(hidden, self.top_k)
        else:
            values, tokens = logits.topk(min(self.top_k, logits.shape[-1]))
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
        if self.typical_p is not None:
            probs = probs * _is_typical(self.typical_p, probs)
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
        windows = [history.last(config.penalty_window) for history in histories]
        repetition = min(max(config.repetition_penalty, 1 / _MAX_PENALTY), _MAX_PENALTY)
        presence, frequency = config.presence_penalty, config.frequency_penalty
        if repetition != 1 or presence or frequency:
            rows, tokens, counts = (
                torch.from_numpy(x).to(logits.device) for x in _counted(windows)
            )
            values = logits[rows, tokens]
            if repetition != 1:
                values = torch.where(values < 0, values * repetition, values / repetition)
            if presence or frequency:
                values -= counts.to(values) * frequency + presence
            logits[rows, tokens] = values
        if config.dry_multiplier:
            allowed = config.dry_allowed_length
            repeated = [extended(window, self._breakers, allowed) for window in windows]
            excess = np.array([length - allowed for each in repeated for length in each.values()])
            with np.errstate(over="ignore"):
                penalties = config.dry_multiplier * config.dry_base ** excess.astype(float)
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


def _counted(windows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, token and count of each distinct token of each window."""
    n = max(map(len, windows))
    ordered = np.full((len(windows), n), -1, np.int64)
    for row, window in zip(ordered, windows, strict=True):
        row[n - len(window) :] = window
    ordered.sort(axis=1)
    is_first = np.ones(ordered.shape, bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    (starts,) = np.nonzero(is_first.ravel())
    tokens, counts = ordered.ravel()[starts], np.diff(starts, append=ordered.size)
    is_known = tokens >= 0
    return (starts // n)[is_known], tokens[is_known], counts[is_known]


def _places(
    tokens: Sequence[Sequence[int] | np.ndarray], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of logits, for tokens of each row."""
    rows = np.repeat(np.arange(len(tokens)), [len(each) for each in tokens])
    columns = np.concatenate([np.asarray(each, np.int64) for each in tokens])
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)


def require_finite(largest: Float[Tensor, "B n"]) -> None:
    """Require that the largest logits or log-probabilities of each text are finite.

    Raises:
        RuntimeError: One is not.
    """
    if not largest[:, 0].isfinite().all():
        raise CheckpointError("the model's probabilities are not finite: its weights are damaged")


def extended(
    tokens: Int32[np.ndarray, " n"], breakers: frozenset[int], at_least: int
) -> dict[int, int]:
    """Return the tokens that would extend a repetition, with its length.

    The length of token x is the largest n for which the last n tokens stand somewhere before,
    followed by x; at most 48 more than ``at_least``. Neither they nor x are breakers. The places
    where the last token stands are compared at once, without a loop over tokens.

    Args:
        tokens: The tokens so far.
        breakers: Tokens that no repetition contains.
        at_least: Lengths below this are left out.
    """
    n = len(tokens)
    longest = min(at_least + _MAX_EXCESS, n - 1)
    last = tokens[: -longest - 1 : -1].tolist()
    longest = next((i for i, token in enumerate(last) if token in breakers), longest)
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
        if token not in breakers:
            lengths_by_token[token] = max(length, lengths_by_token.get(token, 0))
    return lengths_by_token


def breaker_tokens(vocab: Vocab, texts: Sequence[str]) -> list[int]:
    """Return the tokens whose own text contains one of several texts, for DRY.

    The end of a line of a vocabulary of words is the text of a line break.

    Raises:
        ValueError: A text is empty or no text, or no token contains it; the default may be in none.
    """
    values: dict[str, Any] = {"dry_multiplier": 1.0, "dry_sequence_breakers": texts}
    breakers = frozenset[int]()
    for text in GenerateConfig(**values).dry_sequence_breakers:
        tokens = _containing(vocab, text)
        require(
            bool(tokens) or text in GenerateConfig().dry_sequence_breakers,
            f"dry_sequence_breakers: no token of the vocabulary contains {text!r}, which has no "
            "effect; leave it out, or give a part of it that is in one token (in a shell, "
            "$'\\n' is a line break)",
        )
        breakers |= tokens
    return sorted(breakers)


def for_tokens(sampling: dict[str, Any], vocab: Vocab) -> dict[str, Any]:
    """Return settings of sampling as :func:`generate` takes them: with breakers as tokens."""
    if "dry_sequence_breakers" not in sampling:
        return sampling
    tokens = breaker_tokens(vocab, sampling["dry_sequence_breakers"])
    return sampling | {"dry_sequence_breakers": tokens}


@lru_cache(maxsize=64)
def _containing(vocab: Vocab, text: str) -> frozenset[int]:
    wanted = text.encode("utf-8", "surrogatepass")
    return frozenset(token for token, symbol in enumerate(_all_bytes(vocab)) if wanted in symbol)


@lru_cache(maxsize=4)
def _all_bytes(vocab: Vocab) -> list[bytes]:
    def bytes_of(token: int) -> bytes:
        if vocab.token_bytes is not None and token != vocab.unk_id:
            return vocab.decode_bytes([token])
        is_end = token == vocab.eos_id
        return b"\n" if is_end else vocab.symbols[token].encode("utf-8", "replace")

    return [*map(bytes_of, range(len(vocab)))]


def _breakers_of(
    sampling: Sampling, vocab_size: int | None, vocab: Vocab | None
) -> tuple[Sequence[str] | Sequence[int], Sequence[int]]:
    """Return the sequence breakers as they are shown, and as tokens."""
    breakers, texts = sampling.dry_sequence_breakers, sampling.config.dry_sequence_breakers
    if not sampling.dry_multiplier or (breakers is None and vocab is None):
        return (), ()
    if vocab is not None and breakers in (None, texts):
        return texts, breaker_tokens(vocab, texts)
    most = 2**31 if vocab_size is None else vocab_size
    tokens = [x for x in breakers or () if isinstance(x, int) and 0 <= x < most]
    require(
        len(tokens) == len(breakers or ()),
        f"dry_sequence_breakers={shown(breakers)} must be tokens of the vocabulary: "
        "breaker_tokens(vocab, texts) finds those that contain a text",
    )
    return (*sorted(tokens),), tokens


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


def _is_typical(mass: float, weights: Float[Tensor, "B n"]) -> Tensor:
    """Return which tokens are locally typical (Meister et al., 2023), of unnormalized weights."""
    probs = weights / weights.sum(-1, keepdim=True)
    log_probs = probs.log()
    # Of a probability of 0, the product is no number, and its limit 0.
    entropy = -(log_probs * probs).nansum(-1, keepdim=True)
    distances, order = (-log_probs - entropy).abs().sort(-1)
    # The tokens whose cumulative probability is still below the mass; the next one reaches it.
    n_before = (probs.gather(1, order).cumsum(-1) < mass).sum(-1, keepdim=True)
    limit = distances.gather(1, n_before.clamp_(max=probs.shape[-1] - 1))
    return (-log_probs - entropy).abs() <= limit
