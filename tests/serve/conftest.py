"""A tiny model with its vocabulary in a folder, and a server of it on this machine."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_xl.apps.serve.engine import Engine, deliver_to_sinks
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.texts import Part, Text
from transformer_xl.config import GenerateConfig, ModelConfig
from transformer_xl.data import Vocab, train_vocab
from transformer_xl.data.vocab import VocabKind
from transformer_xl.inference.generate import Sampler, Sampling, generate
from transformer_xl.inference.generate.random_numbers import random_numbers
from transformer_xl.model import TransformerXL, build_model

SECONDS = 60
"""Nothing here takes so long on the slowest machine."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(autouse=True, scope="session")
def _certificates_once() -> Iterator[None]:
    """The certificates of the system, which no test needs, are read once, not for each request."""
    transports = pytest.importorskip("httpx")._transports.default
    create = functools.cache(transports.create_ssl_context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "create_ssl_context", create)
        yield


@dataclass
class Made:
    """A model in a folder."""

    folder: Path
    model: TransformerXL
    vocab: Vocab

    @property
    def weights(self) -> Path:
        """Its weights file."""
        return self.folder / "model.safetensors"

    def alone(self, prompt: str, n: int, seed: int | None = None, **settings: Any) -> str:
        """What the model writes when it writes nothing else."""
        ids = self.vocab.encode(prompt)
        ids = list(generate(self.model, ids, Sampling(**settings), length=n, seed=seed))
        return self.vocab.decode(ids)


def _made(folder: Path, vocab: VocabKind = "chars", **settings: Any) -> Made:
    """Write a model of characters, with weights far from zero, that remembers only a little."""
    torch.manual_seed(0)
    size = 280 if vocab == "bpe" else None
    text = "abcdefghijklmnopqrstuvwxyz .,\n" * (50 if size else 1)
    tokens = train_vocab(vocab, [text], size, held_out=["so"] if vocab == "words" else ())
    defaults = {"n_layer": 2, "n_head": 2, "d_model": 16, "d_inner": 32, "mem_len": 12}
    defaults |= {"dropout": 0.0, "init_std": 0.4, "proj_init_std": 0.4}
    model = build_model(ModelConfig(vocab_size=len(tokens), **defaults | settings)).eval()
    model.save_pretrained(folder, tokens)
    return Made(folder, model, tokens)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """Makes tiny models: `make_model(mem_len=3)`."""
    return lambda **settings: _made(tmp_path_factory.mktemp("model"), **settings)


@pytest.fixture(scope="session")
def made(make_model: Callable[..., Made]) -> Made:
    return make_model()


class Asked:
    """A text, and what the engine told of it."""

    def __init__(
        self,
        made: Made,
        prompt: Any,
        n: int,
        *,
        seed: Any = 1,
        stop: Any = (),
        state: Any = None,
        drawing: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.parts: list[Part] = []
        self.ended: Future = Future()
        self.text = Text(
            vocab=made.vocab,
            prompt=tuple(prompt),
            start=state,
            stop=stop,
            generator=random_numbers(seed),
            sampler=Sampler(Sampling(**drawing or {})),
            max_tokens=n,
            sink=self._take,
            **more,
        )

    def _take(self, part: Part) -> None:
        self.parts.append(part)
        if part.reason:
            self.ended.set_result(part)

    def end(self) -> Part:
        """Wait until it has ended."""
        return self.ended.result(SECONDS)

    @property
    def tokens(self) -> list[int]:
        """What was drawn until its end."""
        self.end()
        return [token.id for part in self.parts for token in part.tokens]


@pytest.fixture(scope="session")
def ask() -> type[Asked]:
    """Makes texts for an engine: `ask(made, [1, 2], 6, seed=3)`."""
    return Asked


@pytest.fixture
def start(made: Made) -> Iterator[Callable[..., Engine]]:
    """Starts engines, and ends them: `start(max_batch=2)`."""
    engines: list[Engine] = []

    def begin(
        model: TransformerXL | None = None, deliver: Callable = deliver_to_sinks, **settings: Any
    ) -> Engine:
        engines.append(Engine(model or made.model, ServeSettings(**settings), deliver))
        engines[-1].start()
        return engines[-1]

    yield begin
    for engine in engines:
        engine.stop()


@dataclass
class Running:
    """A server in a thread."""

    address: str
    server: Any
    thread: threading.Thread

    @property
    def service(self) -> Any:
        """What it serves."""
        return self.server.service

    def stop(self) -> None:
        """End it in good order."""
        self.server.should_exit = True
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def _running(
    made: Made, generation: GenerateConfig | None = None, **settings: Any
) -> Iterator[Running]:
    from transformer_xl.apps.serve.server import Server, address_of, listen
    from transformer_xl.apps.serve.service import Service

    serving = ServeSettings(port=0, **{"shutdown_seconds": 1.0, **settings})
    with listen(serving.host, 0) as listening:
        name = serving.name or "tiny"
        server = Server(Service(made.model, made.vocab, made.weights, serving, name, generation))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        _until(lambda: server.started)
        found = Running(address_of(listening).rstrip("/"), server, thread)
        try:
            yield found
        finally:
            found.stop()


@pytest.fixture(scope="session")
def run_server() -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """Serves a model on a free port of this machine: `with run_server(made, max_queue=1)`."""
    return _running


def _until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], object]], None]:
    """Waits until something holds."""
    return _until


@pytest.fixture(scope="module")
def server(
    made: Made, run_server: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server with a folder for its sessions, for all tests of a file."""
    folder = tmp_path_factory.mktemp("sessions")
    with run_server(made, sessions=folder, max_tokens=10**6) as found:
        yield found
