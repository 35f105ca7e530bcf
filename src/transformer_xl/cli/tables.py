"""Files of results, and plots."""

from collections.abc import Mapping
from importlib.util import find_spec
from json import dumps
from pathlib import Path

from transformer_xl.cli.printing import say
from transformer_xl.config import replace_file


def write_results(path: Path, result: Mapping[str, object], table: str) -> None:
    """Write results to ``path`` with the suffix .json, and their table with .md."""
    replace_file(path.with_suffix(".json"), (dumps(result, indent=2) + "\n").encode())
    replace_file(path.with_suffix(".md"), table.encode())


def can_plot() -> bool:
    """Whether matplotlib is installed; say if it is not."""
    if not find_spec("matplotlib"):
        say("no plot: it requires pip install 'transformer-xl[plot]'")
    return bool(find_spec("matplotlib"))
