"""The state of a server: the model, the engine, the sessions, the metrics."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from transformer_xl.apps.serve.chat import chat_template
from transformer_xl.apps.serve.engine import Engine, Parts, deliver_to_sinks
from transformer_xl.apps.serve.errors import session_error
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.sessions import Sessions
from transformer_xl.config import GenerateConfig, total_memory
from transformer_xl.data import Vocab
from transformer_xl.errors import TxlError
from transformer_xl.inference.generate import REWINDABLE, Sampler, Sampling, State, prompt_lengths
from transformer_xl.model import LanguageModel, require_bytes

T = TypeVar("T")
log = logging.getLogger("transformer_xl.serve")


class Service:
    """A model that is served.

    The model is in evaluation mode. ``generation`` has the defaults of sampling; None: the model's
    distribution as it is.

    Raises:
        OSError: The folder of the sessions cannot be created or read.
        SettingsError: The memories of ``max_batch`` texts do not fit into the device, or a setting
            of sampling does not fit the vocabulary.
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
        kept = prompt_lengths(model, None, REWINDABLE).mem_len
        each, n_texts = model.memory_bytes(kept), settings.max_batch
        fitting = (total_memory(model.device) or 0) // max(each, 1)
        require_bytes(
            "the memories of all texts, once full,",
            n_texts * each,
            model.device,
            {"max_batch": n_texts, "mem_len": model.config.mem_len},
            f"lower --max_batch, to at most {fitting:,}" if fitting else "use a smaller model",
        )
        self.generation = generation or GenerateConfig()
        self.chat_template = chat_template(weights.parent, vocab, settings.template)
        self.model, self.vocab, self.settings, self.name = model, vocab, settings, name
        # Not with each request: a setting may not fit the vocabulary.
        self.sampler()
        self.created = int(time.time())
        self.n_streams = 0
        largest = State.largest(model, kept)
        self.sessions = Sessions(settings, weights, model, largest=largest)
        self.engine = Engine(model, settings, self._deliver)
        self.metrics = registry = CollectorRegistry()
        self.n_answers = Counter("txl_requests", "Requests.", ["status"], registry=registry)
        self.seconds = Histogram("txl_request_seconds", "Seconds of requests.", registry=registry)
        self.n_read = Counter("txl_prompt_tokens", "Tokens read.", registry=registry)
        self.n_drawn = Counter("txl_drawn_tokens", "Tokens drawn.", registry=registry)
        n_sessions = Gauge("txl_sessions", "Sessions.", registry=registry)
        n_sessions.set_function(lambda: len(self.sessions))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._saving: set[asyncio.Task] = set()

    def sampler(self, **changes: object) -> Sampler:
        """Return the sampler of a request; settings that it omits are those of the model folder.

        Raises:
            SettingsError: A setting has no effect.
        """
        settings = self.generation.changed(**changes).sampling
        return Sampler(Sampling(**settings), self.model.config.vocab_size)

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        """Run the engine and the expiry of sessions; at the end truncate all texts.

        This is the lifespan of the web application.
        """
        self._loop = asyncio.get_running_loop()
        self.engine.start()
        expiring = asyncio.create_task(self._expire())
        yield
        expiring.cancel()
        await asyncio.to_thread(self.engine.stop)
        # Run the callbacks of the last parts: they begin to save sessions.
        await asyncio.sleep(0)
        await asyncio.gather(*self._saving)

    async def with_session(self, function: Callable[[str], T], name: str) -> T:
        """Call a function with the name of a session in a thread, as it may block on the disk.

        Raises:
            SessionError: The session is not available.
        """
        try:
            return await asyncio.to_thread(function, name)
        except (TxlError, OSError) as error:
            log.error("session %s: %s", name, error)
            raise session_error(error, name) from error

    def keep(self, work: Coroutine[object, None, None]) -> None:
        """Run a coroutine to its end, even if the request that started it is gone."""
        task = asyncio.ensure_future(work)
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    def _deliver(self, parts: Parts) -> None:
        """Pass the parts of the engine to the thread of the event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(deliver_to_sinks, parts)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(60.0, self.settings.session_idle / 2))
            await asyncio.to_thread(self.sessions.expire)
