"""From a request to texts, and from what becomes of them to an answer."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from transformer_xl.generate import Sampler, random_numbers
from transformer_xl.serve.errors import ApiError, JsonResponse, content, response
from transformer_xl.serve.prompts import read_prompts
from transformer_xl.serve.schemas import CompletionRequest
from transformer_xl.serve.service import Service
from transformer_xl.serve.sessions import Session
from transformer_xl.serve.texts import Drawn, Ended, Event, PromptRead, Scored, Text, make_writer

log = logging.getLogger("transformer_xl.serve")

_LONG = 4096
"""Characters that are cut into tokens while others wait; more are cut beside them."""


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Answer a request for completions."""
    started = time.monotonic()
    session = await service.open_session(body.session) if body.session else None
    answer = Answer(service, body, session, started)
    try:
        await answer.begin()
    except BaseException:
        if session:
            await service.close_session(session, None)
        raise
    gone = asyncio.ensure_future(_gone(request))
    try:
        # An answer that fails at once can still say so by its status.
        if not await _finished(answer.first(), gone):
            return _nobody()
        if body.stream:
            return _EventStream(answer, request, body)
        if not await _finished(answer.rest(), gone):
            return _nobody()
        return answer.whole(request)
    except BaseException:
        answer.cancel()
        raise
    finally:
        if gone.done() and not gone.cancelled():
            answer.cancel()
        gone.cancel()


class Answer:
    """The texts of one request.

    Args:
        service: The server.
        body: The request.
        session: The session in which the one text goes on.
        started: When the request came.
    """

    def __init__(
        self, service: Service, body: CompletionRequest, session: Session | None, started: float
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._service, self._body, self._session = service, body, session
        self._started = started
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._texts: list[Text] = []
        self._begins: list[str] = []
        self._offsets: list[int] = []
        self._n_prompt = self._n_going = 0
        self._early: list[tuple[int, Event]] = []
        self._choices: list[dict[str, Any]] = []

    async def begin(self) -> None:
        """Check the request and hand its texts to the engine.

        Raises:
            ApiError: Something in it cannot be.
            QueueFullError: Too many texts wait.
        """
        body, limits = self._body, self._service.settings
        if body.model not in (None, self._service.name):
            message = f"there is no model {body.model!r}: this server has {self._service.name!r}"
            raise ApiError(404, message, "model_not_found", "model")
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        if max_tokens > limits.max_tokens:
            message = f"max_tokens={max_tokens} must be at most {limits.max_tokens}"
            raise ApiError(400, message, "too_long", "max_tokens")
        n = body.n or 1
        if body.best_of not in (None, n):
            raise ApiError(400, f"best_of={body.best_of} must be n={n}", "unsupported", "best_of")
        if body.attention and self._service.model.config.kind != "transformer_xl":
            message = "this model has no attention to look at: leave attention out"
            raise ApiError(400, message, "unsupported", "attention")
        size = len(body.prompt) if isinstance(body.prompt, str) else _LONG + 1
        cut = partial(read_prompts, self._service, body)
        prompts = await asyncio.to_thread(cut) if size > _LONG else cut()
        n_texts = n * len(prompts)
        if n_texts > limits.max_texts:
            message = f"{len(prompts)} prompts times n={n} must be at most {limits.max_texts}"
            raise ApiError(400, message, "too_many", "n")
        if self._session and n_texts > 1:
            message = "a session goes on with one text: give one prompt, and n=1"
            raise ApiError(400, message, "too_many", "session")
        self._make(prompts, n, max_tokens)
        self._service.engine.submit(self._texts)
        self._n_going = len(self._texts)

    def _make(self, prompts: Sequence[tuple[str, Sequence[int]]], n: int, max_tokens: int) -> None:
        body = self._body
        sampler = Sampler(
            1.0 if body.temperature is None else body.temperature, body.top_k, body.top_p
        )
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        state = self._session.state if self._session else None
        last = () if state is None else (state.last_token,)
        before: tuple[int, ...] = ()
        if state is not None and state.read is not None:
            before = tuple(state.read.tolist())
        seed: Any = body.seed
        if seed is None and state is not None:
            # The session's own random numbers go on.
            seed = state.random
        for begin, ids in prompts:
            prompt = (*last, *ids)
            if not prompt:
                message = "the prompt is empty: give at least one token to continue"
                raise ApiError(400, message, "empty_prompt", "prompt")
            self._n_prompt += len(ids)
            for _ in range(n):
                number = len(self._texts)
                own = seed + number if isinstance(seed, int) else seed
                # As torch takes seeds: 64 bits, with a sign or without.
                own = own % 2**64 if isinstance(own, int) else own
                text = Text(
                    prompt=prompt,
                    mems=None if state is None else state.mems,
                    before=before,
                    writer=make_writer(self._service.vocab, stop, before, prompt),
                    generator=random_numbers(own),
                    sampler=sampler,
                    max_tokens=max_tokens,
                    sink=partial(self._take, number),
                    logprobs=body.logprobs,
                    scores_prompt=bool(body.echo) and body.logprobs is not None,
                    attention=body.attention or 0,
                    keeps_state=self._session is not None,
                    deadline=self._started + self._service.settings.max_seconds,
                )
                self._texts.append(text)
                self._begins.append(begin)
                self._offsets.append(0)

    def _take(self, number: int, event: Event) -> None:
        """Take what the engine tells, in the thread of the server."""
        if isinstance(event, Ended) and self._session:
            # What was finished is saved before anybody is told.
            self._service.keep(self._close(number, event, self._session))
        else:
            self._events.put_nowait((number, event))

    async def _close(self, number: int, event: Ended, session: Session) -> None:
        try:
            await self._service.close_session(session, event.state)
        except ApiError as error:
            event = Ended("failed", event.text, None, error.message)
        except Exception:
            # Whatever it was, somebody waits for the end.
            log.exception("session %s could not be given back", session.name)
            message = "the session could not be saved: see the log"
            event = Ended("failed", event.text, None, message)
        self._events.put_nowait((number, event))

    def cancel(self) -> None:
        """Let all texts end: nobody waits for them."""
        for text in self._texts:
            text.is_cancelled = True

    async def first(self) -> None:
        """Wait for the first token.

        Raises:
            ApiError: There will be none.
        """
        while True:
            number, event = await self._next()
            self._early.append((number, event))
            if not isinstance(event, PromptRead):
                break
        self._service.metrics.first_token.observe(time.monotonic() - self._started)

    async def rest(self) -> None:
        """Wait for all.

        Raises:
            ApiError: The engine failed.
        """
        self._choices = [_empty(number) for number in range(len(self._texts))]
        async for number, event in self._all():
            if piece := self._piece(number, event):
                _extend(self._choices[number], piece)

    def whole(self, request: Request) -> Response:
        """Return the answer, after :meth:`rest`."""
        self._note(request)
        return JsonResponse(self._chunk(self._choices) | {"usage": self.usage})

    async def stream(self, request: Request) -> AsyncIterator[bytes]:
        """Write the answer as it comes, as events."""
        options = self._body.stream_options
        usage = {"usage": None} if options and options.include_usage else {}
        try:
            held: dict[int, dict[str, Any]] = {}
            async for number, event in self._all():
                if piece := self._piece(number, event):
                    held.setdefault(number, _empty(number))
                    _extend(held[number], piece)
                # What is there already goes together: a server that is behind catches up.
                if self._events.empty() and held:
                    yield _event(self._chunk([*held.values()]) | usage)
                    held.clear()
            if usage:
                yield _event(self._chunk([]) | {"usage": self.usage})
        except ApiError as error:
            yield _event(content(error))
        yield b"data: [DONE]\n\n"
        self._note(request)

    @property
    def usage(self) -> dict[str, int]:
        """How many tokens were read and drawn."""
        drawn = sum(len(text.written) for text in self._texts)
        return {
            "prompt_tokens": self._n_prompt,
            "completion_tokens": drawn,
            "total_tokens": self._n_prompt + drawn,
        }

    async def _all(self) -> AsyncIterator[tuple[int, Event]]:
        early, self._early = self._early, []
        for each in early:
            yield each
        while self._n_going:
            yield await self._next()

    async def _next(self) -> tuple[int, Event]:
        number, event = await self._events.get()
        if isinstance(event, Ended):
            self._n_going -= 1
            if event.reason == "failed":
                self.cancel()
                raise ApiError(500, event.error, "failed")
            if event.reason == "late":
                self.cancel()
                raise ApiError(503, "the time of the request was over before it began", "late")
        return number, event

    def _note(self, request: Request) -> None:
        usage, metrics = self.usage, self._service.metrics
        metrics.prompt_tokens.inc(usage["prompt_tokens"])
        metrics.completion_tokens.inc(usage["completion_tokens"])
        note = f"{usage['prompt_tokens']}+{usage['completion_tokens']} tokens"
        request.scope["note"] = note + (f", session {self._session.name}" if self._session else "")

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self._service.name,
            "choices": choices,
        }

    def _piece(self, number: int, event: Event) -> dict[str, Any] | None:
        """Return what an event adds to its text."""
        piece = _empty(number)
        if isinstance(event, PromptRead):
            if not self._body.echo:
                return None
            piece["text"] = self._begins[number]
            if self._body.logprobs is not None:
                first = [] if self._session and self._session.state else [self._unscored(number)]
                self._score(number, piece, [*first, *event.scored])
        elif isinstance(event, Drawn):
            piece |= {"text": event.text, "token_ids": [event.token]}
            if event.scored:
                self._score(number, piece, [event.scored])
            if event.attended is not None:
                piece["attention"] = [event.attended]
        else:
            reason = "stop" if event.reason == "stop" else "length"
            piece |= {"text": event.text, "finish_reason": reason}
        return piece

    def _unscored(self, number: int) -> Scored:
        return Scored(self._texts[number].prompt[0], None)

    def _score(self, number: int, piece: dict[str, Any], tokens: Sequence[Scored]) -> None:
        texts = self._service.token_text
        offsets = []
        for each in tokens:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(texts(each.token))
        piece["logprobs"] = {
            "tokens": [texts(each.token) for each in tokens],
            "token_logprobs": [each.log_prob for each in tokens],
            "top_logprobs": [
                None if each.log_prob is None else {texts(token): x for token, x in each.top}
                for each in tokens
            ],
            "text_offset": offsets,
        }


class _EventStream(StreamingResponse):
    """An answer as it comes; who leaves ends it."""

    def __init__(self, answer: Answer, request: Request, body: CompletionRequest) -> None:
        super().__init__(
            answer.stream(request),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()


def _empty(number: int) -> dict[str, Any]:
    return {"index": number, "text": "", "logprobs": None, "finish_reason": None, "token_ids": []}


def _extend(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece to a text."""
    choice["text"] += piece["text"]
    choice["token_ids"] += piece["token_ids"]
    choice["finish_reason"] = piece["finish_reason"] or choice["finish_reason"]
    if "attention" in piece:
        choice["attention"] = [*choice.get("attention", []), *piece["attention"]]
    if choice["logprobs"] is None:
        choice["logprobs"] = piece["logprobs"]
    elif piece["logprobs"]:
        for name, values in piece["logprobs"].items():
            choice["logprobs"][name] += values


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


async def _gone(request: Request) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _finished(work: Any, gone: asyncio.Future) -> bool:
    """Do something, unless the client leaves before; whether it was done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()


def _nobody() -> Response:
    """Return what nobody will read."""
    return response(ApiError(499, "the client has left", "client_closed_request"))
