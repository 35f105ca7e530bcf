"""Chats: from messages to a prompt, and from a completion to a message."""

from starlette.requests import Request
from starlette.responses import Response

from transformer_xl.apps.serve.choices import ChatForm
from transformer_xl.apps.serve.completions import complete
from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.apps.serve.schemas import ChatRequest, CompletionRequest
from transformer_xl.apps.serve.service import Service

_MAX_TOKENS = 256
"""Tokens of a message if the request does not say: a model may never end one by itself."""


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
    limits = [x for x in (body.max_tokens, body.max_completion_tokens) if x is not None]
    least = 0 if body.logprobs else None
    values |= {
        "prompt": template.prompt(body.messages, service.vocab),
        "max_tokens": min(limits or [_MAX_TOKENS, service.settings.max_tokens]),
        "logprobs": least if body.top_logprobs is None else body.top_logprobs,
    }
    completion = CompletionRequest.model_validate(values)
    return await complete(service, completion, request, ChatForm(template))
