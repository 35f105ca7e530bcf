"""The chat template beside a tokenizer, in the files of transformers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from transformer_xl.config.files import read_small_file

TEMPLATE_FILE = "chat_template.jinja"
_SETTINGS_FILE = "tokenizer_config.json"


class StoredTemplate(NamedTuple):
    """A template, and the special tokens that it can name."""

    path: Path
    """The file that has it."""
    source: str
    """Jinja; empty: there is none."""
    tokens: dict[str, str]
    """``bos_token`` and ``eos_token``, as far as the settings of the tokenizer name them."""


def stored_template(folder: Path) -> StoredTemplate:
    """Read ``chat_template.jinja``, or the template in ``tokenizer_config.json``.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged.
    """
    path, template = folder / _SETTINGS_FILE, folder / TEMPLATE_FILE
    try:
        about = json.loads(read_small_file(path)) if path.exists() else {}
        about = about if isinstance(about, dict) else {}
        source = _default(about.get("chat_template"))
        if template.exists():
            path = template
            source = read_small_file(template).decode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; restore it from a copy") from error
    tokens = {name: _token(about.get(name)) for name in ("bos_token", "eos_token")}
    return StoredTemplate(path, source, {name: x for name, x in tokens.items() if x})


def _token(value: object) -> str:
    """Return the text of a special token, which may be stored with its settings; "": none."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _default(value: Any) -> str:
    """Return the template, of several the one called ``default``; "": there is none."""
    for each in value if isinstance(value, list) else ():
        if isinstance(each, dict) and each.get("name") == "default":
            value = each.get("template")
    return value if isinstance(value, str) else ""
