"""The engine: one thread that owns the model and writes all texts, batched.

Streams come and go by rows of one :class:`~transformer_xl.model.Stepper`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.apps.serve.prompt_reading import PromptReader, Reading, scored
from transformer_xl.apps.serve.seeing import most_seen, shares
from transformer_xl.apps.serve.texts import Drawn, Ended, Event, PromptRead, Scored, Text
from transformer_xl.inference.generate import Sampler
from transformer_xl.model import LanguageModel, Memory, Stepper
from transformer_xl.model.lengths import Lengths


class Streams:
    """Streams that read a token each, batched.

    A row that a stream has left is computed on, without a past, until another takes it: to move
    the rows together for each that leaves would copy the memories of all. Only when most rows are
    free the batch becomes smaller, and larger when none is.

    Args:
        model: The model, in evaluation mode.
        mem_len: Remembered positions.
        most: Streams that there can be.
    """

    def __init__(self, model: LanguageModel, mem_len: int, most: int) -> None:
        self._model, self._most = model, most
        self._lengths = Lengths.of(model.config, segment_len=1, mem_len=mem_len, ext_len=0)
        self._stepper: Stepper | None = None
        self._is_free: list[bool] = []

    def __len__(self) -> int:
        return self._is_free.count(False)

    def add(self, memory: Memory) -> int:
        """Let a stream come, with a copy of a memory that sees all; return its row."""
        size = len(self._is_free)
        if self._stepper is None:
            self._stepper, self._is_free = Stepper.of(self._model, self._lengths, memory), [True]
        elif not any(self._is_free):
            more = min(size, self._most - size)
            self._stepper = self._stepper.select([*range(size), *[0] * more])
            self._is_free += [True] * more
        row = self._is_free.index(True)
        # Before a longer past comes: what is in the free rows is none.
        self._stepper.reset(self._free_rows())
        self._stepper.put(row, memory)
        self._is_free[row] = False
        return row

    def copy(self, row: int) -> Memory:
        """Return the memory of a stream, apart from the others."""
        assert self._stepper is not None
        return self._stepper.memory([row]).seen()

    def drop(self, row: int) -> None:
        """Let a stream go."""
        self._is_free[row] = True

    def settle(self) -> dict[int, int]:
        """Give up rows where most are free; return the new rows of those that moved."""
        n, size = len(self), len(self._is_free)
        # Not at one half already: a stream that comes and goes would move all each time.
        few = n * 2 <= size if size <= 4 else n * 8 < size * 3
        if not few or not n or self._stepper is None:
            return {}
        rows = [row for row, is_free in enumerate(self._is_free) if not is_free]
        free = max(n, size // 2) - n
        self._stepper = self._stepper.select(rows + [rows[0]] * free)
        self._is_free = [False] * n + [True] * free
        return {old: row for row, old in enumerate(rows)}

    def read(self, tokens: dict[int, int]) -> Float[Tensor, "B D"]:
        """Read a token of each stream, by its row; return the hidden states in that order."""
        assert self._stepper is not None
        self._stepper.reset(self._free_rows())
        given = torch.tensor([tokens.get(row, 0) for row in range(len(self._is_free))])
        return self._stepper(given)[list(tokens)]

    def _free_rows(self) -> list[int]:
        return [row for row, is_free in enumerate(self._is_free) if is_free]


log = logging.getLogger("transformer_xl.serve")

Events = list[tuple[Text, Event]]

_PARTS = 4
"""Into how many parts a group that finds too few places is divided at most."""
_FAILED = Ended("failed", "", None, "the model failed")


class QueueFullError(Exception):
    """As many texts wait as may."""


@runtime_checkable
class Watcher(Protocol):
    """Is told what the engine does."""

    def stepped(self, batch: int) -> None:
        """Count a step of so many texts."""
        ...


class Engine:
    """Writes texts with one model: each step draws a token for all that are being written.

    Texts come and go between steps. Prompts are read in pieces between steps, several side by
    side. Each text gets, up to rounding, the tokens that it would get alone.

    Args:
        model: The model, in evaluation mode; nobody else may use it while the engine runs.
        max_batch: Most texts at once, counting those whose prompt is being read.
        max_queue: Most texts that wait.
        piece: Most tokens of a prompt read between two steps.
        deliver: Is handed, once a step, what happened to each text. None: each text's ``sink``
            is called.
        watcher: Is told of each step.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_batch: int = 64,
        max_queue: int = 256,
        piece: int = 128,
        deliver: Callable[[Events], object] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.model = model
        self._mem_len = model.config.mem_len
        self._max_batch, self._max_queue, self._piece = max_batch, max_queue, piece
        self._deliver, self._watcher = deliver or _tell, watcher
        self._wake = threading.Condition()
        self._waiting: deque[list[Text]] = deque()
        self._asked: deque[tuple[Callable[[], Any], Future]] = deque()
        self._events: Events = []
        self._is_stopping = False
        self._forget_all()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def n_waiting(self) -> int:
        """How many texts wait for a place."""
        return sum(map(len, tuple(self._waiting)))

    @property
    def n_running(self) -> int:
        """How many texts are read or written."""
        return len(self._running) + sum(len(each.texts) for each in tuple(self._readings))

    def submit(self, texts: Sequence[Text]) -> None:
        """Let texts be written; those that have a prompt in common and no memory share it.

        Raises:
            QueueFullError: Too many wait.
        """
        groups: dict[object, list[Text]] = {}
        for text in texts:
            groups.setdefault(text if text.mems else (text.prompt, text.to_read), []).append(text)
        with self._wake:
            if self._is_stopping or self.n_waiting + len(texts) > self._max_queue:
                raise QueueFullError
            # A group comes as a whole, so it may not be larger than the batch.
            for group in groups.values():
                for first in range(0, len(group), self._max_batch):
                    self._waiting.append(group[first : first + self._max_batch])
            self._wake.notify()

    def ask(self, function: Callable[[], Any]) -> Future:
        """Let the engine's thread call a function between two steps."""
        future: Future = Future()
        with self._wake:
            if self._is_stopping:
                raise QueueFullError
            self._asked.append((function, future))
            self._wake.notify()
        return future

    def look(self, token: int, mems: Memory) -> Float[Tensor, " S"]:
        """Return what a token would be predicted from; to be called by :meth:`ask`."""
        return shares(self.model, [token], self._reader.prepared(mems))[0]

    def cut(self) -> None:
        """End all texts where they are, and take no more; then the thread ends."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    def stop(self) -> None:
        """End all texts where they are and wait for the thread."""
        self.cut()
        if self._thread.is_alive():
            self._thread.join()

    def _forget_all(self) -> None:
        self._readings: list[Reading] = []
        self._running: dict[int, Text] = {}
        self._streams = Streams(self.model, self._mem_len, self._max_batch)
        self._reader = PromptReader(self.model, self._mem_len, self._piece)

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            with self._wake:
                while not (
                    self._waiting or self._readings or self._running or self._asked
                    or self._is_stopping
                ):  # fmt: skip
                    self._wake.wait()
                asked, self._asked = self._asked, deque()
                came = self._came()
                is_stopping = self._is_stopping
            for function, future in asked:
                _answer(function, future)
            try:
                self._readings += [self._reader.begin(texts) for texts in came]
                self._end_early(is_stopping)
                self._read()
                self._write()
            except Exception:
                # Whatever it was, those that come after it shall not suffer from it.
                log.exception("a step failed; the texts in it are given up")
                self._give_up(came)
            if self._events:
                events, self._events = self._events, []
                self._deliver(events)
            if is_stopping:
                return

    def _came(self) -> list[list[Text]]:
        """Take as many waiting groups as there are places, and a part of a large one."""
        came: list[list[Text]] = []
        free = self._max_batch - self.n_running
        while self._waiting and (free > 0 or self._is_stopping):
            first = self._waiting[0]
            if len(first) > free and not self._is_stopping:
                # Not in bits, each of which reads the prompt anew; nor all at once, for which
                # those behind it would wait until the longest text before it has ended.
                if free < self._max_batch / _PARTS:
                    break
                came.append(first[:free])
                self._waiting[0] = first[free:]
                break
            free -= len(first)
            came.append(self._waiting.popleft())
        # One that is not waited for any more needs no place to end.
        gone = [texts for texts in self._waiting if all(t.is_cancelled or t.is_late for t in texts)]
        for texts in gone:
            self._waiting.remove(texts)
        return came + gone

    def _end_early(self, is_stopping: bool) -> None:
        """End texts that nobody waits for, or whose time is over."""
        for reading in [*self._readings]:
            for text in [*reading.texts]:
                if is_stopping or text.is_cancelled or text.is_late:
                    reading.texts.remove(text)
                    reason = "cancelled" if text.is_cancelled else "late"
                    self._events.append((text, Ended(reason, "", None)))
            if not reading.texts:
                self._readings.remove(reading)
        for place, text in [*self._running.items()]:
            if is_stopping or text.is_cancelled or text.is_late:
                state = None
                if text.keeps_state:
                    state = text.state(self._streams.copy(place), self._mem_len)
                self._leave(place)
                reason = "cancelled" if text.is_cancelled else "length"
                self._events.append((text, Ended(reason, text.writer.flush(), state)))

    def _read(self) -> None:
        """Read a piece of the prompts that came first; those that are read begin to be written."""
        unread = [reading for reading in self._readings if not reading.is_done]
        if unread:
            self._reader.read(unread)
        for reading in [each for each in self._readings if each.is_done]:
            for text in reading.texts:
                self._events.append((text, PromptRead(tuple(reading.scored))))
            self._begin(reading)
            # Not before: if that fails, its texts are still found and given up.
            self._readings.remove(reading)

    def _begin(self, reading: Reading) -> None:
        texts = reading.texts
        if reading.hidden is None or not texts[0].max_tokens:
            for text in texts:
                state = text.state(reading.mems, self._mem_len)
                self._events.append((text, Ended("length", "", state)))
            return
        seen = [reading.attended] * len(texts)
        goes_on = self._draw(texts, reading.hidden.expand(len(texts), -1), seen)
        for text, reason in zip(texts, goes_on, strict=True):
            if reason:
                self._ended(text, reason, reading.mems)
            else:
                self._running[self._streams.add(reading.mems)] = text

    def _write(self) -> None:
        """Draw a token for each text that is being written."""
        if not self._running:
            return
        if moved := self._streams.settle():
            self._running = {moved[place]: text for place, text in self._running.items()}
        if self._watcher:
            self._watcher.stepped(len(self._running))
        places, texts = [*self._running], [*self._running.values()]
        seen = [self._look(place, text) for place, text in self._running.items()]
        hidden = self._streams.read(
            {place: text.last_token for place, text in self._running.items()}
        )
        for place, text, reason in zip(places, texts, self._draw(texts, hidden, seen), strict=True):
            if reason:
                mems = self._streams.copy(place) if text.keeps_state else None
                self._leave(place)
                self._ended(text, reason, mems)

    def _look(self, place: int, text: Text) -> tuple[tuple[int, float], ...] | None:
        if not text.attention:
            return None
        past = self._streams.copy(place)
        return most_seen(shares(self.model, [text.last_token], past)[0], text.attention)

    def _draw(
        self,
        texts: Sequence[Text],
        hidden: Float[Tensor, "B D"],
        seen: Sequence[tuple[tuple[int, float], ...] | None],
    ) -> list[str]:
        """Draw a token for each text; return why it ends there, empty where it goes on."""
        # Drawn on the processor: the same seed gives the same numbers wherever the model is.
        numbers = torch.stack(
            [torch.rand((), dtype=torch.float64, generator=text.generator) for text in texts]
        )
        kinds: dict[tuple[object, ...], list[int]] = {}
        for row, text in enumerate(texts):
            sampler = text.sampler
            kinds.setdefault((sampler.temperature, sampler.top_k, sampler.top_p), []).append(row)
        tokens: list[int | None] = [None] * len(texts)
        for rows in kinds.values():
            drawn = self._sampled(texts[rows[0]].sampler, hidden[rows], numbers[rows])
            for row, token in zip(rows, drawn, strict=True):
                tokens[row] = token
        scores = self._scores(texts, hidden, tokens)
        reasons = []
        for row, (text, token) in enumerate(zip(texts, tokens, strict=True)):
            if token is None:
                reasons.append("failed")
                continue
            text.written.append(token)
            piece = text.writer.push(token)
            self._events.append((text, Drawn(token, piece, scores.get(row), seen[row])))
            is_full = len(text.written) >= text.max_tokens
            reasons.append("stop" if text.writer.has_stopped else "length" if is_full else "")
        return reasons

    def _sampled(
        self, sampler: Sampler, hidden: Float[Tensor, "B D"], numbers: Float[Tensor, " B"]
    ) -> list[int | None]:
        """Draw tokens of texts that are drawn alike; None for one of which that fails."""
        try:
            return [*sampler(self.model.head, hidden, numbers)]
        except Exception:
            if len(hidden) == 1:
                log.exception("a token cannot be drawn; its text is given up")
                return [None]
        # One of them may be at fault: the others shall not suffer from it.
        return [
            self._sampled(sampler, hidden[row : row + 1], numbers[row : row + 1])[0]
            for row in range(len(hidden))
        ]

    def _scores(
        self,
        texts: Sequence[Text],
        hidden: Float[Tensor, "B D"],
        tokens: Sequence[int | None],
    ) -> dict[int, Scored]:
        """Score the tokens of the texts that asked for it, by their rows, all in one go."""
        asked = [
            (row, token, text.logprobs)
            for row, (text, token) in enumerate(zip(texts, tokens, strict=True))
            if text.logprobs is not None and token is not None
        ]
        if not asked:
            return {}
        rows, drawn, most = (list(x) for x in zip(*asked, strict=True))
        found = scored(self.model, hidden[rows], drawn, max(most))
        return {
            row: replace(each, top=each.top[:n])
            for row, n, each in zip(rows, most, found, strict=True)
        }

    def _ended(self, text: Text, reason: Any, mems: Memory | None) -> None:
        if reason == "failed":
            self._events.append((text, _FAILED))
            return
        state = None if mems is None else text.state(mems, self._mem_len)
        self._events.append((text, Ended(reason, text.writer.flush(), state)))

    def _leave(self, place: int) -> None:
        self._streams.drop(place)
        del self._running[place]

    def _give_up(self, came: list[list[Text]]) -> None:
        told = {text for text, event in self._events if isinstance(event, Ended)}
        texts = [*self._running.values(), *(t for each in self._readings for t in each.texts)]
        texts += [text for group in came for text in group]
        for text in dict.fromkeys(texts):
            if text not in told:
                self._events.append((text, _FAILED))
        self._forget_all()


def _answer(function: Callable[[], Any], future: Future) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001  (whoever asked is told)
        future.set_exception(error)


def _tell(events: Events) -> None:
    for text, event in events:
        text.sink(event)
