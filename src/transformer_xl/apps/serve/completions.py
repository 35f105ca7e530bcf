"""Completions: from a request to texts for the engine, and from their parts to a response."""

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from transformer_xl.apps.serve.choices import Form, Json
from transformer_xl.apps.serve.errors import ApiError, NotStartedError
from transformer_xl.apps.serve.responses import JsonResponse, error_content
from transformer_xl.apps.serve.schemas import SAMPLING, CompletionRequest
from transformer_xl.apps.serve.service import Service
from transformer_xl.apps.serve.sessions import turns_of
from transformer_xl.apps.serve.texts import Part, Text
from transformer_xl.inference.generate import State, TextWriter

log = logging.getLogger("transformer_xl.serve")

_SEED_BITS = 48
"""Bits of a random seed: few enough to be exact as a number in JavaScript."""
_EVENT_SECONDS = 0.002
"""Least time between two events, of all streamed responses together."""
_DONE = b"data: [DONE]\n\n"


async def complete(
    service: Service, body: CompletionRequest, request: Request, form: Form
) -> Response:
    """Handle a request for completions, or for messages, as the form says.

    Raises:
        ApiError: The request cannot be answered.
    """
    answer = Answer(service, body, request, form)
    with ExitStack() as ending:
        ending.callback(answer.end)
        await answer.begin()
        # Before the headers are sent: an early failure is still returned as a status.
        await answer.wait()
        while not body.stream and answer.has_more:
            await answer.wait()
        answer.require_client()
        if not body.stream:
            answer.record()
            return JsonResponse(answer.response())
        ending.pop_all()
        return _Events(answer.stream())


class Answer:
    """The texts of one request, or the one text that continues a session."""

    def __init__(
        self, service: Service, body: CompletionRequest, request: Request, form: Form
    ) -> None:
        self._service, self._body, self._request, self._form = service, body, request, form
        self._started = time.monotonic()
        self._head: Json = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
        }
        default = min(16, service.settings.max_tokens)
        self._max_tokens: int = default if body.max_tokens is None else body.max_tokens
        self._about: Json = {}
        """Settings of sampling, and warnings about the prompts."""
        self._session = body.session
        self._state: State | None = None
        self._turns = 0
        self._texts: list[Text] = []
        self._parts: list[list[Part]] = []
        """The parts of each text, until its end."""
        self._n_prompt = self._n_unfinished = 0
        self._disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
        self._woken = asyncio.Event()
        self._disconnect.add_done_callback(lambda _: self._woken.set())
        self._error: ApiError | None = None
        self._due = 0.0 if body.stream else float("inf")
        """When the next event may be sent."""

    async def begin(self) -> None:
        """Validate the request and submit its texts to the engine.

        Raises:
            ApiError: The request is invalid, its session is not available, or the queue is full.
        """
        body, service = self._body, self._service
        self._require_supported()
        if self._session:
            self._state = await service.with_session(service.sessions.open, self._session)
        try:
            if self._session:
                self._turns = turns_of(self._state)
                if body.session_turn not in (None, self._turns):
                    message = f"session_turn={body.session_turn}, and the session has given "
                    message += f"{self._turns} answers: nothing was appended"
                    raise ApiError(409, message, "session_at_another_turn", "session_turn")
                # It may have waited, as in a paused process, and been sent again since.
                self.require_client()
            # A long prompt takes long to tokenize.
            await asyncio.to_thread(self._make_texts)
            self._n_unfinished = len(self._texts)
            service.engine.submit(self._texts)
        except BaseException:
            if self._session:
                await asyncio.to_thread(service.sessions.close, self._session)
            raise

    def _require_supported(self) -> None:
        """Require that this server can answer the request, before its session is opened.

        Raises:
            ApiError: The model is another one, a field is not supported, or a limit is exceeded.
        """
        body, service = self._body, self._service
        most = service.settings.max_tokens
        problems = {
            "echo": body.echo
            and "echo and scores of prompts are gone: txl score scores a text, and "
            "transformer_xl.harness has the model type transformer-xl of lm-evaluation-harness",
            "session_turn": body.session_turn is not None
            and not body.session
            and "session_turn is for sessions: name one, or leave it out",
        }
        if body.model not in (None, service.name):
            message = f"there is no model {body.model!r}: this server has {service.name!r}"
            raise ApiError(404, message, "model_not_found", "model")
        _raise_first(problems, "unsupported")
        if self._max_tokens > most:
            message = f"max_tokens={body.max_tokens} must be at most {most}"
            raise ApiError(400, message, "too_long", "max_tokens")

    def _prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts of the request, each as a text or as tokens.

        Raises:
            ApiError: The request has no prompt, or too many.
        """
        prompt = self._body.prompt
        is_missing = prompt is None and self._state is None
        _raise_first({"prompt": is_missing and "prompt is missing: give the text to continue"})
        # An empty list has no tokens, as an empty text.
        is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        prompts = cast(list[str | list[int]], [prompt or ""] if is_one else prompt)
        n, limit = self._body.n or 1, self._service.settings.max_queue
        problems = {
            "n": n * len(prompts) > limit
            and f"{len(prompts)} prompts times n={n} must be at most {limit}",
            "session": self._session
            and n * len(prompts) > 1
            and "a session is continued by one text: give one prompt, and n=1",
        }
        _raise_first(problems, "too_many")
        return prompts

    def _make_texts(self) -> None:
        """Make the texts of the request: ``n`` of each prompt, with the settings of sampling.

        Raises:
            ApiError: A prompt cannot be tokenized or is too long, or there are too many.
            SettingsError: A setting of sampling has no effect.
        """
        body, service, state = self._body, self._service, self._state
        prompts = self._prompts()
        sampler = service.sampler(**body.model_dump(include=SAMPLING, exclude_none=True))
        stops = service.generation.stop if body.stop is None else body.stop
        stops = (*([stops] if isinstance(stops, str) else stops), *self._form.stop)
        # Of a session: the token that was sampled and not read, and those in the memory.
        unread, before = (), ()
        if state is not None:
            unread, before = (state.last_token,), state.tokens[:-1]
        seed = body.seed
        random = state.random if state and seed is None else None
        if seed is None and random is None:
            # A session continues its random numbers; else the response returns a new seed.
            seed = secrets.randbits(_SEED_BITS)
        settings = {"seed": seed, "max_tokens": self._max_tokens}
        if service.model.preface and state is None:
            settings["preface"] = len(service.model.preface)
        self._about = {"settings": sampler.settings | settings, **self._form.about}
        if self._session:
            self._about["session_turn"] = self._turns + 1
        warnings: list[str] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                prompt, _ = service.vocab.normalized(prompt)
            ids, warning = _tokenize(service, prompt)
            if warning:
                warnings.append(warning)
                self._about["warnings"] = warnings
            context = unread
            if not (unread or ids):
                if service.vocab.start_id is None:
                    message = "the prompt is empty, and this vocabulary has no token for the "
                    message += "beginning of a text: give at least one token to continue"
                    raise ApiError(400, message, "empty_prompt", "prompt")
                context = (service.vocab.start_id,)
            # As at OpenAI, characters are counted behind those of the prompt.
            offset = len(prompt)
            if body.logprobs is not None and not isinstance(prompt, str):
                decoder = TextWriter(service.vocab, (), context, before).decoder
                offset = sum(len(decoder.push(token)) for token in ids)
            self._n_prompt += len(context) + len(ids) - len(unread)
            for _ in range(body.n or 1):
                number = len(self._texts)
                generator = torch.Generator()
                if seed is not None:
                    generator.manual_seed((seed + number) % 2**64)
                elif random is not None:
                    generator.set_state(random)
                text = Text(
                    vocab=service.vocab,
                    prompt=(*context, *ids),
                    start=state,
                    stop=stops,
                    generator=generator,
                    sampler=sampler,
                    max_tokens=self._max_tokens,
                    sink=partial(self._receive, number),
                    logprobs=body.logprobs,
                    offset=offset,
                    keeps_state=self._session is not None,
                    deadline=self._started + service.settings.max_seconds,
                )
                self._texts.append(text)
                self._parts.append([])

    def _receive(self, number: int, part: Part) -> None:
        """Handle a part of a text, in the thread of the event loop."""
        if part.reason and self._session:
            # The session is saved before the end is returned.
            self._service.keep(self._save(part, self._session))
        else:
            self._add(number, part)

    async def _save(self, part: Part, name: str) -> None:
        """Save a session with the last part of its text, then report that part.

        If the session cannot be saved, the request fails.

        Args:
            part: The last part, with the new state.
            name: The name of the session.
        """
        state = part.state
        try:
            if state is not None:
                state = replace(state, note=json.dumps({"turns": self._turns + 1}))
            await asyncio.to_thread(self._service.sessions.close, name, state)
        except Exception as error:
            # Whatever failed, the request still waits for the end.
            is_known = isinstance(error, OSError)
            log.error("session %s: %s", name, error, exc_info=not is_known)
            message = f"session {name!r} could not be saved: see the log"
            status = 507 if is_known else 500
            self._error = ApiError(status, message, "session_not_saved", "session")
            part = Part(reason="failed")
        self._add(0, part)

    def _add(self, number: int, part: Part) -> None:
        """Report a part of a text to the request, which is woken when text is due."""
        self._parts[number].append(part)
        if part.reason:
            self._n_unfinished -= 1
            if part.reason == "failed" and self._error is None:
                self._error = ApiError(500, "the model failed", "failed")
            # Texts that were drawn are returned, and those beside them that had no time are empty.
            drew = self._n_unfinished or any(text.written for text in self._texts)
            reasons = [] if drew else [parts[-1].reason for parts in self._parts]
            for reason in ("late", "stopping"):
                if reason in reasons and self._error is None:
                    self._error = NotStartedError(reason)
        elif time.monotonic() < self._due:
            # It is sent together with the next event.
            return
        self._woken.set()

    async def wait(self) -> None:
        """Wait for text that is due, or until the client disconnects.

        Raises:
            ApiError: The request failed.
        """
        await self._woken.wait()
        self._woken.clear()
        if self._error:
            raise self._error

    @property
    def has_more(self) -> bool:
        """Whether there will be more text for the client."""
        return bool(self._n_unfinished) and not self._disconnect.done()

    def require_client(self) -> None:
        """Raise an ApiError if the client has disconnected."""
        if self._disconnect.done():
            raise ApiError(499, "the client has left", "client_closed_request")

    def end(self) -> None:
        """Cancel all texts; no effect on those that have ended."""
        for text in self._texts:
            text.is_cancelled = True
        self._disconnect.cancel()

    def response(self) -> Json:
        """Return the content of the response that is not streamed."""
        form, has_scores = self._form, self._body.logprobs is not None
        choices = [form.choice(n, parts, has_scores) for n, parts in enumerate(self._parts)]
        content = {"object": form.object, "choices": choices, "usage": self._usage()}
        return self._head | content | self._about

    async def stream(self) -> AsyncIterator[bytes]:
        """Stream the response as events, as long as the client is connected.

        An event has all text since the last one. An event costs the server much more than a
        token, so the interval between events grows with the number of streams, and no token waits
        for longer than until the next one.
        """
        form, options = self._form, self._body.stream_options
        usage = {"usage": None} if options and options.include_usage else {}
        head = self._head | {"object": form.part} | usage
        n_sent, written, about = [0] * len(self._texts), b"", self._about
        has_scores = self._body.logprobs is not None
        # What came is sent at once.
        self._woken.set()
        self._service.n_streams += 1
        try:
            has_more = True
            while has_more:
                await self.wait()
                has_more = self.has_more
                for n, parts in enumerate(self._parts):
                    if new := parts[n_sent[n] :]:
                        # One choice for each event, as at OpenAI: clients look at the first alone.
                        first = not n_sent[n]
                        choice = form.choice(n, new, has_scores, is_event=True, is_first=first)
                        written += _event(head | {"choices": [choice]} | about)
                        n_sent[n], about = len(parts), {}
                if written and has_more:
                    yield written
                    written = b""
                    self._due = time.monotonic() + _EVENT_SECONDS * self._service.n_streams
            if usage:
                written += _event(head | {"choices": [], "usage": self._usage()})
        except ApiError as error:
            written += _event(error_content(error))
        finally:
            self._service.n_streams -= 1
            self.end()
        self.record()
        yield written + _DONE

    @property
    def _n_drawn(self) -> int:
        return sum(len(text.written) for text in self._texts)

    def _usage(self) -> Json:
        """Return the number of tokens read and sampled, and of those that were read before."""
        read, drawn = self._n_prompt, self._n_drawn
        # Of the texts of one prompt, one.
        first = self._texts[:: self._body.n or 1]
        return {
            "prompt_tokens": read,
            "completion_tokens": drawn,
            "total_tokens": read + drawn,
            "prompt_tokens_details": {"cached_tokens": sum(text.n_cached for text in first)},
            "recomputed_tokens": sum(text.n_recomputed for text in first),
        }

    def record(self) -> None:
        """Count the tokens, and note them for the access log."""
        self._service.n_read.inc(self._n_prompt)
        self._service.n_drawn.inc(self._n_drawn)
        session = f", session {self._session}" if self._session else ""
        self._request.scope["note"] = f"{self._n_prompt}+{self._n_drawn} tokens{session}"


class _Events(StreamingResponse):
    """A streamed response."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it in this task: starlette's implementation would start two more."""
        await self.stream_response(send)


def _tokenize(service: Service, prompt: str | list[int]) -> tuple[Sequence[int], str]:
    """Return the tokens of a prompt, and a warning about symbols that are read as ``<unk>``.

    Args:
        service: The server, with its vocabulary and limits.
        prompt: A text, or tokens.

    Returns:
        The tokens, and the warning, which is empty if there is nothing to warn of.

    Raises:
        ApiError: The prompt cannot be tokenized, or is too long.
    """
    vocab, limit, unknown, wrong = service.vocab, service.settings.max_prompt, None, None
    ids: Sequence[int] = ()
    if isinstance(prompt, str):
        try:
            ids = vocab.encode(prompt)
            unknown = vocab.unknown_warning(prompt, ids)
        except ValueError as error:
            wrong = f"prompt: {error}", "unknown_symbol"
    elif (largest := max(ids := prompt, default=0)) >= len(vocab):
        wrong = f"token {largest} is outside the vocabulary of {len(vocab)}", "unknown_token"
    if len(ids) > limit:
        wrong = f"the prompt has {len(ids)} tokens; at most {limit} are read at once", "too_long"
    if wrong:
        raise ApiError(400, *wrong, "prompt")
    return ids, f"prompt: {unknown}" if unknown else ""


def _raise_first(problems: Mapping[str, object], code: str = "missing_required_parameter") -> None:
    """Raise an ApiError with the first message, by field; none where it is false."""
    for field, message in problems.items():
        if message:
            raise ApiError(400, str(message), code, field)


def _event(value: Json) -> bytes:
    """Return a value as a server-sent event."""
    return f"data: {json.dumps(value)}\n\n".encode()


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
