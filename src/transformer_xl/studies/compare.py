"""Models compared at equal cost: the same text and vocabulary, the same time, the same search.

Each contestant is a recipe. How many of its steps take the time of the comparison is measured in
turns (:mod:`transformer_xl.studies.pace`), so that no run depends on how busy the machine is. Its
learning rate is searched with short runs, then it is trained once with each seed. The short run
with the chosen learning rate and the long ones are two points of a curve over the training tokens,
both after a cooldown, between which losses at equal tokens and equal FLOPs are interpolated
(:mod:`transformer_xl.studies.standings`).
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    TrainConfig,
    load_recipe,
    locked,
    pick_device,
    pick_precision,
    recipe_names,
    replace_file,
    require,
)
from transformer_xl.data import prepare
from transformer_xl.errors import DataError, SettingsError
from transformer_xl.studies import require_predicted
from transformer_xl.studies.contestant import measured
from transformer_xl.studies.pace import paces, steps_in, with_others
from transformer_xl.studies.process import in_process
from transformer_xl.train import Diverged

PREFIX = "compare-"
"""Names of the recipes of contestants begin with it."""
_OTHERS = ("modern-xl",)
"""Recipes of contestants whose names do not."""
RUNS_FILE = "runs.json"
"""In the folder of a comparison: what was measured of each run."""
FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Factors of the learning rates of a recipe that are searched."""
EVALUATION_SHARE = 0.25
"""Share of the time of a training that an evaluation may take where it is limited."""
_LEAST_TOKENS = 2_000
"""Tokens on which a limited evaluation is made at least."""
_PACE_SHARE = 0.1
"""Share of the time of a run that measuring the pace of a contestant takes, about, at most."""
MOST_BEYOND = 3
"""How often the search goes on beyond them, while the lowest or highest rate is the best one."""
_NOT_DYNAMIC = {x.name: x.default for x in fields(EvalConfig) if x.name.startswith("dynamic")}
"""Defaults of the settings of dynamic evaluation, by name."""


def contestants() -> list[str]:
    """Return the names of the contestants that have a recipe in the package."""
    return [*_OTHERS, *(x.removeprefix(PREFIX) for x in recipe_names() if x.startswith(PREFIX))]


def load_contestants(names: Sequence[str]) -> dict[str, Config]:
    """Return the recipes of contestants.

    Args:
        names: Names of :func:`contestants`, of recipes, or recipe files, which go by their stems.

    Raises:
        FileNotFoundError: A recipe file does not exist.
        SettingsError: A name is unknown, two are the same, or a recipe is invalid.
    """
    recipes: dict[str, Config] = {}
    for name in names:
        recipe = f"{PREFIX}{name}" if f"{PREFIX}{name}" in recipe_names() else name
        stem = Path(name).stem
        if stem in recipes:
            raise SettingsError(f"models={' '.join(names)}: {stem} is given twice")
        try:
            recipes[stem] = load_recipe(recipe)
        except ValueError as error:
            raise SettingsError(f"{error}; contestants are {', '.join(contestants())}") from error
    return recipes


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is compared, and at which cost.

    Raises:
        SettingsError: A setting is out of range.
    """

    data: DataConfig
    """The text and the vocabulary of all."""
    models: Mapping[str, Config]
    """The recipes of the contestants by name; their own text is not used."""
    minutes: float = 20.0
    """Training time of each run."""
    seeds: tuple[int, ...] = (1,)
    factors: tuple[float, ...] = FACTORS
    """Factors of the learning rates to search, and beyond them while the lowest or highest is the
    best; one factor alone is not searched."""
    search_minutes: float | None = None
    """Training time of a run of the search; None: a quarter of ``minutes``."""
    jobs: int = 1
    """Runs at the same time; each has its share of the threads."""
    eval_tokens: int | None = None
    """Evaluate on this many tokens from the start of each split; None: on all."""
    has_short_evaluations: bool = False
    """Evaluate on fewer, if an evaluation would take more than a share of the search's time
    (:data:`EVALUATION_SHARE`) by the pace of the slowest contestant."""

    def __post_init__(self) -> None:
        require(bool(self.models), "models: give at least one contestant")
        is_once = len({*self.seeds}) == len(self.seeds) > 0
        require(is_once, f"seeds={self.seeds} must be different, and at least one")
        is_once = len({*self.factors}) == len(self.factors) > 0 and min(self.factors) > 0
        what = "must be above 0, different, and at least one"
        require(is_once, f"factors={self.factors} {what}")
        require(self.jobs >= 1, f"jobs={self.jobs} must be at least 1")
        for name, minutes in (("minutes", self.minutes), ("search_minutes", self.searched_minutes)):
            require(minutes > 0, f"{name}={minutes} must be above 0")
        for name, recipe in self.models.items():
            for setting in ("window", "max_steps"):
                x = getattr(recipe.eval, setting)
                why = "would measure it otherwise than the others: leave it out"
                require(x is None, f"{name}: eval.{setting}={x} {why}")
        require_predicted(self.eval_tokens)

    @property
    def searched_minutes(self) -> float:
        """Training time of a run of the search."""
        return self.minutes / 4 if self.search_minutes is None else self.search_minutes

    @property
    def n_runs(self) -> tuple[int, int]:
        """Runs of the search, with the given factors, and long ones."""
        n, has_search = len(self.models), len(self.factors) > 1
        return n * len(self.factors) * has_search, n * len(self.seeds)


def threads_of(jobs: int) -> int:
    """Return the threads of each of several runs at the same time."""
    return max(torch.get_num_threads() // jobs, 1)


class Run(msgspec.Struct, kw_only=True):
    """What was measured of a run."""

    model: str
    phase: str
    """``pace``, ``search`` or ``run``."""
    factor: float
    """Of the learning rates of the recipe."""
    seed: int
    digest: str
    """Identifies the settings and the text."""
    minutes: float
    found: dict[str, Any]
    """What :func:`~transformer_xl.studies.contestant.measured` returned, or ``failed``. Of a pace,
    the ``seconds`` of a step in each stage, and ``ceiling_gflops``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A run that is to be made."""

    model: str
    phase: str
    factor: float
    seed: int
    config: Config
    parent: Path
    """The folder of the comparison."""
    minutes: float
    threads: int
    eval_tokens: int | None
    is_detailed: bool
    """Whether all is measured, or the losses only."""
    checksums: Mapping[str, str]
    """Of the corpus."""

    @property
    def digest(self) -> str:
        """Identify the settings, the text, wherever that is, and the use of the machine."""
        return _digest(
            [self._trained, self.eval_tokens, _changed(self.config.eval), self.is_detailed]
        )

    @property
    def folder(self) -> Path:
        """The run folder, which a run with other settings does not share."""
        name = f"search_{self.factor:g}" if self.phase == "search" else f"seed_{self.seed}"
        return self.parent / self.model / f"{name}-{_digest(self._trained)}"

    def ended(self, found: dict[str, Any]) -> Run:
        """Return the run, of which something was measured."""
        about = {name: getattr(self, name) for name in Run.__struct_fields__ if name != "found"}
        return Run(**about, found=found)

    @property
    def _trained(self) -> list[Any]:
        config, device = self.config, pick_device()
        precision = pick_precision(config.train.precision, device)
        # Resolved: `auto` where that is bfloat16 is the same run as bfloat16 elsewhere.
        trained = _changed(replace(config.train, precision="auto"))
        settings = [_changed(config.model), trained, dict(self.checksums)]
        # Not part of the stored text. Left out where unset, for the digests of earlier versions.
        of_text = {"reset_at": config.data.reset_at, "completion_at": config.data.completion_at}
        used = {name: x for name, x in of_text.items() if x}
        return [*settings, self.threads, device.type, precision, *([used] if used else [])]


def _changed(section: ModelConfig | TrainConfig | EvalConfig) -> dict[str, Any]:
    """Return the settings that differ from their defaults: a later version may have more."""
    defaults = {field.name: field.default for field in fields(section)}
    return {name: x for name, x in asdict(section).items() if x != defaults[name]}


def _digest(settings: list[Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class Comparison:
    """Runs of a plan, in a folder.

    Args:
        plan: The plan.
        folder: Holds the runs, and what was measured of those that have ended, which are not made
            again: not even if their run folders are gone.
        say: Is told what is prepared, and what has been made.

    Attributes:
        corpus: The prepared text.
        runs: All runs that have ended, also those of other plans, and those that diverged.
        failed: Runs that failed otherwise in this process; the next one tries them again.

    Raises:
        DataError: The file of the runs is damaged, or the text cannot be read so.
    """

    def __init__(
        self, plan: Plan, folder: Path, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.plan, self.folder, self._say = plan, folder, say
        self.corpus = prepare(plan.data, say)
        self._eval_tokens = plan.eval_tokens
        self.failed: list[Run] = []
        self.runs: list[Run] = self._read()

    def search(self) -> list[Task]:
        """Return the runs of the search, as far as they are known: :meth:`search_of`."""
        tasks = [task for model in self.plan.models for task in self.search_of(model)]
        # The rates of the recipes first.
        return sorted(tasks, key=lambda task: abs(math.log(task.factor)))

    def search_of(self, model: str) -> list[Task]:
        """Return the runs of the search of a contestant, by factor.

        Once those of the plan have ended, and the best of them has the lowest or the highest rate,
        a further one, with the next rate beyond it, belongs to them, and so on up to
        :data:`MOST_BEYOND`. One that diverged is worse than all others.
        """
        factors, seed = sorted(self.plan.factors), self.plan.seeds[0]
        if len(factors) == 1:
            return []
        most = len(factors) + MOST_BEYOND
        while True:
            tasks = [self._task(model, "search", factor, seed) for factor in factors]
            runs = [self.done(task) for task in tasks]
            best = min(range(len(runs)), key=lambda n: valid_nll(runs[n]))
            if not all(runs) or len(runs) == most or 0 < best < len(runs) - 1:
                return tasks
            if best:
                factors.append(factors[-1] ** 2 / factors[-2])
            else:
                factors.insert(0, factors[0] ** 2 / factors[1])

    def final(self) -> Iterator[Task]:
        """Yield the runs with the chosen learning rates; a search must have ended."""
        for seed in self.plan.seeds:
            for model in self.plan.models:
                if (factor := self.factor(model)) is not None:
                    yield self._task(model, "run", factor, seed)

    def factor(self, model: str) -> float | None:
        """Return the factor of the best run of the search.

        None while a run is missing, as one that could not be made, or if all diverged.
        """
        if len(self.plan.factors) == 1:
            return self.plan.factors[0]
        runs = [self.done(task) for task in self.search_of(model)]
        best = min(runs, key=valid_nll)
        return best.factor if all(runs) and best and "valid" in best.found else None

    def done(self, task: Task) -> Run | None:
        """Return what was measured of a run, if it has ended."""
        key = _key(task)
        return next((run for run in self.runs if _key(run) == key), None)

    def planned(self) -> list[Run]:
        """Return the runs of the plan that have ended, in its order."""
        paces = [self._task(model, "pace") for model in self.plan.models]
        tasks = [*paces, *self.search(), *self.final()]
        return [run for task in tasks if (run := self.done(task))] + self.failed

    def add(self, runs: Iterable[Run]) -> None:
        """Add runs that are known from elsewhere, and write them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        held = f"another process is writing {self.folder / RUNS_FILE}; waiting for it"
        with locked(self.folder / f".{RUNS_FILE}.lock", held, self._say):
            # Another process may have written runs of its own since.
            for run in [*runs, *self._read()]:
                if all(_key(run) != _key(x) for x in self.runs):
                    self.runs.append(run)
            text = msgspec.json.format(msgspec.json.encode(self.runs), indent=1)
            replace_file(self.folder / RUNS_FILE, text + b"\n")

    def _read(self) -> list[Run]:
        path = self.folder / RUNS_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=list[Run])
        except FileNotFoundError:
            return []
        except msgspec.DecodeError as error:
            raise DataError(f"{path} is damaged, or no file of runs: {error}") from error

    def go(self) -> None:
        """Search the learning rates and train, seed by seed."""
        self._measure_paces()
        if self.plan.has_short_evaluations and self.plan.eval_tokens is None:
            self._eval_tokens = self._short_evaluation()
            if self._eval_tokens is not None:
                self._say(f"evaluating on {self._eval_tokens:,} tokens of each split, to save time")
        # What belongs to the search depends on what it has found.
        tasks: list[Task] = []
        while new := [task for task in self.search() if task not in tasks]:
            self._make(new)
            tasks += new
        self._make([*self.final()])

    def pace(self, model: str) -> Run | None:
        """Return the measured pace of a contestant."""
        return self.done(self._task(model, "pace"))

    def _short_evaluation(self) -> int | None:
        """Return on how many tokens an evaluation takes its share of the time; None: on all."""
        plan, speeds = self.plan, []
        for model, recipe in plan.models.items():
            if (pace := self.pace(model)) is not None:
                step = recipe.train.batch_size * recipe.train.segment_len
                speeds.append(step / pace.found["seconds"][-1])
        n = max(EVALUATION_SHARE * 60 * plan.searched_minutes * min(speeds), _LEAST_TOKENS)
        n = int(float(f"{n:.1e}"))
        return n if n < max(map(self.corpus.n_tokens, ("valid", "test"))) else None

    def _measure_paces(self) -> None:
        """Measure the seconds of a step of contestants whose pace is not known.

        All take part in the turns. Those that are known keep their pace, and so their runs; that of
        the others is scaled by how much faster or slower the known ones were measured.
        """
        models = self.plan.models
        known = {model: pace.found for model in models if (pace := self.pace(model))}
        if len(known) == len(models):
            return
        self._say("measuring the pace of each contestant, in turns")
        configs = {model: self._task(model, "pace").config for model in models}
        seconds = 60 * _PACE_SHARE * self.plan.minutes * len(configs)
        new, ceiling = in_process(threads_of(self.plan.jobs), paces, configs, seconds)
        for found in known.values():
            ceiling = found["ceiling_gflops"]
        all_paces = with_others({model: x["seconds"] for model, x in known.items()}, new)
        for model in [x for x in models if x not in known]:
            found = {"seconds": all_paces[model], "ceiling_gflops": float(f"{ceiling:.5g}")}
            self.add([self._task(model, "pace").ended(found)])
            self._say(f"{model}: {', '.join(f'{x:.4g}' for x in all_paces[model])} s a step")

    def _task(self, model: str, phase: str, factor: float = 1.0, seed: int = 1) -> Task:
        plan, recipe = self.plan, self.plan.models[model]
        # Without a pace, there is no run yet.
        steps, minutes = 1, 0.0
        if phase != "pace":
            minutes = plan.searched_minutes if phase == "search" else plan.minutes
            if (pace := self.pace(model)) is not None:
                steps = steps_in(minutes, recipe, pace.found["seconds"])
        return Task(
            model=model,
            phase=phase,
            factor=factor,
            seed=seed,
            config=recipe_of(recipe, plan.data, steps=steps, factor=factor, seed=seed),
            parent=self.folder,
            minutes=minutes,
            threads=threads_of(plan.jobs),
            eval_tokens=plan.eval_tokens if phase == "pace" else self._eval_tokens,
            is_detailed=phase == "run" and seed == plan.seeds[0],
            checksums=self.corpus.checksums,
        )

    def _make(self, tasks: Sequence[Task]) -> None:
        left = [task for task in tasks if self.done(task) is None]
        if len(left) < len(tasks):
            self._say(f"{len(tasks) - len(left)} of {len(tasks)} runs have been made before")
        # A process pool of its own for each run: a process that is killed breaks its pool.
        with ThreadPoolExecutor(self.plan.jobs) as threads:
            waiting = {
                threads.submit(in_process, task.threads, _carry_out, task): task for task in left
            }
            try:
                for future in as_completed(waiting):
                    self._end(waiting[future], future)
            finally:
                # After an interrupt, no further run begins.
                threads.shutdown(cancel_futures=True)

    def _end(self, task: Task, future: Future[dict[str, Any]]) -> None:
        """Take what was measured of a run, or why it failed."""
        try:
            found = future.result()
        except Exception as error:  # noqa: BLE001  (the others go on)
            found = {"failed": f"{type(error).__name__}: {error}"}
        run = task.ended(found)
        if "failed" in found and not found.get("diverged"):
            self.failed.append(run)
        else:
            self.add([run])
        self._say(f"{task.folder.relative_to(self.folder)}: {_line(found)}")


def _key(run: Run | Task) -> tuple[str, str, str]:
    """Identify a run.

    A copy of a recipe has the same digest, and is a contestant of its own; so has a pace, if a run
    has a single step.
    """
    return run.model, run.phase, run.digest


def valid_nll(run: Run | None) -> float:
    """Return the loss on the validation text; infinite without a run, or if it failed."""
    return run.found["valid"]["nll"] if run and "valid" in run.found else math.inf


def recipe_of(recipe: Config, data: DataConfig, *, steps: int, factor: float, seed: int) -> Config:
    """Return the recipe of a run of a contestant."""
    train: dict[str, Any] = {"lr": recipe.train.lr * factor}
    if recipe.train.optimizer == "muon":
        train["muon_lr"] = recipe.train.muon_lr * factor
    # Evaluated at the end only: it takes time that is not counted.
    train |= {"steps": steps, "minutes": None, "seed": seed, "eval_every": 0}
    train["warmup_steps"] = min(recipe.train.warmup_steps, steps // 10)
    return replace(
        recipe,
        data=data,
        train=replace(recipe.train, **train),
        eval=replace(recipe.eval, mem_lens=(), **_NOT_DYNAMIC),
    )


def _carry_out(task: Task) -> dict[str, Any]:
    """Train and measure, in a process of its own."""
    try:
        return measured(
            task.config, task.folder, n_tokens=task.eval_tokens, is_detailed=task.is_detailed
        )
    except Diverged as error:
        return {"failed": str(error), "diverged": True}


def _line(found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return f"failed: {found['failed']}"
    trained = found["training"]
    return (
        f"{found['valid']['nll']:.4f} nats on the validation text, {trained['tokens']:,} tokens "
        f"in {trained['seconds']:,.0f} s"
    )
