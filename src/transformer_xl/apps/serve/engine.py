"""The engine: one thread that owns the model and writes all texts, batched.

Streams come and go by rows of one :class:`~transformer_xl.model.Decoder`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.apps.serve.errors import NotStartedError
from transformer_xl.apps.serve.prefixes import Prefixes
from transformer_xl.apps.serve.prompt_reading import PromptReader
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.texts import Part, Reason, Scored, Text
from transformer_xl.inference.generate import REWINDABLE, prompt_lengths
from transformer_xl.model import Decoder, LanguageModel, Memory

log = logging.getLogger("transformer_xl.serve")

Parts = list[tuple[Text, Part]]

_MIN_LOG_PROB = -9999.0
"""The log-probability of what cannot be: JSON has no infinity."""


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
        self._lengths = prompt_lengths(model, None, REWINDABLE)
        self._decoder: Decoder
        self.rows: list[Text | None] = []

    @property
    def texts(self) -> dict[int, Text]:
        """The running texts, by row."""
        return {row: text for row, text in enumerate(self.rows) if text is not None}

    def add(self, text: Text) -> None:
        """Add a text with a copy of its memory, which is not masked."""
        size, memory = len(self.rows), text.mems
        assert memory is not None
        if not self.rows:
            self._decoder, self.rows = Decoder.of(self._model, self._lengths, memory), [None]
        elif None not in self.rows:
            n_new = min(size, self._max_batch - size)
            self._decoder = self._decoder.select([*range(size), *[0] * n_new])
            self.rows += [None] * n_new
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
        is_mostly_free = n * 2 <= size if size <= 4 else n * 8 < size * 3
        if is_mostly_free and n:
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


def deliver_to_sinks(parts: Parts) -> None:
    """Pass each part to the ``sink`` of its text."""
    for text, part in parts:
        text.sink(part)


class Engine:
    """Generates texts with one model by continuous batching: a step samples one token for each.

    Texts join and leave the batch between steps. Prompts are read in chunks between steps, several
    batched. Each text gets, up to rounding, the tokens that it would get alone.

    Args:
        model: The model, in evaluation mode; only the engine may use it while it runs.
        settings: The limits; texts whose prompt is being read count for ``max_batch``, too.
        deliver: Called once a step with the new parts of all texts; by default calls their
            ``sink``.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: ServeSettings,
        deliver: Callable[[Parts], object] = deliver_to_sinks,
    ) -> None:
        self._model, self._settings, self._deliver = model, settings, deliver
        self._wake = threading.Condition()
        self._waiting: deque[Text] = deque()
        self._parts: Parts = []
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
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Number of texts whose prompt is being read or that are being generated."""
        rows = self._batch.rows
        return len(rows) - rows.count(None) + len(self._reading)

    def submit(self, texts: Sequence[Text]) -> None:
        """Queue texts.

        Raises:
            NotStartedError: The queue is full, or the engine is stopping.
        """
        with self._wake:
            if self._is_stopping:
                raise NotStartedError("stopping")
            if self.n_waiting + len(texts) > self._settings.max_queue:
                raise NotStartedError("queue_full")
            self._waiting += texts
            self._wake.notify()

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
        self._reading: list[Text] = []
        self._batch = Batch(self._model, self._settings.max_batch)
        self._prefixes = Prefixes(self._settings.prefix_bytes)
        self._reader = PromptReader(self._model, self._settings.piece, self._prefixes)

    def _has_work(self) -> bool:
        return bool(self._waiting or self.n_running or self._is_stopping)

    @torch.no_grad()
    def _run(self) -> None:
        is_stopping = False
        while not is_stopping:
            with self._wake:
                self._wake.wait_for(self._has_work)
                dequeued = self._dequeue()
                is_stopping = self._is_stopping
            try:
                for text in dequeued:
                    self._reader.begin(text)
                self._reading += dequeued
                self._end_early(is_stopping)
                self._read()
                self._write()
            except Exception:
                # Whatever failed must not affect the texts that are submitted later.
                log.exception("a step failed; the texts in it are given up")
                self._give_up(dequeued)
            if self._parts:
                parts, self._parts = self._parts, []
                self._deliver(parts)

    def _dequeue(self) -> list[Text]:
        """Remove and return the waiting texts that are handled in this step.

        They are as many as there are free rows, and in addition all that are cancelled or late,
        which end without a row. All are if the engine stops.
        """
        free = self._settings.max_batch - self.n_running
        if self._is_stopping:
            free = len(self._waiting)
        dequeued = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        over = [text for text in self._waiting if text.is_over]
        for text in over:
            self._waiting.remove(text)
        return dequeued + over

    def _end_early(self, is_stopping: bool) -> None:
        """End texts that were cancelled or whose deadline has passed; all if the engine stops.

        Args:
            is_stopping: Whether to end all texts.
        """
        for text in [text for text in self._reading if is_stopping or text.is_over]:
            self._reading.remove(text)
            if text.is_cancelled:
                self._end(text, "cancelled")
            elif text.is_over:
                self._end(text, "late")
            else:
                self._end(text, "stopping")
        for row, text in self._batch.texts.items():
            if text.is_cancelled:
                self._end_row(row, "cancelled")
            elif text.is_over or is_stopping:
                # Its tokens are an answer, which is only shorter.
                self._end_row(row, "length")

    def _read(self) -> None:
        """Read a chunk of the oldest prompts; begin to generate where a prompt is complete."""
        if unread := [text for text in self._reading if not text.is_read]:
            self._reader.read(unread)
        complete = [text for text in self._reading if text.is_read]
        hidden = {text: text.hidden for text in complete if text.max_tokens}
        reasons: dict[Text, Reason | None] = dict.fromkeys(complete, "length")
        if states := [each for each in hidden.values() if each is not None]:
            reasons |= zip(hidden, self._draw([*hidden], torch.cat(states)), strict=True)
        for text, reason in reasons.items():
            if reason:
                self._end(text, reason, text.mems)
            else:
                self._batch.add(text)
            # Not before: if that fails, the text must still be found to be given up.
            self._reading.remove(text)

    def _write(self) -> None:
        """Sample a token for each running text."""
        self._batch.shrink()
        if running := self._batch.texts:
            reasons = self._draw([*running.values()], self._batch.step())
            for row, reason in zip(running, reasons, strict=True):
                if reason:
                    self._end_row(row, reason)

    def _draw(self, texts: Sequence[Text], hidden: Float[Tensor, "B D"]) -> list[Reason | None]:
        """Sample a token for each text; return why it ends, or None if it goes on."""
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
        reasons: list[Reason | None] = ["failed"] * len(texts)
        for row, token in sorted(tokens.items()):
            text = texts[row]
            try:
                part = text.add(token, scores.get(row))
            except Exception:
                log.exception("a token cannot be decoded; its text is given up")
                continue
            if part.tokens:
                self._parts.append((text, part))
            reasons[row] = text.reason_to_end
        return reasons

    def _sample(
        self, texts: Sequence[Text], hidden: Float[Tensor, "B D"], numbers: Float[Tensor, " B"]
    ) -> list[int | None]:
        """Sample tokens of texts with the same sampler; None for each that fails."""
        sampler = texts[0].sampler
        histories = [text.history for text in texts] if sampler.needs_history else []
        try:
            return [*sampler(self._model.head, hidden, numbers, histories)]
        except Exception:
            if len(texts) == 1:
                log.exception("a token cannot be drawn; its text is given up")
                return [None]
        # One row may be the cause: sampled one by one, the others do not fail with it.
        rows = zip(texts, hidden.split(1), numbers.split(1), strict=True)
        return [self._sample([text], *row)[0] for text, *row in rows]

    def _scores(
        self, texts: Sequence[Text], hidden: Float[Tensor, "B D"], tokens: dict[int, int]
    ) -> dict[int, Scored]:
        """Return the scores of the texts that ask for them, computed in a batch.

        Args:
            texts: The texts of the batch.
            hidden: The hidden states from which their tokens were sampled.
            tokens: The sampled token by row; none where sampling failed.

        Returns:
            The score of the token, and the most probable tokens with theirs, by row.
        """
        n_top = {row: n for row in tokens if (n := texts[row].logprobs) is not None}
        if not n_top:
            return {}
        log_probs = self._model.head.log_probs(hidden[[*n_top]]).clamp(min=_MIN_LOG_PROB)
        values, ids = log_probs.topk(min(max(n_top.values()), log_probs.shape[-1]))
        sampled = torch.tensor([tokens[row] for row in n_top])
        log_prob_of_token = log_probs[torch.arange(len(n_top)), sampled]
        rows = zip(
            n_top.items(), log_prob_of_token.tolist(), ids.tolist(), values.tolist(), strict=True
        )
        return {
            row: Scored(log_prob, [*zip(top_ids[:n], top_values[:n], strict=True)])
            for (row, n), log_prob, top_ids, top_values in rows
        }

    def _end_row(self, row: int, reason: Reason) -> None:
        """End a running text and free its row."""
        text = self._batch.rows[row]
        assert text is not None
        is_kept = text.keeps_state or (self._prefixes.is_used and text.start is None)
        self._end(text, reason, self._batch.memory(row) if is_kept else None)
        # Not before: if that fails, the text must still be found to be given up.
        self._batch.rows[row] = None

    def _end(self, text: Text, reason: Reason, mems: Memory | None = None) -> None:
        """Queue the last part of a text, with the state for its session if it keeps one."""
        part = text.end(reason)
        if mems is not None and reason != "failed":
            state = text.state(mems, self._reader.rewindable(text))
            if text.start is None and self._prefixes.is_used:
                self._prefixes.add([*text.prompt, *text.written], state)
            if text.keeps_state:
                part = part._replace(state=state)
        self._parts.append((text, part))

    def _give_up(self, dequeued: Sequence[Text]) -> None:
        """End all texts as failed, but those that have ended, and begin with an empty batch.

        Args:
            dequeued: Texts that were dequeued in this step, and may not have reached the reader.
        """
        ended = {text for text, part in self._parts if part.reason}
        for text in dict.fromkeys([*self._batch.texts.values(), *self._reading, *dequeued]):
            if text not in ended:
                self._end(text, "failed")
        self._reset()
