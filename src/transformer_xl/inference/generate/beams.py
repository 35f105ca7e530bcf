"""Beam search: likely continuations of prompts, found without sampling.

Every step extends the hypotheses of all prompts by one token, as one batch of the
:class:`~transformer_xl.model.Decoder`, whose streams are then reordered: a hypothesis goes on from
the memory of the one that it extends.
"""

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, NamedTuple, SupportsIndex

import torch
from annotated_types import Interval
from jaxtyping import Float
from torch import Tensor

from transformer_xl.config import Count, Length, check, require
from transformer_xl.data import Vocab
from transformer_xl.errors import InputError
from transformer_xl.inference.generate.prompts import Prompts, selected
from transformer_xl.inference.generate.sampler import require_finite
from transformer_xl.inference.generate.text_writer import TextWriter
from transformer_xl.model import (
    Decoder,
    LanguageModel,
    Memory,
    Text,
    as_tokens,
    evaluating,
    require_model,
    shown,
    whole,
)


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

    beam_size: Count = 4
    length_penalty: Annotated[float, Interval(ge=0)] = 1.0
    n_best: Count = 1
    stop_tokens: tuple[Length, ...] = ()
    stop: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop_tokens, Set | range):
            object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        check(self)
        require(
            self.n_best <= self.beam_size,
            f"n_best={self.n_best} must be from 1 to beam_size={self.beam_size}",
        )


@dataclass(frozen=True)
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

    def score(self, length_penalty: float) -> float:
        """Return the score by which hypotheses are ranked."""
        return self.log_prob / len(self.tokens) ** length_penalty


_Extensions = tuple[list[_Beam], list[int], list[_Beam]]
"""Of a prompt after a step: hypotheses that go on, the rows that they extend; those that ended."""


def beam_search(
    model: LanguageModel,
    prompts: Sequence[Text],
    searching: Searching | None = None,
    *,
    length: SupportsIndex | None,
    vocab: Vocab | None = None,
    mems: Memory | None = None,
    mem_len: int | None = None,
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
    searching = Searching() if searching is None else searching
    if not isinstance(searching, Searching):
        raise InputError(
            f"searching={shown(searching)} must be a Searching: give searching=Searching(...)"
        )
    config = require_model(model).config
    require(length is not None, "length=None: beam search needs the maximum number of tokens")
    most = whole("length", length, 1)
    assert most is not None
    as_tokens([*searching.stop_tokens], config, "stop_tokens")
    require(
        vocab is not None or not searching.stop,
        f"stop={shown(searching.stop)} needs the vocabulary: give vocab, or stop_tokens",
    )
    begun = Prompts(model, prompts, mems, mem_len, length=most, copies=searching.beam_size)
    writers = [
        None if vocab is None else TextWriter(vocab, searching.stop, prompt)
        for prompt in begun.tokens
    ]
    live = [_Beam(text, (), 0.0, "", writer) for text, writer in enumerate(writers)]
    with torch.no_grad(), evaluating(model):
        return _Search(model, searching, most).run(begun, live)


class _Search:
    """A search for texts of up to ``length`` tokens, and its loop."""

    def __init__(self, model: LanguageModel, searching: Searching, length: int) -> None:
        self._model, self._length, self._beam_size = model, length, searching.beam_size
        self._settings, self._stop_tokens = searching, frozenset(searching.stop_tokens)

    def run(self, prompts: Prompts, live: list[_Beam]) -> list[list[Hypothesis]]:
        """Return the hypotheses of each prompt, the best ones first."""
        hidden, mems = prompts.read(range(len(live)))
        ended: list[list[_Beam]] = [[] for _ in live]
        decoder: Decoder | None = None
        while True:
            rows, extensions = [], self._extended(hidden, live)
            live = []
            for text, (going, rows_of_text, ended_now) in extensions.items():
                ended[text] += ended_now
                if not self._is_done(ended[text], going):
                    rows += rows_of_text
                    live += going
            if not live:
                return [self._best(beams) for beams in ended]
            if decoder is None:
                decoder = Decoder.of(self._model, prompts.lengths, selected(mems, rows))
            elif rows != [*range(decoder.batch_size)]:
                decoder = decoder.take(rows)
            hidden = decoder(torch.tensor([beam.tokens[-1] for beam in live]))

    def _best(self, beams: Sequence[_Beam]) -> list[Hypothesis]:
        """Return the best hypotheses of a prompt; of equal scores, that which ended first."""
        penalty = self._settings.length_penalty
        best = sorted(beams, key=lambda beam: -beam.score(penalty))[: self._settings.n_best]
        rests = ["" if beam.writer is None else beam.writer.flush() for beam in best]
        return [
            Hypothesis(x.tokens, x.log_prob, x.score(penalty), x.is_ended, x.text + rest)
            for x, rest in zip(best, rests, strict=True)
        ]

    def _extended(
        self, hidden: Float[Tensor, "B D"], live: Sequence[_Beam]
    ) -> dict[int, _Extensions]:
        """Extend the hypotheses by a token, given the output of the layers after each of them."""
        # Of one hypothesis no more extensions can go on or end; more complete a stop string.
        k = self._beam_size * (1 + bool(self._settings.stop)) + len(self._stop_tokens)
        log_probs = self._model.head.log_probs(hidden)
        values, tokens = log_probs.topk(min(k, log_probs.shape[-1]))
        require_finite(values)
        likeliest = [*zip(values.double().tolist(), tokens.tolist(), strict=True)]
        extensions = {}
        for text, rows in groupby(range(len(live)), key=lambda row: live[row].prompt):
            # The best first; of equal ones, in the order of the vocabulary.
            candidates = sorted(
                (-(live[row].log_prob + log_prob), row, token)
                for row in rows
                for log_prob, token in zip(*likeliest[row], strict=True)
                if log_prob > -math.inf
            )
            extensions[text] = self._chosen(live, candidates)
        return extensions

    def _chosen(
        self, live: Sequence[_Beam], candidates: Iterable[tuple[float, int, int]]
    ) -> _Extensions:
        """Choose the extensions of one prompt that go on, and those that end."""
        going, rows, ended = [], [], []
        for rank, (cost, row, token) in enumerate(candidates):
            beam = live[row].extended(token, -cost, is_stop=token in self._stop_tokens)
            is_full = len(beam.tokens) == self._length
            if not (beam.is_ended or is_full):
                going.append(beam)
                rows.append(row)
            elif rank < self._beam_size:
                ended.append(beam)
            if len(going) == self._beam_size or (is_full and rank + 1 == self._beam_size):
                break
        return going, rows, ended

    def _is_done(self, ended: Sequence[_Beam], going: Sequence[_Beam]) -> bool:
        """Whether no hypothesis that goes on is better than those that have ended."""
        if not going or len(ended) < self._beam_size:
            return not going
        penalty = self._settings.length_penalty
        scores = sorted((beam.score(penalty) for beam in ended), reverse=True)
        return scores[self._beam_size - 1] >= going[0].score(penalty)
