"""Chat templates: how the messages of a chat become a prompt.

A template is Jinja, as transformers stores it beside a tokenizer. Those of a file are rendered in a
child process with limits, by :mod:`~transformer_xl.apps.serve.chat_rendering`.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformer_xl.apps.serve.chat_rendering import RefusedError, Renderer, render
from transformer_xl.apps.serve.errors import QueueFullError, StoppingError
from transformer_xl.config.files import read_small_file
from transformer_xl.data import Vocab
from transformer_xl.data.chat_templates import stored_template

_ROLES = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
_CONTENTS = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
_TURNS = ("\nuser:", "\nsystem:", "\ndeveloper:", "\nassistant:")
_RENDERER = Renderer()
"""One process for all templates of files."""
_MOST_SECONDS = 30.0
"""How long messages wait to be rendered, and are rendered, at most."""


class ChatTemplate(NamedTuple):
    """A template.

    ``kind`` says where it is from: a ``file``, the folder of the ``model``, or plain ones of ours,
    with the ``roles`` of messages or of their ``contents`` alone. ``stop`` has the texts that end a
    message.
    """

    kind: Literal["file", "model", "roles", "contents"]
    source: str
    stop: tuple[str, ...] = ()
    tokens: Mapping[str, str] = {}
    """The special tokens that it can name, as ``eos_token``."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt for the next message.

        Raises:
            ValueError: The template refuses these messages, or fails.
        """
        given = {**self.tokens, "messages": messages, "add_generation_prompt": True}
        try:
            text = (_RENDERER if self.kind in ("file", "model") else render)(self.source, given)
            text.encode()
        except RefusedError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the chat template failed: character {error.start:,} of what it writes is half of "
                "a surrogate pair, which no text has"
            ) from error
        except ValueError as error:
            raise ValueError(f"the chat template failed: {error}") from error
        return text


class Rendering:
    """Renders messages one by one, in a thread of its own, which no other work waits for.

    Args:
        template: The template.
        max_queue: Largest number of messages that wait.
    """

    def __init__(self, template: ChatTemplate, max_queue: int) -> None:
        self._template = template
        self._thread = ThreadPoolExecutor(1, "chat")
        self._places = threading.BoundedSemaphore(max_queue + 1)

    async def __call__(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt for the next message.

        Raises:
            QueueFullError: Too many wait, or these have waited for too long.
            StoppingError: It is closed.
            ValueError: The template refuses these messages, or fails.
        """
        if not self._places.acquire(blocking=False):
            raise QueueFullError
        try:
            work = self._thread.submit(self._template.render, messages)
        except RuntimeError:
            self._places.release()
            raise StoppingError from None
        # Not when the request is given up: what is being rendered keeps its place until it ends.
        work.add_done_callback(lambda _: self._places.release())
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), _MOST_SECONDS)
        except TimeoutError:
            raise QueueFullError from None

    def close(self) -> None:
        """Render nothing more; what is being rendered ends by the limits of its process."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def find_template(folder: Path, vocab: Vocab, given: Path | None = None) -> ChatTemplate:
    """Return the template that is given, that of a model folder, or a plain one.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged, or a template is empty, or no Jinja.
    """
    path, source, tokens = stored_template(folder)
    # Text that ends a message; a line end is none where the vocabulary alone names the token.
    stop = [_decoded(vocab, tokens["eos_token"])] if "eos_token" in tokens else []
    if vocab.eos_id is not None:
        tokens.setdefault("eos_token", vocab.symbols[vocab.eos_id])
    try:
        if given is not None:
            source = read_small_file(given).decode("utf-8")
        if source is not None:
            if not source.strip():
                raise ValueError("it is empty")
            _RENDERER(source, None)
    except ValueError as error:
        raise ValueError(
            f"{given or path}: the chat template cannot be read: {error}; give another with "
            "--chat_template FILE"
        ) from error
    if source is not None:
        kind = "model" if given is None else "file"
        return ChatTemplate(kind, source, tuple(filter(None, stop)), tokens)
    if _can_write(vocab, "user: \nsystem: \nassistant:"):
        return ChatTemplate("roles", _ROLES, _TURNS)
    return ChatTemplate("contents", _CONTENTS)


def _decoded(vocab: Vocab, token: str) -> str:
    """Return the text that a special token is decoded as; "": it is no token."""
    try:
        return vocab.decode([vocab.number_of(token)])
    except ValueError:
        return ""


def _can_write(vocab: Vocab, text: str) -> bool:
    try:
        ids = vocab.encode(text)
    except ValueError:
        return False
    return vocab.unk_id is None or vocab.unk_id not in ids
