"""The endpoints of the server."""

import base64
import hashlib
import re
from functools import partial
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Query
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response

from transformer_xl import __version__
from transformer_xl.apps.serve import schemas
from transformer_xl.apps.serve.chat import chat
from transformer_xl.apps.serve.completions import complete
from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.apps.serve.guard import Guard
from transformer_xl.apps.serve.repeats import Note, note_of
from transformer_xl.apps.serve.responses import JsonResponse, add_handlers
from transformer_xl.apps.serve.schemas import KEY, errors
from transformer_xl.apps.serve.service import Service
from transformer_xl.apps.serve.session_store import NAME
from transformer_xl.apps.serve.sessions import Session
from transformer_xl.inference.generate import State

Name = Annotated[str, Path(pattern=NAME)]
_DATA = {"type": "string", "description": "JSON with a part of the response, or [DONE]."}
_EVENT = {"type": "object", "properties": {"data": _DATA}, "required": ["data"]}
_STREAM = {"text/event-stream": {"schema": _EVENT}}
_PLAIN = {"text/plain": {"schema": {"type": "string"}}}
_NO_STORE = {"Cache-Control": "no-store"}


def create_app(service: Service) -> FastAPI:
    """Return the web application of a server."""
    app = FastAPI(
        title="Transformer-XL",
        version=__version__,
        description="OpenAI-compatible completions, and sessions that keep their memory.",
        default_response_class=JsonResponse,
        responses=errors(400, 401, 413, 415, 500, 503),
        lifespan=service.running,
        # These pages load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        # A proxy may have removed a part of the path that a redirect would need.
        redirect_slashes=False,
    )
    hosts = [*service.settings.hosts]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app.add_middleware(Guard, service=service)
    add_handlers(app)
    for add in (_add_completions, _add_models, _add_health, _add_sessions):
        add(app, service)
    _add_page(app)
    app.openapi = lambda: _description(app)  # pyright: ignore[reportAttributeAccessIssue]
    return app


def _description(app: FastAPI) -> dict[str, Any]:
    """Return the description of the endpoints, without the 422 that FastAPI adds: all are 400."""
    description = FastAPI.openapi(app)
    for operations in description["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        description["components"]["schemas"].pop(name, None)
    return description


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/completions",
        response_model=schemas.Completion,
        responses={200: {"content": _STREAM}, **errors(404, 409, 429, 503, 507)},
    )
    async def completions(
        body: schemas.CompletionRequest,
        request: Request,
        x_session: Annotated[schemas.SessionName | None, Header()] = None,
        idempotency_key: Annotated[str | None, Header(pattern=KEY)] = None,
    ) -> Response:
        """Continue texts.

        With `session`, or the header X-Session, the text continues from the memory of that
        session, and the prompt has only the new part. A session handles one request at a time.
        A request that is sent again with the same Idempotency-Key is answered as before, and
        appends nothing; nor does one whose `session_turn` is not that of the session.
        """
        if x_session is not None:
            if body.session not in (None, x_session):
                message = f"X-Session is {x_session!r} and session {body.session!r}: give one"
                raise ApiError(400, message, "two_sessions", "session")
            body.session = x_session
        return await complete(service, body, request, key=idempotency_key)

    @app.post(
        "/v1/chat/completions",
        response_model=schemas.Chat,
        responses={200: {"content": _STREAM}, **errors(404, 429)},
    )
    async def chats(body: schemas.ChatRequest, request: Request) -> Response:
        """Write the next message of a chat.

        The messages become a prompt by the template of the server or by a plain one:
        `chat_template` of the response says which.
        """
        return await chat(service, body, request)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> schemas.ModelList:
        """List the models, of which there is one."""
        return schemas.ModelList(data=[await one_model(service.name)])

    @app.get("/v1/models/{name:path}", responses=errors(404))
    async def one_model(name: str) -> schemas.Model:
        """Describe a model."""
        if name != service.name:
            raise ApiError(404, f"there is no model {name!r}", "model_not_found", "model")
        model, vocab = service.model, service.vocab
        n_weights = sum(x.numel() for x in model.parameters())
        about = f"{name}: {n_weights:,} weights, {len(vocab):,} {vocab.kind}"
        if model.has_attention:
            n_layer, mem_len = model.config.n_layer, model.config.mem_len
            about += f", {n_layer} layers that remember {mem_len} tokens each"
        return schemas.Model(id=name, created=service.created, about=about)


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health/live")
    async def live() -> schemas.Health:
        """Liveness: whether the server responds."""
        return schemas.Health(status="ok")

    @app.get("/health", responses=errors(503))
    @app.get("/health/ready", responses=errors(503))
    async def ready() -> schemas.Health:
        """Readiness: whether requests are accepted and a token was computed."""
        if not service.is_ready:
            message = "the server computes its first token, is stopping, or its engine has ended"
            raise ApiError(503, message, "not_ready")
        return schemas.Health(status="ok")

    @app.get("/metrics", response_class=Response, responses={200: {"content": _PLAIN}})
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4")


def _add_sessions(app: FastAPI, service: Service) -> None:
    sessions, path = service.sessions, "/v1/sessions/{name}"

    @app.get("/v1/sessions", response_model=schemas.SessionList, responses=errors(503))
    async def all_sessions(limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> Response:
        """List sessions, the most recently used first."""
        data = [_info(session) for session in await service.on_disk(sessions.all, limit)]
        return JsonResponse({"object": "list", "data": data}, headers=_NO_STORE)

    @app.get(path, response_model=schemas.SessionDetail, responses=errors(404, 409, 429))
    async def one_session(name: Name) -> Response:
        """Describe a session and the content of its memory."""
        state, turns = await read(name)
        info = await described(name) | {"turns": turns, "remembered": len(state.mems)}
        return JsonResponse(info | remembered(state, len(state.mems)), headers=_NO_STORE)

    @app.post(
        f"{path}/fork", response_model=schemas.SessionInfo, responses=errors(404, 409, 429, 507)
    )
    async def fork(name: Name, body: schemas.ForkRequest) -> Response:
        """Copy a session, as it is after its last answer, to a new one that goes on by itself.

        Both sample the same tokens unless given a seed.
        """
        state, turns = await read(name)
        # Keys belong to the requests of one session.
        state = state._replace(note=Note(turns).encoded())
        await service.with_session(partial(sessions.create, state=state), body.name)
        return JsonResponse(await described(body.name))

    @app.delete(path, responses=errors(404, 409))
    async def delete(name: Name) -> schemas.Deleted:
        """Delete a session."""
        await service.with_session(sessions.delete, name)
        return schemas.Deleted(id=name)

    async def read(name: str) -> tuple[State, int]:
        """Return the state of a session and the number of its turns."""
        return await service.with_session(lambda name: with_turns(sessions.peek(name)), name)

    async def described(name: str) -> dict[str, Any]:
        return _info(await service.with_session(sessions.find, name))

    def with_turns(state: State) -> tuple[State, int]:
        return state, note_of(state.note).turns

    def remembered(state: State, most: int) -> dict[str, Any]:
        """Describe the last token and at most so many before it, as far as they are known."""
        read = [] if state.read is None or not most else state.read.tolist()
        tokens = [*read[-most:], state.last_token]
        return {"tokens": tokens, "texts": service.texts_of(tokens)}


def _info(session: Session) -> dict[str, Any]:
    return {
        "id": session.name,
        "object": "session",
        "used": int(session.used),
        "is_busy": session.is_busy,
        "in_memory": session.state is not None,
        "nbytes": session.nbytes,
    }


def _add_page(app: FastAPI) -> None:
    page = (files("transformer_xl.apps.serve") / "page.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _policy(page), "X-Frame-Options": "DENY"}

    @app.get("/", response_class=Response, include_in_schema=False)
    async def show() -> Response:
        return Response(page, headers=headers, media_type="text/html")


def _policy(page: str) -> str:
    """Return a policy that allows only the page's own style and script and this server."""
    inner = {
        tag: re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)[0] for tag in ("style", "script")
    }
    digests = {tag: hashlib.sha256(text.encode()).digest() for tag, text in inner.items()}
    hashes = {tag: base64.b64encode(digest).decode() for tag, digest in digests.items()}
    return (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'"
    )
