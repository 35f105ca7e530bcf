"""The report of a run: one page that needs nothing else, from whatever the run folder holds.

======================  =======================================================================
``metrics.jsonl``       the training: ``bits_per_token``, ``lr`` and ``tokens_per_second``
``results.json``        ``{"test": result, "memory_curve": [result, ...], "dynamic": result,
                        "gzip_bits_per_byte": x, "xz_bits_per_byte": y}``; a result is what
                        ``txl eval`` prints
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from transformer_xl.config.files import replace_file
from transformer_xl.train import figures, memory_section
from transformer_xl.train.figures import Records, has, number
from transformer_xl.train.memory_section import Row, Seen
from transformer_xl.train.metrics import read_metrics

_INSTALL = "pip install 'transformer-xl[plot]'"
_ROWS = 20
_TRAINING_FORMS = {"bits_per_token": ".4f", "lr": ".3g", "tokens_per_second": ",.0f"}
# HTML has no way to write these; a lone surrogate has no UTF-8 either.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run folder, from the parts of the run that are there.

    A part that cannot be read is named on the page. Figures need matplotlib; without it the page
    has the tables.

    Args:
        run_dir: The run folder.

    Returns:
        Path of the page.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    run = _read_run(run_dir)
    try:
        drawn = _figures(run)
    except ImportError:
        drawn = {}
        run.notes.append(f"The figures need matplotlib: {_INSTALL}")
    seen = run.seen
    html = _template().render(
        title=run_dir.resolve().name,
        run=run,
        drawn=drawn,
        facts=_facts(run),
        verdict=_verdict(run),
        tiles=[*_tiles(run)],
        training=_training_rows(run),
        unit=figures.memory_unit(run.curve).replace("_", " "),
        memory=_memory_rows(run),
        seen=seen,
        places=memory_section.places(seen) if seen else None,
        settings=_part(run.sample, "settings"),
        environment=json.dumps(run.environment, indent=2, ensure_ascii=False),
    )
    path = run_dir / "report.html"
    replace_file(path, html.encode("utf-8"))
    return path


def plot_curves(run_dir: Path, png_path: Path) -> Path:
    """Save the loss and the memory curve of a run side by side as one PNG picture.

    Args:
        run_dir: The run folder.
        png_path: Where the picture goes.

    Returns:
        Path of the picture.

    Raises:
        FileNotFoundError: The folder is missing, or what could be drawn.
        RuntimeError: matplotlib is missing.
    """
    run = _read_run(run_dir)
    draws: list[Callable[..., object]] = []
    if has(run.train, "bits_per_token") or has(run.valid, "bits_per_token"):
        draws.append(partial(figures.draw_loss, train=run.train, valid=run.valid))
    if run.curve:
        draws.append(partial(_draw_memory, run=run))
    if not draws:
        raise FileNotFoundError(f"{run_dir} holds no metrics.jsonl or results.json to draw")
    try:
        picture = figures.as_png(draws)
    except ImportError as error:
        raise RuntimeError(f"pictures need matplotlib: {_INSTALL}") from error
    png_path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(png_path, picture)
    return png_path


def _template() -> Template:
    def written(value: object) -> object:
        # What a macro has made is escaped already.
        return value if hasattr(value, "__html__") else _UNWRITABLE.sub("\ufffd", str(value))

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=written,
        trim_blocks=True,
        keep_trailing_newline=True,
    ).get_template("report_template.html")


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

    def setting(self, section: str, name: str) -> Any:
        """A setting of the recipe, or None."""
        return _part(self.recipe, section).get(name)

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

    def read(name: str, parse: Callable[[Path], Any], kind: type, missing: Any) -> Any:
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

    records = read("metrics.jsonl", read_metrics, list, [])
    run.train = [record for record in records if record.get("kind") == "train"]
    run.valid = [record for record in records if record.get("kind") == "valid"]
    results = read("results.json", parse_json, dict, {})
    run.test, run.dynamic = _part(results, "test"), _part(results, "dynamic")
    curve = results.get("memory_curve")
    curve = [row for row in curve if isinstance(row, dict)] if isinstance(curve, list) else []
    curve = [row for row in curve if has([row], "mem_len") and has([row], "bits_per_token")]
    run.curve = sorted(curve, key=lambda row: row["mem_len"])
    for name, key in (("gzip -9", "gzip_bits_per_byte"), ("xz -9e", "xz_bits_per_byte")):
        if (value := number(results, key)) is not None:
            run.baselines[name] = value
    run.seen = read("memory.json", memory_section.parse, Seen, None)
    run.sample = read("sample.json", parse_json, dict, {})
    run.environment = read("environment.json", parse_json, dict, {})
    text = read("recipe.toml", lambda path: path.read_text("utf-8", "replace"), str, "")
    run.recipe_text = text
    run.recipe = read("recipe.toml", lambda path: tomllib.loads(path.read_text("utf-8")), dict, {})
    return run


def _figures(run: _Run) -> dict[str, str]:
    drawn = {}
    if has(run.train, "bits_per_token") or has(run.valid, "bits_per_token"):
        drawn["loss"] = figures.as_svg(
            "loss",
            "Bits per token over the steps",
            lambda figure: figures.draw_loss(figure.subplots(), run.train, run.valid),
        )
    if has(run.train, "lr", "tokens_per_second"):
        drawn["pace"] = figures.as_svg(
            "pace",
            "Learning rate and tokens per second over the steps",
            partial(figures.draw_pace, train=run.train),
        )
    if run.curve:
        drawn["memory"] = figures.as_svg(
            "memory",
            "Bits over the memory length at evaluation",
            lambda figure: _draw_memory(figure.subplots(), run),
        )
    return drawn | memory_section.figures_of(run.seen) if run.seen else drawn


def _draw_memory(axes: Any, run: _Run) -> None:
    figures.draw_memory(axes, run.curve, run.baselines, run.trained_mem_len)


def _facts(run: _Run) -> list[str]:
    """What was trained on what, in a few words each."""
    corpus = run.setting("data", "name") or run.setting("data", "path")
    return [str(corpus)] * bool(corpus) + [
        words.format(value)
        for section, name, words in (
            ("data", "vocab", "{}"),
            ("model", "n_layer", "{} layers"),
            ("model", "d_model", "width {}"),
            ("model", "mem_len", "memory {}"),
            ("train", "segment_len", "segments of {}"),
            ("train", "batch_size", "{} streams"),
        )
        if (value := run.setting(section, name)) is not None
    ]


def _verdict(run: _Run) -> str:
    """One sentence that says how good the model is, for one who knows gzip."""
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


def _tiles(run: _Run) -> Iterable[tuple[str, str]]:
    split = run.test.get("split", "test")
    for name, words, form in (
        ("bits_per_byte", "bits per byte", ".3f"),
        ("bits_per_token", "bits per token", ".3f"),
        ("ppl", "perplexity per token", ",.2f"),
    ):
        value = number(run.test, name)
        if value is not None:
            yield format(value, form), f"{words}, {split} text"
    learned = number(run.dynamic, "bits_per_token")
    if learned is not None:
        yield f"{learned:.3f}", f"bits per token, {split} text, learning as it reads"
    steps, bits = figures.series(run.valid, "bits_per_token")
    if len(bits):
        best = int(np.argmin(bits))
        yield f"{bits[best]:.3f}", f"bits per token, best validation, step {steps[best]:,}"
    if run.train:
        yield f"{run.train[-1]['step']:,}", "training steps"
    _, speeds = figures.series(run.train, "tokens_per_second")
    if len(speeds):
        yield f"{np.median(speeds):,.0f}", "tokens per second in training"


def _training_rows(run: _Run) -> list[Row]:
    lines = {name: figures.series(run.train, name) for name in _TRAINING_FORMS}
    valid_steps, valid_bits = figures.series(run.valid, "bits_per_token")
    validated = dict(zip(valid_steps.tolist(), valid_bits.tolist(), strict=True))
    steps = sorted(validated) or sorted({record["step"] for record in run.train})
    known_steps, bits = lines["bits_per_token"]
    if len(bits):
        lines["bits_per_token"] = known_steps, figures.smoothed(bits)
    best = min(validated, key=lambda step: validated[step]) if validated else None

    def at(name: str, step: int) -> str:
        known_steps, values = lines[name]
        index = int(np.searchsorted(known_steps, step, side="right")) - 1
        return format(values[index], _TRAINING_FORMS[name]) if index >= 0 else ""

    rows = []
    for index in figures.thinned(len(steps), _ROWS):
        step = steps[index]
        valid = f"{validated[step]:.4f}" if step in validated else ""
        bits, *others = (at(name, step) for name in lines)
        rows.append(([f"{step:,}", bits, valid, *others], step == best))
    return rows


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
