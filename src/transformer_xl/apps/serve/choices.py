"""The choices of a response: JSON of texts, or of parts of them, as OpenAI has it."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from transformer_xl.apps.serve.chat import ChatTemplate
from transformer_xl.apps.serve.texts import Part, Token

Json = dict[str, object]
"""An object of JSON."""


class Form:
    """The form of completions.

    Attributes:
        prefix: Of the identifier of a response.
        object: The object of a response.
        part: The object of an event of a stream.
        stop: Stop strings in addition to those of a request.
        about: Further keys of a response.
    """

    prefix, object, part = "cmpl", "text_completion", "text_completion"
    stop: tuple[str, ...] = ()
    about: Mapping[str, str] = MappingProxyType({})

    def choice(
        self,
        index: int,
        parts: Sequence[Part],
        has_scores: bool,
        *,
        is_event: bool = False,
        is_first: bool = False,
    ) -> Json:
        """Return parts of a text as a choice: all, or those of an event of a stream."""
        text = "".join(part.text for part in parts)
        tokens = [token for part in parts for token in part.tokens]
        reason = parts[-1].reason if parts else None
        return {
            "index": index,
            **(self.delta(text, is_first) if is_event else self.content(text)),
            "logprobs": self.scores(tokens) if has_scores and (tokens or not is_event) else None,
            "finish_reason": reason and ("stop" if reason == "stop" else "length"),
            "token_ids": [token.id for token in tokens],
        }

    def content(self, text: str) -> Json:
        """Return a whole text as keys of a choice."""
        return {"text": text}

    def delta(self, text: str, is_first: bool) -> Json:
        """Return a part of a text as keys of a choice."""
        return {"text": text}

    def scores(self, tokens: Sequence[Token]) -> Json:
        """Return the scores of tokens."""
        return {
            "tokens": [token_text(each.raw) for each in tokens],
            "token_logprobs": [each.scored and each.scored.log_prob for each in tokens],
            "top_logprobs": [_likeliest(each) for each in tokens],
            "text_offset": [each.start for each in tokens],
        }


class ChatForm(Form):
    """The form of messages."""

    prefix, object, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, template: ChatTemplate) -> None:
        self.stop, self.about = template.stop, {"chat_template": template.kind}

    def content(self, text: str) -> Json:
        """Return a whole text as a message."""
        return {"message": {"role": "assistant", "content": text}}

    def delta(self, text: str, is_first: bool) -> Json:
        """Return a part of a text as a part of a message."""
        return {"delta": {**({"role": "assistant"} if is_first else {}), "content": text}}

    def scores(self, tokens: Sequence[Token]) -> Json:
        """Return the scores of tokens."""
        content = [
            _scored(each.raw, each.scored and each.scored.log_prob)
            | {"top_logprobs": [_scored(raw, log_prob) for _, raw, log_prob in each.top]}
            for each in tokens
        ]
        return {"content": content}


def _scored(raw: bytes, log_prob: float | None) -> Json:
    return {"token": token_text(raw), "logprob": log_prob, "bytes": [*raw]}


def _likeliest(token: Token) -> dict[str, float]:
    """Return the most probable tokens in the place of one, and itself, as OpenAI does."""
    assert token.scored is not None
    log_probs: dict[str, float] = {}
    for each, raw, log_prob in token.top:
        log_probs.setdefault(token_text(token.raw if each == token.id else raw), log_prob)
    # Also where another token is written alike.
    log_probs[token_text(token.raw)] = token.scored.log_prob
    return log_probs


@lru_cache(maxsize=65_536)
def token_text(raw: bytes) -> str:
    """Return a token as text; invalid UTF-8 is escaped as OpenAI does."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
