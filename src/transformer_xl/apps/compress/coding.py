"""Rounds of coding: predict, code, write a checksum, and with ``learn`` update the weights.

The encoder knows all symbols of a round and predicts them in one call; the decoder gets one symbol
of each stream at a time. Everything else is the same in both.
"""

import math
import zlib
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int32
from torch import Tensor

from transformer_xl.apps.compress import arithmetic
from transformer_xl.apps.compress.planning import CHECK_EVERY, FIRST_CHECK, Layout
from transformer_xl.apps.compress.predicting import Learner, Predictor, start_symbol

Progress = Callable[[int, int], None]
"""Called after each round with the number of coded symbols and the number of all symbols."""


class _CodingState:
    """The state that encoder and decoder share."""

    def __init__(self, layout: Layout, predictor: Predictor, learner: Learner | None) -> None:
        self.layout, self.predictor, self.learner = layout, predictor, learner
        self.first = start_symbol(predictor.model)
        self.is_plain = np.zeros(layout.streams, dtype=bool)
        self._crc = self._checked = self._done = 0

    def inputs(self, parts: Int32[np.ndarray, "B length"], places: slice) -> Tensor:
        """Return the inputs of a round: the symbol before each of its symbols."""
        before = (
            parts[:, places.start - 1]
            if places.start
            else np.full(len(parts), self.first, dtype=np.int32)
        )
        inputs = np.concatenate([before[:, None], parts[:, places.start : places.stop - 1]], 1)
        return torch.from_numpy(inputs.astype(np.int64))

    def distributions(
        self, log_probs: Tensor, shift: int, is_plain: Bool[np.ndarray, " B"]
    ) -> Float64[np.ndarray, "B *T V"]:
        """Return the distributions for coding: the model's, or the uniform one."""
        probabilities = arithmetic.weights(arithmetic.on_grid(log_probs, shift))
        probabilities[is_plain] = 1.0
        return probabilities

    def after(self, parts: Int32[np.ndarray, "B length"], places: slice) -> int | None:
        """End a round: learn from it; return the checksum of all symbols if one is due."""
        symbols = parts[:, places].T[self.layout.is_there(places)]
        self._crc = zlib.crc32(symbols.astype("<i4").tobytes(), self._crc)
        self._done += len(symbols)
        is_last = places.stop == self.layout.length
        if self.learner is not None and not is_last:
            targets = torch.from_numpy(parts[:, places].astype(np.int64))
            self.learner.learn(self.inputs(parts, places), targets)
            self.predictor.follow(self.learner.model, self.learner.mems)
        # Often at first, so that a decoder with deviating probabilities stops early.
        pause = min(FIRST_CHECK + 3 * self._checked, CHECK_EVERY)
        if self._done - self._checked < pause or is_last:
            return None
        self._checked = self._done
        return self._crc


class Bits:
    """The size of a coded text in bits.

    Attributes:
        model: The sum of -log2 p by the model.
        coded: The same, with log2 V for each symbol that is coded without the model.
        plain_tokens: Number of symbols that are coded without the model.
    """

    def __init__(self) -> None:
        self.model = self.coded = 0.0
        self.plain_tokens = 0


def encode(
    tokens: Int32[np.ndarray, " n"],
    layout: Layout,
    predictor: Predictor,
    learner: Learner | None,
    progress: Progress | None = None,
) -> tuple[bytes, Bits]:
    """Encode a text; return the code and its ideal size."""
    sides, coder, total = _CodingState(layout, predictor, learner), arithmetic.Encoder(), Bits()
    parts = layout.cut(tokens)
    for places in layout.rounds():
        is_there = layout.is_there(places)
        log_probs = predictor.read(sides.inputs(parts, places))
        targets = torch.from_numpy(parts[:, places].astype(np.int64)).to(log_probs.device)
        own = log_probs.gather(2, targets[..., None])[..., 0].cpu().numpy() * is_there.T
        of_model = -own.sum(1) / math.log(2)
        of_none = is_there.sum(0) * math.log2(log_probs.shape[2])
        is_plain = of_model > of_none
        total.model += float(of_model.sum())
        total.coded += float(np.minimum(of_model, of_none).sum())
        total.plain_tokens += int(is_there.sum(0)[is_plain].sum())

        shift = arithmetic.safe_shift(log_probs)
        coder.put_shift(shift)
        coder.put_choices(is_plain, sides.is_plain)
        sides.is_plain = is_plain
        probabilities = sides.distributions(log_probs, shift, is_plain)
        for place, row in enumerate(is_there):
            coder.put(parts[row, places.start + place], probabilities[row, place])
        crc = sides.after(parts, places)
        if crc is not None:
            coder.put_check(crc)
        if progress is not None:
            progress(min(places.stop * layout.streams, layout.n_tokens), layout.n_tokens)
    return coder.finish(), total


def decode(
    payload: bytes,
    layout: Layout,
    predictor: Predictor,
    learner: Learner | None,
    progress: Progress | None = None,
) -> Int32[np.ndarray, " n"]:
    """Decode a text; memory grows with the decoded symbols, whatever size the header claims.

    Raises:
        OtherNumbersError: The probabilities here differ from those of the encoder.
    """
    sides, coder = _CodingState(layout, predictor, learner), arithmetic.Decoder(payload)
    parts = np.zeros((layout.streams, 0), dtype=np.int32)
    before = np.full(layout.streams, sides.first, dtype=np.int32)
    for places in layout.rounds():
        shift = coder.get_shift()
        sides.is_plain = coder.get_choices(sides.is_plain)
        if places.stop > parts.shape[1]:
            longer = min(2 * places.stop, layout.length) - parts.shape[1]
            parts = np.pad(parts, ((0, 0), (0, longer)))
        for place, row in enumerate(layout.is_there(places), places.start):
            read = torch.from_numpy(before.astype(np.int64))[:, None]
            log_probs = predictor.read(read)[:, 0]
            probabilities = sides.distributions(log_probs, shift, sides.is_plain)
            parts[row, place] = coder.get(probabilities[row])
            before = parts[:, place]
        crc = sides.after(parts, places)
        if crc is not None and coder.get_check() != crc:
            raise arithmetic.OtherNumbersError("the checksum is wrong")
        if progress is not None:
            progress(min(places.stop * layout.streams, layout.n_tokens), layout.n_tokens)
    return layout.join(parts)
