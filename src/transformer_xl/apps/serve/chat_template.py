"""Chat templates: how the messages of a chat become a prompt.

A template is Jinja, as transformers stores it beside a tokenizer. That of a folder from elsewhere
is a program: it is rendered in Jinja's sandbox, which reaches no file, module or private attribute,
with limits on the steps that it takes and on the text that it writes.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from transformer_xl.config.files import read_small_file
from transformer_xl.data import Vocab
from transformer_xl.data.chat_templates import stored_template

_ROLES = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
_CONTENTS = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
_TURNS = ("\nuser:", "\nsystem:", "\ndeveloper:", "\nassistant:")
_MOST_STEPS = 100_000
"""Steps of loops and calls of macros, at most."""
_MOST_TEXT = 4 << 20
"""Characters of a prompt, or of a product, at most."""


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
        environment, parts, n = _Environment(), [], 0
        try:
            template = environment.from_string(self.source)
            given = dict(self.tokens) | {"messages": messages, "add_generation_prompt": True}
            for part in template.generate(given):
                parts.append(part)
                n += len(part)
                if n > _MOST_TEXT:
                    raise _LimitError(f"it writes more than {_MOST_TEXT:,} characters")
        except _RefusedError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:
            # Whatever a template does: it is a program of others.
            reason = str(error) or type(error).__name__
            raise ValueError(f"the chat template failed: {reason}") from error
        return "".join(parts)


def find_template(folder: Path, vocab: Vocab, given: Path | None = None) -> ChatTemplate:
    """Return the template that is given, that of a model folder, or a plain one.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged, or a template is no Jinja.
    """
    path, source, tokens = stored_template(folder)
    # Text that ends a message; a line end is none where the vocabulary alone names the token.
    stop = [_decoded(vocab, tokens["eos_token"])] if "eos_token" in tokens else []
    if vocab.eos_id is not None:
        tokens.setdefault("eos_token", vocab.symbols[vocab.eos_id])
    if given is not None:
        path, source = given, read_small_file(given).decode("utf-8")
    if source:
        try:
            _Environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ValueError(
                f"{path}: the chat template cannot be read: {error}; give another with "
                "--chat_template FILE"
            ) from error
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


class _RefusedError(jinja2.TemplateError):
    """A template calls ``raise_exception``."""


class _LimitError(jinja2.TemplateError):
    """A template exceeds a limit."""


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that transformers gives to templates, with a limit on steps.

    For one rendering: the steps are counted here.
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(
            # Constants are not computed when a template is compiled: they may be large, too.
            optimized=False,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        self._n_steps = 0
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        self.filters["tojson"] = _to_json

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Let each step of a loop, and each call of a macro, be counted."""
        found = super()._parse(source, name, filename)
        for node in found.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            if isinstance(node, nodes.For) and node.test is not None:
                raise _LimitError("a loop with a condition, whose steps cannot be counted")
            # No name, which a template could give another meaning.
            call = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
            node.body.insert(0, nodes.Output([call]).set_lineno(node.lineno))
        return found

    def step(self) -> str:
        """Count a step; return what is written for it, nothing."""
        self._n_steps += 1
        if self._n_steps > _MOST_STEPS:
            raise _LimitError(f"it takes more than {_MOST_STEPS:,} steps")
        return ""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply, unless the result is large."""
        sizes = [len(x) if isinstance(x, str | list | tuple) else abs(x) for x in (left, right)]
        if (sizes[0] * sizes[1] if operator == "*" else sizes[1] * 64) > _MOST_TEXT:
            raise _LimitError(f"{operator} would make a value of more than {_MOST_TEXT:,}")
        return super().call_binop(context, operator, left, right)


def _refuse(message: object) -> NoReturn:
    raise _RefusedError(str(message))


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
