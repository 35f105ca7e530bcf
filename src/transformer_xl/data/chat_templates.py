"""The chat template beside a tokenizer, in the files of transformers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from transformer_xl.config.files import read_small_file

_TEMPLATE_FILE = "chat_template.jinja"
_SETTINGS_FILE = "tokenizer_config.json"
_TOKENS = ("bos_token", "eos_token")


class StoredTemplate(NamedTuple):
    """A template, and the special tokens that it can name."""

    path: Path
    """The file that has it."""
    source: str | None
    """Jinja; None: there is none."""
    tokens: dict[str, str]
    """``bos_token`` and ``eos_token``, as far as the settings of the tokenizer name them."""


def stored_template(folder: Path) -> StoredTemplate:
    """Read ``chat_template.jinja``, or the template in ``tokenizer_config.json``.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged.
    """
    path, template = folder / _SETTINGS_FILE, folder / _TEMPLATE_FILE
    try:
        about = json.loads(read_small_file(path)) if path.exists() else {}
        if not isinstance(about, dict):
            raise ValueError("it is no JSON object")
        tokens = {name: _token(name, about.get(name)) for name in _TOKENS}
        source = _default(about.get("chat_template"))
        if template.exists():
            path = template
            source = read_small_file(template).decode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: {error}; restore it from a copy, or delete it"
        ) from error
    return StoredTemplate(path, source, {name: x for name, x in tokens.items() if x})


def store_template(folder: Path, template: StoredTemplate) -> None:
    """Write a template and its tokens to a folder; other settings of a tokenizer are kept.

    Raises:
        OSError: A file cannot be written.
    """
    if template.source is None:
        return
    (folder / _TEMPLATE_FILE).write_bytes(template.source.encode())
    path = folder / _SETTINGS_FILE
    about = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps(template.tokens | about, indent=2) + "\n", encoding="utf-8")


def _token(name: str, value: object) -> str:
    """Return the text of a special token, which may be stored with its settings; "": none."""
    value = value.get("content") if isinstance(value, dict) else value
    return _text(name, "" if value is None else value)


def _default(value: Any) -> str | None:
    """Return the template, of several the one called ``default``; None: there is none."""
    if isinstance(value, list):
        own = [x for x in value if isinstance(x, dict) and x.get("name") == "default"]
        value = own[-1].get("template") if own else None
    return None if value is None else _text("chat_template", value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {str(value)[:50]!r} and no text")
    # Half of a surrogate pair, as JSON can have it, is no text.
    value.encode()
    return value
