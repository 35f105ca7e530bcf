"""Files of results: JSON in which each row is a line, small and readable in a diff."""

import json
from pathlib import Path
from typing import Any

from transformer_xl.config.files import replace_file

_WIDTH = 100


def write_result_file(path: Path, content: Any) -> None:
    """Write results as JSON, in one piece."""
    replace_file(path, f"{json_text(content)}\n".encode())


def rounded(x: Any, digits: int = 6) -> Any:
    """Return JSON values with so many digits of each number: no more than it means."""
    if isinstance(x, float):
        return float(f"{x:.{digits}g}")
    if isinstance(x, list):
        return [rounded(each, digits) for each in x]
    if isinstance(x, dict):
        return {name: rounded(each, digits) for name, each in x.items()}
    return x


def json_text(content: Any, depth: int = 0) -> str:
    """Return JSON in which what fits into a line, and each list of plain values, is a line."""
    flat = json.dumps(content)
    is_nested = isinstance(content, (dict, list)) and bool(content)
    parts = content.values() if isinstance(content, dict) else content
    if not is_nested or depth + len(flat) <= _WIDTH:
        return flat
    if isinstance(content, list) and not any(isinstance(x, (dict, list)) for x in parts):
        return flat
    lines = [json_text(x, depth + 1) for x in parts]
    if isinstance(content, dict):
        lines = [f"{json.dumps(name)}: {x}" for name, x in zip(content, lines, strict=True)]
    space = " " * depth
    first, last = ("{", "}") if isinstance(content, dict) else ("[", "]")
    return f"{first}\n{space} " + f",\n{space} ".join(lines) + f"\n{space}{last}"
