"""Completions: from a request to texts for the engine, and from their events to a response."""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from transformer_xl.apps.serve import repeats
from transformer_xl.apps.serve.errors import ApiError, NotStartedError
from transformer_xl.apps.serve.outputs import Output
from transformer_xl.apps.serve.responses import (
    JsonResponse,
    encoded,
    error_content,
    error_response,
)
from transformer_xl.apps.serve.schemas import SAMPLING, CompletionRequest
from transformer_xl.apps.serve.service import Service
from transformer_xl.apps.serve.sessions import Session
from transformer_xl.apps.serve.texts import Ended, Event, PromptRead, Text, make_writer
from transformer_xl.config import UnusedError
from transformer_xl.data import StreamDecoder, normalized_prompt, unknown_warning
from transformer_xl.inference.generate import Sampler, State, random_numbers, seed_of

log = logging.getLogger("transformer_xl.serve")

_MAX_INLINE = 4096
"""Characters that are tokenized in the event loop; longer prompts are tokenized in a thread."""
_SEED_BITS = 48
"""Bits of a random seed: few enough to be exact as a number in JavaScript."""
_EVENT_SECONDS = 0.002
"""Least time between two events, of all streamed responses together."""


async def complete(
    service: Service,
    body: CompletionRequest,
    request: Request,
    *,
    output: type[Output] = Output,
    stop: tuple[str, ...] = (),
    about: Mapping[str, Any] = MappingProxyType({}),
    key: str | None = None,
) -> Response:
    """Handle a request for completions, or for messages.

    Args:
        service: The server.
        body: What is asked.
        request: The request that it came with.
        output: The form of the texts of the response.
        stop: Stop strings in addition to those of the request.
        about: Further keys of the response.
        key: The Idempotency-Key: a request whose session has it is answered as before.

    Raises:
        ApiError: The request cannot be answered.
    """
    answer = Answer(service, body, request, output, key)
    with ExitStack() as ending:
        ending.callback(answer.end)
        await answer.begin(stop, about)
        # Before the headers are sent: an early failure is still returned as a status.
        await answer.first()
        if not body.stream:
            await answer.rest()
        if answer.is_abandoned:
            return error_response(_abandoned())
        if not body.stream:
            return answer.whole()
        ending.pop_all()
        return _EventStream(answer, service)


class Answer:
    """The texts of one request, or the one text that continues a session."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        request: Request,
        output: type[Output],
        key: str | None,
    ) -> None:
        self._service, self._body, self._request, self._key = service, body, request, key
        self._output, self._notes = output, repeats.Notes()
        self._told: repeats.Told | None = None
        """The answer that was given for the key before."""
        self._started = time.monotonic()
        self._head = {
            "id": f"{output.prefix}-{uuid.uuid4().hex}",
            "object": output.part if body.stream else output.object,
            "created": int(time.time()),
            "model": service.name,
        }
        most = min(16, service.settings.max_tokens)
        self._max_tokens: int = most if body.max_tokens is None else body.max_tokens
        self._about: dict[str, Any] = {}
        """Settings of sampling, and warnings about the prompts."""
        self._session: Session | None = None
        self._texts: list[Text] = []
        self._outputs: list[Output] = []
        self._n_prompt = self._n_going = 0
        self._gone = asyncio.ensure_future(_disconnected(request))
        self._woken = asyncio.Event()
        self._gone.add_done_callback(lambda _: self._woken.set())
        self._error: ApiError | None = None
        self._not_started = ""
        self._due = 0.0
        """When the next event may be sent."""

    async def begin(self, stop: tuple[str, ...], about: Mapping[str, Any]) -> None:
        """Validate the request and submit its texts to the engine.

        Raises:
            ApiError: The request is invalid, its session is not available, or the queue is full.
        """
        body, service = self._body, self._service
        repeats.require_repeatable(body, self._key)
        self._require_served()
        if body.session:
            self._session = await service.with_session(service.sessions.open, body.session)
        try:
            if self._session and self._session.state is not None:
                self._notes = repeats.notes_of(self._session.state.note)
            if self._session:
                self._look_up()
            is_short = isinstance(body.prompt, str) and len(body.prompt) <= _MAX_INLINE
            if is_short:
                self._make_texts(stop, about)
            else:
                await asyncio.to_thread(self._make_texts, stop, about)
            self._n_going = len(self._texts)
            if self._told is None:
                service.engine.submit(self._texts)
            else:
                self._tell_again(self._told)
        except BaseException:
            if self._session:
                await service.close_session(self._session, None)
            raise

    def _require_served(self) -> None:
        """Require what this server, and this model, can do."""
        body, service = self._body, self._service
        if body.model not in (None, service.name):
            message = f"there is no model {body.model!r}: this server has {service.name!r}"
            raise ApiError(404, message, "model_not_found", "model")
        if self._max_tokens > service.settings.max_tokens:
            message = f"max_tokens={body.max_tokens} must be at most {service.settings.max_tokens}"
            raise ApiError(400, message, "too_long", "max_tokens")
        if body.attention and not service.model.has_attention:
            message = "this model has no attention to return: leave attention out"
            raise ApiError(400, message, "unsupported", "attention")

    def _look_up(self) -> None:
        """Find whether the session has answered this request before."""
        self._told = repeats.find(self._notes, self._key, self._body)
        if self._told is None and self.is_abandoned:
            # It waited, as in a process that was paused, and may have been sent again since.
            raise _abandoned()

    def _tell_again(self, told: repeats.Told) -> None:
        (text,), (output,) = self._texts, self._outputs
        self._about["settings"]["seed"] = told.seed
        self._about |= {"session_turn": told.turn, "repeated": True}
        text.written += told.tokens
        output.tell_again(told)
        self._receive(0, Ended(told.reason))

    def _prompts(self, state: State | None) -> list[str | list[int]]:
        """Return the prompts of the request, each as a text or as tokens.

        Raises:
            ApiError: There is none, or there are too many.
        """
        prompts: Any = self._body.prompt
        if prompts is None and state is not None:
            prompts = ""
        if prompts is None:
            message = "prompt is missing: give the text to continue"
            raise ApiError(400, message, "missing_required_parameter", "prompt")
        # An empty list has no tokens, as an empty text.
        if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
            prompts = [prompts]
        n, settings = self._body.n or 1, self._service.settings
        # More than the queue holds would never be accepted.
        most = min(settings.max_texts, settings.max_queue)
        if n * len(prompts) > most:
            message = f"{len(prompts)} prompts times n={n} must be at most {most}"
            raise ApiError(400, message, "too_many", "n")
        if self._session and n * len(prompts) > 1:
            message = "a session is continued by one text: give one prompt, and n=1"
            raise ApiError(400, message, "too_many", "session")
        return prompts

    def _make_texts(self, stop: tuple[str, ...], about: Mapping[str, Any]) -> None:
        body, service, session = self._body, self._service, self._session
        state = session.state if session else None
        prompts, sampler = self._prompts(state), _sampler(service, body)
        own_stop = service.generation.stop if body.stop is None else body.stop
        stop = (*([own_stop] if isinstance(own_stop, str) else own_stop), *stop)
        last = () if state is None else (state.last_token,)
        before = () if state is None or state.read is None else state.read.numpy()
        seed: Any = body.seed
        if seed is None:
            # A session continues its random numbers; else the response returns a new seed.
            seed = secrets.randbits(_SEED_BITS) if state is None else state.random
        max_tokens = self._max_tokens
        shown = seed if isinstance(seed, int) else None
        settings = {**sampler.settings, "seed": shown, "max_tokens": max_tokens}
        if service.model.preface and state is None and (session or max_tokens):
            settings["preface"] = len(service.model.preface)
        self._about = {"settings": settings, **about}
        if session:
            self._about["session_turn"] = self._notes.turns + 1
        for prompt in prompts:
            if isinstance(prompt, str):
                prompt, _ = normalized_prompt(prompt, service.vocab)
            ids, warning = read_prompt(service, prompt)
            if warning:
                self._about.setdefault("warnings", []).append(warning)
            context = last or (() if ids else _start(service))
            tokens = (*context, *ids)
            self._n_prompt += len(tokens) - len(last)
            begun = make_writer(service.vocab, (), before, context).decoder
            start = 0
            if body.logprobs is not None and not body.echo:
                # As at OpenAI, places are those in the prompt and the text together.
                start = len(prompt) if isinstance(prompt, str) else _n_characters(begun, ids)
            for _ in range(body.n or 1):
                number = len(self._texts)
                text = Text(
                    prompt=tokens,
                    mems=None if state is None else state.mems,
                    before=before,
                    writer=make_writer(
                        service.vocab, stop, before, tokens, is_echoed=bool(body.echo)
                    ),
                    generator=random_numbers(
                        seed_of(seed, number) if isinstance(seed, int) else seed
                    ),
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
                self._outputs.append(self._output(service, number, text, ids, echoing, start))

    def _receive(self, number: int, event: Event) -> None:
        """Handle an event of a text, in the thread of the event loop."""
        output = self._outputs[number]
        if isinstance(event, Ended) and self._session:
            # The session is saved before the end is reported.
            self._service.keep(self._close(output, event, self._session))
        else:
            self._add_event(output, event)

    async def _close(self, output: Output, event: Ended, session: Session) -> None:
        state = event.state
        try:
            if state is not None:
                state = state._replace(note=self._noted(output, event))
            await self._service.close_session(session, state)
        except Exception as error:
            # Whatever failed, the request still waits for the end.
            is_known = isinstance(error, OSError)
            log.error("session %s: %s", session.name, error, exc_info=not is_known)
            message = f"session {session.name!r} could not be saved: see the log"
            status = 507 if is_known else 500
            self._error = ApiError(status, message, "session_not_saved", "session")
            event = Ended("failed", error=message)
        self._add_event(output, event)

    def _noted(self, output: Output, event: Ended) -> str:
        """Return what the session keeps with its state after an answer."""
        told = None
        if self._key is not None:
            told = repeats.Told(
                key=self._key,
                request=repeats.digest(self._body),
                turn=self._notes.turns + 1,
                tokens=self._texts[0].written,
                text="".join([*output.said, event.text]),
                reason=cast(Any, event.reason),
                seed=self._about["settings"]["seed"],
                n_behind=output.n_behind if event.reason == "stop" else 0,
                echo=output.echo,
            )
        return self._notes.after(told).encoded()

    def _add_event(self, output: Output, event: Event) -> None:
        output.add(event)
        if isinstance(event, Ended):
            self._n_going -= 1
            if event.reason == "failed" and self._error is None:
                self._error = ApiError(500, event.error, "failed")
            if event.reason in ("late", "stopping"):
                self._not_started = event.reason
            # Texts that were drawn are returned, and those beside them that had no time are empty.
            drew = any(text.written for text in self._texts)
            if self._not_started and not (self._n_going or drew or self._error):
                self._error = NotStartedError(self._not_started)
        elif isinstance(event, PromptRead) or time.monotonic() < self._due:
            # It is sent together with the next event.
            return
        self._woken.set()

    async def _wait(self) -> None:
        """Wait for an event that is due, or until the client disconnects.

        Raises:
            ApiError: The request failed.
        """
        await self._woken.wait()
        self._woken.clear()
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
        await self._wait()
        # What came is sent at once.
        self._woken.set()
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
        written, is_over = b"", False
        try:
            while not (is_over or self.is_abandoned):
                await self._wait()
                is_over = not self._n_going
                for output in [each for each in self._outputs if each.is_new]:
                    # One choice for each event, as at OpenAI: clients look at the first alone.
                    choices = encoded([output.take(is_part=True)])
                    written += b"data: " + first[0] + choices + first[2] + b"\n\n"
                    first = later
                if written and not is_over:
                    yield written
                    written = b""
                    self._due = time.monotonic() + _EVENT_SECONDS * self._service.n_streams
            if usage:
                written += _event(empty | {"usage": self._usage()})
        except ApiError as error:
            written += _event(error_content(error))
        self._record_usage()
        yield written + b"data: [DONE]\n\n"

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

    def __init__(self, answer: Answer, service: Service) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(answer.stream(), media_type="text/event-stream", headers=headers)
        self._answer, self._service = answer, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it in this task: starlette's implementation would start two more."""
        self._service.n_streams += 1
        try:
            await self.stream_response(send)
        finally:
            self._service.n_streams -= 1
            self._answer.end()


def _sampler(service: Service, body: CompletionRequest) -> Sampler:
    """Return the sampler of a request.

    Raises:
        ApiError: A setting contradicts another one, or has no effect.
    """
    try:
        return service.sampler(**body.model_dump(include=SAMPLING, exclude_none=True))
    except UnusedError as error:
        raise ApiError(400, str(error), "unsupported", error.name) from error
    except ValueError as error:
        message = str(error).removeprefix("generate.")
        raise ApiError(400, message, "invalid_value", message.partition("=")[0]) from error


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
    elif (largest := max(ids := prompt, default=0)) >= len(vocab):
        message = f"token {largest} is outside the vocabulary of {len(vocab)}"
        raise ApiError(400, message, "unknown_token", "prompt")
    if len(ids) > limit:
        message = f"the prompt has {len(ids)} tokens; at most {limit} are read at once"
        raise ApiError(400, message, "too_long", "prompt")
    return ids, warning


def _start(service: Service) -> tuple[int]:
    """Return the token that an empty prompt stands for; raises an ApiError if there is none."""
    if service.vocab.start_id is None:
        message = (
            "the prompt is empty, and this vocabulary has no token for the beginning of a text: "
            "give at least one token to continue"
        )
        raise ApiError(400, message, "empty_prompt", "prompt")
    return (service.vocab.start_id,)


def _n_characters(decoder: StreamDecoder, tokens: Sequence[int]) -> int:
    """Return how many characters are complete with tokens."""
    decoder = decoder.fork()
    return sum(len(decoder.push(token)) for token in tokens)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


def _abandoned() -> ApiError:
    return ApiError(499, "the client has left", "client_closed_request")


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
