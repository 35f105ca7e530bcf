"""What a server has: the model, the engine, the sessions, the numbers it counts."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from transformer_xl.apps.serve.engine import Engine, Events
from transformer_xl.apps.serve.errors import of_session
from transformer_xl.apps.serve.prometheus import Metrics
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.sessions import Session, SessionError, Sessions
from transformer_xl.apps.serve.texts import Event, Text
from transformer_xl.config import GenerateConfig
from transformer_xl.config.device import total_memory
from transformer_xl.data import Vocab
from transformer_xl.inference.generate import Sampler, State
from transformer_xl.model import LanguageModel
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.needs import full_memory, require_room
from transformer_xl.model.reading import read

log = logging.getLogger("transformer_xl.serve")

_DISK_THREADS = 4
_LONGEST_PAUSE = 60.0
"""Seconds after which it is looked at the latest which sessions have expired."""


class Service:
    """A model that is served.

    Args:
        model: The model, in evaluation mode.
        vocab: Its vocabulary.
        weights: Its weights file.
        settings: Limits.
        name: What it is called.
        generation: How it draws what a request leaves open: ``temperature``, ``top_k``, ``top_p``.
            None: as tokens are distributed.

    Raises:
        OSError: The folder of the sessions cannot be made or read.
        RuntimeError: The model cannot run.
        ValueError: There is no room for as many texts as may be written side by side.
    """

    def __init__(
        self,
        model: LanguageModel,
        vocab: Vocab,
        weights: Path,
        settings: ServeSettings,
        name: str,
        generation: GenerateConfig | None = None,
    ) -> None:
        _require_working(model, settings.max_batch)
        self.generation = generation or GenerateConfig()
        self.model, self.vocab, self.settings, self.name = model, vocab, settings, name
        self.created = int(time.time())
        self.n_weights = sum(x.numel() for x in model.parameters())
        self.is_closing = False
        self.n_streams = 0
        self.sessions = Sessions(
            weights,
            settings.sessions,
            most=settings.max_sessions,
            in_memory=settings.sessions_in_memory,
            memory_bytes=settings.session_bytes,
            largest=full_memory(model, model.config.mem_len),
            idle=settings.session_idle,
            saves_each=settings.save == "answer",
            model=model,
        )
        self.metrics = Metrics(
            {
                "txl_queued_texts": ("Texts that wait.", lambda: self.engine.n_waiting),
                "txl_running_texts": ("Texts in work.", lambda: self.engine.n_running),
                "txl_sessions": ("Sessions.", lambda: len(self.sessions)),
                "txl_sessions_in_memory": (
                    "Sessions in memory.",
                    lambda: self.sessions.n_in_memory,
                ),
                "txl_session_bytes": ("Bytes of these.", lambda: self.sessions.nbytes),
            }
        )
        self.engine = Engine(
            model,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            piece=settings.piece,
            deliver=self._deliver,
            watcher=self.metrics,
        )
        self.token_text = lru_cache(maxsize=65_536)(self._token_text)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._disk = ThreadPoolExecutor(_DISK_THREADS, "disk")
        self._expiring: asyncio.Task | None = None
        self._kept: set[asyncio.Task] = set()

    def sampler(self, temperature: float | None, top_k: int | None, top_p: float | None) -> Sampler:
        """Return how a request is drawn: as it asks, and else as the folder of the model says."""
        usual = self.generation
        return Sampler(
            usual.temperature if temperature is None else temperature,
            usual.top_k if top_k is None else top_k,
            usual.top_p if top_p is None else top_p,
            self.model.config.vocab_size,
        )

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self.engine.is_alive and not self.is_closing

    async def start(self) -> None:
        """Begin to work."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()
        self._expiring = asyncio.create_task(self._expire())

    async def stop(self) -> None:
        """End all texts where they are and save the sessions."""
        self.is_closing = True
        if self._expiring:
            self._expiring.cancel()
        await asyncio.to_thread(self.engine.stop)
        # The last events have been handed over; what they began on the disk has its turn.
        await asyncio.sleep(0)
        await asyncio.to_thread(self._disk.shutdown)
        if failed := await asyncio.to_thread(self.sessions.save_all):
            log.error("%d sessions could not be saved", failed)

    async def on_disk(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call what may wait for the disk, and let others go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, function, *given)

    async def open_session(self, name: str) -> Session:
        """Take a session for a request.

        Raises:
            ApiError: It cannot be had.
        """
        if self.sessions.is_at_hand(name):
            with _told(name):
                return self.sessions.open(name)
        return await self.with_session(self.sessions.open, name)

    async def with_session(self, function: Callable[[str], Any], name: str) -> Any:
        """Call what may wait for the disk with the name of a session.

        Raises:
            ApiError: The session cannot be had.
        """
        with _told(name):
            return await self.on_disk(function, name)

    async def close_session(self, session: Session, state: State | None) -> None:
        """Give a session back, saved if it has gone on and that is wanted.

        Raises:
            ApiError: It cannot be saved.
        """
        started = time.perf_counter()
        try:
            await self.on_disk(self.sessions.close, session, state)
        except OSError as error:
            log.error("session %s: %s", session.name, error)
            raise of_session(error, session.name) from error
        if state is not None:
            self.metrics.save_seconds.observe(time.perf_counter() - started)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something to its end, whether or not anybody waits for it."""
        task = asyncio.ensure_future(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    async def ask(self, function: Callable[[], Any]) -> Any:
        """Let the engine's thread call a function of the model.

        Raises:
            QueueFullError: The server ends.
        """
        return await asyncio.wrap_future(self.engine.ask(function))

    def _deliver(self, events: Events) -> None:
        """Hand on, in the thread of the server, what the engine tells."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_tell, events)

    def _token_text(self, token: int) -> str:
        """Return a token as text; bytes that are no character as OpenAI writes them."""
        try:
            raw = self.vocab.decode_bytes([token])
        except ValueError:
            symbol = self.vocab.symbols[token]
            return "\n" if token == self.vocab.eos_id else f" {symbol}"
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(_LONGEST_PAUSE, self.settings.session_idle / 2))
            try:
                if gone := await self.on_disk(self.sessions.expire):
                    log.info("%d sessions expired", gone)
            except (OSError, SessionError) as error:
                log.error("a session cannot be deleted: %s", error)


@torch.no_grad()
def _require_working(model: LanguageModel, max_batch: int) -> None:
    """Refuse what would take requests and fail: too many texts, or a model that cannot run."""
    mem_len = model.config.mem_len
    each = full_memory(model, mem_len)
    fitting = (total_memory(model.device) or 0) // max(each, 1)
    require_room(
        "the memories of all texts, once full,",
        max_batch * each,
        model.device,
        {"max_batch": max_batch, "mem_len": mem_len},
        f"lower --max_batch, to {fitting:,} at the most" if fitting else "take another model",
    )
    try:
        start = model.keep(model.start_memory(1))
        token = torch.zeros(1, 1, dtype=torch.int64)
        (piece,) = read(model, token, Lengths.of(model.config, ext_len=0), start)
        works = not model.head.log_probs(piece.hidden[:, -1]).isnan().any()
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise RuntimeError(f"the model cannot run: it failed to read a token: {error}") from error
    if not works:
        raise RuntimeError("the model cannot run: what it predicts is not a number")


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Say in the shape of OpenAI why a session cannot be had."""
    try:
        yield
    except (SessionError, ValueError, RuntimeError, OSError) as error:
        if not isinstance(error, SessionError):
            log.error("session %s: %s", name, error)
        raise of_session(error, name) from error


def _tell(events: list[tuple[Text, Event]]) -> None:
    for text, event in events:
        text.sink(event)
