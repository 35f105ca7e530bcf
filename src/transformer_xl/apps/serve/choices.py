"""What becomes of texts, as the JSON of an answer: whole, or piece by piece."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformer_xl.apps.serve.schemas import CompletionRequest
from transformer_xl.apps.serve.texts import Drawn, Event, PromptRead, Scored, Text


@dataclass(eq=False)
class _Piece:
    """What has come of a text since it was last taken. Parts are joined once, at the end."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    attention: list[Any] = field(default_factory=list)
    reason: str | None = None


class Choices:
    """The texts of an answer.

    Args:
        body: The request.
        texts: Its texts.
        begins: What an echo of the prompt of each is.
        goes_on: Whether the first token of the prompt is the last of what was before.
        token_text: Returns a token as text.
    """

    def __init__(
        self,
        body: CompletionRequest,
        texts: Sequence[Text],
        begins: Sequence[str],
        goes_on: bool,
        token_text: Callable[[int], str],
    ) -> None:
        self._body, self._texts, self._begins = body, texts, begins
        self._goes_on, self._token_text = goes_on, token_text
        self._offsets = [0] * len(texts)
        self._pieces: dict[int, _Piece] = {}

    def add(self, number: int, event: Event) -> None:
        """Add what happened to a text."""
        if isinstance(event, PromptRead) and not self._body.echo:
            return
        piece = self._pieces.get(number)
        if piece is None:
            piece = self._pieces[number] = _Piece()
        if isinstance(event, Drawn):
            piece.texts.append(event.text)
            piece.tokens.append(event.token)
            if event.scored:
                piece.scored.append(event.scored)
            if event.attended is not None:
                piece.attention.append(event.attended)
        elif isinstance(event, PromptRead):
            piece.texts.append(self._begins[number])
            if self._body.logprobs is not None:
                if not self._goes_on:
                    piece.scored.append(Scored(self._texts[number].prompt[0], None))
                piece.scored += event.scored
        else:
            piece.texts.append(event.text)
            piece.reason = "stop" if event.reason == "stop" else "length"

    def take(self) -> list[dict[str, Any]]:
        """Return what has come since the last time, for the texts of which something has."""
        pieces, self._pieces = self._pieces, {}
        return [self._json(number, piece) for number, piece in pieces.items()]

    def take_all(self) -> list[dict[str, Any]]:
        """Return what has come, for every text."""
        none = _Piece()
        return [self._json(n, self._pieces.get(n, none)) for n in range(len(self._texts))]

    def _json(self, number: int, piece: _Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": number,
            "text": "".join(piece.texts),
            "logprobs": self._scores(number, piece.scored) if piece.scored else None,
            "finish_reason": piece.reason,
            "token_ids": piece.tokens,
        }
        if piece.attention:
            choice["attention"] = piece.attention
        return choice

    def _scores(self, number: int, scored: Sequence[Scored]) -> dict[str, Any]:
        texts = self._token_text
        tokens = [texts(each.token) for each in scored]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.log_prob for each in scored],
            "top_logprobs": [
                None if each.log_prob is None else {texts(token): x for token, x in each.top}
                for each in scored
            ],
            "text_offset": offsets,
        }
