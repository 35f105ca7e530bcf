"""The engine: one thread that owns the model and writes all texts, batched.

Streams come and go by rows of one :class:`~transformer_xl.model.Decoder`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.apps.serve.errors import NotStartedError
from transformer_xl.apps.serve.prompt_reading import (
    PromptReader,
    Reading,
    most_seen,
    scored,
    shares,
)
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.texts import Drawn, Ended, Event, PromptRead, Scored, Shares, Text
from transformer_xl.model import Decoder, LanguageModel, Lengths, Memory

log = logging.getLogger("transformer_xl.serve")

Events = list[tuple[Text, Event]]

_PARTS = 4
"""Texts with one prompt fill a batch in so many parts, each of which reads it: neither one by one,
nor only as a whole, which would block the queue until the longest running text has ended."""


class Batch:
    """The running texts, in rows of a decoder; every step reads one token of each.

    A free row is still computed, with an empty memory, until another text takes it: compacting
    the batch whenever a text ends would copy all memories. The batch shrinks only when most rows
    are free, and grows when none is.

    Attributes:
        rows: The text of each row; None: free.
    """

    def __init__(self, model: LanguageModel, max_batch: int) -> None:
        self._model, self._max_batch = model, max_batch
        self._lengths = Lengths.of(model.config, segment_len=1, ext_len=0)
        self._decoder: Decoder
        self.rows: list[Text | None] = []

    @property
    def texts(self) -> dict[int, Text]:
        """The running texts, by row."""
        return {row: text for row, text in enumerate(self.rows) if text is not None}

    def add(self, text: Text, memory: Memory) -> None:
        """Add a text with a copy of an unmasked memory."""
        size = len(self.rows)
        if not self.rows:
            self._decoder, self.rows = Decoder.of(self._model, self._lengths, memory), [None]
        elif None not in self.rows:
            more = min(size, self._max_batch - size)
            self._decoder = self._decoder.select([*range(size), *[0] * more])
            self.rows += [None] * more
        row = self.rows.index(None)
        # Before a longer memory is added: free rows must not keep stale positions.
        self._decoder.reset(self._free_rows())
        self._decoder.put(row, memory)
        self.rows[row] = text

    def memory(self, row: int) -> Memory:
        """Return a copy of the memory of one text."""
        return self._decoder.memory([row]).seen()

    def shrink(self) -> None:
        """Shrink the batch if most rows are free."""
        rows, size = [*self.texts], len(self.rows)
        n = len(rows)
        # Below one half, else one text that starts and ends would resize it each time.
        few = n * 2 <= size if size <= 4 else n * 8 < size * 3
        if few and n:
            free = max(n, size // 2) - n
            self._decoder = self._decoder.select(rows + [rows[0]] * free)
            self.rows = [self.rows[row] for row in rows] + [None] * free

    def step(self) -> Float[Tensor, "B D"]:
        """Read the last token of each running text; return the hidden states in their order."""
        self._decoder.reset(self._free_rows())
        tokens = torch.tensor([0 if text is None else text.last_token for text in self.rows])
        return self._decoder(tokens)[[*self.texts]]

    def _free_rows(self) -> list[int]:
        return [row for row, text in enumerate(self.rows) if text is None]


def tell(events: Events) -> None:
    """Pass each event to the ``sink`` of its text."""
    for text, event in events:
        text.sink(event)


class Engine:
    """Generates texts with one model by continuous batching: a step samples one token for each.

    Texts join and leave the batch between steps. Prompts are read in chunks between steps, several
    batched. Each text gets, up to rounding, the tokens that it would get alone.

    Args:
        model: The model, in evaluation mode; only the engine may use it while it runs.
        settings: The limits; texts whose prompt is being read count for ``max_batch``, too.
        deliver: Called once a step with the events of all texts; by default calls their ``sink``.
        stepped: Called with the number of texts of each step, in the engine's thread.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: ServeSettings,
        deliver: Callable[[Events], object] = tell,
        stepped: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.model, self._mem_len = model, model.config.mem_len
        self._settings, self._max_batch = settings, settings.max_batch
        self._deliver, self._stepped = deliver, stepped
        self._wake = threading.Condition()
        self._waiting: deque[list[Text]] = deque()
        self._asked: list[tuple[Callable[[], Any], Future]] = []
        self._events: Events = []
        self._is_stopping = False
        self._reset()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def n_waiting(self) -> int:
        """Number of waiting texts."""
        return sum(map(len, tuple(self._waiting)))

    @property
    def n_running(self) -> int:
        """Number of texts whose prompt is being read or that are being generated."""
        rows, readings = self._batch.rows, tuple(self._readings)
        return len(rows) - rows.count(None) + sum(len(each.texts) for each in readings)

    def submit(self, texts: Sequence[Text]) -> None:
        """Queue texts; those with the same prompt and without a memory share its reading.

        Raises:
            NotStartedError: The queue is full, or the engine is stopping.
        """
        groups: dict[object, list[Text]] = {}
        for text in texts:
            groups.setdefault(text if text.mems else (text.prompt, text.to_read), []).append(text)
        with self._wake:
            if self._is_stopping:
                raise NotStartedError("stopping")
            if self.n_waiting + len(texts) > self._settings.max_queue:
                raise NotStartedError("queue_full")
            size = max(self._max_batch // _PARTS, 1)
            for group in groups.values():
                self._waiting += [group[i : i + size] for i in range(0, len(group), size)]
            self._wake.notify()

    def ask(self, function: Callable[[], Any]) -> Future:
        """Call a function in the engine's thread, between two steps.

        Raises:
            NotStartedError: The engine is stopping.
        """
        future: Future = Future()
        with self._wake:
            if self._is_stopping:
                raise NotStartedError("stopping")
            self._asked.append((function, future))
            self._wake.notify()
        return future

    def attention_shares(self, token: int, mems: Memory) -> Float[Tensor, " S"]:
        """Return the attention of a token to the memory; to be called through :meth:`ask`."""
        return shares(self.model, token, self._reader.prepared(mems))

    def cut(self) -> None:
        """Truncate all texts, accept no more, and let the thread end."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    def stop(self) -> None:
        """Truncate all texts and wait for the thread."""
        self.cut()
        if self.is_alive:
            self._thread.join()

    def _reset(self) -> None:
        self._readings: list[Reading] = []
        self._batch = Batch(self.model, self._max_batch)
        self._reader = PromptReader(self.model, self._settings.piece)

    def _has_work(self) -> bool:
        return bool(self._asked or self._waiting or self.n_running or self._is_stopping)

    @torch.no_grad()
    def _run(self) -> None:
        is_stopping = False
        while not is_stopping:
            with self._wake:
                self._wake.wait_for(self._has_work)
                asked, self._asked = self._asked, []
                came = self._dequeue()
                is_stopping = self._is_stopping
            for function, future in asked:
                _call(function, future)
            try:
                for texts in came:
                    self._readings.append(Reading(texts, self._reader.start_of(texts[0])))
                self._end_early(is_stopping)
                self._read()
                self._write()
            except Exception:
                # Whatever failed must not affect the texts that are submitted later.
                log.exception("a step failed; the texts in it are given up")
                self._give_up(came)
            if self._events:
                events, self._events = self._events, []
                self._deliver(events)

    def _dequeue(self) -> list[list[Text]]:
        """Dequeue as many groups as there are free rows, and those that need none to end."""
        came: list[list[Text]] = []
        free = self._max_batch - self.n_running
        while self._waiting and (len(self._waiting[0]) <= free or self._is_stopping):
            came.append(self._waiting.popleft())
            free -= len(came[-1])
        over = [texts for texts in self._waiting if all(text.is_over for text in texts)]
        for texts in over:
            self._waiting.remove(texts)
        return came + over

    def _end_early(self, is_stopping: bool) -> None:
        """End texts that were cancelled or whose deadline has passed."""
        for reading in [*self._readings]:
            for text in [each for each in reading.texts if is_stopping or each.is_over]:
                reading.texts.remove(text)
                reason = "late" if text.is_over else "stopping"
                reason = "cancelled" if text.is_cancelled else reason
                self._events.append((text, Ended(reason)))
            if not reading.texts:
                self._readings.remove(reading)
        for row, text in self._batch.texts.items():
            if is_stopping or text.is_over:
                self._end_row(row, "cancelled" if text.is_cancelled else "length")

    def _read(self) -> None:
        """Read a chunk of the oldest prompts; begin to generate where a prompt is complete."""
        if unread := [reading for reading in self._readings if not reading.is_done]:
            self._reader.read(unread)
        for reading in [each for each in self._readings if each.is_done]:
            for text in reading.texts:
                self._events.append((text, PromptRead(reading.scored)))
            self._begin(reading)
            # Not before: if that fails, its texts must still be found to be given up.
            self._readings.remove(reading)

    def _begin(self, reading: Reading) -> None:
        texts = reading.texts
        if reading.hidden is None or not texts[0].max_tokens:
            for text in texts:
                self._end(text, "length", reading.mems)
            return
        seen = [reading.attended] * len(texts)
        reasons = self._draw(texts, reading.hidden.expand(len(texts), -1), seen)
        for text, reason in zip(texts, reasons, strict=True):
            if reason:
                self._end(text, reason, reading.mems)
            else:
                self._batch.add(text, reading.mems)

    def _write(self) -> None:
        """Sample a token for each running text."""
        self._batch.shrink()
        running = self._batch.texts
        if not running:
            return
        self._stepped(len(running))
        seen = [self._attention_of(row, text) for row, text in running.items()]
        reasons = self._draw([*running.values()], self._batch.step(), seen)
        for row, reason in zip(running, reasons, strict=True):
            if reason:
                self._end_row(row, reason)

    def _attention_of(self, row: int, text: Text) -> Shares | None:
        if not text.attention:
            return None
        past = self._batch.memory(row)
        return most_seen(shares(self.model, text.last_token, past), text.attention)

    def _draw(
        self, texts: Sequence[Text], hidden: Float[Tensor, "B D"], seen: Sequence[Shares | None]
    ) -> list[str]:
        """Sample a token for each text; return why it ends, or an empty string if it continues."""
        # Drawn on the CPU: the same seed gives the same numbers on every device.
        numbers = torch.stack(
            [torch.rand((), dtype=torch.float64, generator=text.generator) for text in texts]
        )
        kinds: dict[tuple[object, ...], list[int]] = {}
        for row, text in enumerate(texts):
            kinds.setdefault(text.sampler.kind, []).append(row)
        tokens: dict[int, int] = {}
        for rows in kinds.values():
            drawn = self._sample([texts[row] for row in rows], hidden[rows], numbers[rows])
            tokens |= {row: x for row, x in zip(rows, drawn, strict=True) if x is not None}
        scores = self._scores(texts, hidden, tokens)
        reasons = ["failed"] * len(texts)
        for row, token in sorted(tokens.items()):
            text = texts[row]
            text.add(token)
            try:
                piece = text.writer.push(token)
            except Exception:
                log.exception("a token cannot be decoded; its text is given up")
                continue
            self._events.append((text, Drawn(token, piece, scores.get(row), seen[row])))
            reasons[row] = text.reason_to_end
        return reasons

    def _sample(
        self, texts: Sequence[Text], hidden: Float[Tensor, "B D"], numbers: Float[Tensor, " B"]
    ) -> list[int | None]:
        """Sample tokens of texts with the same sampler; None for each that fails."""
        sampler = texts[0].sampler
        histories = [text.history for text in texts] if sampler.needs_history else []
        try:
            return [*sampler(self.model.head, hidden, numbers, histories)]
        except Exception:
            if len(hidden) == 1:
                log.exception("a token cannot be drawn; its text is given up")
                return [None]
        # One row may be the cause: sampled one by one, the others do not fail with it.
        rows = zip(texts, hidden.split(1), numbers.split(1), strict=True)
        return [self._sample([text], *row)[0] for text, *row in rows]

    def _scores(
        self, texts: Sequence[Text], hidden: Float[Tensor, "B D"], tokens: dict[int, int]
    ) -> dict[int, Scored]:
        """Score the tokens of the texts that ask for it, batched; return the scores by row."""
        most = {row: n for row in tokens if (n := texts[row].logprobs) is not None}
        if not most:
            return {}
        drawn = [tokens[row] for row in most]
        scores = scored(self.model, hidden[[*most]], drawn, max(most.values()))
        cut = [x._replace(top=x.top[:n]) for x, n in zip(scores, most.values(), strict=True)]
        return dict(zip(most, cut, strict=True))

    def _end_row(self, row: int, reason: Any) -> None:
        """End a running text and free its row."""
        text = self._batch.rows[row]
        assert text is not None
        self._end(text, reason, self._batch.memory(row) if text.keeps_state else None)
        # Not before: if that fails, the text must still be found to be given up.
        self._batch.rows[row] = None

    def _end(self, text: Text, reason: Any, mems: Memory | None) -> None:
        is_failed = reason == "failed"
        state = None if mems is None or is_failed else text.state(mems, self._mem_len)
        held = "" if is_failed else text.writer.held
        self._events.append((text, Ended(reason, held, state)))

    def _give_up(self, came: list[list[Text]]) -> None:
        ended = {text for text, event in self._events if isinstance(event, Ended)}
        groups = [[*self._batch.texts.values()], *(each.texts for each in self._readings), *came]
        for text in dict.fromkeys(text for group in groups for text in group):
            if text not in ended:
                self._events.append((text, Ended("failed")))
        self._reset()


def _call(function: Callable[[], Any], future: Future) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001  (raised again in the caller)
        future.set_exception(error)
