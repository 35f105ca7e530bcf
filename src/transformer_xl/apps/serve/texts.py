"""One text: what it is written from, and what of it is final.

A token belongs to the characters that its bytes are part of. Text is final once it cannot be a part
of a stop string and none of its characters is incomplete; it is returned together with its tokens,
so that the tokens of each event of a stream, joined, are its text.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.data import Vocab
from transformer_xl.inference.generate import History, Sampler, State, TextWriter, joined
from transformer_xl.model import Memory

_PROMPT_CONTEXT = 1024
"""Tokens of a prompt that decide how what follows it is decoded: it may have an open quotation."""

Tokens = Sequence[int] | np.ndarray
Reason = Literal["stop", "length", "cancelled", "late", "stopping", "failed"]
"""Why a text ends. late: the deadline passed before it began. stopping: the server stops before it
began. failed: an internal error of the server."""


class Scored(NamedTuple):
    """The log-probability of a token, and the most probable tokens at its position with theirs."""

    log_prob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(slots=True)
class Token:
    """A sampled token, with the characters that it has in the text."""

    id: int
    raw: bytes
    """Its bytes in the text."""
    piece: str
    """The characters that are complete with it, also those that an earlier one begins."""
    start: int
    """How many characters are before it; if it begins within a character, before that one."""
    stop: int
    """How many characters are complete with it."""
    is_whole: bool
    """Whether no character is incomplete behind it."""
    scored: Scored | None
    top: list[tuple[int, bytes, float]]
    """The most probable tokens in its place, with their bytes there and log-probabilities."""


class Part(NamedTuple):
    """Text that has become final, with its tokens; or the end of a text."""

    text: str = ""
    tokens: Sequence[Token] = ()
    reason: Reason | None = None
    """Why the text ends with this part. None: it goes on."""
    state: State | None = None
    """The new state of the session. None: unchanged."""


@dataclass(eq=False, kw_only=True)
class Text:
    """The request for a text, and its progress. Only the engine's thread changes it."""

    vocab: Vocab
    prompt: tuple[int, ...]
    """Tokens to read; of a session first its last token, which was sampled and not read."""
    generator: torch.Generator
    sampler: Sampler
    max_tokens: int
    sink: Callable[[Part], None]
    """Called with each part in the thread of the engine's ``deliver``; it must not block."""
    start: State | None = None
    """What it goes on from. None: from the start of a text, after the preface of the model."""
    stop: Sequence[str] = ()
    logprobs: int | None = None
    """How many of the most probable tokens are returned for each; None: no scores."""
    keeps_state: bool = False
    deadline: float = float("inf")
    """When it ends at the latest, by ``time.monotonic``."""
    offset: int = 0
    """How many characters the first one is placed behind."""
    is_cancelled: bool = False
    """Set by any thread to end it."""
    written: list[int] = field(default_factory=list)
    begun: State | None = None
    """The state with which reading began: that of ``start``, or of an earlier text."""
    mems: Memory | None = None
    """The memory, once the prompt is being read."""
    n_cached: int = 0
    """How many tokens of the prompt were in the memory that reading began with."""
    n_recomputed: int = 0
    """How many more are read again, though an earlier text began with them."""
    n_read: int = 0
    """How many tokens of the prompt are in the memory."""
    hidden: Float[Tensor, "1 D"] | None = None
    """The hidden state of the last one."""

    def __post_init__(self) -> None:
        # Of a long prompt the end: to decode all would take as long as to tokenize it.
        context = self.prompt[-_PROMPT_CONTEXT:]
        self._writer = TextWriter(self.vocab, self.stop, context, self.before)
        self._decoder = self._writer.decoder.fork()
        # In characters: what is decoded, what is in no stop string, what was returned.
        self._decoded = self._settled = self._returned = self.offset
        self._held: list[Token] = []
        self._held_text = ""

    @property
    def before(self) -> Tokens:
        """The tokens in the memory that it begins with, as far as they are known."""
        return () if self.start is None else self.start.tokens[:-1]

    @property
    def to_read(self) -> tuple[int, ...]:
        """The part of the prompt to read; without tokens to generate, all but the last one."""
        return self.prompt[self.n_cached : None if self.max_tokens else -1]

    @property
    def is_read(self) -> bool:
        """Whether the prompt is read."""
        return self.n_read == len(self.to_read)

    @property
    def last_token(self) -> int:
        """The token that is read next."""
        return self.written[-1] if self.written else self.prompt[-1]

    @cached_property
    def history(self) -> History:
        """The tokens so far, for penalties; made when it is first used, before any is sampled."""
        return History(self.before, self.prompt)

    @property
    def reason_to_end(self) -> Reason | None:
        """Why it ends after the last token. None: it goes on."""
        if self._writer.has_stopped:
            return "stop"
        if len(self.written) >= self.max_tokens:
            return "length"
        return None

    @property
    def is_over(self) -> bool:
        """Whether it was cancelled or its deadline has passed."""
        return self.is_cancelled or time.monotonic() > self.deadline

    def add(self, token: int, scored: Scored | None) -> Part:
        """Add a token that was sampled; return the text that is final with it."""
        self.written.append(token)
        if self.sampler.needs_history:
            self.history.append(token)
        decoder, start = self._decoder, self._decoded
        raw = decoder.raw(token)
        top = [(x, decoder.raw(x), log_prob) for x, log_prob in (scored.top if scored else ())]
        if self.vocab.token_bytes is not None and raw and not 0x80 <= raw[0] < 0xC0:
            # A new character: one that was not completed becomes U+FFFD.
            start += len(decoder.pending())
        piece = decoder.push(token)
        self._decoded += len(piece)
        about = (token, raw, piece, start, self._decoded, not decoder.pending())
        self._held.append(Token(*about, scored, top))
        self._settle(self._writer.push(token))
        whole = (n for n, x in enumerate(self._held, 1) if x.is_whole and x.stop <= self._settled)
        n = max(whole, default=0)
        return self._returning(n, self._held[n - 1].stop - self._returned) if n else Part()

    def end(self, reason: Reason) -> Part:
        """End the text; return what was held back.

        Of a session an incomplete character is left to the next text.
        """
        if reason == "failed":
            return Part(reason=reason)
        self._settle(self._writer.held)
        if reason == "stop":
            self._cut()
        elif self.written and not self.keeps_state:
            rest = self._decoder.flush()
            if self._held and self.vocab.token_bytes is None:
                self._held[-1].raw += rest.encode()
            self._held_text += rest
        part = self._returning(len(self._held), len(self._held_text))
        return part._replace(reason=reason)

    def state(self, mems: Memory, rewindable: int) -> State:
        """Return the state at the end.

        Args:
            mems: The memory of all but the last token.
            rewindable: By how many tokens it can be rewound.
        """
        n_before = 0 if self.start is None else self.start.n_tokens - 1
        return State(
            source=mems,
            tokens=joined(self.before, self.prompt, self.written, most=State.MOST_TOKENS),
            random=self.generator.get_state(),
            rewindable=rewindable,
            n_tokens=n_before + len(self.prompt) + len(self.written),
        )

    def _settle(self, text: str) -> None:
        """Add text that is in no stop string."""
        self._held_text += text
        self._settled += len(text)

    def _returning(self, n_tokens: int, n_chars: int) -> Part:
        """Return the first tokens and characters that are held."""
        part = Part(self._held_text[:n_chars], self._held[:n_tokens])
        self._held, self._held_text = self._held[n_tokens:], self._held_text[n_chars:]
        self._returned += n_chars
        return part

    def _cut(self) -> None:
        """Drop the tokens behind the text, and of one that is partly there the part behind it."""
        self._held = [each for each in self._held if each.start < self._settled]
        for each in self._held[-1:]:
            if (n := each.stop - self._settled) > 0:
                each.raw = each.raw.rpartition(each.piece[-n:].encode())[0]
