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
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from transformer_xl.config.files import replace_file
from transformer_xl.train import figures, memory_section, page
from transformer_xl.train.figures import Records, has, number
from transformer_xl.train.memory_section import Seen
from transformer_xl.train.metrics import read_metrics

_INSTALL = "pip install 'transformer-xl[plot]'"
_ROWS = 20


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
    body = [
        _training(run, drawn),
        _memory(run, drawn),
        memory_section.shown(run.seen, drawn) if run.seen else "",
        _sample(run.sample),
        page.folded("Recipe", f"<pre>{page.text(run.recipe_text)}</pre>", run.recipe_text),
        page.folded("Machine and versions", page.listed(run.environment), run.environment),
    ]
    template = Template(Path(__file__).with_name("report_template.html").read_text("utf-8"))
    html = template.substitute(
        title=page.text(run_dir.resolve().name),
        head=_head(run),
        body="\n".join(filter(None, body)),
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
        settings = self.recipe.get(section)
        return settings.get(name) if isinstance(settings, dict) else None

    @property
    def trained_mem_len(self) -> float | None:
        return number({"mem_len": self.setting("model", "mem_len")}, "mem_len")


def _read_run(run_dir: Path) -> _Run:
    if not run_dir.is_dir():
        raise FileNotFoundError(f"there is no run folder {run_dir}")
    run = _Run()

    def read(name: str, parse: Callable[[Path], Any], kind: type) -> Any:
        path = run_dir / name
        # What has no empty form is absent.
        missing = None if kind is Seen else kind()
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

    records = read("metrics.jsonl", read_metrics, list)
    run.train = [record for record in records if record.get("kind") == "train"]
    run.valid = [record for record in records if record.get("kind") == "valid"]
    results = read("results.json", parse_json, dict)
    test, curve = results.get("test"), results.get("memory_curve")
    run.test = test if isinstance(test, dict) else {}
    dynamic = results.get("dynamic")
    run.dynamic = dynamic if isinstance(dynamic, dict) else {}
    curve = [row for row in curve if isinstance(row, dict)] if isinstance(curve, list) else []
    curve = [row for row in curve if has([row], "mem_len") and has([row], "bits_per_token")]
    run.curve = sorted(curve, key=lambda row: row["mem_len"])
    for name, key in (("gzip -9", "gzip_bits_per_byte"), ("xz -9e", "xz_bits_per_byte")):
        value = number(results, key)
        if value is not None:
            run.baselines[name] = value
    run.seen = read("memory.json", memory_section.parse, Seen)
    run.sample = read("sample.json", parse_json, dict)
    run.environment = read("environment.json", parse_json, dict)
    run.recipe_text = read("recipe.toml", lambda path: path.read_text("utf-8", "replace"), str)
    run.recipe = read("recipe.toml", lambda path: tomllib.loads(path.read_text("utf-8")), dict)
    return run


def _figures(run: _Run) -> dict[str, str]:
    drawn = {}
    if has(run.train, "bits_per_token") or has(run.valid, "bits_per_token"):
        draw_loss = partial(figures.draw_loss, train=run.train, valid=run.valid)
        drawn["loss"] = figures.as_svg(
            "loss", "Bits per token over the steps", lambda figure: draw_loss(figure.subplots())
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
    if run.seen:
        drawn |= memory_section.figures_of(run.seen)
    return drawn


def _draw_memory(axes: Any, run: _Run) -> None:
    figures.draw_memory(axes, run.curve, run.baselines, run.trained_mem_len)


def _head(run: _Run) -> str:
    facts = []
    corpus = run.setting("data", "name") or run.setting("data", "path")
    facts += [corpus] if corpus else []
    for section, name, words in (
        ("data", "vocab", "{}"),
        ("model", "n_layer", "{} layers"),
        ("model", "d_model", "width {}"),
        ("model", "mem_len", "memory {}"),
        ("train", "segment_len", "segments of {}"),
        ("train", "batch_size", "{} streams"),
    ):
        value = run.setting(section, name)
        facts += [words.format(value)] if value is not None else []
    parts = [f'<p class="facts soft">{page.text(" · ".join(map(str, facts)))}</p>'] if facts else []
    verdict = _verdict(run)
    parts += [f'<p class="verdict">{page.text(verdict)}</p>'] if verdict else []
    tiles = [
        f"<li><b>{page.text(value)}</b><span>{page.text(words)}</span></li>"
        for value, words in _tiles(run)
    ]
    parts += [f'<ul class="tiles">{"".join(tiles)}</ul>'] if tiles else []
    parts += [f'<p class="soft">{page.text(note)}</p>' for note in run.notes]
    if len(parts) == 0:
        parts = ['<p class="soft">This run has measured nothing yet.</p>']
    return "\n".join(parts)


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


def _training(run: _Run, drawn: dict[str, str]) -> str:
    if not run.train and not run.valid:
        return ""
    shown = [
        page.figure(
            drawn.get("loss"), "Loss in bits per token: each record faint, their mean strong."
        ),
        page.figure(drawn.get("pace"), "Learning rate and speed."),
    ]
    pair = f'<div class="pair">{"".join(shown)}</div>' if any(shown) else ""
    table = f"<div>{_training_table(run)}</div>"
    numbers = page.folded("Numbers of the training", table, run.train or run.valid, not drawn)
    return f"<h2>Training</h2>\n{pair}\n{numbers}"


def _training_table(run: _Run) -> str:
    names = ("bits_per_token", "lr", "tokens_per_second")
    lines = {name: figures.series(run.train, name) for name in names}
    valid_steps, valid_bits = figures.series(run.valid, "bits_per_token")
    validated = dict(zip(valid_steps.tolist(), valid_bits.tolist(), strict=True))
    steps = sorted(validated) or sorted({record["step"] for record in run.train})
    if len(lines["bits_per_token"][1]):
        lines["bits_per_token"] = (
            lines["bits_per_token"][0],
            figures.smoothed(lines["bits_per_token"][1]),
        )
    best = min(validated, key=lambda step: validated[step]) if validated else None

    def at(name: str, step: int, form: str) -> str:
        known_steps, values = lines[name]
        index = int(np.searchsorted(known_steps, step, side="right")) - 1
        return format(values[index], form) if index >= 0 else ""

    rows = []
    for index in figures.thinned(len(steps), _ROWS):
        step = steps[index]
        valid = f"{validated[step]:.4f}" if step in validated else ""
        cells = [f"{step:,}", at("bits_per_token", step, ".4f"), valid, at("lr", step, ".3g")]
        rows.append(([*cells, at("tokens_per_second", step, ",.0f")], step == best))
    head = ["step", "training, bits per token", "validation", "learning rate", "tokens per second"]
    return page.table(head, rows, marks="the best validation")


def _memory(run: _Run, drawn: dict[str, str]) -> str:
    if not run.curve:
        return ""
    per_byte = figures.memory_unit(run.curve) == "bits_per_byte"
    split = run.curve[0].get("split", "test")
    rows = []
    for row in run.curve:
        bits = number(row, "bits_per_byte" if per_byte else "bits_per_token")
        values = [(row["mem_len"], ",.0f"), (bits, ".4f")]
        values += [(number(row, "ppl"), ",.3f"), (number(row, "tokens_per_second"), ",.0f")]
        cells = ["" if value is None else format(value, form) for value, form in values]
        rows.append((cells, row["mem_len"] == run.trained_mem_len))
    if per_byte:
        rows += [([name, f"{value:.4f}", "", ""], False) for name, value in run.baselines.items()]
    unit = "bits per byte" if per_byte else "bits per token"
    head = ["memory", unit, "perplexity", "tokens per second"]
    table = page.table(head, rows, marks="the memory of the training")
    caption = f"The same weights read the {split} text with more and more memory."
    return (
        "<h2>What the memory is worth</h2>\n"
        f'<div class="pair">{page.figure(drawn.get("memory"), caption)}'
        f'<div class="box">{table}</div></div>'
    )


def _sample(sample: dict[str, Any]) -> str:
    if not sample.get("text"):
        return ""
    settings = sample.get("settings")
    facts = ""
    if isinstance(settings, dict) and settings:
        named = " · ".join(f"{name} {value}" for name, value in settings.items())
        facts = f'<p class="soft">{page.text(named)}</p>\n'
    prompt, text = page.text(sample.get("prompt", "")), page.text(sample["text"])
    return f'<h2>What it writes</h2>\n{facts}<pre class="box sample"><b>{prompt}</b>{text}</pre>'
