"""What helps: variants of a recipe, trained for the same time on one machine, with several seeds.

    python benchmarks/experiments.py benchmarks/experiments/network.toml --minutes 3 --seeds 1 2 3
    python benchmarks/experiments.py mine.toml --minutes 3 --set data.path=corpus/ --out runs/mine
    python benchmarks/experiments.py --docs

An experiment file names a recipe and a list of variants: settings in which each departs from it.
The first variant is what the others are compared with. How many steps of each take the time is
measured first, in turns (transformer_xl.studies.pace), so that no run depends on how busy the
machine is. Runs follow one another, seed 1 of all, seed 2 of all and so on.

The result, written anew after each run, is one JSON file in benchmarks/results, from which --docs
makes docs/experiments.md. It keeps what it has: a run that is in it and did not fail is not made
again, and a stopped one goes on, so the same command goes on with a stopped experiment, and one
with other seeds or variants (--only) adds to it. A file of other settings or minutes is refused: to
begin anew, give another one (--json).
"""

import argparse
import hashlib
import json
import math
import signal
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout
from result_file import rounded, write_result_file
from revision import ROOT, commit
from turns import circumstances

from transformer_xl.config import Config, DataConfig, ModelConfig
from transformer_xl.config.device import prepare_process
from transformer_xl.config.files import replace_file
from transformer_xl.config.recipes import differences, dump_recipe, load_recipe, parse_recipe
from transformer_xl.studies.pace import paces, steps_in, with_others
from transformer_xl.train.checkpoint.checkpoints import read_about
from transformer_xl.train.metrics import read_metrics

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "experiments.md"
Settings = dict[str, Any]


def read_experiment(path: Path) -> Settings:
    """Read an experiment file.

    Raises:
        ValueError: It is not one, or two variants share a name.
    """
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    variants = values.get("variant", [])
    unknown = values.keys() - {"about", "recipe", "set", "variant"}
    if unknown or "recipe" not in values or not variants:
        raise ValueError(
            f"{path}: an experiment has a recipe, a list of [[variant]], and if need be about and "
            f"[set]; not {', '.join(unknown) or 'less'}"
        )
    known = {"name", "recipe", "about", *(field.name for field in fields(Config))}
    if unknown := {name for variant in variants for name in variant} - known:
        names = (", ".join(sorted(x)) for x in (known, unknown))
        raise ValueError("{}: a [[variant]] may have {}; not {}".format(path, *names))
    names = [variant.get("name") for variant in variants]
    if len(set(names)) < len(names) or not all(names):
        raise ValueError(f"{path}: each variant needs a name of its own: {names}")
    return values


def given(words: Sequence[str]) -> Settings:
    """Read settings as ``section.key=value``; what is no TOML value is a text."""
    settings: Settings = {}
    for word in words:
        name, is_setting, value = word.partition("=")
        section, has_key, key = name.partition(".")
        if not (is_setting and has_key):
            raise ValueError(f"--set {word}: write section.key=value")
        try:
            parsed = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            parsed = value
        settings.setdefault(section, {})[key] = parsed
    return settings


def recipe_of(experiment: Settings, variant: Settings, more: Settings, source: str) -> Config:
    """Return the settings of a variant: recipe < what all set < its own < the command line's."""
    recipe = load_recipe(variant.get("recipe", experiment["recipe"]))
    values = tomllib.loads(dump_recipe(recipe))
    # The time is the experiment's.
    values["train"].pop("minutes", None)
    own = {key: x for key, x in variant.items() if isinstance(x, Mapping)}
    for settings in (experiment.get("set", {}), own, more):
        for section, changed in settings.items():
            values.setdefault(section, {}).update(changed)
    return parse_recipe(tomli_w.dumps(values), f"{source}: variant {variant['name']}")


class Experiment:
    """The runs of an experiment and the file that holds them.

    Args:
        path: The file, which need not exist.
        experiment: The experiment file.
        configs: The settings of all variants, by name.
        minutes: Training time of each run.
        note: What else should be known of the results; None: what the file says.

    Raises:
        ValueError: The file has runs of other settings, of another time or of another experiment,
            which would be lost.
    """

    def __init__(
        self,
        path: Path,
        experiment: Settings,
        configs: Mapping[str, Config],
        minutes: float,
        note: str | None = None,
    ) -> None:
        self.path, self.experiment, self.configs, self.minutes = path, experiment, configs, minutes
        known: Settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        self.note, self.calls = note or known.get("note"), known.get("circumstances", [])
        self._has_other_note = self.note != known.get("note")
        variants = {x["name"]: x for x in known.get("variants", [])}
        self.digests = {name: digest(config) for name, config in configs.items()}
        reason = ""
        if variants and known["minutes"] != minutes:
            reason = f"has runs of {_counted(known['minutes'], 'minute')}, not {minutes:g}"
        elif others := variants.keys() - configs.keys():
            reason = f"has the variant {min(others)}, which the experiment lacks"
        elif others := [x for x in variants if variants[x].get("settings") != self.digests[x]]:
            reason = f"has runs of {others[0]} that were made with other settings"
        if reason:
            raise ValueError(f"{path} {reason}: give --json another file, or remove this one")
        self.runs: dict[str, list[Settings]] = {
            name: variants[name]["runs"] if name in variants else [] for name in configs
        }
        self.paces: dict[str, list[float]] = {
            name: x["seconds_per_step"] for name, x in variants.items() if "seconds_per_step" in x
        }

    def finished(self, name: str) -> list[Settings]:
        """Return the runs of a variant that did not fail."""
        return [run for run in self.runs[name] if "failed" not in run]

    def run(self, names: Sequence[str], seeds: Sequence[int], out: Path) -> None:
        """Make the runs of variants that are missing, and write the file after each.

        Raises:
            ValueError: A variant would be trained beside others whose pace is not known.
        """
        for seed in seeds:
            for name in names:
                if any(run["seed"] == seed for run in self.finished(name)):
                    continue
                print(f"{name}, seed {seed}", file=sys.stderr)
                steps = self._steps(name, names)
                train = self.configs[name].train
                warmup = min(train.warmup_steps, steps // 10)
                train = replace(train, seed=seed, steps=steps, warmup_steps=warmup)
                config = replace(self.configs[name], train=train)
                # Other settings, or another time, have a folder of their own.
                run = {"seed": seed} | _trained(
                    config, out / name / f"seed_{seed}-{digest(config)}"
                )
                if "failed" in run:
                    print(f"{name}, seed {seed}: failed: {run['failed']}", file=sys.stderr)
                others = [x for x in self.runs[name] if x["seed"] != seed]
                self.runs[name] = sorted([*others, run], key=lambda x: x["seed"])
                self.write()
        if self._has_other_note:
            self.write()

    def _steps(self, name: str, names: Sequence[str]) -> int:
        """Return how many steps of a variant take the time."""
        if before := self.finished(name):
            return before[0]["steps"]
        if not {*names} <= self.paces.keys():
            if without := [x for x in names if self.runs[x] and x not in self.paces]:
                raise ValueError(
                    f"{self.path} has runs of {without[0]}, but not its pace, beside which "
                    "another variant could be timed: give --json another file"
                )
            # As the trainings do.
            prepare_process()
            measured = paces({name: self.configs[name] for name in names})[0]
            self.paces = with_others(self.paces, measured)
            # Before the first run, whose number of steps depends on it.
            self.write()
        return steps_in(self.minutes, self.configs[name], self.paces[name])

    def write(self) -> None:
        """Write the file."""
        about = {**circumstances(), "commit": commit()}
        self.calls = [x for x in self.calls if x != about] + [about]
        self._has_other_note = False
        write_result_file(self.path, rounded(self.result(), 8))

    def result(self) -> Settings:
        """Return what the file holds."""
        listed = self.experiment["variant"]
        first, variants = self.runs[listed[0]["name"]], []
        for variant in listed:
            name = variant["name"]
            if self.runs[name] or name in self.paces:
                about = {"about": variant.get("about", ""), "settings": self.digests[name]}
                pace = {"seconds_per_step": self.paces[name]} if name in self.paces else {}
                variants.append(summary(name, self.runs[name], first) | about | pace)
        return {
            "experiment": self.path.stem.removeprefix("experiments_"),
            "about": self.experiment.get("about", ""),
            "recipe": self.experiment["recipe"],
            "minutes": self.minutes,
            "seeds": sorted({run["seed"] for each in self.runs.values() for run in each}),
            "circumstances": self.calls,
            "variants": variants,
        } | ({"note": self.note} if self.note else {})


def digest(config: Config) -> str:
    """Identify settings by what differs from the defaults, and texts by their names alone."""
    paths = {x: getattr(config.data, x) for x in ("path", "valid_path", "test_path")}
    names = {x: Path(path).name for x, path in paths.items() if path}
    config = replace(config, data=replace(config.data, cache_dir=None, **names))
    lines = differences(Config(model=ModelConfig(), data=DataConfig()), config)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _trained(config: Config, folder: Path) -> Settings:
    """Train in a process of its own, or go on; return what came of it."""
    recipe, log = folder.with_suffix(".toml"), folder.with_suffix(".log")
    replace_file(recipe, dump_recipe(config).encode())
    command = [sys.executable, "-m", "transformer_xl", "train", str(recipe), "--out", str(folder)]
    with log.open("ab") as file:
        # In a group of its own, so that an interrupt reaches it once, and it saves a checkpoint.
        training = subprocess.Popen(command, stdout=file, stderr=file, process_group=0)
    try:
        code = training.wait()
    except KeyboardInterrupt:
        training.send_signal(signal.SIGINT)
        training.wait()
        raise
    if code:
        lines = log.read_text(errors="replace").splitlines()
        return {"failed": lines[-1] if lines else f"exit code {code}"}
    state = read_about(max((folder / "checkpoints").glob("step_*")))
    valid = [r["nll"] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "valid"]
    test = json.loads((folder / "results.json").read_text("utf-8"))["test"]
    return {
        "steps": state["step"],
        "seconds": state["seconds"],
        "valid_nll": min(valid),
        "test_nll": test["nll"],
    }


def summary(name: str, runs: Sequence[Settings], first: Sequence[Settings]) -> Settings:
    """Sum up the runs of a variant, and compare them with those of the first.

    The spread is the standard deviation over the seeds, and the effect size Cohen's d: the
    difference, divided by the root of the mean of both variances.
    """
    losses, base = ([run["valid_nll"] for run in x if "failed" not in run] for x in (runs, first))
    values: Settings = {"name": name, "runs": list(runs)}
    if losses:
        values["mean"] = statistics.fmean(losses)
    if len(losses) > 1:
        values["spread"] = statistics.stdev(losses)
    if losses and base:
        values["difference"] = values["mean"] - statistics.fmean(base)
    if len(losses) > 1 and len(base) > 1:
        pooled = math.sqrt((statistics.variance(losses) + statistics.variance(base)) / 2)
        values["effect_size"] = values["difference"] / pooled if pooled else None
    return values


def table(result: Settings) -> str:
    """Return the result as a Markdown table, the best variant in bold."""
    columns = [
        "variant",
        "what_it_changes",
        "runs",
        "steps",
        "validation,_nats",
        "difference",
        "effect_size",
    ]
    lines = [f"| {' | '.join(columns)} |".replace("_", " "), "|---" * len(columns) + "|"]
    best = min((v["mean"] for v in result["variants"] if "mean" in v), default=None)
    for place, variant in enumerate(result["variants"]):
        done = [run for run in variant["runs"] if "failed" not in run]
        failed = len(variant["runs"]) - len(done)
        steps = f"{statistics.fmean(run['steps'] for run in done):,.0f}" if done else "-"
        mean = f"{variant['mean']:.4f}" if "mean" in variant else "-"
        if done and variant["mean"] == best:
            mean = f"**{mean}**"
        if "spread" in variant:
            mean += f" ± {variant['spread']:.4f}"
        difference, effect = (
            variant.get(x) if place else None for x in ("difference", "effect_size")
        )
        count = f"{len(done)}" + f" ({failed} failed)" * bool(failed)
        lines.append(
            f"| {variant['name']} | {variant['about']} | {count} | {steps} | {mean} | "
            f"{'-' if difference is None else f'{difference:+.4f}'} | "
            f"{'-' if effect is None else f'{effect:+.1f}'} |"
        )
    return "\n".join(lines)


def page(results: Mapping[str, Settings]) -> str:
    """Return docs/experiments.md for results by the name of their file."""
    parts = [
        "# Experiments",
        "What was tried, each at the same training time on the same machine: what helped, what did "
        "not, and by how much. Newer runs make as many steps as take this time at the measured "
        "pace; older ones stop when the time is up. Losses are in nats per token on the validation "
        "text; lower is better. "
        "± is the standard deviation over the seeds. The effect size is the difference divided by "
        "the pooled standard deviation (Cohen's d); with two or three seeds, less than 2 says "
        "little. This page is made by "
        "`python benchmarks/experiments.py --docs` from the files that it names.",
    ]
    for name, result in results.items():
        calls = result["circumstances"]
        threads = _counted(calls[-1]["threads"], "thread")
        parts += [
            f"## {result['experiment']}",
            result["about"],
            table(result),
            *([result["note"]] if "note" in result else []),
            f"{_counted(result['minutes'], 'minute')} of training for each run of "
            f"`{result['recipe']}`, seeds {', '.join(map(str, result['seeds']))}; "
            f"{_joined(x['processor'] for x in calls)}, {threads}, "
            f"torch {_joined(x['torch'] for x in calls)}, {_joined(x['date'] for x in calls)}. "
            f"Command: `{_joined((x['command'] for x in calls), '`, `')}`. "
            f"Runs: [{name}](../benchmarks/results/{name}).",
        ]
    return "\n\n".join(parts) + "\n"


def _joined(words: Iterable[str], between: str = ", ") -> str:
    return between.join(dict.fromkeys(words))


def _counted(n: float, unit: str) -> str:
    return f"{n:g} {unit}{'s' * (n != 1)}"


def recorded() -> dict[str, Settings]:
    """Return the results that were committed, by the name of their file."""
    files = sorted(RESULTS.glob("experiments_*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in files}


def main() -> None:
    """Run an experiment, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("file", type=Path, nargs="?", help="the experiment")
    add("--minutes", type=float, default=5.0, help="training time of each run")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--only", nargs="+", default=[], help="these variants, and the first")
    add("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE")
    add("--out", type=Path, help="run folders; default runs/experiments/NAME")
    add("--json", type=Path, help="default benchmarks/results/experiments_NAME.json")
    add("--note", help="what else should be known, in a sentence")
    add("--docs", action="store_true", help="write docs/experiments.md and end")
    arguments = parser.parse_args()
    if arguments.docs:
        replace_file(PAGE, page(recorded()).encode())
        return
    if arguments.file is None:
        parser.error("name an experiment file, or --docs")
    path = arguments.json or RESULTS / f"experiments_{arguments.file.stem}.json"
    out = arguments.out or ROOT / "runs" / "experiments" / arguments.file.stem
    try:
        read = read_experiment(arguments.file)
        variants = {v["name"]: v for v in read["variant"]}
        names = [*variants]
        if unknown := [x for x in arguments.only if x not in names]:
            raise ValueError(f"--only {unknown[0]}: the variants are {', '.join(names)}")
        more, source = given(arguments.set), str(arguments.file)
        configs = {name: recipe_of(read, v, more, source) for name, v in variants.items()}
        called = [x for x in names if x in (names[0], *(arguments.only or names))]
        with FileLock(path.with_name(f".{path.name}.lock"), blocking=False):
            experiment = Experiment(path, read, configs, arguments.minutes, arguments.note)
            experiment.run(called, arguments.seeds, out)
    except Timeout:
        sys.exit(f"{path}: another call is adding to this file; wait until it has ended")
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")
    print(table(experiment.result()))


if __name__ == "__main__":
    main()
