"""The report of a run: one page that needs nothing else, from whatever the run folder holds.

======================  =======================================================================
``metrics.jsonl``       the training: ``bits_per_token``, ``lr`` and ``tokens_per_second``
``results.json``        ``{"test": result, "memory_curve": [result, ...], "dynamic": result,
                        "gzip_bits_per_byte": x, "xz_bits_per_byte": y}``, the settings and the
                        checksum of the text; a result is what ``txl eval`` prints
``memory.json``         what the memory does: :class:`Seen`
``sample.json``         ``{"prompt": ..., "text": ..., "settings": {...}}``; the text goes on
                        where the prompt ends
``recipe.toml``         the settings
``environment.json``    machine and versions
======================  =======================================================================
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from transformer_xl.config import replace_file
from transformer_xl.train import figures
from transformer_xl.train.figures import number, series
from transformer_xl.train.metrics import read_metrics
from transformer_xl.train.seen import MEMORY_FILE

Row = tuple[list[str], bool]
"""Cells of a table, and whether they stand out."""
_ROWS = 20
# HTML has no way to write these; a lone surrogate has no UTF-8 either.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_LEVELS = 9
"""Shades of a token, without none at all."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Place = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Loss = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1.01)]
_NOT_EMPTY = msgspec.Meta(min_length=1)


class Span(msgspec.Struct):
    """The mean loss of neighbouring places, which are counted from 1, in nats."""

    first: _Place
    last: _Place
    nll: _Loss


class LossCurve(msgspec.Struct):
    """The loss by place in the segment, with one length of memory; spans of places grow."""

    mem_len: _Count
    spans: Annotated[list[Span], _NOT_EMPTY]


class FromStart(LossCurve):
    """The loss by how many tokens a text has already, the memory empty at its start."""

    # None if all completions are in the rest that is shorter than a piece.
    spans: list[Span]
    pieces: _Count


class Shares(msgspec.Struct):
    """How much of each layer's attention is at some distances."""

    first: _Count
    last: _Count
    shares: Annotated[list[_Share], msgspec.Meta(min_length=1, max_length=10_000)]


class Attention(msgspec.Struct):
    """The text before one token, what its prediction takes of each token, shares of distances."""

    nll: _Loss
    nll_without_memory: _Loss
    texts: list[str]
    predicted: str
    shares: Annotated[list[_Share], _NOT_EMPTY]
    direct: Annotated[list[Shares], _NOT_EMPTY]
    through: Annotated[list[Shares], _NOT_EMPTY]

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.shares):
            raise ValueError(f"{len(self.texts)} texts have {len(self.shares)} shares")
        if len({len(each.shares) for each in (*self.direct, *self.through)}) > 1:
            raise ValueError("not all distances have shares of the same layers")

    def shaded(self) -> Iterator[tuple[int, str]]:
        """Yield the text with its shades; the root of a share, to tell small ones apart."""
        most = max(self.shares) or 1.0
        levels = (round(_LEVELS * (share / most) ** 0.5) for share in self.shares)
        for level, tokens in groupby(zip(levels, self.texts, strict=True), key=itemgetter(0)):
            yield level, "".join(token for _, token in tokens)


class Seen(msgspec.Struct):
    """What ``memory.json`` holds; the first loss curve is that without memory."""

    split: str
    tokens: _Count
    segment_len: _Place
    mem_len: _Count
    in_segment: Annotated[list[LossCurve], _NOT_EMPTY]
    from_start: FromStart
    attention: Attention | None
    """None where a model has no attention."""


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
        training=_training_rows(run),
        unit=figures.memory_unit(run.curve).replace("_", " "),
        memory=_memory_rows(run),
        places=_place_rows(run.seen) if run.seen else None,
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
        self.test, self.dynamic = _part(results, "test"), _part(results, "dynamic")
        rows = results.get("memory_curve")
        rows = [x for x in rows if isinstance(x, dict)] if isinstance(rows, list) else []
        names = "mem_len", "bits_per_token"
        rows = [x for x in rows if all(number(x, name) is not None for name in names)]
        self.curve = sorted(rows, key=lambda row: row["mem_len"])
        sizes = {"gzip -9": "gzip_bits_per_byte", "xz -9e": "xz_bits_per_byte"}
        sizes = {name: number(results, key) for name, key in sizes.items()}
        self.baselines = {name: value for name, value in sizes.items() if value is not None}
        self.seen: Seen | None = self._read(MEMORY_FILE, _parse_seen, None)
        self.sample = self._read("sample.json", _parse_object, {})
        self.environment = self._read("environment.json", _parse_object, {})
        self.recipe_text = self._read("recipe.toml", partial(_text, errors="replace"), "")
        self.recipe = self._read("recipe.toml", lambda path: tomllib.loads(_text(path)), {})
        self.trained_mem_len = number(_part(self.recipe, "model"), "mem_len")

    def _read(self, name: str, parse: Callable[[Path], Any], missing: Any) -> Any:
        try:
            return parse(self._folder / name)
        except FileNotFoundError:
            return missing
        except (OSError, ValueError, RecursionError) as error:
            self.notes.append(f"{name} could not be read: {error}")
            return missing


def _text(path: Path, errors: str = "strict") -> str:
    return path.read_text("utf-8", errors)


def _parse_object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not a dict")
    return content


def _parse_seen(path: Path) -> Seen:
    return msgspec.json.decode(path.read_bytes(), type=Seen)


def _part(record: dict[str, Any], name: str) -> dict[str, Any]:
    part = record.get(name)
    return part if isinstance(part, dict) else {}


def _draw(run: Run) -> dict[str, str]:
    """Return each figure that can be drawn as SVG, by name."""
    rates = [len(series(run.train, name)[0]) for name in ("lr", "tokens_per_second")]
    bits = [len(series(x, "bits_per_token")[0]) for x in (run.train, run.valid)]
    drawings: dict[str, tuple[str, Callable[[Any], object]]] = {}
    if any(bits):
        draw = partial(figures.draw_loss, train=run.train, valid=run.valid)
        drawings["loss"] = "Bits per token over the steps", draw
    if any(rates):
        draw = partial(figures.draw_pace, train=run.train)
        drawings["pace"] = "Learning rate and tokens per second over the steps", draw
    if run.curve:
        about = {"baselines": run.baselines, "trained": run.trained_mem_len}
        draw = partial(figures.draw_memory, curve=run.curve, **about)
        drawings["memory"] = "Bits over the memory length at evaluation", draw
    if seen := run.seen:
        curves = {"in_segment": seen.in_segment, "from_start": seen.from_start}
        label = "Bits by place in the segment, and by tokens since the start of the text"
        drawings["places"] = label, partial(figures.draw_places, **curves)
    if seen and (attention := seen.attention):
        for name, spans, title in (
            ("direct", attention.direct, "each layer's own attention, all predictions"),
            ("through", attention.through, "what comes out of each layer, this prediction"),
        ):
            draw = partial(figures.draw_attention, spans=spans, title=title)
            drawings[name] = f"Shares of distances by layer: {title}", draw
    sizes = {"places": (7.4, 3.2)}
    try:
        return {
            name: figures.as_svg(name, label, draw, sizes.get(name, figures.SIZE))
            for name, (label, draw) in drawings.items()
        }
    except ImportError:
        run.notes.append("The figures need matplotlib: pip install 'transformer-xl[plot]'")
        return {}


def _training_rows(run: Run) -> list[Row]:
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


def _memory_rows(run: Run) -> list[Row]:
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


def _place_rows(seen: Seen) -> tuple[list[str], list[Row]]:
    """Return head and rows of the table of losses by place."""
    names = [f"in the segment, memory {row.mem_len:,}" for row in seen.in_segment]
    names.append(f"from the start, memory {seen.from_start.mem_len:,}")
    by_place: dict[tuple[int, int], dict[str, str]] = {}
    for name, curve in zip(names, (*seen.in_segment, seen.from_start), strict=True):
        for span in curve.spans:
            by_place.setdefault((span.first, span.last), {})[name] = f"{span.nll:.4f}"
    rows = []
    for (first, last), cells in sorted(by_place.items()):
        place = f"{first:,} to {last:,}" if last > first else f"{first:,}"
        rows.append(([place, *(cells.get(name, "") for name in names)], False))
    return ["place, nats per token", *names], rows
