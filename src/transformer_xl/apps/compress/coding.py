"""Rounds of coding: predict, code, write a checksum, and with ``learn`` update the weights.

The encoder knows all symbols of a round and predicts them in one call; the decoder gets one symbol
of each stream at a time. Everything else is the same in both.
"""

import math
import zlib
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int32
from torch import Tensor

from transformer_xl.apps.compress import arithmetic
from transformer_xl.apps.compress.header import Coding
from transformer_xl.apps.compress.predicting import Learner, Predictor, start_symbol
from transformer_xl.inference.evaluate import NGramCache

FIRST_CHECK = 1 << 12
"""Symbols before the first checksum in the code."""
CHECK_EVERY = 1 << 18
"""Largest number of symbols between two checksums, up to the end of a round."""

Progress = Callable[[int, int], None]
"""Called after each round with the number of coded symbols and the number of all symbols."""


class Rounds:
    """What the encoder and the decoder of a text share; ``learner`` None: the weights are fixed."""

    def __init__(
        self,
        coding: Coding,
        predictor: Predictor,
        learner: Learner | None,
        progress: Progress | None,
    ) -> None:
        self.coding, self.predictor, self.learner = coding, predictor, learner
        self._progress = progress
        self._cache = NGramCache(coding.streams, coding.counted) if coding.counted else None
        self._crc = self._checked = self._done = 0

    def code(
        self,
        weights: Float64[np.ndarray, "n V"],
        coded: Callable[[Float64[np.ndarray, "n V"]], Int32[np.ndarray, " n"]],
    ) -> Int32[np.ndarray, " n"]:
        """Code a symbol of each of the first streams, and count them.

        Args:
            weights: The model's probabilities, unnormalized: integers, whose sum is exact.
            coded: Codes symbols with their probabilities, and returns the symbols.
        """
        if (cache := self._cache) is None:
            return coded(weights)
        of_model = weights / weights.sum(1, keepdims=True)
        mixed = [cache.distribution(p, stream) for stream, p in enumerate(of_model)]
        symbols = coded(np.stack(mixed))
        for stream, symbol in enumerate(symbols.tolist()):
            cache.read(symbol, float(of_model[stream, symbol]), stream=stream)
        return symbols

    def end(self, parts: Int32[np.ndarray, "B columns"], places: slice) -> list[int] | None:
        """End a round: learn from it; return the checksum of all symbols if one is due."""
        coding = self.coding
        symbols = parts[:, 1:][:, places].T[coding.is_there(places)]
        self._crc = zlib.crc32(symbols.astype("<i4").tobytes(), self._crc)
        self._done += len(symbols)
        is_last = places.stop == coding.length
        if self.learner is not None and not is_last:
            self.learner.learn(*_read_and_next(parts, places))
            self.predictor.follow(self.learner.model, self.learner.mems)
        if self._progress is not None:
            self._progress(self._done, coding.n_tokens)
        # Often at first, so that a decoder with deviating probabilities stops early.
        pause = min(FIRST_CHECK + 3 * self._checked, CHECK_EVERY)
        if self._done - self._checked < pause or is_last:
            return None
        self._checked = self._done
        return [*self._crc.to_bytes(4, "little")]


def encode(tokens: Int32[np.ndarray, " n"], rounds: Rounds) -> bytes:
    """Encode a text; return the code."""
    coding, coder = rounds.coding, arithmetic.Encoder()
    parts = coding.cut(tokens, start_symbol(rounds.predictor.model))
    was_plain = np.zeros(coding.streams, dtype=bool)
    for places in coding.rounds():
        is_there = coding.is_there(places)
        read, following = _read_and_next(parts, places)
        log_probs = rounds.predictor.read(read)
        of_symbols = log_probs.gather(2, following.to(log_probs.device)[..., None])[..., 0]
        of_model = -(of_symbols.cpu().numpy() * is_there.T).sum(1) / math.log(2)
        is_plain = of_model > is_there.sum(0) * math.log2(log_probs.shape[2])

        shift = arithmetic.safe_shift(log_probs)
        coder.put([shift], arithmetic.SHIFT_PROBABILITIES)
        coder.put(is_plain, arithmetic.choice_probabilities(was_plain))
        was_plain = is_plain
        probabilities = _distributions(log_probs, shift, is_plain)
        for place, row in enumerate(is_there):
            symbols = parts[row, 1 + places.start + place]
            rounds.code(probabilities[row, place], partial(coder.put, symbols))
        if (check := rounds.end(parts, places)) is not None:
            coder.put(check, arithmetic.CHECK_PROBABILITIES)
    return coder.finish()


def decode(payload: bytes, rounds: Rounds) -> Int32[np.ndarray, " n"]:
    """Decode a text; memory grows with the decoded symbols, whatever size the header claims.

    Raises:
        OtherNumbersError: The probabilities here differ from those of the encoder.
    """
    coding, coder = rounds.coding, arithmetic.Decoder(payload)
    start = start_symbol(rounds.predictor.model)
    parts = np.full((coding.streams, 1), start, dtype=np.int32)
    is_plain = np.zeros(coding.streams, dtype=bool)
    for places in coding.rounds():
        shift = int(coder.get(arithmetic.SHIFT_PROBABILITIES)[0])
        is_plain = coder.get(arithmetic.choice_probabilities(is_plain)).astype(bool)
        if places.stop >= parts.shape[1]:
            longer = 1 + min(2 * places.stop, coding.length) - parts.shape[1]
            parts = np.pad(parts, ((0, 0), (0, longer)))
        for place, row in enumerate(coding.is_there(places), places.start):
            read, _ = _read_and_next(parts, slice(place, place + 1))
            log_probs = rounds.predictor.read(read)[:, 0]
            probabilities = _distributions(log_probs, shift, is_plain)
            parts[row, 1 + place] = rounds.code(probabilities[row], coder.get)
        check = rounds.end(parts, places)
        if check is not None and coder.get(arithmetic.CHECK_PROBABILITIES).tolist() != check:
            raise arithmetic.OtherNumbersError("the checksum is wrong")
    return coding.join(parts)


def _read_and_next(parts: Int32[np.ndarray, "B columns"], places: slice) -> tuple[Tensor, Tensor]:
    """Return the symbols that are read to predict those at some places, and those themselves."""
    columns = torch.from_numpy(parts[:, places.start : places.stop + 1].astype(np.int64))
    return columns[:, :-1], columns[:, 1:]


def _distributions(
    log_probs: Tensor, shift: int, is_plain: Bool[np.ndarray, " B"]
) -> Float64[np.ndarray, "B *T V"]:
    """Return the distributions for coding: the model's, or the uniform one."""
    probabilities = arithmetic.weights(arithmetic.on_grid(log_probs, shift))
    probabilities[is_plain] = 1.0
    return probabilities
