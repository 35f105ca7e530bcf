"""A text that is being written, and what is told of it as it goes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from transformer_xl.data import Vocab
from transformer_xl.inference.generate import Sampler, State, TextWriter
from transformer_xl.model import Memory

_CONTEXT = 16
"""Tokens before a text that decide what stands between them and its first word."""
_PROMPT_CONTEXT = 1024
"""As many of a prompt, where they are at hand: a quotation may be open in it."""


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability, and the likeliest ones in its place."""

    token: int
    log_prob: float | None
    """None: nothing was before it."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptRead:
    """A prompt was read; its tokens are scored if that was asked for."""

    scored: tuple[Scored, ...]


@dataclass(frozen=True)
class Drawn:
    """A token was drawn."""

    token: int
    text: str
    """What is certain with it."""
    scored: Scored | None
    attended: tuple[tuple[int, float], ...] | None
    """How many tokens back, and its share; 0 is the token before. None: nobody asked."""


@dataclass(frozen=True)
class Ended:
    """A text has ended."""

    reason: Literal["stop", "length", "cancelled", "late", "failed"]
    """late: its time was over before it began. failed: by a fault of the server."""
    text: str
    """What was held back."""
    state: State | None
    """What a session goes on from. None: from where it was."""
    error: str = ""


Event = PromptRead | Drawn | Ended


@dataclass(eq=False)
class Text:
    """One text: what is asked for, and how far it is. The engine's thread alone changes it.

    Attributes:
        prompt: Tokens to be read; of a session its last token first, which it has not read.
        mems: The memory to begin with; None: as at the start of a text.
        before: The tokens in that memory, as far as they are known.
        writer: Turns tokens into text.
        generator: Where its random numbers come from.
        sampler: How tokens are drawn.
        max_tokens: How many.
        sink: Is told what happens; called by the engine's thread, so it must not wait.
        logprobs: How many of the likeliest tokens are told of each; None: no scores.
        scores_prompt: Whether the tokens of the prompt are scored, too.
        attention: How many places are told that each token was predicted from.
        keeps_state: Whether the state at the end is asked for.
        deadline: When it ends at the latest, by ``time.monotonic``.
        is_cancelled: Set by any thread: nobody waits for it any more.
    """

    prompt: tuple[int, ...]
    mems: Memory | None
    before: tuple[int, ...]
    writer: TextWriter
    generator: torch.Generator
    sampler: Sampler
    max_tokens: int
    sink: Callable[[Event], None]
    logprobs: int | None = None
    scores_prompt: bool = False
    attention: int = 0
    keeps_state: bool = False
    deadline: float = float("inf")
    is_cancelled: bool = False
    written: list[int] = field(default_factory=list)

    @property
    def to_read(self) -> tuple[int, ...]:
        """What of the prompt is read at once; a text that will not be written keeps the last."""
        return self.prompt if self.max_tokens else self.prompt[:-1]

    @property
    def last_token(self) -> int:
        """The token that is read next."""
        return self.written[-1] if self.written else self.prompt[-1]

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self.deadline

    def state(self, mems: Memory, mem_len: int) -> State | None:
        """Return what a session goes on from, if that is asked for."""
        if not self.keeps_state:
            return None
        read = (*self.before, *self.prompt, *self.written)[:-1]
        # As many as it can remember, and a few where that is nothing, to go on with the text.
        read = read[-max(mem_len, _CONTEXT) :]
        return State(
            mems,
            self.last_token,
            self.generator.get_state(),
            read=torch.tensor(read, dtype=torch.int64),
        )


def make_writer(
    vocab: Vocab, stop: Sequence[str], before: Sequence[int], prompt: Sequence[int]
) -> TextWriter:
    """Return what turns the tokens behind a prompt into text."""
    # Not all: a long prompt would take as long to be read as to be cut into tokens.
    return TextWriter(vocab, stop, (*before[-_CONTEXT:], *prompt[-_PROMPT_CONTEXT:]))
