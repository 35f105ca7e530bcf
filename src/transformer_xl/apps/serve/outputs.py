"""The texts of a response: each part of a text with the tokens that it consists of.

A token belongs to the characters that its bytes are part of. Text is returned once it is final and
none of its characters is incomplete, together with its tokens; so the tokens of each event of a
stream, joined, are its text.
"""

from dataclasses import dataclass
from typing import Any

from transformer_xl.apps.serve.repeats import Told
from transformer_xl.apps.serve.service import Service
from transformer_xl.apps.serve.texts import Drawn, Ended, Event, PromptRead, Scored, Shares, Text
from transformer_xl.data import StreamDecoder

_FINISH_REASONS = {"stop": "stop", "repetition": "stop"}
"""OpenAI's reasons by ours; all others are "length"."""


@dataclass(slots=True)
class Spelled:
    """A token of a text, with the characters that it has there."""

    token: int
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
    is_given: bool
    """Whether it is of the prompt."""
    scored: Scored | None
    likeliest: list[tuple[int, bytes, float]]
    """The most probable tokens in its place, with their bytes there and log-probabilities."""
    attended: Shares | None


class Output:
    """What a text of a response has written since the last event of the response.

    Attributes:
        prefix: Of the identifier of a response.
        object: The object of a response.
        part: The object of an event of a stream.

    Args:
        service: The server.
        index: The number of the text.
        text: The text, before it is submitted.
        prompt_ids: The tokens of its prompt, without those that were read before.
        context: The decoder before the prompt if the prompt is returned; otherwise None.
        start: The place of the first character.
    """

    prefix, object, part = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        service: Service,
        index: int,
        text: Text,
        prompt_ids: list[int],
        context: StreamDecoder | None,
        start: int,
    ) -> None:
        self._service, self._index, self._text = service, index, text
        self._prompt_ids, self._is_echoed = prompt_ids, context is not None
        self._decoder = context or text.writer.decoder.fork()
        # In characters: what is decoded, what is final, what was returned or is about to be.
        self._decoded = self._final = self._ready = start
        # What the decoder has of an incomplete character.
        self._pending = self._decoder.pending()
        self._is_exact = service.vocab.token_bytes is not None
        self._held: list[Spelled] = []
        self._held_text = ""
        self.said: list[str] = []
        """All of what was written, for an answer that is kept."""
        self.echo: str | None = None
        """The text of the prompt, if it is returned."""
        self._clear()

    def _clear(self) -> None:
        # Joined once, at the end.
        self._parts: list[str] = []
        self._tokens: list[Spelled] = []
        self._reason: str | None = None

    @property
    def is_new(self) -> bool:
        """Whether there is anything to return."""
        return bool(self._parts or self._tokens or self._reason)

    @property
    def n_behind(self) -> int:
        """How many of the sampled tokens begin behind the text that is final."""
        return sum(each.start >= self._final and not each.is_given for each in self._held)

    def add(self, event: Event) -> None:
        """Add an event of the text."""
        if isinstance(event, PromptRead):
            self._add_prompt(event)
        elif isinstance(event, Drawn):
            self._spell(event.token, event.scored, event.attended)
            self.said.append(event.text)
            self._write(event.text)
        else:
            self._write(event.text)
            self._end(event)

    def tell_again(self, told: Told) -> None:
        """Add all but the end of an answer that was given before."""
        if self._is_echoed:
            echo = self._service.vocab.decode(self._prompt_ids) if told.echo is None else told.echo
            self._parts.append(echo)
        self._parts.append(told.text)
        for token in told.tokens[: len(told.tokens) - told.n_behind]:
            self._spell(token, None, None)
        self._tokens, self._held = self._held, []

    def _add_prompt(self, event: PromptRead) -> None:
        if not self._is_echoed:
            return
        scores: list[Scored | None] = [*event.scored]
        if self._text.scores_prompt and len(scores) < len(self._prompt_ids):
            # Nothing predicts the first token of a text.
            scores.insert(0, Scored(self._prompt_ids[0], None))
        scores = scores or [None] * len(self._prompt_ids)
        pieces = [
            self._spell(token, scored, None, is_given=True)
            for token, scored in zip(self._prompt_ids, scores, strict=True)
        ]
        self.echo = "".join(pieces)
        self._write(self.echo)

    def _spell(
        self, token: int, scored: Scored | None, attended: Shares | None, *, is_given: bool = False
    ) -> str:
        """Decode a token; return the text that it completes."""
        decoder, start = self._decoder, self._decoded
        top = scored.top if scored else ()
        likeliest = [(each, decoder.raw(each), log_prob) for each, log_prob in top]
        raw = decoder.raw(token)
        if self._is_exact and raw and not 0x80 <= raw[0] < 0xC0:
            # A new character: one that was not completed becomes U+FFFD.
            start += len(self._pending)
        piece = decoder.push(token)
        self._decoded += len(piece)
        self._pending = decoder.pending()
        about = (token, raw, piece, start, self._decoded, not self._pending, is_given)
        self._held.append(Spelled(*about, scored, likeliest, attended))
        return piece

    def _write(self, text: str) -> None:
        """Add text that is final; release the tokens of which all text is, with that text."""
        self._held_text += text
        self._final += len(text)
        whole = (n for n, x in enumerate(self._held, 1) if x.is_whole and x.stop <= self._final)
        if n := max(whole, default=0):
            self._release(n, self._held[n - 1].stop - self._ready)

    def _release(self, n_tokens: int, n_chars: int) -> None:
        self._tokens += self._held[:n_tokens]
        if n_chars:
            self._parts.append(self._held_text[:n_chars])
        self._held, self._held_text = self._held[n_tokens:], self._held_text[n_chars:]
        self._ready += n_chars

    def _end(self, event: Ended) -> None:
        self._reason = event.reason
        if event.reason == "stop":
            self._cut()
        elif not self._text.keeps_state and (self._text.written or self.echo is not None):
            # A session may go on with the rest of the character.
            rest = self._decoder.flush()
            if self._held and not self._is_exact:
                self._held[-1].raw += rest.encode()
            self._held_text += rest
        self._release(len(self._held), len(self._held_text))

    def _cut(self) -> None:
        """Drop the tokens behind the text, and of one that is partly there the part behind it."""
        self._held = [each for each in self._held if each.start < self._final]
        for each in self._held[-1:]:
            if (n := each.stop - self._final) > 0:
                each.raw = each.raw.rpartition(each.piece[-n:].encode())[0]

    def take(self, *, is_part: bool = False) -> dict[str, Any]:
        """Return the new output as a choice of the response; ``is_part``: of a stream."""
        drawn = [each for each in self._tokens if not each.is_given]
        has_scores = self._text.logprobs is not None and (self._tokens or not is_part)
        choice: dict[str, Any] = {
            "index": self._index,
            **self._content("".join(self._parts), is_part=is_part),
            "logprobs": self._scores(self._tokens) if has_scores else None,
            "finish_reason": self._reason and _FINISH_REASONS.get(self._reason, "length"),
            "token_ids": [each.token for each in drawn],
        }
        if self._reason == "repetition":
            choice["stop_reason"] = self._reason
        if attention := [each.attended for each in drawn if each.attended is not None]:
            choice["attention"] = attention
        self._clear()
        return choice

    def _content(self, text: str, *, is_part: bool) -> dict[str, Any]:
        return {"text": text}

    def _scores(self, tokens: list[Spelled]) -> dict[str, Any]:
        return {
            "tokens": [self._service.token_text(each.raw) for each in tokens],
            "token_logprobs": [each.scored and each.scored.log_prob for each in tokens],
            "top_logprobs": [self._likeliest(each) for each in tokens],
            "text_offset": [each.start for each in tokens],
        }

    def _likeliest(self, spelled: Spelled) -> dict[str, float] | None:
        """Return the most probable tokens in the place of one, and itself, as OpenAI does."""
        if spelled.scored is None or spelled.scored.log_prob is None:
            return None
        log_probs: dict[str, float] = {}
        for token, raw, log_prob in spelled.likeliest:
            is_own = token == spelled.token
            log_probs.setdefault(self._service.token_text(spelled.raw if is_own else raw), log_prob)
        # Also where another token is written alike.
        log_probs[self._service.token_text(spelled.raw)] = spelled.scored.log_prob
        return log_probs
