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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    Precision,
    TrainConfig,
    load_recipe,
    locked,
    pick_device,
    recipe_names,
    replace_file,
    require,
)
from transformer_xl.data import prepare
from transformer_xl.errors import DataError, SettingsError
from transformer_xl.inference.evaluate import require_cache
from transformer_xl.model import MemoryLimitError
from transformer_xl.studies.contestant import Found, measured
from transformer_xl.studies.pace import paces, steps_in, with_others
from transformer_xl.train import Diverged, Interrupted

PREFIX = "compare-"
"""Names of the recipes of contestants begin with it."""
_OTHERS = ("modern-xl",)
"""Recipes of contestants whose names do not."""
RUNS_FILE = "runs.json"
"""In the folder of a comparison: what was measured of each run."""
FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Factors of the learning rates of a recipe that are searched."""
_PACE_SHARE = 0.1
"""Share of the time of a run that measuring the pace of a contestant takes, about, at most."""
_NOT_DYNAMIC = {x.name: x.default for x in fields(EvalConfig) if x.name.startswith("dynamic")}
"""Defaults of the settings of dynamic evaluation, by name."""


def contestants() -> list[str]:
    """Return the names of the contestants that have a recipe in the package."""
    return [*_OTHERS, *(x.removeprefix(PREFIX) for x in recipe_names() if x.startswith(PREFIX))]


def load_contestants(
    names: Sequence[str],
    changes: Mapping[str, Mapping[str, object]] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Config]:
    """Return the recipes of contestants.

    Args:
        names: Names of :func:`contestants`, of recipes, or recipe files, which go by their stems.
        changes: Settings of all, by section, in place of their own.
        say: Is told what else they change.

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
        try:
            recipes[stem] = recipes[stem].changed(
                changes or {}, lambda x, stem=stem: say(f"{stem}: {x}")
            )
        except SettingsError as error:
            raise SettingsError(f"{stem}: {error}") from error
    return recipes


@dataclass(frozen=True, kw_only=True)
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
    eval_tokens: int | None = None
    """Evaluate on this many tokens from the start of each split; None: on all."""
    counts: bool = True
    """Also measure runs, but not those of the search, with the counts of the training text."""

    def __post_init__(self) -> None:
        once = "must be different, and at least one"
        rules = [
            (bool(self.models), "models: give at least one contestant"),
            (len({*self.seeds}) == len(self.seeds) > 0, f"seeds={self.seeds} {once}"),
            (
                len({*self.factors}) == len(self.factors) > 0 and min(self.factors) > 0,
                f"factors={self.factors} must be above 0, different, and at least one",
            ),
            (self.minutes > 0, f"minutes={self.minutes} must be above 0"),
            (self.searched_minutes > 0, f"search_minutes={self.search_minutes} must be above 0"),
            (
                self.eval_tokens is None or self.eval_tokens > 1,
                f"tokens={self.eval_tokens} must be at least 2",
            ),
        ]
        for name, recipe in self.models.items():
            for setting in ("window", "max_steps"):
                x = getattr(recipe.eval, setting)
                why = "would measure it otherwise than the others: leave it out"
                rules.append((x is None, f"{name}: eval.{setting}={x} {why}"))
        for holds, rule in rules:
            require(holds, rule)

    @property
    def searched_minutes(self) -> float:
        """Training time of a run of the search."""
        return self.minutes / 4 if self.search_minutes is None else self.search_minutes


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
    found: Found
    """What :func:`~transformer_xl.studies.contestant.measured` returned, or ``failed``. Of a pace,
    the ``seconds`` of a step in each stage."""


class Task(NamedTuple):
    """A run that is to be made."""

    run: Run
    """It, with nothing found."""
    config: Config
    folder: Path
    """The run folder, which a run with other settings does not share."""


def _changed(section: ModelConfig | TrainConfig | EvalConfig) -> dict[str, object]:
    """Return the settings that differ from their defaults: a later version may have more."""
    defaults = {field.name: field.default for field in fields(section)}
    return {name: x for name, x in asdict(section).items() if x != defaults[name]}


def _digest(settings: list[object]) -> str:
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
        if plan.counts:
            n_tokens = self.corpus.n_tokens(self.corpus.held_out)
            try:
                require_cache(min(plan.eval_tokens or n_tokens, n_tokens))
            except MemoryLimitError as error:
                say(f"without counts: {error}")
                self.plan = replace(plan, counts=False)
        self.failed: list[Run] = []
        self.runs = self._read()

    def go(self) -> None:
        """Measure paces, search the learning rates and train, seed by seed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        held = f"another process is comparing in {self.folder}; waiting for it"
        with locked(self.folder / f".{RUNS_FILE}.lock", held, self._say):
            # What another process has made meanwhile.
            self.runs = self._read()
            self._measure_paces()
            made: list[Task] = []
            while tasks := [task for task in self.search() if task not in made]:
                self._make(tasks)
                made += tasks
            self._make([*self.final()])

    def search(self) -> list[Task]:
        """Return the runs of the search, the rates of the recipes first.

        While the best of a contestant is the lowest or highest that was tried, the next one beyond
        it, by a factor of two, is searched, too.
        """
        factors = sorted(self.plan.factors, key=lambda factor: abs(math.log(factor)))
        if len(factors) == 1:
            return []
        models = self.plan.models
        tasks = [self._searched(model, factor) for factor in factors for model in models]
        for model in models:
            tried = list(factors)
            while runs := self._done([self._searched(model, factor) for factor in tried]):
                best = min(runs, key=_valid_nll)
                is_lowest, is_highest = best.factor == min(tried), best.factor == max(tried)
                if "valid" not in best.found or not (is_lowest or is_highest):
                    break
                tried.append(best.factor / 2 if is_lowest else best.factor * 2)
                tasks.append(self._searched(model, tried[-1]))
        return tasks

    def _searched(self, model: str, factor: float) -> Task:
        return self._task(model, "search", factor, self.plan.seeds[0])

    def _done(self, tasks: Sequence[Task]) -> list[Run]:
        """Return what was measured of runs; nothing if one has not ended."""
        runs = [run for task in tasks if (run := self.done(task))]
        return runs if len(runs) == len(tasks) else []

    def final(self) -> Iterator[Task]:
        """Yield the runs with the chosen learning rates; a search must have ended."""
        for seed in self.plan.seeds:
            for model in self.plan.models:
                if (factor := self.factor(model)) is not None:
                    yield self._task(model, "run", factor, seed)

    def factor(self, model: str) -> float | None:
        """Return the factor of the best run of the search.

        None if a run of a given factor is missing or failed, or if all diverged.
        """
        if len(self.plan.factors) == 1:
            return self.plan.factors[0]
        if not self._done([self._searched(model, factor) for factor in self.plan.factors]):
            return None
        tasks = [task for task in self.search() if task.run.model == model]
        best = min((run for task in tasks if (run := self.done(task))), key=_valid_nll)
        return best.factor if "valid" in best.found else None

    def done(self, task: Task) -> Run | None:
        """Return what was measured of a run, if it has ended."""
        # A copy of a recipe has the same digest, and is a contestant of its own; so has a pace, if
        # a run has a single step.
        run = task.run
        key = run.model, run.phase, run.digest
        return next((x for x in self.runs if (x.model, x.phase, x.digest) == key), None)

    def planned(self) -> list[Run]:
        """Return the runs of the plan that have ended, in its order."""
        tasks = [*self._paces().values(), *self.search(), *self.final()]
        return [run for task in tasks if (run := self.done(task))] + self.failed

    def _add(self, task: Task, found: Found) -> None:
        """Add what was measured of a run."""
        self.runs.append(msgspec.structs.replace(task.run, found=found))
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

    def _paces(self) -> dict[str, Task]:
        return {model: self._task(model, "pace") for model in self.plan.models}

    def _measure_paces(self) -> None:
        """Measure the seconds of a step of contestants whose pace is not known.

        All take part in the turns. Those that are known keep their pace, and so their runs; that of
        the others is scaled by how much faster or slower the known ones were measured.
        """
        tasks = self._paces()
        known = {model: x.found["seconds"] for model in tasks if (x := self.done(tasks[model]))}
        if len(known) == len(tasks):
            return
        self._say("measuring the pace of each contestant, in turns")
        seconds = 60 * _PACE_SHARE * self.plan.minutes * len(tasks)
        measured = paces({model: task.config for model, task in tasks.items()}, seconds)
        scaled = with_others(known, measured)
        for model in [x for x in tasks if x not in known]:
            self._add(tasks[model], {"seconds": scaled[model]})
            self._say(f"{model}: {', '.join(f'{x:.4g}' for x in scaled[model])} s a step")

    def _task(self, model: str, phase: str, factor: float = 1.0, seed: int = 1) -> Task:
        plan, recipe = self.plan, self.plan.models[model]
        # Without a pace, there is no run yet.
        steps, minutes = 1, 0.0
        if phase != "pace":
            minutes = plan.searched_minutes if phase == "search" else plan.minutes
            if (pace := self.done(self._task(model, "pace"))) is not None:
                steps = steps_in(minutes, recipe, pace.found["seconds"])
        config = plan_training(
            recipe,
            plan.data,
            steps=steps,
            factor=factor,
            seed=seed,
            counts=plan.counts and phase == "run",
        )
        device = pick_device()
        # Resolved: `auto` where that is bfloat16 is the same run as bfloat16 elsewhere.
        precision = Precision(config.train.precision, device).name
        training = _changed(replace(config.train, precision="auto"))
        trained: list[object]
        trained = [_changed(config.model), training, dict(self.corpus.checksums)]
        trained += [torch.get_num_threads(), device.type, precision]
        # Not part of the stored text. Left out where unset, for the digests of earlier versions.
        of_text = {"reset_at": plan.data.reset_at, "completion_at": plan.data.completion_at}
        if used := {name: x for name, x in of_text.items() if x}:
            trained.append(used)
        # Earlier versions measured more of the first seed.
        is_first = phase == "run" and seed == plan.seeds[0]
        digest = _digest([trained, plan.eval_tokens, _changed(config.eval), is_first])
        name = f"search_{factor:g}" if phase == "search" else f"seed_{seed}"
        return Task(
            Run(
                model=model,
                phase=phase,
                factor=factor,
                seed=seed,
                digest=digest,
                minutes=minutes,
                found={},
            ),
            config,
            self.folder / model / f"{name}-{_digest(trained)}",
        )

    def _make(self, tasks: Sequence[Task]) -> None:
        left = [task for task in tasks if self.done(task) is None]
        if len(left) < len(tasks):
            self._say(f"{len(tasks) - len(left)} of {len(tasks)} runs have been made before")
        for task in left:
            try:
                found = measured(task.config, task.folder, n_tokens=self.plan.eval_tokens)
                trained = found["training"]
                line = (
                    f"{found['valid']['nll']:.4f} nats on the validation text, "
                    f"{trained['tokens']:,} tokens in {trained['seconds']:,.0f} s"
                )
                self._add(task, found)
            except Interrupted:
                raise
            except Diverged as error:
                line = f"failed: {error}"
                self._add(task, {"failed": str(error)})
            except Exception as error:  # noqa: BLE001  (the others go on)
                line = f"failed: {type(error).__name__}: {error}"
                found = {"failed": f"{type(error).__name__}: {error}"}
                self.failed.append(msgspec.structs.replace(task.run, found=found))
            self._say(f"{task.folder.relative_to(self.folder)}: {line}")


def _valid_nll(run: Run) -> float:
    """Return the loss on the validation text; infinite if the run failed."""
    return run.found["valid"]["nll"] if "valid" in run.found else math.inf


def plan_training(
    recipe: Config, data: DataConfig, *, steps: int, factor: float, seed: int, counts: bool = False
) -> Config:
    """Return a contestant's recipe with the corpus, steps, learning rate and seed of one run.

    The run is evaluated at its end only, without dynamic evaluation, and with the memory length of
    the recipe. The warmup is at most a tenth of the steps.

    Args:
        recipe: The recipe of the contestant. It is not modified.
        data: The data settings that all contestants share.
        steps: Number of training steps; the limit in minutes of the recipe does not apply.
        factor: Factor of the learning rates, that of Muon included.
        seed: Random seed of the training.
        counts: Evaluate it with the counts of the training text, too.
    """
    training = recipe.train
    rates = {"lr": training.lr * factor}
    if training.optimizer == "muon":
        rates["muon_lr"] = training.muon_lr * factor
    training = replace(
        training,
        **rates,
        steps=steps,
        minutes=None,
        seed=seed,
        # At the end only: it takes time that is not counted.
        eval_every=0,
        warmup_steps=min(training.warmup_steps, steps // 10),
    )
    return replace(
        recipe,
        data=data,
        train=training,
        eval=replace(
            recipe.eval,
            mem_lens=(),
            ngram_cache="training" if counts else None,
            **_NOT_DYNAMIC,
        ),
    )
