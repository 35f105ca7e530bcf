"""A tiny model with its vocabulary in a folder, and a server of it on this machine."""

import base64
import contextlib
import functools
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_xl.apps.serve.engine import Engine, tell
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.texts import Drawn, Ended, Event, Text, make_writer
from transformer_xl.config import GenerateConfig, ModelConfig
from transformer_xl.data import Vocab, train_vocab
from transformer_xl.data.vocab import VocabKind
from transformer_xl.inference.generate import Sampler, Sampling, generate, random_numbers
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transports, "create_ssl_context", functools.cache(transports.create_ssl_context)
        )
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
    defaults = {
        "n_layer": 2,
        "n_head": 2,
        "d_model": 16,
        "d_inner": 32,
        "mem_len": 12,
        "dropout": 0.0,
        "init_std": 0.4,
        "proj_init_std": 0.4,
    }
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
        mems: Any = None,
        drawing: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.events: list[Event] = []
        self.ended: Future = Future()
        self.text = Text(
            prompt=tuple(prompt),
            mems=mems,
            before=(),
            writer=make_writer(made.vocab, stop, (), prompt),
            generator=random_numbers(seed),
            sampler=Sampler(Sampling(**drawing or {})),
            max_tokens=n,
            sink=self._take,
            **more,
        )

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Ended):
            self.ended.set_result(event)

    def end(self) -> Ended:
        """Wait until it has ended."""
        return self.ended.result(SECONDS)

    @property
    def tokens(self) -> list[int]:
        """What was drawn until its end."""
        self.end()
        return [event.token for event in self.events if isinstance(event, Drawn)]


@pytest.fixture(scope="session")
def ask() -> type[Asked]:
    """Makes texts for an engine: `ask(made, [1, 2], 6, seed=3)`."""
    return Asked


@pytest.fixture
def start(made: Made) -> Iterator[Callable[..., Engine]]:
    """Starts engines, and ends them: `start(max_batch=2)`."""
    engines: list[Engine] = []

    def begin(
        model: TransformerXL | None = None, deliver: Callable = tell, **settings: Any
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
        _until(lambda: server.started and server.service.is_ready)
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


class Browser:
    """One page of a headless Chromium, driven over a pipe by its DevTools protocol.

    Args:
        program: The browser.
        profile: A folder for what it keeps.
    """

    def __init__(self, program: str, profile: Path) -> None:
        # It reads commands from 3 and answers to 4; each ends with a zero.
        to_it, mine = os.pipe()
        from_it, its = os.pipe()
        flags = [
            *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"),
            *("--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--mute-audio"),
            *("--force-device-scale-factor=1", f"--user-data-dir={profile}"),
            # Sites that all lie on this machine.
            "--host-resolver-rules=MAP *.example 127.0.0.1, MAP *.localhost 127.0.0.1",
        ]
        command = f'exec "$0" "$@" 3<&{to_it} 4>&{its}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *flags, "about:blank"],
            pass_fds=(to_it, its),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(its)
        self._write, self._read = mine, from_it
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each for each in targets if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End it."""
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(SECONDS)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method; return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def size(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Set the size of the window, and whether the system is dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, address: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of a script."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until a script is true."""
        end = time.monotonic() + SECONDS
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, control: bool = False) -> None:
        """Press a key."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "End": 35, "Home": 36}
        more = {"text": "\r"} if key == "Enter" and not control else {}
        about = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": codes[key],
            "modifiers": 2 if control else 0,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))

    @property
    def faults(self) -> list[str]:
        """What the page complained of."""
        self.run("0")
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] == "error":
                    found.append(entry["text"])
        return found

    @property
    def addresses(self) -> list[str]:
        """What was asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The browser of this machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs Chromium: apt install chromium")
    found = Browser(program, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
