"""From a request to prompts and texts, and from what becomes of them to an answer in JSON."""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from transformer_xl.apps.serve.errors import ApiError, JsonResponse, content, encoded, response
from transformer_xl.apps.serve.schemas import CompletionRequest
from transformer_xl.apps.serve.service import Service
from transformer_xl.apps.serve.sessions import Session
from transformer_xl.apps.serve.texts import (
    Drawn,
    Ended,
    Event,
    PromptRead,
    Scored,
    Text,
    make_writer,
)
from transformer_xl.data.vocab import unknown_warning
from transformer_xl.inference.generate import random_numbers, seed_of


def read_prompts(
    service: Service, body: CompletionRequest
) -> tuple[list[tuple[str, list[int]]], list[str]]:
    """Cut the prompts of a request into tokens.

    Returns:
        For each, what an echo of it is, if that is asked for, and its tokens; then warnings of what
        is read as ``<unk>``.

    Raises:
        ApiError: One cannot be cut, is too long, or there is none.
    """
    vocab, limit = service.vocab, service.settings.max_prompt
    given = body.prompt
    one = isinstance(given, str) or (given and isinstance(given[0], int))
    prompts: list[Any] = [given] if one else list(given)
    found, warnings = [], []
    for prompt in prompts:
        if isinstance(prompt, str):
            try:
                ids = vocab.encode(prompt)
            except ValueError as error:
                raise ApiError(400, f"prompt: {error}", "unknown_symbol", "prompt") from error
            if warning := unknown_warning(vocab, prompt, ids):
                warnings.append(f"prompt: {warning}")
        else:
            ids = prompt
            wrong = next((token for token in ids if token >= len(vocab)), None)
            if wrong is not None:
                message = f"token {wrong} is outside the vocabulary of {len(vocab)}"
                raise ApiError(400, message, "unknown_token", "prompt")
        if len(ids) > limit:
            message = f"the prompt has {len(ids)} tokens; at most {limit} are read at once"
            raise ApiError(400, message, "too_long", "prompt")
        begin = ""
        if body.echo:
            begin = prompt if isinstance(prompt, str) else vocab.decode(ids)
        found.append((begin, ids))
    if not found:
        raise ApiError(400, "the list of prompts is empty: give one", "empty_prompt", "prompt")
    return found, warnings


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


log = logging.getLogger("transformer_xl.serve")

_LONG = 4096
"""Characters that are cut into tokens while others wait; more are cut beside them."""
_SEED_BITS = 48
"""Of seeds that nobody chose: few enough to be written as they are in JavaScript."""
_EVENT_SECONDS = 0.002
"""Least time from one event to the next, of all streams together."""


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
    answer.watch(gone)
    is_streamed = False
    try:
        # An answer that fails at once can still say so by its status.
        await answer.first()
        if not body.stream:
            await answer.rest()
        if gone.done():
            return response(ApiError(499, "the client has left", "client_closed_request"))
        if not body.stream:
            return answer.whole(request)
        is_streamed = True
        return _EventStream(answer, request, gone)
    finally:
        if not is_streamed:
            # Of a text that has ended already, nobody asks it.
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
        self._texts: list[Text] = []
        self._begins: list[str] = []
        self._about: dict[str, Any] = {}
        """How its texts are drawn, and warnings of its prompts."""
        self._n_prompt = self._n_going = 0
        self._events: list[tuple[int, Event]] = []
        self._gone: asyncio.Future | None = None
        self._waiter: asyncio.Future | None = None
        self._is_woken = False
        self._error: ApiError | None = None
        self._due = 0.0
        """When the next event may be written."""

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
        if body.attention and not self._service.model.has_attention:
            message = "this model has no attention to look at: leave attention out"
            raise ApiError(400, message, "unsupported", "attention")
        make = partial(self._make, n, max_tokens)
        if n * _size(body.prompt) > _LONG:
            await asyncio.to_thread(make)
        else:
            make()
        self._service.engine.submit(self._texts)
        self._n_going = len(self._texts)
        self._choices = Choices(
            body,
            self._texts,
            self._begins,
            bool(self._session and self._session.state),
            self._service.token_text,
        )

    def _make(self, n: int, max_tokens: int) -> None:
        body, limits = self._body, self._service.settings
        prompts, warnings = read_prompts(self._service, body)
        n_texts = n * len(prompts)
        if n_texts > limits.max_texts:
            message = f"{len(prompts)} prompts times n={n} must be at most {limits.max_texts}"
            raise ApiError(400, message, "too_many", "n")
        if self._session and n_texts > 1:
            message = "a session goes on with one text: give one prompt, and n=1"
            raise ApiError(400, message, "too_many", "session")
        sampler = self._service.sampler(body.temperature, body.top_k, body.top_p)
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        state = self._session.state if self._session else None
        last = () if state is None else (state.last_token,)
        before: tuple[int, ...] = ()
        if state is not None and state.read is not None:
            before = tuple(state.read.tolist())
        seed: Any = body.seed
        if seed is None:
            # The session's own random numbers go on; else the seed is said, to draw the same again.
            seed = secrets.randbits(_SEED_BITS) if state is None else state.random
        told = seed if isinstance(seed, int) else None
        settings = {**sampler.settings, "seed": told, "max_tokens": max_tokens}
        self._about = {"settings": settings, **({"warnings": warnings} if warnings else {})}
        for begin, ids in prompts:
            prompt = (*last, *ids)
            if not prompt:
                message = "the prompt is empty: give at least one token to continue"
                raise ApiError(400, message, "empty_prompt", "prompt")
            self._n_prompt += len(ids)
            for _ in range(n):
                number = len(self._texts)
                own = seed_of(seed, number) if isinstance(seed, int) else seed
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

    def _take(self, number: int, event: Event) -> None:
        """Take what the engine tells, in the thread of the server."""
        if isinstance(event, Ended) and self._session:
            # What was finished is saved before anybody is told.
            self._service.keep(self._close(number, event, self._session))
        else:
            self._put(number, event)

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
        self._put(number, event)

    def _put(self, number: int, event: Event) -> None:
        self._events.append((number, event))
        if isinstance(event, Ended):
            self._n_going -= 1
            if event.reason == "failed":
                self._error = ApiError(500, event.error, "failed")
            elif event.reason == "late":
                message = "the time of the request was over before it began"
                self._error = ApiError(503, message, "late")
        elif isinstance(event, PromptRead) or time.monotonic() < self._due:
            # It goes with what comes next.
            return
        self._wake()

    def _wake(self, *_: Any) -> None:
        # Kept, where nobody waits just now: an event is being written.
        self._is_woken = True
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if not self._is_woken:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_woken = False

    def watch(self, gone: asyncio.Future) -> None:
        """Wait for nothing any more when the client has left."""
        self._gone = gone
        gone.add_done_callback(self._wake)

    @property
    def _is_watched(self) -> bool:
        return not (self._gone and self._gone.done())

    def cancel(self) -> None:
        """Let all texts end: nobody waits for them."""
        for text in self._texts:
            text.is_cancelled = True

    async def first(self) -> None:
        """Wait for the first token, or until the client has left.

        Raises:
            ApiError: There will be none.
        """
        while self._is_watched and all(isinstance(e, PromptRead) for _, e in self._events):
            await self._wait()
        self._check()
        if self._is_watched:
            self._service.metrics.first_token.observe(time.monotonic() - self._started)

    async def rest(self) -> None:
        """Wait for all, or until the client has left.

        Raises:
            ApiError: The engine failed.
        """
        # Nobody is told before the end.
        self._due = float("inf")
        while self._n_going and self._is_watched:
            await self._wait()
            self._check()

    def whole(self, request: Request) -> Response:
        """Return the answer, after :meth:`rest`."""
        self._note(request)
        for number, event in self._events:
            self._choices.add(number, event)
        chunk = self._chunk(self._choices.take_all())
        return JsonResponse(chunk | {"usage": self.usage} | self._about)

    async def stream(
        self, request: Request, send: Callable[[bytes, bool], Awaitable[None]]
    ) -> None:
        """Write the answer as it comes, as events, as long as the client is there.

        All that has come until an event can be written goes with it. To write one costs the
        server much more than a token, so a stream writes the less often the more of them there
        are, and no token waits for longer than until the next one.
        """
        options = self._body.stream_options
        usage = {"usage": None} if options and options.include_usage else {}
        written, chunk = b"", self._chunk([]) | usage
        # Of the first event alone, and before what is split at the empty list of choices.
        first, later = (encoded(x | chunk).rpartition(b"[]") for x in (self._about, {}))
        try:
            while self._is_watched:
                events, self._events = self._events, []
                is_over = not self._n_going
                self._check()
                for number, event in events:
                    self._choices.add(number, event)
                if choices := self._choices.take():
                    written = b"data: " + first[0] + encoded(choices) + first[2] + b"\n\n"
                    first = later
                if is_over:
                    break
                if written:
                    await send(written, True)
                    written = b""
                    pause = _EVENT_SECONDS * self._service.n_streams
                    self._due = time.monotonic() + pause
                if self._n_going:
                    await self._wait()
            if usage:
                written += _event(self._chunk([]) | {"usage": self.usage})
        except ApiError as error:
            written += _event(content(error))
        await send(written + b"data: [DONE]\n\n", False)
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

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Count as one that writes events."""
        self._service.n_streams += 1
        try:
            yield
        finally:
            self._service.n_streams -= 1

    def _check(self) -> None:
        if self._error:
            self.cancel()
            raise self._error

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


class _EventStream(StreamingResponse):
    """An answer as it comes; who leaves ends it."""

    def __init__(self, answer: Answer, request: Request, gone: asyncio.Future) -> None:
        super().__init__(
            (),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._answer, self._request, self._gone = answer, request, gone

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Write it, in this task: starlette's own would start two more."""

        async def write(body: bytes, more: bool) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            with self._answer.streaming():
                headers = self.raw_headers
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._answer.stream(self._request, write)
        finally:
            self._answer.cancel()
            self._gone.cancel()


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


def _size(prompt: str | list[Any]) -> int:
    """Return how many characters or tokens there are."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(1 if isinstance(each, int) else len(each) for each in prompt)


async def _gone(request: Request) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
