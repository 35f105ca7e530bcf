"""Chat templates of others, rendered in a child process with limits on memory and time.

Such a template is a program. Jinja's sandbox keeps it from files, modules and private attributes,
and a process of its own from the memory and the time of the server: the operators, filters and
methods that can make a value grow are too many to bound each. The process is kept for the next
template; after a failure another one is started.

The two exchange lines of JSON. Little more than Jinja is imported here, so that it starts soon.
"""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from transformer_xl.config.child_limits import command_of, environment, limit_this_process

COMMAND = command_of(
    "from transformer_xl.apps.serve.chat_rendering import render_standard_input as run; run()"
)
"""The child process."""
_SECONDS = 2
"""Processor time of a template, at most."""
_WAITING = 8
"""Seconds after which its process is ended in any case."""
_BYTES = 256 << 20
"""Memory of its process, at most."""
_MOST_TEXT = 4 << 20
"""Characters of a prompt, at most."""
_MOST_REASON = 500
"""Characters of an error, at most."""


class RefusedError(jinja2.TemplateError):
    """A template calls ``raise_exception``."""


def render(source: str, given: Mapping[str, Any]) -> str:
    """Render a template in this process, without limits.

    Args:
        source: Jinja.
        given: What the template can name, as ``messages``.

    Raises:
        RefusedError: The template refuses these messages.
        Exception: Whatever a template raises: it is a program of others.
    """
    parts, n = [], 0
    for part in _compiled(source).generate(given):
        parts.append(part)
        n += len(part)
        if n > _MOST_TEXT:
            raise ValueError(f"it writes more than {_MOST_TEXT:,} characters")
    return "".join(parts)


class Renderer:
    """Renders templates in a child process, started when it is first needed; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = lambda: None

    def __call__(self, source: str, given: Mapping[str, Any] | None) -> str:
        """Render a template; with ``given`` None compile it and return "".

        Raises:
            RefusedError: The template refuses these messages.
            ValueError: It fails, or exceeds a limit.
        """
        question = json.dumps([source, given]).encode() + b"\n"
        with self._lock:
            # A process that did nothing may have been ended by the system.
            if self._process is None or self._process.poll() is not None:
                self._start()
            answer = self._ask(question)
            if not answer:
                self._stop()
        if not answer:
            raise ValueError(f"it exceeded {_SECONDS} s or {_BYTES >> 20} MB of memory")
        kind, text = json.loads(answer)
        if kind == "refused":
            raise RefusedError(text)
        if kind == "failed":
            raise ValueError(text)
        return text

    def _ask(self, question: bytes) -> bytes:
        """Return the line that the process writes; b"": it was ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(_WAITING, process.kill)
        timer.start()
        try:
            process.stdin.write(question)
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            return b""
        finally:
            timer.cancel()
        return answer if answer.endswith(b"\n") else b""

    def _start(self) -> None:
        self._stop()
        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(
            COMMAND, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment()
        )
        # Also when the program ends.
        self._end = weakref.finalize(self, _end, process)

    def _stop(self) -> None:
        self._end()
        self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    # What was not written to it any more.
    with suppress(OSError), process:
        pass


def render_standard_input() -> None:
    """Render template after template, as the child process of :class:`Renderer`."""
    # Ctrl-C is for the server, which ends this process when it has none to render.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        limit_this_process(_BYTES, _SECONDS)
        sys.stdout.write(json.dumps(_answer(line)) + "\n")
        sys.stdout.flush()


def _answer(line: bytes) -> tuple[str, str]:
    try:
        source, given = json.loads(line)
        if given is None:
            _compiled(source)
            return "rendered", ""
        return "rendered", render(source, given)
    except RefusedError as error:
        return "refused", str(error)[:_MOST_REASON]
    except MemoryError:
        return "failed", f"it exceeded {_BYTES >> 20} MB of memory"
    except Exception as error:  # noqa: BLE001
        # Whatever a template does: it is a program of others.
        return "failed", str(error)[:_MOST_REASON] or type(error).__name__


@lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that transformers gives to templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    made.filters["tojson"] = _to_json
    return made


def _refuse(message: object) -> NoReturn:
    raise RefusedError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes of HTML, as transformers does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
