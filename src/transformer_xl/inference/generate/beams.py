"""Beam search: likely continuations of prompts, found without sampling.

Every step extends the hypotheses of all prompts by one token, as one batch of the
:class:`~transformer_xl.model.Decoder`, whose streams are then reordered: a hypothesis goes on from
the memory of the one that it extends.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.config.checks import no_type_check, require
from transformer_xl.data import Vocab
from transformer_xl.inference.generate.prompts import Prompts, selected
from transformer_xl.inference.generate.sampler import require_finite
from transformer_xl.inference.generate.sampling import with_deprecated
from transformer_xl.inference.generate.text_writer import TextWriter
from transformer_xl.model import Decoder, LanguageModel, Memory
from transformer_xl.model.arguments import Text, as_tokens, require_model, shown, whole
from transformer_xl.model.calling import evaluating
from transformer_xl.model.segment import Lengths


@no_type_check
@dataclass(frozen=True, kw_only=True, slots=True)
class Searching:
    """How beam search ranks, ends and returns hypotheses.

    Args:
        beam_size: Number of hypotheses of each prompt.
        length_penalty: Exponent A of the length in the score, log p / length^A: 1, the mean
            log-probability of a token; 0, the log-probability, which favours short texts.
        n_best: How many hypotheses of each prompt to return, at most.
        stop_tokens: Tokens that end a hypothesis.
        stop: Strings that end a hypothesis once its text contains one.

    Raises:
        ValueError: A setting is of a wrong type or out of range.

    Example:
        >>> Searching(beam_size=8, n_best=2).length_penalty
        1.0
    """

    beam_size: int = 4
    length_penalty: float = 1.0
    n_best: int = 1
    stop_tokens: Collection[int] = ()
    stop: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("beam_size", "n_best"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1))
        require(
            self.n_best <= self.beam_size,
            f"n_best={self.n_best} must be from 1 to beam_size={self.beam_size}",
        )
        if isinstance(self.stop_tokens, str) or not isinstance(self.stop_tokens, Iterable):
            raise ValueError(f"stop_tokens={shown(self.stop_tokens)} must be a list of tokens")
        tokens = tuple(whole("stop_tokens", x) for x in self.stop_tokens)
        object.__setattr__(self, "stop_tokens", tokens)
        if isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))
        penalty = self.length_penalty
        require(
            isinstance(penalty, int | float) and 0 <= penalty < math.inf,
            f"length_penalty={shown(penalty)} must be a number, 0 or above",
        )


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A continuation that beam search has found.

    Attributes:
        tokens: Its tokens, with the one that ended it.
        log_prob: Their log-probability, in nats.
        score: ``log_prob / len(tokens) ** length_penalty``, by which hypotheses are ranked.
        is_ended: Whether a stop token or stop string ended it; False: it has the full length.
        text: Its text, without stop token or stop string; empty if no vocabulary was given.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> ((best,),) = beam_search(model, [vocab.encode("ROMEO:")], length=5)
        >>> best.is_ended, best.log_prob / len(best.tokens) == best.score
        (False, True)
    """

    tokens: tuple[int, ...]
    log_prob: float
    score: float
    is_ended: bool
    text: str
    _read: Callable[[Sequence[int]], Memory] = field(repr=False)

    @property
    def mems(self) -> Memory:
        """The memory that has read the prompt and all tokens but the last; computed when asked.

        ``generate(model, [h.tokens[-1]], mems=h.mems)`` continues the text.
        """
        return self._read(self.tokens[:-1])


class _Beam(NamedTuple):
    """A hypothesis of the prompt with index ``prompt``."""

    prompt: int
    tokens: tuple[int, ...]
    log_prob: float
    text: str
    writer: TextWriter | None
    is_ended: bool = False

    def extended(self, token: int, log_prob: float, *, is_stop: bool) -> "_Beam":
        """Return the hypothesis with one more token and its new log-probability."""
        text, writer, is_ended = self.text, self.writer, is_stop
        if writer is not None and not is_stop:
            writer = writer.fork()
            text += writer.push(token)
            is_ended = writer.has_stopped
        return _Beam(self.prompt, (*self.tokens, token), log_prob, text, writer, is_ended)


class _Extended(NamedTuple):
    """The hypotheses of one prompt after a step."""

    rows: list[int]
    """For each of ``going``, the row of the batch that it extends."""
    going: list[_Beam]
    ended: list[_Beam]


def beam_search(
    model: LanguageModel,
    prompts: Sequence[Text],
    searching: Searching | None = None,
    *,
    length: SupportsIndex | None,
    vocab: Vocab | None = None,
    mems: Memory | None = None,
    mem_len: int | None = None,
    history: Sequence[int] | Int[np.ndarray, " n"] | Int[Tensor, " n"] = (),
    **deprecated: Any,
) -> list[list[Hypothesis]]:
    """Find likely continuations of several prompts; deterministic.

    Of each prompt, every step keeps the ``beam_size`` most likely of all extensions of the
    hypotheses by a token. One that ends is set aside if it is among these. The search of a prompt
    ends with ``length`` tokens; or once ``beam_size`` hypotheses have ended and, at its present
    length, none that goes on has a better score than they (as in transformers, with its default
    ``early_stopping=False``). With a beam of every sequence of tokens it is exhaustive, and with
    ``beam_size=1`` greedy.

    Args:
        model: The model. It reads in evaluation mode; its mode is restored afterwards.
        prompts: The prompts in tokens, of any lengths; identical prompts are read once.
        searching: How hypotheses are ranked, end and are returned. None: the defaults.
        length: Maximum number of tokens.
        vocab: The vocabulary, for stop strings and the texts of the hypotheses.
        mems: The memory to start with: of one stream, for all, or of one stream for each prompt.
            None: start of a text.
        mem_len: Memory length. None: as configured.
        history: The last tokens in ``mems``, which complete a character that they begin.
        deprecated: Settings of the search, which belong into ``searching``.

    Returns:
        For each prompt its best hypotheses, the best one first. There are fewer than ``n_best``
        only if there are fewer sequences.

    Raises:
        RuntimeError: The probabilities are not finite.
        ValueError: There is no prompt, one is empty or has a token outside the vocabulary, a
            setting is of a wrong type or out of range, or the memory does not fit the model.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> two = Searching(n_best=2)
        >>> ((best, *others),) = beam_search(model, [vocab.encode("ROMEO:")], two, length=5)
        >>> len(others), best.score >= others[0].score
        (1, True)
    """
    searching = with_deprecated(Searching, searching, deprecated, "beam_search", "searching")
    search = _Search(model, searching, length, vocab, history)
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError(f"prompts={shown(prompts)}: give a list of prompts, one at least")
    with torch.no_grad(), evaluating(model):
        size: Any = {"length": length, "copies": searching.beam_size}
        hypotheses = search.run(Prompts(model, prompts, mems, mem_len, **size))
    return [each[: searching.n_best] for each in hypotheses]


class _Search:
    """A search for texts of up to ``length`` tokens, and its loop."""

    def __init__(
        self, model: Any, searching: Searching, length: Any, vocab: Vocab | None, history: Any
    ) -> None:
        config = require_model(model).config
        self._model, self._vocab, self._stop = model, vocab, searching.stop
        self._history = as_tokens(history, config, "the history").tolist()
        require(length is not None, "length=None: beam search needs the maximum number of tokens")
        self._length, self.beam_size = whole("length", length, 1), searching.beam_size
        self._length_penalty = searching.length_penalty
        tokens = as_tokens([*searching.stop_tokens], config, "stop_tokens").tolist()
        self._stop_tokens = frozenset(tokens)
        require(
            vocab is not None or not self._stop,
            f"stop={shown(self._stop)} needs the vocabulary: give vocab, or stop_tokens",
        )

    def run(self, prompts: Prompts) -> list[list[Hypothesis]]:
        """Return the hypotheses of each prompt, the best ones first."""
        texts = range(len(prompts.tokens))
        hidden, mems, _ = prompts.read(texts)
        reads = [partial(_read, self._model, prompts.lengths, mems, text) for text in texts]
        found: list[list[Hypothesis]] = [[] for _ in texts]
        decoder: Decoder | None = None
        live = [
            _Beam(text, (), 0.0, "", self._writer(prompt))
            for text, prompt in enumerate(prompts.tokens)
        ]
        while live:
            rows, extended = [], self._extended(hidden, live)
            live = []
            for text, of_text in extended.items():
                found[text] += [self._hypothesis(beam, reads[text]) for beam in of_text.ended]
                if not self._is_done(found[text], of_text.going):
                    rows += of_text.rows
                    live += of_text.going
            if not live:
                break
            if decoder is None:
                decoder = Decoder.of(self._model, prompts.lengths, selected(mems, rows))
            elif rows != [*range(decoder.batch_size)]:
                decoder = decoder.take(rows)
            hidden = decoder(torch.tensor([beam.tokens[-1] for beam in live]))
        # Stable: of equal scores, the hypothesis that ended first.
        return [sorted(each, key=lambda x: -x.score)[: self.beam_size] for each in found]

    def _writer(self, prompt: Sequence[int]) -> TextWriter | None:
        if self._vocab is None:
            return None
        return TextWriter(self._vocab, self._stop, prompt, self._history)

    def _extended(
        self, hidden: Float[Tensor, "B D"], live: Sequence[_Beam]
    ) -> dict[int, _Extended]:
        """Extend the hypotheses by a token, given the output of the layers after each of them."""
        V = self._model.config.vocab_size
        # Of one hypothesis no more extensions can go on or end, unless many complete a stop string.
        least = min(self.beam_size + len(self._stop_tokens) + self.beam_size * bool(self._stop), V)
        likeliest = self._likeliest(hidden, least)
        found = {}
        for text, group in groupby(range(len(live)), key=lambda row: live[row].prompt):
            rows, k = [*group], least
            following = [likeliest[row] for row in rows]
            while (extended := self._chosen(live, rows, following, is_all=k == V)) is None:
                k = min(4 * k, V)
                following = self._likeliest(hidden[rows], k)
            found[text] = extended
        return found

    def _likeliest(
        self, hidden: Float[Tensor, "B D"], k: int
    ) -> list[tuple[Sequence[float], Sequence[int]]]:
        """Return the log-probabilities of the ``k`` most likely tokens of each row, and these."""
        values, tokens = self._model.head.top_k(hidden, k)
        require_finite(values)
        return [*zip(values.double().tolist(), tokens.tolist(), strict=True)]

    def _chosen(
        self,
        live: Sequence[_Beam],
        rows: Sequence[int],
        following: Sequence[tuple[Sequence[float], Sequence[int]]],
        *,
        is_all: bool,
    ) -> _Extended | None:
        """Choose the extensions of one prompt that go on, and those that end.

        Args:
            live: All hypotheses.
            rows: Those of the prompt.
            following: For each of them, likely tokens with their log-probabilities.
            is_all: Whether these are all tokens of the vocabulary.

        Returns:
            None: further tokens are needed.
        """
        # Of equal ones, in the order of the hypotheses and of the vocabulary.
        candidates = sorted(
            (-(live[row].log_prob + log_prob), row, token, n == len(tokens) - 1)
            for row, (log_probs, tokens) in zip(rows, following, strict=True)
            for n, (log_prob, token) in enumerate(zip(log_probs, tokens, strict=True))
            if log_prob > -math.inf
        )
        found = _Extended([], [], [])
        is_full = len(live[rows[0]].tokens) + 1 == self._length
        for rank, (cost, row, token, is_last) in enumerate(candidates):
            beam = live[row].extended(token, -cost, is_stop=token in self._stop_tokens)
            if not (beam.is_ended or is_full):
                found.rows.append(row)
                found.going.append(beam)
            elif rank < self.beam_size:
                found.ended.append(beam)
            if len(found.going) == self.beam_size or (is_full and rank + 1 == self.beam_size):
                return found
            if is_last and not is_all:
                return None
        return found

    def _is_done(self, found: Sequence[Hypothesis], going: Sequence[_Beam]) -> bool:
        """Whether no hypothesis that goes on is better than those that have ended."""
        if not going or len(found) < self.beam_size:
            return not going
        worst = sorted((x.score for x in found), reverse=True)[self.beam_size - 1]
        return worst >= self._score(going[0])

    def _score(self, beam: _Beam) -> float:
        return beam.log_prob / len(beam.tokens) ** self._length_penalty

    def _hypothesis(self, beam: _Beam, read: Callable[[Sequence[int]], Memory]) -> Hypothesis:
        text = beam.text + (beam.writer.flush() if beam.writer is not None else "")
        score = self._score(beam)
        return Hypothesis(beam.tokens, beam.log_prob, score, beam.is_ended, text, read)


def _read(
    model: LanguageModel, lengths: Lengths, mems: Memory, text: int, tokens: Sequence[int]
) -> Memory:
    """Return the memory after tokens that follow a prompt, read one by one as in the search."""
    own = mems.select([text])
    if not tokens:
        return own
    with torch.no_grad(), evaluating(model):
        decoder = Decoder.of(model, lengths, own)
        for token in tokens:
            decoder(torch.tensor([token]))
    return decoder.memory()
