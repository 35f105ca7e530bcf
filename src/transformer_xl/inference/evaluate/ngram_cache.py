r"""An n-gram cache: what followed the same tokens before, in the text read so far.

A cache of what was read goes back to Kuhn and De Mori (1990); counting after contexts of several
lengths, of which a longer one has the last word, to prediction by partial matching (PPM; Cleary and
Witten, 1984). Here the model stands where PPM has its shortest context. Its probability $p$ of the
token $w$ is mixed with counts $c$, from the shortest context $h$ to the longest one that has
occurred before:

$$p \leftarrow (1 - \lambda)\, p + \lambda\, \frac{c(hw)}{c(h)}$$

The counts are those of the text read so far. Those of another text, such as that of the training,
may be mixed in, too: for each context before those of the text itself. The weight $\lambda$ depends
on which of the two texts is counted, on the length of the context, on its count, and on how many
different tokens have followed it in the text read so far. It is learned from that text by online
expectation maximization: it moves towards the probability that the token came from the counts,
$\lambda\, c(hw) / (c(h)\, p)$ with the $p$ on the left.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer

from transformer_xl.config import EvalConfig
from transformer_xl.errors import InputError
from transformer_xl.model import require_bytes

CONTEXT_LENGTHS = (2, 3, 4, 5, 6, 8, 12, 24)
"""Lengths of the contexts that are counted, in tokens."""
FIRST_WEIGHT = 0.1
_FIRST_EXAMPLES, _MOST_EXAMPLES = 20, 128
"""A weight moves by 1 / examples: as if it had seen the first number at its beginning, and never
more than the second."""
_FIRST = (FIRST_WEIGHT, _FIRST_EXAMPLES)
_LEAST_WEIGHT = 1 / 4096
"""Weights are at least this, and at most one minus it."""
_LEAST_PROBABILITY = 1e-300
BYTES = 1_500
"""Memory for each token that is read, at most, where hardly a context occurs twice."""
MOST_TOKENS = 8_000_000
"""The counts of another text are those of its last tokens, which take 56 bytes each while they are
sorted."""
_BLOCK = 1 << 16
"""Tokens that are counted in another text at once."""

Count = Sequence[int]
"""Two numbers: how often a token followed a context, and how often the context occurred."""
Followers = dict[int, int]
"""Counts of the tokens that followed a context."""


class NGramCache:
    """Mixes the probabilities of a model with what followed the same tokens before.

    It takes up to :data:`BYTES` of memory for each token that it has read. Several streams of a
    text may be read side by side, each with the counts of all.

    Args:
        n_streams: How many are read.
        most_tokens: It takes no more memory than for so many tokens: further contexts, and further
            tokens after them, are not counted. None: all are.

    Example:
        >>> cache = NGramCache()
        >>> p = [cache.read(token, 0.1) for token in [1, 2, 3, 4] * 8]
        >>> p[5], round(p[6], 2), p[-1] > 0.7  # before p[6], two tokens occur again
        (0.1, 0.19, True)
    """

    def __init__(self, n_streams: int = 1, most_tokens: int | None = None) -> None:
        self._n_counts, most = 0, math.inf if most_tokens is None else most_tokens
        self._most_counts = len(CONTEXT_LENGTHS) * most
        self._recent = [array("q") for _ in range(n_streams)]
        # A context that occurred once has the token alone: most long ones do.
        self._followers: tuple[dict[bytes, int | Followers], ...]
        self._followers = tuple({} for _ in CONTEXT_LENGTHS)
        # By text, length, count and number of different tokens: a weight, and its examples.
        self._weights: dict[tuple[bool, int, int, int], tuple[float, int]] = {}

    def read(self, token: int, p: float, elsewhere: Sequence[Count] = (), stream: int = 0) -> float:
        """Return the probability of the next token, and count the token.

        Args:
            token: The token.
            p: Its probability by the model.
            elsewhere: Its counts in another text after contexts of :data:`CONTEXT_LENGTHS`, as
                :class:`SortedContexts` finds them.
            stream: The stream that it is the next one of.
        """
        p, contexts = max(p, _LEAST_PROBABILITY), self._contexts(stream)
        for i, length in enumerate(CONTEXT_LENGTHS):
            if elsewhere and elsewhere[i][1]:
                p = self._mixed(p, elsewhere[i], (False, length), 0)
            followed = self._followers[i].get(contexts[i]) if i < len(contexts) else None
            if isinstance(followed, int):
                p = self._mixed(p, (int(followed == token), 1), (True, length), 1)
            elif followed is not None:
                count = followed.get(token, 0), followed[_TOTAL]
                p = self._mixed(p, count, (True, length), min(len(followed) - 1, 4))
        self._count(token, contexts, stream)
        return p

    def distribution(self, p: Float[np.ndarray, " V"], stream: int = 0) -> Float[np.ndarray, " V"]:
        """Return what :meth:`read` would return for each token, without counts of another text.

        Nothing is counted. With the same text before, the result is the same to the last bit
        wherever numbers are those of IEEE 754.
        """
        for length, context, followers in zip(
            CONTEXT_LENGTHS, self._contexts(stream), self._followers, strict=False
        ):
            followed = followers.get(context)
            if followed is None:
                continue
            is_one = isinstance(followed, int)
            counts = {followed: 1} if is_one else followed
            total = 1 if is_one else followed[_TOTAL]
            n_different = 1 if is_one else min(len(followed) - 1, 4)
            weight, _ = self._weights.get(_kind((True, length), total, n_different), _FIRST)
            p = (1 - weight) * p
            for token, count in counts.items():
                if token != _TOTAL:
                    p[token] += weight * count / total
        return p

    def count(self, token: int) -> None:
        """Count the next token, without a probability of it."""
        self._count(token, self._contexts(0), 0)

    def _count(self, token: int, contexts: list[bytes], stream: int) -> None:
        for context, followers in zip(contexts, self._followers, strict=False):
            followed, is_full = followers.get(context), self._n_counts >= self._most_counts
            if followed is None:
                if not is_full:
                    followers[context] = token
                    self._n_counts += 1
            elif isinstance(followed, int):
                if not is_full:
                    followers[context] = counts = {_TOTAL: 2, followed: 1}
                    counts[token] = counts.get(token, 0) + 1
                    # The dictionary takes twice as much as the context.
                    self._n_counts += 2
            elif token in followed or not is_full:
                self._n_counts += token not in followed
                followed[_TOTAL] += 1
                followed[token] = followed.get(token, 0) + 1
        recent = self._recent[stream]
        recent.append(token)
        del recent[: -CONTEXT_LENGTHS[-1]]

    def _contexts(self, stream: int) -> list[bytes]:
        """Return the contexts of the next token, of all lengths that the stream has."""
        recent = self._recent[stream]
        n = len(recent)
        return [recent[n - k :].tobytes() for k in CONTEXT_LENGTHS if k <= n]

    def _mixed(self, p: float, counts: Count, of: tuple[bool, int], n_different: int) -> float:
        """Mix a probability with counts, and learn the weight."""
        count, total = counts
        kind = _kind(of, total, n_different)
        weight, examples = self._weights.get(kind, _FIRST)
        from_counts = weight * count / total
        p = (1 - weight) * p + from_counts
        weight += (from_counts / p - weight) / examples
        weight = min(max(weight, _LEAST_WEIGHT), 1 - _LEAST_WEIGHT)
        self._weights[kind] = weight, min(examples + 1, _MOST_EXAMPLES)
        return p


def _kind(of: tuple[bool, int], total: int, n_different: int) -> tuple[bool, int, int, int]:
    # Larger counts share their weights by powers of two.
    return *of, total if total < 4 else 2 + total.bit_length(), n_different


_TOTAL = -1
"""The key of a context's own count among those of tokens."""


class SortedContexts:
    """The places of a text, sorted by the tokens before them: how often did one follow another?

    The places behind a context are neighbours, as the text is sorted from the last token before a
    place to the first (the suffix array of the reversed text; Manber and Myers, 1993), so their
    number is the difference of two binary searches.

    Args:
        text: The text, of which the last :data:`MOST_TOKENS` tokens count.

    Raises:
        InputError: It is empty.
    """

    def __init__(self, text: Integer[np.ndarray, " length"]) -> None:
        if not len(text):
            raise InputError("a text of 0 tokens has no counts: it needs at least 1")
        rank = text[-MOST_TOKENS:][::-1].astype(np.int64) + 1
        self._tokens, n_sorted, places = np.append(rank, 0), 1, np.empty(0)
        # Twice as many tokens are a pair of ranks. 0 is the beginning of the text.
        while n_sorted <= CONTEXT_LENGTHS[-1]:
            behind = np.concatenate([rank[n_sorted:], np.zeros(min(n_sorted, len(rank)), np.int64)])
            keys = rank * (rank.max() + 1) + behind
            places = np.argsort(keys, kind="stable")
            keys = keys[places]
            rank[places] = np.cumsum(np.append(1, keys[1:] != keys[:-1]))
            n_sorted *= 2
        self._places = places.astype(np.int32)
        # That of the whole text, which nothing follows.
        self._last = int(np.flatnonzero(places == 0)[0])

    def counts(self, text: Integer[np.ndarray, " length"]) -> Int[np.ndarray, "length lengths 2"]:
        """Return, for each token of another text and each of its contexts, a :data:`Count`."""
        counts = np.zeros((len(text), len(CONTEXT_LENGTHS), 2), dtype=np.int64)
        # Of the contexts before each token, and behind the last one: which places.
        start, stop = np.zeros((2, len(text) + 1), dtype=np.int64)
        stop[:] = len(self._places)
        for n in range(CONTEXT_LENGTHS[-1] + 1):
            column = CONTEXT_LENGTHS.index(n) if n in CONTEXT_LENGTHS else None
            if column is not None:
                has_last = (start <= self._last) & (self._last < stop)
                counts[:, column, 1] = (stop - start - has_last)[:-1]
            # Those with one token more.
            longer = np.flatnonzero((start < stop) & (np.arange(len(stop)) > n))
            token = text[longer - n - 1].astype(np.int64) + 1
            edges = [self._first(start[longer], stop[longer], n, token + i) for i in range(2)]
            start[:], stop[:] = 0, 0
            start[longer], stop[longer] = edges
            if column is not None:
                counts[:, column, 0] = (stop - start)[1:]
        return counts

    def _first(
        self,
        start: Int[np.ndarray, " n"],
        stop: Int[np.ndarray, " n"],
        depth: int,
        token: Int[np.ndarray, " n"],
    ) -> Int[np.ndarray, " n"]:
        """Return the first place of each range whose token at a depth is not below another one."""
        start, stop = start.copy(), stop.copy()
        while len(open_ := np.flatnonzero(start < stop)):
            middle = (start[open_] + stop[open_]) // 2
            at_depth = np.minimum(self._places[middle] + depth, len(self._places))
            is_below = self._tokens[at_depth] < token[open_]
            start[open_[is_below]] = middle[is_below] + 1
            stop[open_[~is_below]] = middle[~is_below]
        return start


@dataclass(frozen=True)
class NGramMixture:
    """What the predictions of a model are mixed with: an n-gram cache, and other counts.

    Args:
        other: Another text whose counts are mixed in, such as that of the training. None: those of
            the text read so far alone.
    """

    other: SortedContexts | None = None

    def nats(
        self,
        text: Integer[np.ndarray, " length"],
        nll: Float[np.ndarray, " n"],
        is_scored: Bool[np.ndarray, " n"],
    ) -> float:
        """Return the sum of -log p with a cache that reads a text from its beginning, in nats.

        Args:
            text: The tokens.
            nll: -log p of the model for each token but the first.
            is_scored: Which of them count. The others are read alone, up to the last one that
                counts.
        """
        n = int(np.flatnonzero(is_scored)[-1]) + 1
        cache, total = NGramCache(), 0.0
        cache.count(int(text[0]))
        for start in range(0, n, _BLOCK):
            places = slice(start, min(start + _BLOCK, n))
            tokens = text[start + 1 : places.stop + 1]
            elsewhere: list[list[Count]] = [[]] * len(tokens)
            if self.other is not None:
                before = max(start + 1 - CONTEXT_LENGTHS[-1], 0)
                counts = self.other.counts(text[before : places.stop + 1])
                elsewhere = counts[start + 1 - before :].tolist()
            values = tokens.tolist(), nll[places].tolist(), is_scored[places].tolist(), elsewhere
            for token, x, is_counted, found in zip(*values, strict=True):
                if is_counted:
                    total -= math.log(cache.read(token, math.exp(-x), found))
                else:
                    cache.count(token)
        return total


def require_cache(n_tokens: int) -> None:
    """Require that the machine has the memory of a cache of this many tokens.

    Raises:
        MemoryLimitError: It has not.
    """
    remedy = "evaluate a shorter text, or leave out ngram_cache"
    n_bytes = BYTES * n_tokens
    require_bytes("the n-gram cache", n_bytes, torch.device("cpu"), {"tokens": n_tokens}, remedy)


def plan_ngram_cache(
    settings: EvalConfig,
    n_tokens: int,
    training_text: Callable[[], Integer[np.ndarray, " length"]],
) -> NGramMixture | None:
    """Return the n-gram cache that settings ask for, if any.

    Args:
        settings: The evaluation settings.
        n_tokens: Number of tokens to evaluate.
        training_text: Returns the training text; only called for ``ngram_cache="training"``.

    Raises:
        MemoryLimitError: The machine has not the memory of a cache of so many tokens.
    """
    if settings.ngram_cache is None:
        return None
    require_cache(n_tokens)
    is_training = settings.ngram_cache == "training"
    return NGramMixture(SortedContexts(np.asarray(training_text())) if is_training else None)
