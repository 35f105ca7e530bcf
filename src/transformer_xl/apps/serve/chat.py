"""Chats: from messages to a prompt, and from a completion to a message."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from transformer_xl.apps.serve.completions import Form, complete
from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.apps.serve.outputs import Output, Spelled
from transformer_xl.apps.serve.schemas import ChatRequest, CompletionRequest, Message
from transformer_xl.apps.serve.service import Service
from transformer_xl.data.normalizing import normalized_prompt
from transformer_xl.data.vocab import Vocab

_MAX_TOKENS = 256
"""Tokens of a message if the request does not say: a model may never end one by itself."""
_OWN = {"messages", "max_completion_tokens", "top_logprobs", "response_format", "tools"}
_OWN |= {"tool_choice", "parallel_tool_calls", "store"}
"""Fields of a chat that are none of a completion."""


class ChatOutput(Output):
    """What a message has written since the last event of the response."""

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
        ApiError: It is refused.
    """
    for header, param in (("X-Session", "session"), ("Idempotency-Key", "Idempotency-Key")):
        if header in request.headers:
            message = f"a chat has no session, as each request has all its messages: leave {header}"
            raise ApiError(400, f"{message} out", "unsupported_parameter", param)
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        message = (
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens}: "
            "give one"
        )
        raise ApiError(400, message, "invalid_value", "max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        message = "top_logprobs has no effect without logprobs: leave it out, or set logprobs"
        raise ApiError(400, message, "invalid_value", "top_logprobs")
    template = service.chat_template
    try:
        messages = [_plain(each, service.vocab) for each in body.messages]
        prompt = await service.render_chat(messages)
    except ValueError as error:
        raise ApiError(400, str(error), "chat_template", "messages") from error
    given = body.model_dump(exclude=_OWN | {"max_tokens", "logprobs"}, exclude_unset=True)
    most = min(_MAX_TOKENS, service.settings.max_tokens)
    completion = CompletionRequest.model_validate(
        given
        | {
            "prompt": prompt,
            "max_tokens": limits.pop() if limits else most,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        }
    )
    form = Form(
        prefix="chatcmpl",
        object="chat.completion",
        part="chat.completion.chunk",
        output=ChatOutput,
        stop=template.stop,
        about={"chat_template": template.kind},
    )
    return await complete(service, completion, request, form)


def _plain(message: Message, vocab: Vocab) -> dict[str, str]:
    """Return a message as templates expect it, with one text, normalized."""
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    name = {} if message.name is None else {"name": message.name}
    content, _ = normalized_prompt(content, vocab)
    return {"role": message.role, "content": content, **name}
