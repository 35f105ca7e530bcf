r"""N-grams: interpolated modified Kneser-Ney smoothing, in numpy.

Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling (1999), section
3. For a token $w$ after a context $h$ of $k - 1$ tokens, of which $h'$ are all but the first:

$$p_k(w | h) = \frac{c(hw) - D(c(hw))}{\sum_v c(hv)} + \gamma(h) p_{k-1}(w | h')$$

where $\gamma(h)$ is what the discounts $D$ of all $v$ leave, and $p_0$ is uniform. At the highest
order $c$ are counts, below it the number of different tokens before the sequence. Sequences are
stored as sorted integers, ``context * V + token``, where the context is the index of a sequence of
one token less: learning is a sort for each order, and a probability a binary search for each order.

Dimension key: T tokens of a text, V tokens in the vocabulary.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Integer

from transformer_xl.errors import InputError

_FALLBACK = (0.0, 0.5, 1.0, 1.5)
"""Discounts where the counts of counts give none, as for a text in which nothing occurs once; those
that KenLM takes (its option --discount_fallback)."""


@dataclass(frozen=True, slots=True)
class _Smoothed:
    """Counts of the sequences of one length, and what they leave to a shorter context."""

    counts: Integer[np.ndarray, " sequences"]
    discounts: Float[np.ndarray, "4"]
    totals: Float[np.ndarray, " contexts"]
    left: Float[np.ndarray, " contexts"]

    @classmethod
    def of(cls, counts: np.ndarray, contexts: np.ndarray, n_contexts: int) -> "_Smoothed":
        discounts = discounts_of(counts)
        taken = discounts[np.minimum(counts, 3)]
        totals = np.bincount(contexts, weights=counts, minlength=n_contexts)
        reserved = np.bincount(contexts, weights=taken, minlength=n_contexts)
        # The sequence that ends the text may have nothing behind it.
        left = np.divide(reserved, totals, out=np.ones(n_contexts), where=totals > 0)
        return cls(counts.astype(np.uint32), discounts, np.maximum(totals, 1), left)

    def probability(
        self, found: np.ndarray, contexts: np.ndarray, shorter: np.ndarray
    ) -> np.ndarray:
        """Return probabilities; ``found`` and ``contexts`` are indices, -1 where there is none."""
        counts = np.where(found < 0, 0, self.counts[found]).astype(np.int64)
        rest = counts - self.discounts[np.minimum(counts, 3)]
        p = rest / self.totals[contexts] + self.left[contexts] * shorter
        return np.where(contexts < 0, shorter, p)


def discounts_of(counts: Integer[np.ndarray, " sequences"]) -> Float[np.ndarray, "4"]:
    """Return the discounts of the counts 0, 1, 2, and 3 or more (equation 26 of the paper).

    Where the formula gives no number between 0 and the count, for lack of sequences that occur
    once, twice, three or four times, they are 0.5, 1 and 1.5.
    """
    n = np.bincount(np.minimum(counts, 5), minlength=5)[:5].astype(np.float64)
    if n[1:].all():
        y = n[1] / (n[1] + 2 * n[2])
        found = np.array([0.0] + [c - (c + 1) * y * n[c + 1] / n[c] for c in (1, 2, 3)])
        if (found[1:] > 0).all():
            return found
    return np.array(_FALLBACK)


class KneserNey:
    """An n-gram model of a text, for all orders up to one.

    It takes up to 50 bytes for each different sequence of 1 to ``order`` tokens. 5 million
    characters of order 6 are learned in seconds.

    Attributes:
        order: The highest order: a token is predicted from ``order - 1`` before it.
        vocab_size: The number of tokens, V.

    Raises:
        InputError: The text is empty, or a token is not in the vocabulary.
    """

    def __init__(
        self, ids: Integer[np.ndarray, " length"], vocab_size: int, *, order: int = 6
    ) -> None:
        """Count the sequences of a training text."""
        self.vocab_size = vocab_size
        text = self._checked(ids)
        if not len(text):
            raise InputError("a training text of 0 tokens gives no counts: it needs at least 1")
        # A sequence is no longer than the text.
        self.order = min(order, len(text))
        self._keys: list[np.ndarray] = []
        self._highest: list[_Smoothed] = []
        self._lower: list[_Smoothed] = []
        # The sequence of 0 tokens has the index 0; `index` has that of each place of the text.
        index, n_contexts = np.zeros(len(text) + 1, dtype=np.int64), 1
        before: tuple[np.ndarray, int] | None = None
        for length in range(1, self.order + 1):
            keys = index[: len(text) - length + 1] * vocab_size + text[length - 1 :]
            unique, first, inverse, counts = np.unique(
                keys, return_index=True, return_inverse=True, return_counts=True
            )
            if before is not None:
                # Different tokens before each shorter sequence, and the beginning of the text.
                different = np.bincount(index[first + 1], minlength=n_contexts)
                different[index[0]] += 1
                self._lower.append(_Smoothed.of(different, *before))
            contexts = unique // vocab_size
            self._keys.append(unique)
            self._highest.append(_Smoothed.of(counts, contexts, n_contexts))
            before = contexts, n_contexts
            index, n_contexts = inverse, len(unique)

    def _checked(self, ids: Integer[np.ndarray, " length"]) -> np.ndarray:
        text = np.asarray(ids).astype(np.int64)
        if wrong := text[(text < 0) | (text >= self.vocab_size)][:1].tolist():
            raise InputError(
                f"token {wrong[0]} is not in the vocabulary of {self.vocab_size:,}: encode the "
                "text with the vocabulary of the training text"
            )
        return text

    def nll(
        self, ids: Integer[np.ndarray, " length"], *, order: int | None = None
    ) -> Float[np.ndarray, " length"]:
        """Return -log p of each token after those before it in this text, in nats.

        ``order`` is one up to that of the model. None: that one.
        """
        order = order or self.order
        return self._nll_by_order(ids, order)[order]

    def best_order(self, ids: Integer[np.ndarray, " length"]) -> int:
        """Return the order with the least loss on a text, such as the validation text."""
        losses = self._nll_by_order(ids, self.order)
        return min(losses, key=lambda order: losses[order].sum())

    def _nll_by_order(self, ids: np.ndarray, most: int) -> dict[int, np.ndarray]:
        text = self._checked(ids)
        shorter = np.full(len(text), 1 / self.vocab_size)
        contexts = np.zeros(len(text), dtype=np.int64)
        losses = {}
        for order in range(1, most + 1):
            keys = self._keys[order - 1]
            wanted = contexts * self.vocab_size + text
            found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            found[(keys[found] != wanted) | (contexts < 0)] = -1
            losses[order] = -np.log(self._highest[order - 1].probability(found, contexts, shorter))
            if order < most:
                shorter = self._lower[order - 1].probability(found, contexts, shorter)
                contexts = np.concatenate([[-1], found[:-1]])[: len(text)]
        return losses
