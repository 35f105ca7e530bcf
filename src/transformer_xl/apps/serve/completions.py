"""Completions: from a request to texts for the engine, and from their events to a response."""

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
    """Tokenize the prompts of a request.

    Returns:
        For each, its echo (empty if none is requested) and its tokens; then warnings about
        characters and words that are read as ``<unk>``.

    Raises:
        ApiError: One cannot be tokenized or is too long, or there is none.
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
class _Output:
    """The output of a text since the last response event. Parts are joined once, at the end."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    attention: list[Any] = field(default_factory=list)
    reason: str | None = None


class Choices:
    """The choices of a response.

    Args:
        begins: The echo of the prompt of each.
        goes_on: Whether the first token of the prompt is the last token of the session.
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
        self._pieces: dict[int, _Output] = {}

    def add(self, number: int, event: Event) -> None:
        """Add an event of a text."""
        if isinstance(event, PromptRead) and not self._body.echo:
            return
        piece = self._pieces.get(number)
        if piece is None:
            piece = self._pieces[number] = _Output()
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
        """Return the new output of each text that has any."""
        pieces, self._pieces = self._pieces, {}
        return [self._json(number, piece) for number, piece in pieces.items()]

    def take_all(self) -> list[dict[str, Any]]:
        """Return the output of every text."""
        none = _Output()
        return [self._json(n, self._pieces.get(n, none)) for n in range(len(self._texts))]

    def _json(self, number: int, piece: _Output) -> dict[str, Any]:
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

_MAX_INLINE = 4096
"""Characters that are tokenized in the event loop; longer prompts are tokenized in a thread."""
_SEED_BITS = 48
"""Bits of a random seed: few enough to be exact as a number in JavaScript."""
_EVENT_SECONDS = 0.002
"""Least time between two events, of all streamed responses together."""


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Handle a request for completions."""
    started = time.monotonic()
    session = await service.open_session(body.session) if body.session else None
    answer = Answer(service, body, session, started)
    try:
        await answer.begin()
    except BaseException:
        if session:
            await service.close_session(session, None)
        raise
    gone = asyncio.ensure_future(_disconnected(request))
    answer.watch(gone)
    is_streamed = False
    try:
        # Before the headers are sent: an early failure is still returned as a status.
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
            # No effect on texts that have ended.
            answer.cancel()
            gone.cancel()


class Answer:
    """The texts of one request, or the one text that continues a session."""

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
        """Settings of sampling, and warnings about the prompts."""
        self._n_prompt = self._n_going = 0
        self._events: list[tuple[int, Event]] = []
        self._disconnected: asyncio.Future | None = None
        self._waiter: asyncio.Future | None = None
        self._is_woken = False
        self._error: ApiError | None = None
        self._due = 0.0
        """When the next event may be sent."""

    async def begin(self) -> None:
        """Validate the request and submit its texts to the engine.

        Raises:
            ApiError: The request is invalid.
            QueueFullError: The queue is full.
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
            message = "this model has no attention to return: leave attention out"
            raise ApiError(400, message, "unsupported", "attention")
        make = partial(self._make_texts, n, max_tokens)
        if n * _size(body.prompt) > _MAX_INLINE:
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

    def _make_texts(self, n: int, max_tokens: int) -> None:
        body, limits = self._body, self._service.settings
        prompts, warnings = read_prompts(self._service, body)
        n_texts = n * len(prompts)
        if n_texts > limits.max_texts:
            message = f"{len(prompts)} prompts times n={n} must be at most {limits.max_texts}"
            raise ApiError(400, message, "too_many", "n")
        if self._session and n_texts > 1:
            message = "a session is continued by one text: give one prompt, and n=1"
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
            # A session continues its random numbers; else the response returns a new seed.
            seed = secrets.randbits(_SEED_BITS) if state is None else state.random
        shown = seed if isinstance(seed, int) else None
        settings = {**sampler.settings, "seed": shown, "max_tokens": max_tokens}
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
                    sink=partial(self._receive, number),
                    logprobs=body.logprobs,
                    scores_prompt=bool(body.echo) and body.logprobs is not None,
                    attention=body.attention or 0,
                    keeps_state=self._session is not None,
                    deadline=self._started + self._service.settings.max_seconds,
                )
                self._texts.append(text)
                self._begins.append(begin)

    def _receive(self, number: int, event: Event) -> None:
        """Handle an event of the engine, in the thread of the event loop."""
        if isinstance(event, Ended) and self._session:
            # The session is saved before the end is reported.
            self._service.keep(self._close(number, event, self._session))
        else:
            self._add_event(number, event)

    async def _close(self, number: int, event: Ended, session: Session) -> None:
        try:
            await self._service.close_session(session, event.state)
        except ApiError as error:
            event = Ended("failed", event.text, None, error.message)
        except Exception:
            # Whatever failed, the request still waits for the end.
            log.exception("session %s could not be released", session.name)
            message = "the session could not be saved: see the log"
            event = Ended("failed", event.text, None, message)
        self._add_event(number, event)

    def _add_event(self, number: int, event: Event) -> None:
        self._events.append((number, event))
        if isinstance(event, Ended):
            self._n_going -= 1
            if event.reason == "failed":
                self._error = ApiError(500, event.error, "failed")
            elif event.reason == "late":
                message = "the request waited longer than its time limit: try again later"
                self._error = ApiError(503, message, "late")
        elif isinstance(event, PromptRead) or time.monotonic() < self._due:
            # It is sent together with the next event.
            return
        self._wake()

    def _wake(self, *_: Any) -> None:
        # Remembered for the next wait: an event may be being sent now.
        self._is_woken = True
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if not self._is_woken:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_woken = False

    def watch(self, gone: asyncio.Future) -> None:
        """Stop waiting when the client disconnects."""
        self._disconnected = gone
        gone.add_done_callback(self._wake)

    @property
    def _is_watched(self) -> bool:
        return not (self._disconnected and self._disconnected.done())

    def cancel(self) -> None:
        """Cancel all texts."""
        for text in self._texts:
            text.is_cancelled = True

    async def first(self) -> None:
        """Wait for the first token, or until the client disconnects.

        Raises:
            ApiError: There will be none.
        """
        while self._is_watched and all(isinstance(e, PromptRead) for _, e in self._events):
            await self._wait()
        self._check()
        if self._is_watched:
            self._service.metrics.first_token.observe(time.monotonic() - self._started)

    async def rest(self) -> None:
        """Wait for the end of all texts, or until the client disconnects.

        Raises:
            ApiError: The engine failed.
        """
        # Tokens do not wake the waiting task.
        self._due = float("inf")
        while self._n_going and self._is_watched:
            await self._wait()
            self._check()

    def whole(self, request: Request) -> Response:
        """Return the complete response, after :meth:`rest`."""
        self._record_usage(request)
        for number, event in self._events:
            self._choices.add(number, event)
        chunk = self._chunk(self._choices.take_all())
        return JsonResponse(chunk | {"usage": self.usage} | self._about)

    async def stream(
        self, request: Request, send: Callable[[bytes, bool], Awaitable[None]]
    ) -> None:
        """Stream the response as events, as long as the client is connected.

        An event has all output since the last one. An event costs the server much more than a
        token, so the interval between events grows with the number of streams, and no token waits
        for longer than until the next one.
        """
        options = self._body.stream_options
        usage = {"usage": None} if options and options.include_usage else {}
        written, chunk = b"", self._chunk([]) | usage
        # Only in the first event; at its start, as the JSON is split at the empty choices.
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
        self._record_usage(request)

    @property
    def usage(self) -> dict[str, int]:
        """Number of tokens read and sampled."""
        drawn = sum(len(text.written) for text in self._texts)
        return {
            "prompt_tokens": self._n_prompt,
            "completion_tokens": drawn,
            "total_tokens": self._n_prompt + drawn,
        }

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Count this response as streaming inside a ``with`` block."""
        self._service.n_streams += 1
        try:
            yield
        finally:
            self._service.n_streams -= 1

    def _check(self) -> None:
        if self._error:
            self.cancel()
            raise self._error

    def _record_usage(self, request: Request) -> None:
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
    """A streamed response; it ends if the client disconnects."""

    def __init__(self, answer: Answer, request: Request, gone: asyncio.Future) -> None:
        super().__init__(
            (),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._answer, self._request, self._disconnected = answer, request, gone

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it in this task: starlette's implementation would start two more."""

        async def write(body: bytes, more: bool) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            with self._answer.streaming():
                headers = self.raw_headers
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._answer.stream(self._request, write)
        finally:
            self._answer.cancel()
            self._disconnected.cancel()


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


def _size(prompt: str | list[Any]) -> int:
    """Return the number of characters or tokens."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(1 if isinstance(each, int) else len(each) for each in prompt)


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
