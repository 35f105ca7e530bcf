"""Running a task: the texts, the trainings, the measurements, a table."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from transformer_xl.config import Config, autocast, checksum, load_recipe, pick_device, replace_file
from transformer_xl.data import load_vocab
from transformer_xl.errors import DataError, InputError
from transformer_xl.model import Lengths, load_model
from transformer_xl.tasks.task import Measured, SelfTrainingTask, Task, Trained
from transformer_xl.train import train

RESULTS_FILE = "results.json"
TABLE_FILE = "results.md"
_ABOUT_FILE = "about.json"
"""In the folder of the texts: of which task, from which data."""
_PREPARED, _INCOMPLETE = "data", "data.incomplete"
_UNREADABLE = (KeyError, TypeError, IndexError, UnicodeError)
"""Errors of programs that read other data than they expect."""
_RESAMPLES = 9_999


def run_task(
    task: Task,
    source: Path | None,
    out: Path,
    *,
    models: Sequence[str] = ("txl",),
    seeds: Sequence[int] = (1,),
    splits: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Prepare the data of a task, train models on them, and measure them beside the baselines.

    What an earlier call in the same folder has made is not made again; a training that was stopped
    goes on. ``results.json`` holds what one call has measured, so that models, seeds and splits of
    an earlier call must be named, too.

    Args:
        task: The task.
        source: Its data as they are published. None: the task makes them.
        out: The folder of the texts (``data``), the run folders and the results.
        models: Names among ``task.models``, or recipe files: of one training, or of each of those
            of a :class:`~transformer_xl.tasks.task.SelfTrainingTask`.
        seeds: Seeds of the trainings.
        splits: The splits to measure; None: those of the task.
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
    splits = task.splits if splits is None else splits
    _require_distinct([Path(name).stem for name in models], "models", "a file name")
    _require_distinct(seeds, "seeds", "a seed")
    if models and not seeds:
        raise InputError("there is no seed: give at least one, or no models")
    _require_all_named(out, models, seeds, splits)
    folder = prepared(task, source, out, say)
    found: dict[str, dict[str, list[Measured]]] = {}

    def note(name: str, who: str, split: str, parts: Sequence[Measured]) -> None:
        measured = joined(parts)
        say(_line(who, split, measured))
        _require_finite(who, split, measured)
        found.setdefault(name, {}).setdefault(split, []).append(measured)

    for split in splits:
        by_part: dict[str, list[Measured]] = {}
        for part in task.parts:
            for name, measured in task.baselines(folder / part, split):
                by_part.setdefault(name, []).append(measured)
        for name, measured in by_part.items():
            note(name, name, split, measured)
    names = [*found]
    for name, recipes in stages.items():
        for seed in seeds:
            by_split: dict[str, list[Measured]] = {split: [] for split in splits}
            for part in task.parts:
                run = out / f"{Path(name).stem}-{seed}"
                trained = _trained(task, recipes, source or folder, folder, run, seed, part, say)
                for split in splits:
                    with autocast(trained.config.train.precision, trained.model.device):
                        by_split[split].append(task.measure(trained, folder / part, split))
                    if part:
                        say(_line(f"{name}, seed {seed}, {part}", split, by_split[split][-1]))
            for split, measured in by_split.items():
                note(name, f"{name}, seed {seed}", split, measured)
    results = {
        "task": task.name,
        "seeds": [*seeds],
        "baselines": {name: _rows(found, name) for name in names},
        "models": {name: _rows(found, name) for name in stages},
    }
    replace_file(out / RESULTS_FILE, _json(results, indent=1))
    replace_file(out / TABLE_FILE, table(task, results).encode())
    return results


def _json(content: Any, indent: int | None = None) -> bytes:
    return (json.dumps(content, indent=indent, allow_nan=False) + "\n").encode()


def _require_finite(name: str, split: str, measured: Measured) -> None:
    for metric, value in measured.metrics.items():
        if not math.isfinite(value):
            raise DataError(
                f"{name}, {split}: {metric} is {value}, no figure: the training has diverged, or "
                "there is nothing to measure; leave it out, or change its recipe or the data"
            )


def _require_distinct(values: Sequence[Any], what: str, key: str) -> None:
    """Require that no two trainings have the same run folder."""
    twice = [x for n, x in enumerate(values) if x in values[:n]]
    if twice:
        raise InputError(
            f"{what}: {twice[0]} is there twice, and {key} names a run folder: give each once, or "
            "under another name"
        )


def _require_all_named(
    out: Path, models: Sequence[str], seeds: Sequence[int], splits: Sequence[str]
) -> None:
    """Require that the results of an earlier call are measured again, not lost."""
    path = out / RESULTS_FILE
    if not path.is_file():
        return
    try:
        known = json.loads(path.read_bytes())
        earlier = {
            "models": {Path(name).stem: name for name in known["models"]},
            "seeds": {x: x for x in known["seeds"]} if known["models"] else {},
            "splits": {x: x for rows in known["models"].values() for x in rows},
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not of txl task: give another --out") from error
    named = {"models": {Path(name).stem for name in models}, "seeds": seeds, "splits": splits}
    for what, values in earlier.items():
        lost = [str(name) for key, name in values.items() if key not in named[what]]
        if lost:
            raise InputError(
                f"{path} has what an earlier call measured with the {what} {', '.join(lost)}, "
                "which would be lost: name them, too (what is trained is not trained again), or "
                "give another --out"
            )


def prepared(task: Task, source: Path | None, out: Path, say: Callable[[str], None]) -> Path:
    """Return the folder with the texts of a task, written if it is not there.

    If the data have changed since, it is written anew, unless there are runs that have read it.

    Raises:
        OSError: A file is missing or cannot be written.
        InputError, DataError: The data are not those of the task, or the folder has other texts.
    """
    folder, writing = out / _PREPARED, out / _INCOMPLETE
    source = None if source is None else source.resolve()
    about = {
        "task": task.name,
        "source": None if source is None else str(source),
        "data": task.identity(source),
        "version": task.version,
    }
    if folder.is_dir() and _is_prepared(folder, json.loads(_json(about)), task.reads):
        return folder
    _begin(writing)
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
    replace_file(writing / _ABOUT_FILE, _json(about))
    if folder.exists():
        rmtree(folder)
    writing.rename(folder)
    return folder


def _begin(folder: Path) -> None:
    """Make a new folder, without what an interrupted call may have left."""
    if folder.exists():
        rmtree(folder)
    folder.mkdir(parents=True)


def _is_prepared(folder: Path, about: dict[str, Any], reads: Sequence[str]) -> bool:
    """Return whether a folder holds the texts of these data; False: they may be written anew."""
    try:
        known = json.loads((folder / _ABOUT_FILE).read_bytes())
        task, source = known["task"], known["source"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder} is not of txl task: give another --out") from error
    if (task, source) != (about["task"], about["source"]):
        raise InputError(
            f"{folder} holds the texts of task {task} from {source}, not of {about['task']} from "
            f"{about['source']}: give another --out"
        )
    # An earlier version may have noted files that the task does not read.
    if isinstance(data := known.get("data"), dict):
        is_read = {x: x in about["data"] or any(fnmatch(x, y) for y in reads) for x in data}
        known["data"] = {x: data[x] for x in data if is_read[x]}
    if known == about:
        return True
    inside = (x for x in folder.parent.iterdir() if x.is_dir())
    if runs := [x for x in inside if x.name not in (_PREPARED, _INCOMPLETE)]:
        before, now = known.get("data", {}), about["data"]
        changed = [x for x in {**before, **now} if before.get(x) != now.get(x)]
        what = f"{', '.join(changed)} of {source or task}" if changed else "the program"
        raise InputError(
            f"{folder} was prepared from other data, or otherwise ({what} changed since), and "
            f"{min(runs)} may have read it: give another --out"
        )
    return False


def _recipes(task: Task, name: str) -> list[Config]:
    names: Sequence[str] | None = task.models.get(name)
    if name.endswith(".toml"):
        names = [name] * (task.n_trainings if isinstance(task, SelfTrainingTask) else 1)
    if names is None:
        raise InputError(
            f"task {task.name} has no model {name!r}: choose among {', '.join(task.models)}, or "
            "give a recipe file"
        )
    recipes = [load_recipe(each) for each in names]
    # A model that labels examples reads them as one that is measured.
    for recipe in recipes if isinstance(task, SelfTrainingTask) else recipes[-1:]:
        unused = {f"eval.{x}": getattr(recipe.eval, x) for x in ("window", "dynamic", "ext_len")}
        for setting, value in {**unused, "model.ext_len": recipe.model.ext_len}.items():
            if value:
                raise InputError(
                    f"{setting}={value} of model {name}: task {task.name} reads its examples "
                    "through the memory, and would be measured without it: leave it out"
                )
    return recipes


def _trained(
    task: Task,
    recipes: Sequence[Config],
    source: Path,
    folder: Path,
    out: Path,
    seed: int,
    part: str,
    say: Callable[[str], None],
) -> Trained:
    """Train by one recipe after the other; return the last model.

    The first ``task.n_shared`` read the texts of ``folder``, the others, of which the last is
    always one, those of a part in it, or what :meth:`SelfTrainingTask.pseudo_label` writes.
    """
    run, n_shared = None, min(task.n_shared, len(recipes) - 1)
    for n, recipe in enumerate(recipes):
        own = "" if n < n_shared else part
        data, before = folder / own, run
        run = out / own / f"stage_{n + 1}"
        if before is not None and isinstance(task, SelfTrainingTask):
            prepared, data = data, out / own / f"stage_{n + 1}_data"
            _pseudo_label(task, before, recipes[n - 1], source, prepared, data, n, say)
            before = None
        config = _fitted(recipe, data, before, seed)
        say(f"training {run}")
        train(config, run, quiet=True, reports=False)
    assert run is not None
    return _loaded(run, recipes[-1])


def _pseudo_label(
    task: SelfTrainingTask,
    run: Path,
    config: Config,
    source: Path,
    prepared: Path,
    folder: Path,
    n: int,
    say: Callable[[str], None],
) -> None:
    """Write the data of the next training, if the folder does not hold them.

    Raises:
        ValueError: It holds those of another model.
    """
    trained = _loaded(run, config)
    files = sorted((run / "model" / "best").glob("*.safetensors"))
    weights = {path.name: checksum(path) for path in files}
    about = _json({"weights": weights, "lengths": trained.lengths, "version": task.version})
    if folder.is_dir():
        path = folder / _ABOUT_FILE
        if not (path.is_file() and path.read_bytes() == about):
            raise InputError(
                f"{folder} was not labelled by the model in {run}, or otherwise than now: give "
                "another --out"
            )
        return
    say(f"labelling {folder}")
    writing = folder.with_name(f"{folder.name}.incomplete")
    _begin(writing)
    with autocast(config.train.precision, trained.model.device):
        task.pseudo_label(trained, source, prepared, writing, n)
    replace_file(writing / _ABOUT_FILE, about)
    writing.rename(folder)


def _loaded(run: Path, config: Config) -> Trained:
    model = load_model(run).to(pick_device())
    settings = config.eval.lengths_after(config.train.segment_len)
    lengths = Lengths.of(model.config, **settings)
    has_text = config.data.vocab != "features"
    vocab = load_vocab(run / "model" / "best") if has_text else None
    return Trained(model, vocab, config, lengths)


def joined(parts: Sequence[Measured]) -> Measured:
    """Return what was measured on all parts of a task: mean metrics, and all scores."""
    names = dict.fromkeys(name for x in parts for name in x.metrics)
    metrics = {
        name: float(np.mean([x.metrics[name] for x in parts if name in x.metrics]))
        for name in names
    }
    scores = [x.scores for x in parts if x.scores is not None]
    return Measured(metrics, np.concatenate(scores) if len(scores) == len(parts) else None)


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


def _rows(found: dict[str, dict[str, list[Measured]]], name: str) -> dict[str, Any]:
    """Return by split the metrics of each seed, and how a baseline or model compares with others.

    ``above`` are the p-values of paired tests, one-sided, against each other method: how likely at
    least as large a mean difference would be if signs of the differences were random.
    """
    rows = {}
    for split, own in found[name].items():
        rows[split] = {"seeds": [x.metrics for x in own]}
        above = {}
        for other, theirs in found.items():
            if other != name and split in theirs:
                p = paired_p(own, theirs[split])
                above |= {} if p is None else {other: p}
        rows[split]["above"] = above
    return rows


def paired_p(own: Sequence[Measured], others: Sequence[Measured]) -> float | None:
    """Return the p-value of a paired permutation test of mean scores; None without scores.

    The scores of several seeds are averaged first.
    """
    scores = [[x.scores for x in side if x.scores is not None] for side in (own, others)]
    if not all(scores):
        return None
    ours, theirs = (np.mean(side, axis=0) for side in scores)
    difference = ours - theirs
    # Sums of the same numbers in another order are equal up to rounding.
    least = difference.sum() - 1e-12 * np.abs(difference).sum()
    draw = np.random.default_rng(0)
    n_above = 0
    for _ in range(_RESAMPLES):
        signs = draw.integers(0, 2, size=len(difference), dtype=np.int8) * 2 - 1
        n_above += bool(signs @ difference >= least)
    return (n_above + 1) / (_RESAMPLES + 1)


def _line(name: str, split: str, measured: Measured) -> str:
    values = "   ".join(f"{key} {x:.4g}" for key, x in measured.metrics.items())
    return f"{name}, {split}: {values}"


def table(task: Task, results: dict[str, Any]) -> str:
    """Return a table in Markdown of the first metric: mean, and the range over seeds."""
    methods = {**results["baselines"], **results["models"]}
    splits = [*dict.fromkeys(split for rows in methods.values() for split in rows)]
    lines = [f"{task.title}: {task.metric}", "", f"| | {' | '.join(splits)} |"]
    lines.append("|---" * (1 + len(splits)) + "|")
    for name, rows in methods.items():
        cells = []
        for split in splits:
            values = [next(iter(x.values())) for x in rows.get(split, {}).get("seeds", [])]
            cell = f"{np.mean(values):.4g}" if values else "-"
            if len(values) > 1:
                cell += f" ({min(values):.4g} to {max(values):.4g})"
            cells.append(cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
