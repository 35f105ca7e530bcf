"""A text that is being generated, and its events."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from transformer_xl.data import Vocab
from transformer_xl.inference.generate import Sampler, State, TextWriter
from transformer_xl.model import Memory

_CONTEXT = 16
"""Tokens of the context that decide the whitespace before the first word of a text."""
_PROMPT_CONTEXT = 1024
"""The same of a prompt, where more is available: it may have an open quotation."""


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability, and the most probable tokens at its position."""

    token: int
    log_prob: float | None
    """None: it is the first token of the text."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptRead:
    """A prompt was read; its tokens are scored if the request asks for it."""

    scored: tuple[Scored, ...]


@dataclass(frozen=True)
class Drawn:
    """A token was sampled."""

    token: int
    text: str
    """The text that is final with it."""
    scored: Scored | None
    attended: tuple[tuple[int, float], ...] | None
    """Distances in tokens, 0 the token before, and shares of attention. None: not requested."""


@dataclass(frozen=True)
class Ended:
    """A text has ended."""

    reason: Literal["stop", "length", "cancelled", "late", "failed"]
    """late: the deadline passed before it began. failed: an internal error of the server."""
    text: str
    """The remaining text that was held back."""
    state: State | None
    """The new state of the session. None: unchanged."""
    error: str = ""


Event = PromptRead | Drawn | Ended


@dataclass(eq=False)
class Text:
    """One text: the request and its progress. Only the engine's thread changes it.

    Attributes:
        prompt: Tokens to read; of a session first its last token, which was sampled and not read.
        mems: The initial memory; None: as at the start of a text.
        before: The tokens in that memory, as far as they are known.
        writer: Decodes tokens to text.
        generator: Its random number generator.
        sampler: Samples its tokens.
        max_tokens: Largest number of tokens.
        sink: Called with each event in the engine's thread, so it must not block.
        logprobs: How many of the most probable tokens are returned for each; None: no scores.
        scores_prompt: Whether the tokens of the prompt are scored, too.
        attention: How many positions of the largest attention are returned for each token.
        keeps_state: Whether the state at the end is returned.
        deadline: When it ends at the latest, by ``time.monotonic``.
        is_cancelled: Set by any thread to end it.
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
        """The part of the prompt to read; without tokens to generate, all but the last one."""
        return self.prompt if self.max_tokens else self.prompt[:-1]

    @property
    def last_token(self) -> int:
        """The token that is read next."""
        return self.written[-1] if self.written else self.prompt[-1]

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def state(self, mems: Memory, mem_len: int) -> State | None:
        """Return the state for the session, if it is kept."""
        if not self.keeps_state:
            return None
        read = (*self.before, *self.prompt, *self.written)[:-1]
        # As many as it can remember; at least a few, which the decoder needs to continue the text.
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
    """Return the decoder of the tokens after a prompt."""
    # Not the whole prompt: to decode a long one takes as long as to tokenize it.
    return TextWriter(vocab, stop, (*before[-_CONTEXT:], *prompt[-_PROMPT_CONTEXT:]))
