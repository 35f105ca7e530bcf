"""The report of a run: one page that needs nothing else.

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
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from transformer_xl.config import replace_file
from transformer_xl.train import figures
from transformer_xl.train.figures import number, series
from transformer_xl.train.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# HTML has no way to write these; a lone surrogate has no UTF-8 either.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the folder of a run that has ended.

    Figures need matplotlib; without it the page has the tables.

    Returns:
        Path of the page.

    Raises:
        OSError: A file of the run is missing, or the page cannot be written.
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
    """What a run has written at its end; nothing in place of a sample that it did not write.

    Args:
        folder: The run folder.

    Raises:
        OSError: A file is missing or cannot be read.
        DataError: A line of ``metrics.jsonl`` is damaged.
    """

    def __init__(self, folder: Path) -> None:
        results = json.loads((folder / "results.json").read_bytes())
        records = read_metrics(folder / "metrics.jsonl")
        self.notes: list[str] = []
        self.train = [record for record in records if record.get("kind") == "train"]
        self.valid = [record for record in records if record.get("kind") == "valid"]
        self.test = results["test"]
        self.curve = sorted(results["memory_curve"], key=lambda row: row["mem_len"])
        sizes = {"gzip -9": "gzip_bits_per_byte", "xz -9e": "xz_bits_per_byte"}
        self.baselines = {name: results[key] for name, key in sizes.items() if key in results}
        sample = folder / "sample.json"
        self.sample = json.loads(sample.read_bytes()) if sample.is_file() else {}
        self.environment = json.loads((folder / "environment.json").read_bytes())
        self.recipe_text = (folder / "recipe.toml").read_text(encoding="utf-8")
        self.recipe = tomllib.loads(self.recipe_text)
        self.trained_mem_len = number(self.recipe.get("model", {}), "mem_len")


def _draw(run: Run) -> dict[str, str]:
    """Return each figure that can be drawn as SVG, by name."""
    drawings: dict[str, tuple[str, Callable[["Figure"], object]]] = {}
    if any(len(series(records, "bits_per_token")[0]) for records in (run.train, run.valid)):
        draw = partial(figures.draw_loss, train=run.train, valid=run.valid)
        drawings["loss"] = "Bits per token over the steps", draw
    about = {"baselines": run.baselines, "trained": run.trained_mem_len}
    draw = partial(figures.draw_memory, curve=run.curve, **about)
    drawings["memory"] = "Bits over the memory length at evaluation", draw
    try:
        return {name: figures.as_svg(name, *drawing) for name, drawing in drawings.items()}
    except ImportError:
        run.notes.append("The figures need matplotlib: pip install 'transformer-xl[plot]'")
        return {}
