"""A text that is being generated, and its events."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from transformer_xl.config import MAX_HISTORY
from transformer_xl.data import Vocab
from transformer_xl.inference.generate import History, Sampler, State, TextWriter, Tokens, joined
from transformer_xl.model import Memory

_PROMPT_CONTEXT = 1024
"""Tokens of a prompt that decide how what follows it is decoded: it may have an open quotation."""

Shares = tuple[tuple[int, float], ...]
"""Distances in tokens, 0 the token before, and shares of attention."""


class Scored(NamedTuple):
    """A token with its log-probability, and the most probable tokens at its position."""

    token: int
    log_prob: float | None
    """None: it is the first token of the text."""
    top: tuple[tuple[int, float], ...] = ()


class PromptRead(NamedTuple):
    """A prompt was read; its tokens are scored if the request asks for it."""

    scored: Sequence[Scored]


class Drawn(NamedTuple):
    """A token was sampled."""

    token: int
    text: str
    """The text that is final with it."""
    scored: Scored | None
    attended: Shares | None


class Ended(NamedTuple):
    """A text has ended."""

    reason: Literal["stop", "repetition", "length", "cancelled", "late", "stopping", "failed"]
    """repetition: it loops. late: the deadline passed before it began. stopping: the server stops
    before it began. failed: an internal error of the server."""
    text: str = ""
    """The remaining text that was held back, without an incomplete character."""
    state: State | None = None
    """The new state of the session. None: unchanged."""
    error: str = "the model failed"


Event = PromptRead | Drawn | Ended


@dataclass(eq=False)
class Text:
    """One text: the request and its progress. Only the engine's thread changes it."""

    prompt: tuple[int, ...]
    """Tokens to read; of a session first its last token, which was sampled and not read."""
    mems: Memory | None
    """The initial memory; None: as at the start of a text, after the preface of the model."""
    before: Tokens
    """The tokens in that memory, as far as they are known."""
    writer: TextWriter
    generator: torch.Generator
    sampler: Sampler
    max_tokens: int
    sink: Callable[[Event], None]
    """Called with each event in the thread of the engine's ``deliver``; it must not block."""
    logprobs: int | None = None
    """How many of the most probable tokens are returned for each; None: no scores."""
    scores_prompt: bool = False
    attention: int = 0
    """How many positions of the largest attention are returned for each token."""
    keeps_state: bool = False
    deadline: float = float("inf")
    """When it ends at the latest, by ``time.monotonic``."""
    is_cancelled: bool = False
    """Set by any thread to end it."""
    written: list[int] = field(default_factory=list)

    @property
    def has_preface(self) -> bool:
        """Whether it begins after the preface of the model: not where its prompt is scored only."""
        return self.mems is None and bool(self.max_tokens or self.keeps_state)

    @property
    def to_read(self) -> tuple[int, ...]:
        """The part of the prompt to read; without tokens to generate, all but the last one."""
        return self.prompt if self.max_tokens else self.prompt[:-1]

    @property
    def last_token(self) -> int:
        """The token that is read next."""
        return self.written[-1] if self.written else self.prompt[-1]

    @cached_property
    def history(self) -> History:
        """The tokens so far, for penalties; made when it is first used, before any is sampled."""
        return History(self.before, self.prompt)

    def add(self, token: int) -> None:
        """Add a token that was sampled."""
        self.written.append(token)
        if self.sampler.needs_history:
            self.history.append(token)

    @property
    def reason_to_end(self) -> Literal["stop", "repetition", "length", ""]:
        """Why it ends after the last token; empty: it goes on."""
        if self.writer.has_stopped:
            return "stop"
        if len(self.written) >= self.max_tokens:
            return "length"
        return ""

    @property
    def is_over(self) -> bool:
        """Whether it was cancelled or its deadline has passed."""
        return self.is_cancelled or time.monotonic() > self.deadline

    def state(self, mems: Memory, mem_len: int) -> State | None:
        """Return the state for the session, if it is kept."""
        if not self.keeps_state:
            return None
        most = most_tokens(mem_len)
        read = joined(self.before, self.prompt, self.written, most=most + 1)[:-1]
        known = torch.from_numpy(read[-most:])
        return State(mems, self.last_token, self.generator.get_state(), read=known)


def most_tokens(mem_len: int) -> int:
    """Return how many tokens a state has at most: those remembered, and those penalties can see."""
    return max(mem_len, MAX_HISTORY)


def make_writer(
    vocab: Vocab,
    stop: Sequence[str],
    before: Tokens,
    prompt: Sequence[int],
    *,
    is_echoed: bool = False,
) -> TextWriter:
    """Return the decoder of the tokens after a prompt."""
    # Unless the prompt is decoded anyway: for a long one it takes as long as to tokenize it.
    context = prompt if is_echoed else prompt[-_PROMPT_CONTEXT:]
    return TextWriter(vocab, stop, context, before)
