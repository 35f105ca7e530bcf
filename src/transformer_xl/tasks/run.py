"""Running a task: the texts, the trainings, the measurements, a table."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import TypedDict, TypeVar

import msgspec
import numpy as np

from transformer_xl.config import Config, Precision, load_recipe, pick_device, replace_file
from transformer_xl.data import load_vocab
from transformer_xl.errors import DataError, InputError
from transformer_xl.model import Lengths, load_model
from transformer_xl.studies import markdown_table
from transformer_xl.tasks.task import Measured, Task, Trained
from transformer_xl.train import train

RESULTS_FILE = "results.json"
TABLE_FILE = "results.md"
_ABOUT_FILE = "about.json"
"""In the folder of the texts: of which task, from which data."""
Known = TypeVar("Known")
_UNREADABLE = (KeyError, TypeError, IndexError, UnicodeError)
"""Errors of programs that read other data than they expect."""
_RESAMPLES = 9_999


class Results(TypedDict):
    """The contents of ``results.json``."""

    task: str
    seeds: list[int]
    baselines: dict[str, dict[str, "Row"]]
    models: dict[str, dict[str, "Row"]]


class Row(TypedDict):
    """What was measured of a method on a split."""

    seeds: list[dict[str, float]]
    """The metrics of each seed."""
    above: dict[str, float]
    """The p-values of paired tests, one-sided, against each other method: how likely at least as
    large a mean difference would be if signs of the differences were random."""


def run_task(
    task: Task,
    source: Path | None,
    out: Path,
    *,
    models: Sequence[str] = ("txl",),
    seeds: Sequence[int] = (1,),
    splits: Sequence[str] = ("valid", "test"),
    say: Callable[[str], None] = lambda line: None,
) -> Results:
    """Prepare the data of a task, train models on them, and measure them beside the baselines.

    What an earlier call in the same folder has made is not made again; a training that was stopped
    goes on. ``results.json`` holds what one call has measured, so that models, seeds and splits of
    an earlier call must be named, too.

    Args:
        task: The task.
        source: Its data as they are published. None: the task makes them.
        out: The folder of the texts (``data``), the run folders and the results.
        models: Names among ``task.models``, or recipe files of one training.
        seeds: Seeds of the trainings.
        splits: The splits to measure.
        say: Called with lines that tell the progress.

    Returns:
        The contents of ``results.json``: ``baselines`` and ``models``, each by name and split.

    Raises:
        OSError: A file is missing or cannot be written.
        InputError: There is no such model, data are missing, or earlier results would be lost.
        DataError: The data are not those of the task, or a figure is not finite.
    """
    if (source is None) != task.makes_data:
        has = "makes its data: leave them out" if task.makes_data else "needs its data"
        data = "" if task.makes_data else " DATA"
        raise InputError(f"task {task.name} {has}: txl task {task.name}{data}")
    stages = {name: _recipes(task, name) for name in models}
    _require_all_named(out, models, seeds, splits)
    folder = prepare_data(task, source, out, say)
    results: dict[str, dict[str, list[Measured]]] = {}

    def note(name: str, title: str, split: str, measured: Measured) -> None:
        values = "   ".join(f"{key} {x:.4g}" for key, x in measured.metrics.items())
        say(f"{title}, {split}: {values}")
        for metric, value in measured.metrics.items():
            if not math.isfinite(value):
                raise DataError(
                    f"{title}, {split}: {metric} is {value}, no figure: the training has diverged, "
                    "or there is nothing to measure; leave it out, or change its recipe or the data"
                )
        results.setdefault(name, {}).setdefault(split, []).append(measured)

    for split in splits:
        for name, measured in task.baselines(folder, split):
            note(name, name, split, measured)
    baselines = [*results]
    for name, recipes in stages.items():
        for seed in seeds:
            trained = _trained(recipes, folder, out / f"{Path(name).stem}-{seed}", seed, say)
            for split in splits:
                with Precision(trained.config.train.precision, trained.model.device).autocast():
                    measured = task.measure(trained, folder, split)
                note(name, f"{name}, seed {seed}", split, measured)
    content: Results = {
        "task": task.name,
        "seeds": [*seeds],
        "baselines": {name: _rows(results, name) for name in baselines},
        "models": {name: _rows(results, name) for name in stages},
    }
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    replace_file(out / RESULTS_FILE, text.encode())
    replace_file(out / TABLE_FILE, table(task, content).encode())
    return content


class _Earlier(msgspec.Struct):
    """What is read of the results of an earlier call."""

    models: dict[str, dict[str, object]]
    """By model and split."""
    seeds: list[int]


class _About(msgspec.Struct):
    """What prepared texts were made from."""

    task: str
    source: str | None
    data: object = None
    """What :meth:`~transformer_xl.tasks.task.Task.identity` returned, as in JSON."""


def _read(path: Path, kind: type[Known]) -> Known:
    """Read what an earlier call has written.

    Raises:
        InputError: The file is missing or something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not of txl task: give another --out") from error


def _require_all_named(
    out: Path, models: Sequence[str], seeds: Sequence[int], splits: Sequence[str]
) -> None:
    """Require run folders of different names, and that no results of an earlier call are lost."""
    names = [Path(name).stem for name in models]
    for what, values in (("models", names), ("seeds", seeds)):
        if twice := [x for n, x in enumerate(values) if x in values[:n]]:
            raise InputError(
                f"{what}: {twice[0]} is there twice, and names a run folder: give each once, or "
                "under another name"
            )
    if models and not seeds:
        raise InputError("there is no seed: give at least one, or no models")
    if not (path := out / RESULTS_FILE).is_file():
        return
    known = _read(path, _Earlier)
    earlier: dict[str, tuple[Iterable[object], Sequence[object]]] = {
        "models": ([Path(name).stem for name in known.models], names),
        "seeds": (known.seeds if known.models else (), seeds),
        "splits": (dict.fromkeys(x for rows in known.models.values() for x in rows), splits),
    }
    for what, (before, now) in earlier.items():
        if lost := ", ".join(str(x) for x in before if x not in now):
            raise InputError(
                f"{path} has what an earlier call measured with the {what} {lost}, which would be "
                "lost: name them, too (what is trained is not trained again), or give another --out"
            )


def prepare_data(task: Task, source: Path | None, out: Path, say: Callable[[str], None]) -> Path:
    """Write the texts of a task, unless they are there and up to date; return their folder.

    If the data have changed since, the folder is replaced, unless there are runs that have read it.

    Args:
        task: The task.
        source: The data from elsewhere. None: the task makes them.
        out: The folder of the results, in which that of the texts is.
        say: Called with a line if the texts are written.

    Raises:
        OSError: A file is missing or cannot be written.
        DataError: The data are not those of the task.
        InputError: The folder is not of a task, or there are runs that have read other data.
    """
    folder, writing = out / "data", out / "data.incomplete"
    source = None if source is None else source.resolve()
    about = _About(task.name, None if source is None else str(source), task.identity(source))
    about = msgspec.json.decode(msgspec.json.encode(about), type=_About)
    if folder.is_dir():
        if (known := _read(folder / _ABOUT_FILE, _About)) == about:
            return folder
        inside = (x for x in out.iterdir() if x.is_dir())
        if runs := [str(x) for x in inside if x not in (folder, writing)]:
            raise InputError(
                f"{folder} was prepared from other data or otherwise (task {known.task}, "
                f"{known.source or 'made'}), and {min(runs)} may have read it: give another --out"
            )
    # What an interrupted call may have left.
    rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    say(f"preparing the data of {task.name}")
    try:
        task.prepare(source or writing, writing)
    except _UNREADABLE as error:
        if source is None:
            raise
        raise DataError(
            f"{source} is not what task {task.name} reads ({', '.join(task.reads)}; "
            f"docs/tasks): {type(error).__name__}: {error}"
        ) from error
    replace_file(writing / _ABOUT_FILE, msgspec.json.encode(about))
    rmtree(folder, ignore_errors=True)
    writing.rename(folder)
    return folder


def _recipes(task: Task, name: str) -> list[Config]:
    names = [name] if name.endswith(".toml") else task.models.get(name)
    if names is None:
        raise InputError(
            f"task {task.name} has no model {name!r}: choose among {', '.join(task.models)}, or "
            "give a recipe file"
        )
    recipes = [load_recipe(each) for each in names]
    last = recipes[-1]
    unused = {f"eval.{x}": getattr(last.eval, x) for x in ("window", "dynamic", "ext_len")}
    for setting, value in {**unused, "model.ext_len": last.model.ext_len}.items():
        if value:
            raise InputError(
                f"{setting}={value} of model {name}: task {task.name} reads its examples through "
                "the memory, and would be measured without it: leave it out"
            )
    return recipes


def _trained(
    recipes: Sequence[Config], folder: Path, out: Path, seed: int, say: Callable[[str], None]
) -> Trained:
    """Train by one recipe after the other on the texts of a folder; return the last model."""
    run = None
    for n, recipe in enumerate(recipes, 1):
        before, run = run, out / f"stage_{n}"
        say(f"training {run}")
        train(_fitted(recipe, folder, before, seed), run, quiet=True, reports=False)
    assert run is not None
    config = recipes[-1]
    model = load_model(run).to(pick_device())
    settings = config.eval.lengths_after(config.train.segment_len)
    has_text = config.data.vocab != "features"
    vocab = load_vocab(run / "model" / "best") if has_text else None
    return Trained(model, vocab, config, Lengths.of(model.config, **settings))


def _fitted(recipe: Config, folder: Path, before: Path | None, seed: int) -> Config:
    """Return a recipe with its texts, its seed, and the model of the run before it."""
    data, training = recipe.data, replace(recipe.train, seed=seed)
    names = ("path", "valid_path", "test_path", "tokenizer")
    paths = {x: getattr(data, x) and str(folder / getattr(data, x)) for x in names}
    if before is not None:
        training = replace(training, init_from=str(before))
        # Which vocabulary was made, and how, is said by the recipe of the first training.
        data = replace(data, vocab_size=None, vocab_from=None)
        paths["tokenizer"] = str(before / "model" / "best")
    return replace(recipe, data=replace(data, **paths), train=training)


def _rows(results: dict[str, dict[str, list[Measured]]], name: str) -> dict[str, Row]:
    """Return the metrics of a method by split, and how it compares with others."""
    rows: dict[str, Row] = {}
    for split, measured in results[name].items():
        others = {x: by_split[split] for x, by_split in results.items() if split in by_split}
        above = {x: paired_p(measured, other) for x, other in others.items() if x != name}
        above = {x: p for x, p in above.items() if p is not None}
        rows[split] = {"seeds": [x.metrics for x in measured], "above": above}
    return rows


def paired_p(one: Sequence[Measured], other: Sequence[Measured]) -> float | None:
    """Return the p-value of a paired permutation test of mean scores; None without scores.

    The scores of several seeds are averaged first.
    """
    scores = [[x.scores for x in side if x.scores is not None] for side in (one, other)]
    if not all(scores):
        return None
    difference = np.subtract(*(np.mean(side, axis=0) for side in scores))
    # Sums of the same numbers in another order are equal up to rounding.
    least = difference.sum() - 1e-12 * np.abs(difference).sum()
    draw = np.random.default_rng(0)
    n_above = 0
    for _ in range(_RESAMPLES):
        signs = draw.integers(0, 2, size=len(difference), dtype=np.int8) * 2 - 1
        n_above += bool(signs @ difference >= least)
    return (n_above + 1) / (_RESAMPLES + 1)


def table(task: Task, results: Results) -> str:
    """Return a table in Markdown of the first metric: mean, and the range over seeds."""
    methods = {**results["baselines"], **results["models"]}
    splits = [*dict.fromkeys(split for rows in methods.values() for split in rows)]

    def cell(row: Row | None) -> str:
        values = [next(iter(x.values())) for x in row["seeds"]] if row else []
        spread = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else ""
        return f"{np.mean(values):.4g}{spread}" if values else "-"

    lines = [[name, *(cell(rows.get(x)) for x in splits)] for name, rows in methods.items()]
    text = markdown_table(["", *splits], lines, n_texts=1 + len(splits))
    return f"{task.title}: {task.metric}\n\n{text}\n"
