"""Files of results, and plots."""

from collections.abc import Mapping
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import Any

from transformer_xl.cli.printing import say
from transformer_xl.config import replace_file, require, require_new_file

_PLOT = "pip install 'transformer-xl[plot]'"


def write_results(path: Path, result: Mapping[str, Any], table: str) -> None:
    """Write results to ``path`` with the suffix .json, and their table with .md."""
    replace_file(path.with_suffix(".json"), (dumps(result, indent=2) + "\n").encode())
    replace_file(path.with_suffix(".md"), table.encode())


def can_plot() -> bool:
    """Whether matplotlib is installed; say if it is not."""
    if not find_spec("matplotlib"):
        say(f"no plot: it requires {_PLOT}")
    return bool(find_spec("matplotlib"))


def require_plot(path: Path) -> None:
    """Require that a plot can be written to a file.

    Raises:
        OSError: The file cannot be written.
        RuntimeError: matplotlib is missing.
        SettingsError: It is neither .png nor .svg.
    """
    if not find_spec("matplotlib"):
        raise RuntimeError(f"plotting to {path} requires matplotlib: {_PLOT}")
    require(path.suffix in (".png", ".svg"), f"--plot {path} must end in .png or .svg")
    require_new_file(path, force=True)
