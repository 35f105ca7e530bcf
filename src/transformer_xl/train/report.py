"""The report of a run: one page that needs nothing else, from whatever the run folder holds.

======================  =======================================================================
``metrics.jsonl``       the training: ``bits_per_token``, ``lr`` and ``tokens_per_second``
``results.json``        ``{"test": result, "memory_curve": [result, ...],
                        "gzip_bits_per_byte": x, "xz_bits_per_byte": y}``, the settings and the
                        checksum of the text; a result is what ``txl eval`` prints
``sample.json``         ``{"prompt": ..., "text": ..., "settings": {...}}``; the text goes on
                        where the prompt ends
``recipe.toml``         the settings
``environment.json``    machine and versions
======================  =======================================================================
"""

import json
import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from transformer_xl.config import replace_file
from transformer_xl.train import figures
from transformer_xl.train.figures import number, series
from transformer_xl.train.metrics import read_metrics

# HTML has no way to write these; a lone surrogate has no UTF-8 either.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run folder, from the parts of the run that are there.

    A part that cannot be read is named on the page. Figures need matplotlib; without it the page
    has the tables.

    Returns:
        Path of the page.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    run = Run(run_dir)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        # What a macro has made is escaped already.
        finalize=lambda x: x if hasattr(x, "__html__") else _UNWRITABLE.sub("\ufffd", str(x)),
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    steps, bits = series(run.valid, "bits_per_token")
    _, speeds = series(run.train, "tokens_per_second")
    html = environment.get_template("report_template.html").render(
        title=run_dir.resolve().name,
        run=run,
        number=number,
        part=_part,
        drawn=_draw(run),
        best=(steps[bits.argmin()], bits.min()) if len(bits) else None,
        speed=np.median(speeds) if len(speeds) else None,
        unit=figures.memory_unit(run.curve),
        environment=json.dumps(run.environment, indent=2, ensure_ascii=False),
    )
    path = run_dir / "report.html"
    replace_file(path, html.encode("utf-8"))
    return path


class Run:
    """What a run folder holds; what is missing is empty, and what is damaged also in ``notes``.

    Args:
        folder: The run folder.

    Raises:
        FileNotFoundError: There is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no run folder {folder}")
        self._folder, self.notes = folder, []
        records = self._read("metrics.jsonl", read_metrics, [])
        self.train = [record for record in records if record.get("kind") == "train"]
        self.valid = [record for record in records if record.get("kind") == "valid"]
        results = self._read("results.json", _parse_object, {})
        self.test = _part(results, "test")
        rows = results.get("memory_curve")
        rows = [x for x in rows if isinstance(x, dict)] if isinstance(rows, list) else []
        names = "mem_len", "bits_per_token"
        rows = [x for x in rows if all(number(x, name) is not None for name in names)]
        self.curve = sorted(rows, key=lambda row: row["mem_len"])
        sizes = {"gzip -9": "gzip_bits_per_byte", "xz -9e": "xz_bits_per_byte"}
        sizes = {name: number(results, key) for name, key in sizes.items()}
        self.baselines = {name: value for name, value in sizes.items() if value is not None}
        self.sample = self._read("sample.json", _parse_object, {})
        self.environment = self._read("environment.json", _parse_object, {})
        text = self._read("recipe.toml", lambda path: path.read_bytes(), b"")
        self.recipe_text = text.decode("utf-8", "replace")
        self.recipe = self._read("recipe.toml", lambda _: tomllib.loads(text.decode()), {})
        self.trained_mem_len = number(_part(self.recipe, "model"), "mem_len")

    def _read(self, name: str, parse: Callable[[Path], Any], missing: Any) -> Any:
        try:
            return parse(self._folder / name)
        except FileNotFoundError:
            return missing
        except (OSError, ValueError, RecursionError) as error:
            self.notes.append(f"{name} could not be read: {error}")
            return missing


def _parse_object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not a dict")
    return content


def _part(record: dict[str, Any], name: str) -> dict[str, Any]:
    part = record.get(name)
    return part if isinstance(part, dict) else {}


def _draw(run: Run) -> dict[str, str]:
    """Return each figure that can be drawn as SVG, by name."""
    drawings: dict[str, tuple[str, Callable[[Any], object]]] = {}
    if any(len(series(records, "bits_per_token")[0]) for records in (run.train, run.valid)):
        draw = partial(figures.draw_loss, train=run.train, valid=run.valid)
        drawings["loss"] = "Bits per token over the steps", draw
    if run.curve:
        about = {"baselines": run.baselines, "trained": run.trained_mem_len}
        draw = partial(figures.draw_memory, curve=run.curve, **about)
        drawings["memory"] = "Bits over the memory length at evaluation", draw
    try:
        return {name: figures.as_svg(name, *drawing) for name, drawing in drawings.items()}
    except ImportError:
        run.notes.append("The figures need matplotlib: pip install 'transformer-xl[plot]'")
        return {}
