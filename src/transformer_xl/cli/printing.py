"""Output of the command line: results to stdout, everything else to stderr."""

import json
import sys
from collections.abc import Mapping

from transformer_xl.errors import SettingsError


def say(text: str) -> None:
    """Print a message to stderr."""
    print(text, file=sys.stderr)


def exclude(**options: object) -> None:
    """Require that at most one of several options is set.

    Args:
        options: The values by the names of the options, with ``__`` for the dot of a section.

    Raises:
        SettingsError: Two are.
    """
    names = [f"--{name.replace('__', '.')}" for name, value in options.items() if value]
    if len(names) > 1:
        raise SettingsError(f"{names[0]} and {names[1]} exclude each other: leave out one of them")


def show(values: Mapping[str, object], *, as_json: bool) -> None:
    """Print a result: a table, or one line of JSON."""
    if as_json:
        try:
            line = json.dumps(values, allow_nan=False)
        except ValueError:
            # JSON has no infinity, which a perplexity may be: null.
            line = json.dumps(json.loads(json.dumps(values), parse_constant=lambda name: None))
        print(line)
        return
    width = max([20, *map(len, values)])
    for key, value in values.items():
        shown = f"{value:.4f}" if isinstance(value, float) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{name} {x}" for name, x in value.items())
        print(f"{key:{width}} {shown}")
