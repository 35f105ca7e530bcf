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
    sections = {field.name for field in fields(Config)}
    for variant in variants:
        if unknown := variant.keys() - sections - {"name", "recipe", "about"}:
            raise ValueError(
                f"{path}: a [[variant]] has a name, and if need be about, a recipe and sections: "
                f"{', '.join(sorted(sections))}; not {', '.join(sorted(unknown))}"
            )
    names = [variant.get("name") for variant in variants]
    if len(set(names)) < len(names) or not all(names):
        raise ValueError(f"{path}: each variant needs a name of its own: {names}")
    return values


def given(words: Sequence[str]) -> Settings:
    """Read settings as ``section.key=value``; what is no TOML value is a text."""
    found: Settings = {}
    for word in words:
        name, is_setting, value = word.partition("=")
        section, has_key, key = name.partition(".")
        if not (is_setting and has_key):
            raise ValueError(f"--set {word}: write section.key=value")
        try:
            parsed = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            parsed = value
        found.setdefault(section, {})[key] = parsed
    return found


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


class Record:
    """The file of results: runs of an experiment, and the pace of each variant.

    Args:
        path: The file, which need not exist.
        experiment: The experiment file.
        configs: The settings of all variants, by name.
        minutes: Training time of each run.

    Raises:
        ValueError: The file has runs of other settings, of another time or of another experiment,
            which would be lost.
    """

    def __init__(
        self, path: Path, experiment: Settings, configs: Mapping[str, Config], minutes: float
    ) -> None:
        self.path, self.experiment, self.minutes = path, experiment, minutes
        self.digests = {name: digest(config) for name, config in configs.items()}
        self._known: Settings = (
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        )
        variants = {x["name"]: x for x in self._known.get("variants", [])}
        reason = ""
        if variants and self._known["minutes"] != minutes:
            reason = f"has runs of {_counted(self._known['minutes'], 'minute')}, not {minutes:g}"
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

    def add(self, name: str, run: Settings) -> None:
        """Add a run, in place of a failed one with its seed."""
        others = [x for x in self.runs[name] if x["seed"] != run["seed"]]
        self.runs[name] = sorted([*others, run], key=lambda x: x["seed"])

    def write(self, note: str | None = None) -> None:
        """Write the file.

        Args:
            note: What else should be known; None: what the file says.
        """
        about = {**circumstances(), "commit": commit()}
        calls = [x for x in self._known.get("circumstances", []) if x != about]
        self._known["circumstances"] = [*calls, about]
        if note:
            self._known["note"] = note
        write_result_file(self.path, rounded(self.result(), 8))

    def result(self) -> Settings:
        """Return what the file holds."""
        variants = self.experiment["variant"]
        first = self.runs[variants[0]["name"]]
        noted = {"note": self._known["note"]} if "note" in self._known else {}
        return {
            "experiment": self.path.stem.removeprefix("experiments_"),
            "about": self.experiment.get("about", ""),
            "recipe": self.experiment["recipe"],
            "minutes": self.minutes,
            "seeds": sorted({run["seed"] for each in self.runs.values() for run in each}),
            "circumstances": self._known.get("circumstances", []),
            "variants": [self._variant(x, first) for x in variants if self._has(x["name"])],
        } | noted

    def _has(self, name: str) -> bool:
        return bool(self.runs[name]) or name in self.paces

    def _variant(self, variant: Settings, first: Sequence[Settings]) -> Settings:
        name = variant["name"]
        pace = {"seconds_per_step": self.paces[name]} if name in self.paces else {}
        about = {"about": variant.get("about", ""), "settings": self.digests[name]}
        return summary(name, self.runs[name], first) | about | pace


class Experiment:
    """Runs that are made of an experiment, and added to its record.

    Args:
        configs: The settings of the variants that are called, by name.
        record: What is known of them.
        out: Where the run folders lie.
        note: What else should be known of the results.
    """

    def __init__(
        self, configs: dict[str, Config], record: Record, out: Path, note: str | None = None
    ) -> None:
        self.configs, self.record, self.out, self.note = configs, record, out, note

    def run(self, seeds: Sequence[int]) -> None:
        """Make the runs that are missing, seed by seed, and write the file after each.

        Raises:
            ValueError: A variant would be trained beside others whose pace is not known.
        """
        for seed in seeds:
            for name, config in self.configs.items():
                if all(run["seed"] != seed for run in self.record.finished(name)):
                    seeded = replace(config, train=replace(config.train, seed=seed))
                    self.record.add(name, self._made(name, seeded))
                    self.record.write(self.note)
        if self.note and self.note != self.record.result().get("note"):
            self.record.write(self.note)

    def _made(self, name: str, config: Config) -> Settings:
        """Make a run, or go on with a stopped one."""
        seed = config.train.seed
        print(f"{name}, seed {seed}", file=sys.stderr)
        timed = self._timed(config, name)
        # Other settings, or another time, have a folder of their own.
        run = {"seed": seed} | _trained(timed, self.out / name / f"seed_{seed}-{digest(timed)}")
        if "failed" in run:
            print(f"{name}, seed {seed}: failed: {run['failed']}", file=sys.stderr)
        return run

    def _timed(self, config: Config, name: str) -> Config:
        """Return the settings with as many steps as take the time."""
        if before := self.record.finished(name):
            steps = before[0]["steps"]
        else:
            self._measure_paces()
            steps = steps_in(self.record.minutes, config, self.record.paces[name])
        warmup = min(config.train.warmup_steps, steps // 10)
        return replace(config, train=replace(config.train, steps=steps, warmup_steps=warmup))

    def _measure_paces(self) -> None:
        """Measure the seconds of a step of variants without any, beside those that have them."""
        known = self.record.paces
        if self.configs.keys() <= known.keys():
            return
        if without := [x for x in self.configs if self.record.runs[x] and x not in known]:
            raise ValueError(
                f"{self.record.path} has runs of {without[0]}, but not its pace, beside which "
                "another variant could be timed: give --json another file"
            )
        # As the trainings do.
        prepare_process()
        self.record.paces = with_others(known, paces(self.configs)[0])
        # Before the first run, whose number of steps depends on it.
        self.record.write(self.note)


def digest(config: Config) -> str:
    """Identify settings by what differs from the defaults, and texts by their names alone."""
    paths = {x: getattr(config.data, x) for x in ("path", "valid_path", "test_path")}
    names = {x: Path(path).name for x, path in paths.items() if path}
    config = replace(config, data=replace(config.data, cache_dir=None, **names))
    lines = differences(Config(model=ModelConfig(), data=DataConfig()), config)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _trained(config: Config, folder: Path) -> Settings:
    """Train in a process of its own, or go on; return what came of it."""
    recipe = folder.with_suffix(".toml")
    replace_file(recipe, dump_recipe(config).encode())
    command = [sys.executable, "-m", "transformer_xl", "train", str(recipe), "--out", str(folder)]
    with folder.with_suffix(".log").open("ab") as log:
        # In a group of its own, so that an interrupt reaches it once, and it saves a checkpoint.
        training = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
    try:
        code = training.wait()
    except KeyboardInterrupt:
        training.send_signal(signal.SIGINT)
        training.wait()
        raise
    if code:
        lines = folder.with_suffix(".log").read_text(errors="replace").splitlines()
        return {"failed": lines[-1] if lines else f"exit code {code}"}
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    valid = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "valid"]
    checkpoint = max((folder / "checkpoints").glob("step_*"))
    state = read_about(checkpoint)
    return {
        "steps": state["step"],
        "seconds": state["seconds"],
        "valid_nll": min(r["nll"] for r in valid),
        "test_nll": results["test"]["nll"],
    }


def summary(name: str, runs: Sequence[Settings], first: Sequence[Settings]) -> Settings:
    """Sum up the runs of a variant, and compare them with those of the first.

    The spread is the standard deviation over the seeds, and the effect size Cohen's d: the
    difference, divided by the root of the mean of both variances.
    """
    found = [run["valid_nll"] for run in runs if "failed" not in run]
    base = [run["valid_nll"] for run in first if "failed" not in run]
    values: Settings = {"name": name, "runs": list(runs)}
    if found:
        values["mean"] = statistics.fmean(found)
    if len(found) > 1:
        values["spread"] = statistics.stdev(found)
    if found and base:
        values["difference"] = values["mean"] - statistics.fmean(base)
    if len(found) > 1 and len(base) > 1:
        pooled = math.sqrt((statistics.variance(found) + statistics.variance(base)) / 2)
        values["effect_size"] = values["difference"] / pooled if pooled else None
    return values


def table(result: Settings) -> str:
    """Return the result as a Markdown table, the best variant in bold."""
    lines = [
        "| variant | what it changes | runs | steps | validation, nats | difference "
        "| effect size |",
        "|---|---|---|---|---|---|---|",
    ]
    best = min((v["mean"] for v in result["variants"] if "mean" in v), default=None)
    for place, variant in enumerate(result["variants"]):
        done = [run for run in variant["runs"] if "failed" not in run]
        failed = len(variant["runs"]) - len(done)
        steps = f"{statistics.fmean(run['steps'] for run in done):,.0f}" if done else "-"
        mean = "-"
        if "mean" in variant:
            mean = f"{variant['mean']:.4f}"
            mean = f"**{mean}**" if variant["mean"] == best else mean
        if "spread" in variant:
            mean += f" ± {variant['spread']:.4f}"
        compared = place > 0 and "difference" in variant
        difference = f"{variant['difference']:+.4f}" if compared else "-"
        effect = variant.get("effect_size") if place else None
        count = f"{len(done)}" + f" ({failed} failed)" * bool(failed)
        lines.append(
            f"| {variant['name']} | {variant['about']} | {count} | {steps} | {mean} | "
            f"{difference} | {'-' if effect is None else f'{effect:+.1f}'} |"
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
    if not results:
        parts.append("No experiment has been recorded yet.")
    for name, result in results.items():
        calls = result["circumstances"]
        where = calls[-1]
        noted = [result["note"]] if "note" in result else []
        parts += [
            f"## {result['experiment']}",
            result["about"],
            table(result),
            *noted,
            f"{_counted(result['minutes'], 'minute')} of training for each run of "
            f"`{result['recipe']}`, seeds {', '.join(map(str, result['seeds']))}; "
            f"{_joined(x['processor'] for x in calls)}, {_counted(where['threads'], 'thread')}, "
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
    parser.add_argument("file", type=Path, nargs="?", help="the experiment")
    parser.add_argument("--minutes", type=float, default=5.0, help="training time of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", default=[], help="these variants, and the first")
    parser.add_argument("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path, help="run folders; default runs/experiments/NAME")
    parser.add_argument(
        "--json", type=Path, help="default benchmarks/results/experiments_NAME.json"
    )
    parser.add_argument("--note", help="what else should be known, in a sentence")
    parser.add_argument("--docs", action="store_true", help="write docs/experiments.md and end")
    arguments = parser.parse_args()
    if arguments.docs:
        replace_file(PAGE, page(recorded()).encode())
        return
    if arguments.file is None:
        parser.error("name an experiment file, or --docs")
    name = arguments.file.stem
    try:
        experiment = read_experiment(arguments.file)
        variants = experiment["variant"]
        names = [v["name"] for v in variants]
        if unknown := [x for x in arguments.only if x not in names]:
            raise ValueError(f"--only {unknown[0]}: the variants are {', '.join(names)}")
        only = {names[0], *arguments.only} if arguments.only else None
        more = given(arguments.set)
        configs = {v["name"]: recipe_of(experiment, v, more, str(arguments.file)) for v in variants}
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")
    path = arguments.json or RESULTS / f"experiments_{name}.json"
    out = arguments.out or ROOT / "runs" / "experiments" / name
    called = {x: configs[x] for x in configs if only is None or x in only}
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), blocking=False):
            record = Record(path, experiment, configs, arguments.minutes)
            Experiment(called, record, out, arguments.note).run(arguments.seeds)
    except Timeout:
        sys.exit(f"{path}: another call is adding to this file; wait until it has ended")
    except ValueError as error:
        sys.exit(f"{error}")
    print(table(record.result()))


if __name__ == "__main__":
    main()
