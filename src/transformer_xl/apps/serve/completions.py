"""Completions: from a request to texts for the engine, and from their events to a response."""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from transformer_xl.apps.serve import repeats
from transformer_xl.apps.serve.errors import NOT_BEGUN, ApiError, SessionError, file_error
from transformer_xl.apps.serve.outputs import Output
from transformer_xl.apps.serve.responses import (
    JsonResponse,
    encoded,
    error_content,
    error_response,
)
from transformer_xl.apps.serve.schemas import SAMPLING, CompletionRequest
from transformer_xl.apps.serve.service import Service
from transformer_xl.apps.serve.session_store import Turn
from transformer_xl.apps.serve.sessions import Session
from transformer_xl.apps.serve.texts import Ended, Event, PromptRead, Text, make_writer
from transformer_xl.config.checks import UnusedError
from transformer_xl.data.normalizing import normalized_prompt
from transformer_xl.data.vocab import StreamDecoder, unknown_warning
from transformer_xl.inference.generate import Sampler, random_numbers, seed_of

log = logging.getLogger("transformer_xl.serve")

_MAX_INLINE = 4096
"""Characters that are tokenized in the event loop; longer prompts are tokenized in a thread."""
_SEED_BITS = 48
"""Bits of a random seed: few enough to be exact as a number in JavaScript."""
_EVENT_SECONDS = 0.002
"""Least time between two events, of all streamed responses together."""


class Form(NamedTuple):
    """What distinguishes the responses of an endpoint.

    ``stop`` has stop strings in addition to those of the request, ``about`` further keys.
    """

    prefix: str = "cmpl"
    object: str = "text_completion"
    part: str = "text_completion"
    """The object of an event of a stream."""
    output: type[Output] = Output
    stop: tuple[str, ...] = ()
    about: Mapping[str, Any] = MappingProxyType({})


async def complete(
    service: Service,
    body: CompletionRequest,
    request: Request,
    form: Form | None = None,
    key: str | None = None,
) -> Response:
    """Handle a request for completions, or for what has another form.

    A request with a ``key`` that its session has seen is answered as before.
    """
    answer = Answer(service, body, request, form or Form(), key)
    with ExitStack() as ending:
        ending.callback(answer.end)
        await answer.begin()
        # Before the headers are sent: an early failure is still returned as a status.
        await answer.first()
        if not body.stream:
            await answer.rest()
        if answer.is_abandoned:
            return error_response(ApiError(499, "the client has left", "client_closed_request"))
        if not body.stream:
            return answer.whole()
        ending.pop_all()
        return _EventStream(answer)


class Answer:
    """The texts of one request, or the one text that continues a session."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        request: Request,
        form: Form,
        key: str | None = None,
    ) -> None:
        self._service, self._body, self._request, self._form = service, body, request, form
        self._key, self._told = key, None
        """The key, and the answer that was given for it before."""
        self._notes = repeats.Notes()
        self._started = time.monotonic()
        self._head = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",
            "object": form.part if body.stream else form.object,
            "created": int(time.time()),
            "model": service.name,
        }
        self._about: dict[str, Any] = {}
        """Settings of sampling, and warnings about the prompts."""
        self._session: Session | None = None
        self._texts: list[Text] = []
        self._outputs: list[Output] = []
        self._n_prompt = self._n_going = self._n_last = 0
        self._gone = asyncio.ensure_future(_disconnected(request))
        self._woken = asyncio.Event()
        self._gone.add_done_callback(lambda _: self._woken.set())
        self._error: ApiError | None = None
        self._refusal = ""
        self._due = 0.0
        """When the next event may be sent."""

    async def begin(self) -> None:
        """Validate the request and submit its texts to the engine.

        Raises:
            ApiError: The request is invalid, its session is not available, or the queue is full.
        """
        repeats.require_repeatable(self._body, self._key)
        if self._body.session:
            sessions, name = self._service.sessions, self._body.session
            blocks = not sessions.is_at_hand(name)
            self._session = await self._service.with_session(sessions.open, name, blocks=blocks)
        try:
            self._look_up()
            await self._submit()
        except BaseException:
            if self._session:
                await self._service.close_session(self._session, None)
            raise

    def _look_up(self) -> None:
        """Find whether the session has answered this request before."""
        if self._session is None:
            return
        if self._session.state is not None:
            try:
                self._notes = repeats.notes_of(self._session.state.note)
            except RuntimeError as error:
                raise file_error(error, self._session.name) from error
        self._told = repeats.find(self._notes, self._key, self._body)
        if self._told is None and self.is_abandoned:
            # It waited, as in a process that was paused, and may have been sent again since.
            raise ApiError(499, "the client has left", "client_closed_request")

    async def _submit(self) -> None:
        body, most = self._body, self._service.settings.max_tokens
        if body.model not in (None, self._service.name):
            message = f"there is no model {body.model!r}: this server has {self._service.name!r}"
            raise ApiError(404, message, "model_not_found", "model")
        max_tokens = min(16, most) if body.max_tokens is None else body.max_tokens
        if max_tokens > most:
            message = f"max_tokens={max_tokens} must be at most {most}"
            raise ApiError(400, message, "too_long", "max_tokens")
        n = body.n or 1
        if body.stream_options and not body.stream:
            message = "stream_options has no effect without stream: leave it out, or set stream"
            raise ApiError(400, message, "invalid_value", "stream_options")
        if body.best_of not in (None, n):
            raise ApiError(400, f"best_of={body.best_of} must be n={n}", "unsupported", "best_of")
        if body.attention and not self._service.model.has_attention:
            message = "this model has no attention to return: leave attention out"
            raise ApiError(400, message, "unsupported", "attention")
        # Sequence breakers are looked for in the whole vocabulary.
        if n * _size(body.prompt) > _MAX_INLINE or body.dry_sequence_breakers:
            await asyncio.to_thread(self._make_texts, n, max_tokens)
        else:
            self._make_texts(n, max_tokens)
        self._n_going = len(self._texts)
        if self._told is None:
            self._service.engine.submit(self._texts)
        else:
            self._tell_again(self._told)

    def _tell_again(self, told: repeats.Told) -> None:
        (text,), (output,) = self._texts, self._outputs
        self._about["settings"]["seed"] = told.seed
        self._about |= {"session_turn": told.turn, "repeated": True}
        text.written += told.tokens
        output.tell_again(told)
        self._receive(0, Ended(told.reason))

    def _make_texts(self, n: int, max_tokens: int) -> None:
        body, service, session = self._body, self._service, self._session
        prompts: Any = body.prompt
        if prompts is None and session is not None and session.state is not None:
            prompts = ""
        if prompts is None:
            message = "prompt is missing: give the text to continue"
            raise ApiError(400, message, "missing_required_parameter", "prompt")
        # An empty list has no tokens, as an empty text.
        if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
            prompts = [prompts]
        # More than the queue holds would be refused for ever.
        most = min(service.settings.max_texts, service.settings.max_queue)
        if n * len(prompts) > most:
            message = f"{len(prompts)} prompts times n={n} must be at most {most}"
            raise ApiError(400, message, "too_many", "n")
        if session and n * len(prompts) > 1:
            message = "a session is continued by one text: give one prompt, and n=1"
            raise ApiError(400, message, "too_many", "session")
        sampler = self._sampler()
        stop = service.generation.stop if body.stop is None else body.stop
        stop = [*([stop] if isinstance(stop, str) else stop), *self._form.stop]
        state = session.state if session else None
        last = () if state is None else (state.last_token,)
        self._n_last = len(last)
        before = () if state is None or state.read is None else state.read.numpy()
        seed: Any = body.seed
        if seed is None:
            # A session continues its random numbers; else the response returns a new seed.
            seed = secrets.randbits(_SEED_BITS) if state is None else state.random
        shown = seed if isinstance(seed, int) else None
        settings = {**sampler.settings, "seed": shown, "max_tokens": max_tokens}
        if service.model.preface and state is None and (session or max_tokens):
            settings["preface"] = len(service.model.preface)
        self._about = {"settings": settings, **self._form.about}
        if session:
            self._about["session_turn"] = self._notes.turns + 1
        for given in prompts:
            if isinstance(given, str):
                given, _ = normalized_prompt(given, service.vocab)
            ids, warning = read_prompt(service, given)
            if warning:
                self._about.setdefault("warnings", []).append(warning)
            context = last or (() if ids else _start(service))
            prompt = (*context, *ids)
            self._n_prompt += len(prompt) - len(last)
            begun = make_writer(service.vocab, (), before, context).decoder
            start = 0
            if body.logprobs is not None and not body.echo:
                # As at OpenAI, places are those in the prompt and the text together.
                start = len(given) if isinstance(given, str) else _n_characters(begun.fork(), ids)
            for _ in range(n):
                number = len(self._texts)
                own = seed_of(seed, number) if isinstance(seed, int) else seed
                writer = make_writer(service.vocab, stop, before, prompt, is_echoed=bool(body.echo))
                text = Text(
                    prompt=prompt,
                    mems=None if state is None else state.mems,
                    before=before,
                    writer=writer,
                    generator=random_numbers(own),
                    sampler=sampler,
                    max_tokens=max_tokens,
                    sink=partial(self._receive, number),
                    logprobs=body.logprobs,
                    scores_prompt=bool(body.echo) and body.logprobs is not None,
                    attention=body.attention or 0,
                    keeps_state=session is not None,
                    deadline=self._started + service.settings.max_seconds,
                )
                self._texts.append(text)
                echoing = begun.fork() if body.echo else None
                output = self._form.output(service, number, text, ids, echoing, start)
                self._outputs.append(output)

    def _sampler(self) -> Sampler:
        given = {name: x for name in SAMPLING if (x := getattr(self._body, name)) is not None}
        try:
            return self._service.sampler(**given)
        except UnusedError as error:
            raise ApiError(400, str(error), "unsupported", error.name) from error
        except ValueError as error:
            # A rule of the settings that the description of the request does not have.
            message = str(error).removeprefix("generate.")
            raise ApiError(400, message, "invalid_value", message.partition("=")[0]) from error

    def _receive(self, number: int, event: Event) -> None:
        """Handle an event of a text, in the thread of the event loop."""
        output = self._outputs[number]
        if isinstance(event, Ended) and self._session:
            # The session is saved before the end is reported.
            self._service.keep(self._close(output, event, self._session))
        else:
            self._add_event(output, event)

    async def _close(self, output: Output, event: Ended, session: Session) -> None:
        state, text = event.state, self._texts[0]
        try:
            if state is not None:
                state = state._replace(note=self._noted(output, event))
            turn = Turn(text.prompt[self._n_last :], text.written)
            await self._service.close_session(session, state, turn)
        except SessionError as error:
            log.error("session %s: %s", session.name, error)
            self._error, event = error, Ended("failed", error=error.message)
        except Exception as error:
            # Whatever failed, the request still waits for the end.
            is_unexpected = not isinstance(error, OSError)
            log.error("session %s: %s", session.name, error, exc_info=is_unexpected)
            message = f"session {session.name!r} could not be saved: see the log"
            status = 500 if is_unexpected else 507
            self._error = ApiError(status, message, "session_not_saved", "session")
            event = Ended("failed", error=message)
        self._add_event(output, event)

    def _noted(self, output: Output, event: Ended) -> str:
        """Return what the session keeps with its state after an answer."""
        told = None
        if self._key is not None:
            written, reason = self._texts[0].written, cast(Any, event.reason)
            said, seed = "".join([*output.said, event.text]), self._about["settings"]["seed"]
            request, turn = repeats.digest(self._body), self._notes.turns + 1
            n_behind = output.n_behind if reason == "stop" else 0
            told = repeats.Told(
                *(self._key, request, turn, written, said, reason, seed, n_behind, output.echo)
            )
        return self._notes.after(told).encoded()

    def _add_event(self, output: Output, event: Event) -> None:
        output.add(event)
        if isinstance(event, Ended):
            self._n_going -= 1
            if event.reason == "failed" and self._error is None:
                self._error = ApiError(500, event.error, "failed")
            if event.reason in NOT_BEGUN:
                self._refusal = event.reason
            # Texts that were drawn are returned, and those beside them that had no time are empty.
            drew = any(text.written for text in self._texts)
            if self._refusal and not (self._n_going or drew or self._error):
                self._error = NOT_BEGUN[self._refusal]()
        elif isinstance(event, PromptRead) or time.monotonic() < self._due:
            # It is sent together with the next event.
            return
        self._woken.set()

    async def _wait(self) -> None:
        await self._woken.wait()
        self._woken.clear()

    def _check(self) -> None:
        if self._error:
            raise self._error

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has disconnected."""
        return self._gone.done()

    def end(self) -> None:
        """Cancel all texts; no effect on those that have ended, or whose answer is kept."""
        for text in self._texts:
            text.is_cancelled |= self._key is None
        self._gone.cancel()

    async def first(self) -> None:
        """Wait for the first token, or until the client disconnects.

        Raises:
            ApiError: There will be none.
        """
        await self._woken.wait()
        self._check()
        if not self.is_abandoned:
            self._service.metrics.first_token.observe(time.monotonic() - self._started)

    async def rest(self) -> None:
        """Wait for the end of all texts, or until the client disconnects.

        Raises:
            ApiError: The engine failed.
        """
        # Tokens do not wake the waiting task.
        self._due = float("inf")
        while self._n_going and not self.is_abandoned:
            await self._wait()
            self._check()

    def whole(self) -> Response:
        """Return the complete response, after :meth:`rest`."""
        choices = [output.take() for output in self._outputs]
        about = {"choices": choices, "usage": self._record_usage()}
        return JsonResponse(self._head | about | self._about)

    async def stream(self) -> AsyncIterator[bytes]:
        """Stream the response as events, as long as the client is connected.

        An event has all output since the last one. An event costs the server much more than a
        token, so the interval between events grows with the number of streams, and no token waits
        for longer than until the next one.
        """
        options, empty = self._body.stream_options, self._head | {"choices": []}
        usage = {"usage": None} if options and options.include_usage else {}
        # Only in the first event; at its start, as the JSON is split at the empty choices.
        first, later = (encoded(x | empty | usage).rpartition(b"[]") for x in (self._about, {}))
        written = b""
        try:
            while not self.is_abandoned:
                is_over = not self._n_going
                self._check()
                for output in [each for each in self._outputs if each.is_new]:
                    # One choice for each event, as at OpenAI: clients look at the first alone.
                    choices = encoded([output.take(is_part=True)])
                    written += b"data: " + first[0] + choices + first[2] + b"\n\n"
                    first = later
                if is_over:
                    break
                if written:
                    yield written
                    written = b""
                    self._due = time.monotonic() + _EVENT_SECONDS * self._service.n_streams
                await self._wait()
            if usage:
                written += _event(empty | {"usage": self._usage()})
        except ApiError as error:
            written += _event(error_content(error))
        self._record_usage()
        yield written + b"data: [DONE]\n\n"

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Count this response as streaming inside a ``with`` block; end it behind."""
        self._service.n_streams += 1
        try:
            yield
        finally:
            self._service.n_streams -= 1
            self.end()

    def _usage(self) -> dict[str, int]:
        """Return the number of tokens read and sampled."""
        read, drawn = self._n_prompt, sum(len(text.written) for text in self._texts)
        return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}

    def _record_usage(self) -> dict[str, int]:
        usage, metrics = self._usage(), self._service.metrics
        # An answer that is told again was counted when it was drawn.
        if self._told is None:
            metrics.prompt_tokens.inc(usage["prompt_tokens"])
            metrics.completion_tokens.inc(usage["completion_tokens"])
        note = f"{usage['prompt_tokens']}+{usage['completion_tokens']} tokens"
        session = f", session {self._session.name}" if self._session else ""
        self._request.scope["note"] = note + session
        return usage


class _EventStream(StreamingResponse):
    """A streamed response; it ends if the client disconnects."""

    def __init__(self, answer: Answer) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(answer.stream(), media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it in this task: starlette's implementation would start two more."""
        with self._answer.streaming():
            await self.stream_response(send)


def read_prompt(service: Service, prompt: str | list[int]) -> tuple[list[int], str]:
    """Tokenize a prompt.

    Returns:
        Its tokens, and a warning about characters or words that are read as ``<unk>``, or "".

    Raises:
        ApiError: It cannot be tokenized or is too long.
    """
    vocab, limit, warning = service.vocab, service.settings.max_prompt, ""
    if isinstance(prompt, str):
        try:
            ids = vocab.encode(prompt)
        except ValueError as error:
            raise ApiError(400, f"prompt: {error}", "unknown_symbol", "prompt") from error
        if unknown := unknown_warning(vocab, prompt, ids):
            warning = f"prompt: {unknown}"
    else:
        ids = prompt
        if ids and max(ids) >= len(vocab):
            message = f"token {max(ids)} is outside the vocabulary of {len(vocab)}"
            raise ApiError(400, message, "unknown_token", "prompt")
    if len(ids) > limit:
        message = f"the prompt has {len(ids)} tokens; at most {limit} are read at once"
        raise ApiError(400, message, "too_long", "prompt")
    return ids, warning


def _start(service: Service) -> tuple[int]:
    """Return the token that an empty prompt stands for.

    Raises:
        ApiError: There is none.
    """
    if service.vocab.start_id is None:
        message = (
            "the prompt is empty, and this vocabulary has no token for the beginning of a text: "
            "give at least one token to continue"
        )
        raise ApiError(400, message, "empty_prompt", "prompt")
    return (service.vocab.start_id,)


def _n_characters(decoder: StreamDecoder, tokens: Sequence[int]) -> int:
    """Return how many characters are complete with tokens."""
    return sum(len(decoder.push(token)) for token in tokens)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


def _size(prompt: str | list[Any] | None) -> int:
    """Return the number of characters or tokens."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(1 if isinstance(each, int) else len(each) for each in prompt or ())


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
