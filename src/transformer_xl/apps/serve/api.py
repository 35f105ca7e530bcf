"""The endpoints of the server."""

import base64
import hashlib
import re
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Query
from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import Response

from transformer_xl import __version__
from transformer_xl.apps.serve import schemas
from transformer_xl.apps.serve.choices import ChatForm, Form, Json, token_text
from transformer_xl.apps.serve.completions import complete
from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.apps.serve.guard import Guard
from transformer_xl.apps.serve.responses import JsonResponse, add_handlers
from transformer_xl.apps.serve.service import Service
from transformer_xl.apps.serve.sessions import turns_of

Responses = dict[int | str, dict[str, Any]]
"""As FastAPI types them."""
Name = Annotated[str, Path(pattern=schemas.NAME)]
_STREAMED: Responses = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
_PLAIN: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_CHAT_TOKENS = 256
"""Maximum tokens of a message if the request has no limit."""


def create_app(service: Service) -> FastAPI:
    """Return the web application of a server."""
    app = FastAPI(
        title="Transformer-XL",
        version=__version__,
        description="OpenAI-compatible completions, and sessions that keep their memory.",
        default_response_class=JsonResponse,
        responses={"default": {"model": schemas.ErrorBody, "description": "An error"}},
        lifespan=service.running,
        # These pages load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        # A proxy may have removed a part of the path that a redirect would need.
        redirect_slashes=False,
    )
    app.add_middleware(Guard, service=service)
    add_handlers(app)
    for add in (_add_completions, _add_models, _add_health, _add_sessions):
        add(app, service)
    _add_page(app)
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    """Add the endpoints that generate text: ``/v1/completions`` and ``/v1/chat/completions``."""

    @app.post("/v1/completions", responses=_STREAMED)
    async def completions(
        body: schemas.CompletionRequest,
        request: Request,
        x_session: Annotated[schemas.SessionName | None, Header()] = None,
    ) -> Response:
        """Continue one or more texts.

        With the field `session` or the header `X-Session`, the text of that session is continued:
        the model remembers it, so `prompt` holds only what is new. A session handles one request
        at a time.

        If `session_turn` is not the number of answers that the session has given, the request fails
        with status 409 and nothing is appended.
        """
        _require_no_key(request)
        if x_session is not None:
            if body.session not in (None, x_session):
                message = f"X-Session is {x_session!r} and session {body.session!r}: give one"
                raise ApiError(400, message, "two_sessions", "session")
            body.session = x_session
        return await complete(service, body, request, Form())

    @app.post("/v1/chat/completions", responses=_STREAMED)
    async def chats(body: schemas.ChatRequest, request: Request) -> Response:
        """Generate the next message of a chat.

        The messages are formatted as one prompt with the template of the server, or with a plain
        template if it has none. The field `chat_template` of the response names which was used.
        """
        _require_no_key(request)
        if "X-Session" in request.headers:
            message = (
                "a chat has no session, as each request has all its messages: leave X-Session "
            )
            raise ApiError(400, f"{message}out", "unsupported_parameter", "X-Session")
        completion = _completion_request(body, service)
        return await complete(service, completion, request, ChatForm(service.chat_template))


def _require_no_key(request: Request) -> None:
    """Require that a request has no header of earlier versions, which would have no effect."""
    if "Idempotency-Key" in request.headers:
        message = "Idempotency-Key is gone: send session_turn, with which a request is appended "
        message += "once; GET /v1/sessions/NAME has the turns and the tokens"
        raise ApiError(400, message, "unsupported_parameter", "Idempotency-Key")


def _completion_request(body: schemas.ChatRequest, service: Service) -> schemas.CompletionRequest:
    """Return the request for the completion that is the next message of a chat.

    Args:
        body: The request for the message.
        service: The server, with its template, vocabulary and limits.

    Raises:
        ApiError: ``top_logprobs`` is given without ``logprobs``.
    """
    if body.top_logprobs and not body.logprobs:
        message = "top_logprobs requires logprobs=true"
        raise ApiError(400, message, "unsupported_parameter", "top_logprobs")
    limits = [x for x in (body.max_tokens, body.max_completion_tokens) if x is not None]
    max_tokens = min(limits or [_CHAT_TOKENS, service.settings.max_tokens])
    shared = body.model_dump(include={*schemas.CompletionRequest.model_fields}, exclude_unset=True)
    return schemas.CompletionRequest(
        **shared
        | {
            "prompt": service.chat_template.prompt(body.messages, service.vocab),
            "max_tokens": max_tokens,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        }
    )


def _add_models(app: FastAPI, service: Service) -> None:
    """Add the endpoints that describe the model."""

    @app.get("/v1/models")
    async def models() -> Json:
        """List the models: the one that this server has."""
        return {"object": "list", "data": [await one_model(service.name)]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Json:
        """Describe a model."""
        if name != service.name:
            raise ApiError(404, f"there is no model {name!r}", "model_not_found", "model")
        model, vocab = service.model, service.vocab
        n_weights = sum(x.numel() for x in model.parameters())
        about = f"{name}: {n_weights:,} weights, {len(vocab):,} {vocab.kind}"
        about += f", a memory of {model.config.mem_len} tokens"
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "about": about,
            "owned_by": "transformer-xl",
        }


def _add_health(app: FastAPI, service: Service) -> None:
    """Add the endpoints that monitors read: liveness, readiness and metrics."""

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        """Liveness: whether the server responds."""
        return {"status": "ok"}

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> dict[str, str]:
        """Readiness: whether requests are accepted."""
        if not service.engine.is_alive:
            raise ApiError(503, "the server is stopping, or its engine has ended", "not_ready")
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response, responses=_PLAIN)
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(generate_latest(service.metrics), media_type="text/plain; version=0.0.4")


def _add_sessions(app: FastAPI, service: Service) -> None:
    """Add the endpoints that list, describe and delete sessions."""
    sessions, path = service.sessions, "/v1/sessions/{name}"

    @app.get("/v1/sessions")
    async def all_sessions(limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> Json:
        """List sessions, the most recently used first."""
        return {"object": "list", "data": sessions.all(limit)}

    @app.get(path)
    async def one_session(name: Name) -> Json:
        """Describe a session and the content of its memory.

        `tokens` are the IDs of the remembered tokens, as far as they are known, followed by the
        last token, which the model has not read yet. `texts` are the same tokens as text.
        """
        state = await service.with_session(sessions.peek, name)
        n_remembered = min(state.n_positions, service.model.config.mem_len)
        tokens = state.tokens[-n_remembered - 1 :].tolist()
        decoder, texts = service.vocab.stream_decoder(), []
        for token in tokens:
            # The first one as at the beginning of a line.
            texts.append(token_text(decoder.raw(token)))
            decoder.push(token)
        content = {"turns": turns_of(state), "remembered": n_remembered}
        content |= {"tokens": tokens, "texts": texts, "n_tokens": state.n_tokens}
        content |= {"rewindable": state.rewindable, "bytes": state.nbytes}
        return sessions.describe(name) | content | {"checksum": state.checksum}

    @app.post(f"{path}/fork")
    async def fork(name: Name, body: schemas.ForkRequest) -> Json:
        """Begin a session that goes on from the present state of this one."""
        await service.with_session(lambda x: sessions.fork(x, body.to), name)
        return sessions.describe(body.to)

    @app.post(f"{path}/rewind")
    async def rewind(name: Name, body: schemas.RewindRequest) -> Json:
        """Take back the last tokens of a session, at most `rewindable` of them."""
        await service.with_session(lambda x: sessions.rewind(x, body.tokens), name)
        return sessions.describe(name)

    @app.delete(path)
    async def delete(name: Name) -> Json:
        """Delete a session."""
        await service.with_session(sessions.delete, name)
        return {"id": name, "object": "session", "deleted": True}


def _add_page(app: FastAPI) -> None:
    """Add the page for browsers, with a policy that lets it run nothing but its own script."""
    here = files("transformer_xl.apps.serve")
    page = (here / "page.html").read_text(encoding="utf-8")
    for part in ("token_view.css", "token_view.js"):
        page = page.replace(f"/* {part} */", (here / part).read_text(encoding="utf-8"))
    hashes: dict[str, str] = {}
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        hashes[tag] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    # Only the page's own style and script and this server.
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'"
    )
    headers = {"Content-Security-Policy": policy, "X-Frame-Options": "DENY"}

    @app.get("/", response_class=Response, include_in_schema=False)
    async def show() -> Response:
        return Response(page, headers=headers, media_type="text/html")
