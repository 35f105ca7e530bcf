"""Chats: from messages to a prompt, and from a completion to a message."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from transformer_xl.apps.serve.completions import complete
from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.apps.serve.outputs import Output, Spelled
from transformer_xl.apps.serve.schemas import ChatRequest, CompletionRequest
from transformer_xl.apps.serve.service import Service

_MAX_TOKENS = 256
"""Tokens of a message if the request does not say: a model may never end one by itself."""


class ChatOutput(Output):
    """What a message has written since the last event of the response."""

    prefix, object, part = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _has_begun = False

    def _content(self, text: str, *, is_part: bool) -> dict[str, Any]:
        if not is_part:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        role = {} if self._has_begun else {"role": "assistant"}
        self._has_begun = True
        return {"delta": {**role, "content": text}}

    def _scores(self, tokens: list[Spelled]) -> dict[str, Any]:
        content = [
            self._scored_token(each.raw, each.scored and each.scored.log_prob)
            | {"top_logprobs": [self._scored_token(raw, x) for _, raw, x in each.likeliest]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}

    def _scored_token(self, raw: bytes, log_prob: float | None) -> dict[str, Any]:
        return {"token": self._service.token_text(raw), "logprob": log_prob, "bytes": [*raw]}


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Handle a request for the next message of a chat.

    Raises:
        ApiError: It cannot be answered.
    """
    for header, param in (("X-Session", "session"), ("Idempotency-Key", "Idempotency-Key")):
        if header in request.headers:
            message = f"a chat has no session, as each request has all its messages: leave {header}"
            raise ApiError(400, f"{message} out", "unsupported_parameter", param)
    template = service.chat_template
    values = body.model_dump(include={*CompletionRequest.model_fields}, exclude_unset=True)
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if max_tokens is None:
        max_tokens = min(_MAX_TOKENS, service.settings.max_tokens)
    values |= {
        "prompt": template.prompt(body.messages, service.vocab),
        "max_tokens": max_tokens,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    return await complete(
        service,
        CompletionRequest.model_validate(values),
        request,
        output=ChatOutput,
        stop=template.stop,
        about={"chat_template": template.kind},
    )
