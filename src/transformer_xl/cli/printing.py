"""Output of the command line: results to stdout, everything else to stderr."""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


def say(text: str) -> None:
    """Print a message to stderr."""
    print(text, file=sys.stderr)


def show(values: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a result: a table, or one line of JSON."""
    if as_json:
        print(json.dumps(_without_infinity(values), allow_nan=False))
        return
    width = max([20, *map(len, values)])
    for key, value in values.items():
        shown = f"{value:.4f}" if isinstance(value, float) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{name} {x}" for name, x in value.items())
        print(f"{key:{width}} {shown}")


def _without_infinity(value: Any) -> Any:
    # JSON has no infinity, which a perplexity may be.
    if isinstance(value, Mapping):
        return {key: _without_infinity(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
