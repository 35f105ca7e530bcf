"""The report of a run: one page that needs nothing else, from whatever the run folder holds.

======================  =======================================================================
``metrics.jsonl``       the training: ``bits_per_token``, ``lr`` and ``tokens_per_second``
``results.json``        ``{"test": result, "memory_curve": [result, ...], "dynamic": result,
                        "gzip_bits_per_byte": x, "xz_bits_per_byte": y}``, the settings and the
                        checksum of the text; a result is what ``txl eval`` prints
``memory.json``         what the memory does; see :mod:`transformer_xl.train.seen`
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from transformer_xl.config.files import replace_file
from transformer_xl.train import figures, memory_section
from transformer_xl.train.figures import Records, has, number, series
from transformer_xl.train.memory_section import Row, Seen
from transformer_xl.train.metrics import read_metrics

_INSTALL = "pip install 'transformer-xl[plot]'"
_ROWS = 20
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
    run = _read_run(run_dir)
    drawn = {}
    try:
        for name, (label, draw) in _figures(run).items():
            drawn[name] = figures.as_svg(name, label, draw)
        if run.seen:
            drawn |= memory_section.figures_of(run.seen)
    except ImportError:
        run.notes.append(f"The figures need matplotlib: {_INSTALL}")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        # What a macro has made is escaped already.
        finalize=lambda x: x if hasattr(x, "__html__") else _UNWRITABLE.sub("\ufffd", str(x)),
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    html = environment.get_template("report_template.html").render(
        title=run_dir.resolve().name,
        run=run,
        drawn=drawn,
        facts=_facts(run),
        verdict=_verdict(run),
        tiles=_tiles(run),
        training=_training_rows(run),
        unit=figures.memory_unit(run.curve).replace("_", " "),
        memory=_memory_rows(run),
        seen=run.seen,
        places=memory_section.places(run.seen) if run.seen else None,
        settings=_part(run.sample, "settings"),
        environment=json.dumps(run.environment, indent=2, ensure_ascii=False),
    )
    path = run_dir / "report.html"
    replace_file(path, html.encode("utf-8"))
    return path


def plot_curves(run_dir: Path, png_path: Path) -> Path:
    """Save the loss and the memory curve of a run side by side as one PNG picture.

    Returns:
        Path of the picture.

    Raises:
        FileNotFoundError: The folder is missing, or what could be drawn.
        RuntimeError: matplotlib is missing.
    """
    curves = {name: draw for name, (_, draw) in _figures(_read_run(run_dir)).items()}
    draws = [curves[name] for name in ("loss", "memory") if name in curves]
    if not draws:
        raise FileNotFoundError(f"{run_dir} holds no metrics.jsonl or results.json to draw")

    def draw_all(figure: Any) -> None:
        parts = figure.subfigures(1, len(draws), squeeze=False)[0]
        for part, draw in zip(parts, draws, strict=True):
            draw(part)

    try:
        picture = figures.rendered("png", draw_all, (figures.SIZE[0] * len(draws), figures.SIZE[1]))
    except ImportError as error:
        raise RuntimeError(f"pictures need matplotlib: {_INSTALL}") from error
    png_path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(png_path, picture)
    return png_path


@dataclass
class _Run:
    """What a run folder holds; what is missing is empty."""

    train: Records = ()
    valid: Records = ()
    test: dict[str, Any] = field(default_factory=dict)
    dynamic: dict[str, Any] = field(default_factory=dict)
    curve: Records = ()
    baselines: dict[str, float] = field(default_factory=dict)
    seen: Seen | None = None
    sample: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    recipe_text: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def trained_mem_len(self) -> float | None:
        return number(_part(self.recipe, "model"), "mem_len")


def _part(record: dict[str, Any], name: str) -> dict[str, Any]:
    part = record.get(name)
    return part if isinstance(part, dict) else {}


def _read_run(run_dir: Path) -> _Run:
    if not run_dir.is_dir():
        raise FileNotFoundError(f"there is no run folder {run_dir}")
    run = _Run()

    def read(name: str, parse: Callable[[Path], Any], missing: Any, kind: type = dict) -> Any:
        path = run_dir / name
        if not path.exists():
            return missing
        try:
            content = parse(path)
            if not isinstance(content, kind):
                raise ValueError(f"it holds a {type(content).__name__}, not a {kind.__name__}")
        except (OSError, ValueError, RecursionError) as error:
            run.notes.append(f"{name} could not be read: {error}")
            return missing
        return content

    def parse_json(path: Path) -> Any:
        return json.loads(path.read_bytes())

    records = read("metrics.jsonl", read_metrics, [], list)
    run.train = [record for record in records if record.get("kind") == "train"]
    run.valid = [record for record in records if record.get("kind") == "valid"]
    results = read("results.json", parse_json, {})
    run.test, run.dynamic = _part(results, "test"), _part(results, "dynamic")
    curve = results.get("memory_curve")
    curve = [row for row in curve if isinstance(row, dict)] if isinstance(curve, list) else []
    curve = [row for row in curve if has([row], "mem_len") and has([row], "bits_per_token")]
    run.curve = sorted(curve, key=lambda row: row["mem_len"])
    for name, key in (("gzip -9", "gzip_bits_per_byte"), ("xz -9e", "xz_bits_per_byte")):
        if (value := number(results, key)) is not None:
            run.baselines[name] = value
    run.seen = read("memory.json", memory_section.parse, None, Seen)
    run.sample = read("sample.json", parse_json, {})
    run.environment = read("environment.json", parse_json, {})
    run.recipe_text = read("recipe.toml", lambda path: path.read_text("utf-8", "replace"), "", str)
    run.recipe = read("recipe.toml", lambda path: tomllib.loads(path.read_text("utf-8")), {})
    return run


def _figures(run: _Run) -> dict[str, tuple[str, Callable[[Any], object]]]:
    """Return for each figure that can be drawn what a screen reader says, and what draws it."""
    found: dict[str, tuple[str, Callable[[Any], object]]] = {}
    if has(run.train, "bits_per_token") or has(run.valid, "bits_per_token"):
        found["loss"] = (
            "Bits per token over the steps",
            lambda figure: figures.draw_loss(figure.subplots(), run.train, run.valid),
        )
    if has(run.train, "lr", "tokens_per_second"):
        found["pace"] = (
            "Learning rate and tokens per second over the steps",
            lambda figure: figures.draw_pace(figure, run.train),
        )
    if run.curve:
        found["memory"] = (
            "Bits over the memory length at evaluation",
            lambda figure: figures.draw_memory(
                figure.subplots(), run.curve, run.baselines, run.trained_mem_len
            ),
        )
    return found


def _facts(run: _Run) -> list[str]:
    """Return what was trained on what, in a few words each."""
    data, model, train = (_part(run.recipe, name) for name in ("data", "model", "train"))
    facts = (
        (data.get("name") or data.get("path") or None, "{}"),
        (data.get("vocab"), "{}"),
        (model.get("n_layer"), "{} layers"),
        (model.get("d_model"), "width {}"),
        (model.get("mem_len"), "memory {}"),
        (train.get("segment_len"), "segments of {}"),
        (train.get("batch_size"), "{} streams"),
    )
    return [words.format(value) for value, words in facts if value is not None]


def _verdict(run: _Run) -> str:
    """Say in a sentence how good the model is, for one who knows gzip."""
    bits = number(run.test, "bits_per_byte")
    if bits is None:
        return ""
    verdict = f"The model needs {bits:.3f} bits for a byte of unseen text"
    compared = [
        f"{abs(1 - bits / value):.0%} {'less' if bits <= value else 'more'} than {name}"
        for name, value in run.baselines.items()
        if value > 0
    ]
    # Without a comparison: finish.py says when there is none.
    return f"{verdict}: {' and '.join(compared)}." if compared else f"{verdict}."


def _tiles(run: _Run) -> list[tuple[str, str]]:
    """Return the main numbers, and what they are."""
    split, (steps, bits) = run.test.get("split", "test"), series(run.valid, "bits_per_token")
    _, speeds = series(run.train, "tokens_per_second")
    best = int(np.argmin(bits)) if len(bits) else None
    tiles = [
        (number(run.test, "bits_per_byte"), ".3f", f"bits per byte, {split} text"),
        (number(run.test, "bits_per_token"), ".3f", f"bits per token, {split} text"),
        (number(run.test, "ppl"), ",.2f", f"perplexity per token, {split} text"),
        (
            number(run.dynamic, "bits_per_token"),
            ".3f",
            f"bits per token, {split} text, learning as it reads",
        ),
    ]
    if best is not None:
        tiles.append((bits[best], ".3f", f"bits per token, best validation, step {steps[best]:,}"))
    if run.train:
        tiles.append((run.train[-1]["step"], ",", "training steps"))
    if len(speeds):
        tiles.append((float(np.median(speeds)), ",.0f", "tokens per second in training"))
    return [(format(value, form), words) for value, form, words in tiles if value is not None]


def _training_rows(run: _Run) -> list[Row]:
    """Return the rows of the table of the training: at validations, or else at some records."""
    valid_steps, valid_bits = series(run.valid, "bits_per_token")
    validated = dict(zip(valid_steps.tolist(), valid_bits.tolist(), strict=True))
    steps = sorted(validated) or sorted({record["step"] for record in run.train})
    best = min(validated, key=lambda step: validated[step]) if validated else None
    steps = [steps[index] for index in figures.thinned(len(steps), _ROWS)]

    def column(name: str, form: str) -> list[str]:
        known_steps, values = series(run.train, name)
        if name == "bits_per_token" and len(values):
            values = figures.smoothed(values)
        # The last record up to each step.
        indices = np.searchsorted(known_steps, steps, side="right") - 1
        return [format(values[index], form) if index >= 0 else "" for index in indices]

    columns = (
        [f"{step:,}" for step in steps],
        column("bits_per_token", ".4f"),
        [f"{validated[step]:.4f}" if step in validated else "" for step in steps],
        column("lr", ".3g"),
        column("tokens_per_second", ",.0f"),
    )
    rows = zip(*columns, strict=True)
    return [([*cells], step == best) for step, cells in zip(steps, rows, strict=True)]


def _memory_rows(run: _Run) -> list[Row]:
    unit = figures.memory_unit(run.curve)
    forms = {"mem_len": ",.0f", unit: ".4f", "ppl": ",.3f", "tokens_per_second": ",.0f"}
    rows = []
    for row in run.curve:
        values = ((number(row, name), form) for name, form in forms.items())
        cells = ["" if value is None else format(value, form) for value, form in values]
        rows.append((cells, row["mem_len"] == run.trained_mem_len))
    if unit == "bits_per_byte":
        rows += [([name, f"{value:.4f}", "", ""], False) for name, value in run.baselines.items()]
    return rows
