"""What helps: variants of a recipe, trained for the same time on one machine, with several seeds.

    python benchmarks/experiments.py benchmarks/experiments/network.toml --minutes 3 --seeds 1 2 3
    python benchmarks/experiments.py mine.toml --minutes 3 --set data.path=corpus/ --out runs/mine
    python benchmarks/experiments.py --docs

An experiment file names a recipe and a list of variants: settings in which each departs from it.
The first variant is what the others are compared with. How many steps of each take the time is
measured first, in turns (transformer_xl.studies.pace), so that no run depends on how busy the
machine is. Runs follow one another, seed 1 of all, seed 2 of all and so on.

The result, written anew after each run, is one JSON file in benchmarks/results, from which --docs
makes docs/experiments.md. A finished run that the file has with the same settings and minutes is
not made again, and a stopped one goes on; so the same command goes on with a stopped experiment.
One with other seeds adds to it, with as many steps as the first seed of the variant. A call with
--only leaves what the file has of the other variants. To begin anew, give another file (--json).
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
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import tomli_w
from result_file import rounded, write_result_file
from revision import ROOT, commit
from turns import circumstances

from transformer_xl.config import Config, EvalConfig
from transformer_xl.config.device import prepare_process
from transformer_xl.config.files import replace_file
from transformer_xl.config.recipes import dump_recipe, load_recipe, parse_recipe
from transformer_xl.studies.pace import paces, steps_in, with_others
from transformer_xl.train.checkpoint.checkpoints import read_about
from transformer_xl.train.metrics import read_metrics

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "experiments.md"
POINTS = 40
"""How many points of a validation curve are kept."""
PACES_FILE = "paces.json"
"""In the folder of the runs: the seconds of a step of each variant, by stage."""
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


class Experiment:
    """Variants, seeds and the folder with their runs.

    Args:
        values: The experiment file.
        configs: The settings of each variant, by name.
        minutes: Training time of each run.
        out: Where the run folders lie.
        finished: Finished runs of each variant, from a file of results.
    """

    def __init__(
        self,
        values: Settings,
        configs: dict[str, Config],
        minutes: float,
        out: Path,
        finished: Mapping[str, Sequence[Settings]],
    ) -> None:
        self.values, self.configs, self.minutes, self.out = values, configs, minutes, out
        self.finished = finished

    def run(self, name: str, seed: int) -> Settings:
        """Make a run, or go on with a stopped one."""
        config = self.configs[name]
        print(f"{name}, seed {seed}", file=sys.stderr)
        timed = self._timed(replace(config, train=replace(config.train, seed=seed)), name)
        # Other settings, or another time, have a folder of their own.
        run = {"seed": seed} | _trained(timed, self.out / name / f"seed_{seed}-{_digest(timed)}")
        if "failed" in run:
            print(f"{name}, seed {seed}: failed: {run['failed']}", file=sys.stderr)
        return run

    def _timed(self, config: Config, name: str) -> Config:
        """Return the settings with as many steps as take the time."""
        if before := self.finished.get(name):
            steps = before[0]["steps"]
        else:
            steps = steps_in(self.minutes, config, self._paces()[name])
        warmup = min(config.train.warmup_steps, steps // 10)
        return replace(config, train=replace(config.train, steps=steps, warmup_steps=warmup))

    def _paces(self) -> dict[str, list[float]]:
        """Return the seconds of a step of each variant; measured once with its settings."""
        file = self.out / PACES_FILE
        stored: Settings = json.loads(file.read_text()) if file.is_file() else {}
        settings = {
            # What has no part in a step does not count.
            name: dump_recipe(replace(config, eval=EvalConfig()))
            for name, config in self.configs.items()
        }
        known: dict[str, list[float]] = {
            name: stored[name]["seconds"]
            for name, text in settings.items()
            if stored.get(name, {}).get("settings") == text
        }
        if known.keys() == settings.keys():
            return known
        # As the trainings do.
        prepare_process()
        measured, _ = paces(self.configs)
        known = with_others(known, measured)
        for name, text in settings.items():
            stored[name] = {"settings": text, "seconds": known[name]}
        replace_file(file, (json.dumps(stored, indent=1) + "\n").encode())
        return known


def _digest(config: Config) -> str:
    return hashlib.sha256(dump_recipe(config).encode()).hexdigest()[:16]


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
    stride = math.ceil(len(valid) / POINTS)
    # Counted from the end, whose point is kept.
    curve = [[r["step"], r["nll"]] for r in valid[::-1][::stride]][::-1]
    return {
        "steps": state["step"],
        "seconds": state["seconds"],
        "valid_nll": min(r["nll"] for r in valid),
        "last_valid_nll": valid[-1]["nll"],
        "test_nll": results["test"]["nll"],
        "curve": curve,
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
        where = result["circumstances"]
        noted = [result["note"]] if "note" in result else []
        parts += [
            f"## {result['experiment']}",
            result["about"],
            table(result),
            *noted,
            f"{_counted(result['minutes'], 'minute')} of training for each run of "
            f"`{result['recipe']}`, seeds {', '.join(map(str, result['seeds']))}; "
            f"{where['processor']}, {_counted(where['threads'], 'thread')}, "
            f"torch {where['torch']}, {where['date']}. "
            f"Command: `{where['command']}`. "
            f"Runs: [{name}](../benchmarks/results/{name}).",
        ]
    return "\n\n".join(parts) + "\n"


def _counted(n: float, unit: str) -> str:
    return f"{n:g} {unit}{'s' * (n != 1)}"


def recorded() -> dict[str, Settings]:
    """Return the results that were committed, by the name of their file."""
    files = sorted(RESULTS.glob("experiments_*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in files}


def _variants_in(path: Path, minutes: float) -> list[Settings]:
    """Return the variants of a file of results, if they were trained for this time."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return known["variants"] if known.get("minutes") == minutes else []


def _finished(variants: list[Settings], configs: Mapping[str, Config]) -> dict[str, list[Settings]]:
    """Return the finished runs, by variant, that were made with these settings."""
    digests = {name: _digest(config) for name, config in configs.items()}
    return {
        x["name"]: [run for run in x["runs"] if "failed" not in run]
        for x in variants
        if x["name"] in digests and x.get("settings") == digests[x["name"]]
    }


def main() -> None:
    """Run an experiment, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", help="the experiment")
    parser.add_argument("--minutes", type=float, default=5.0, help="training time of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", help="these variants alone, after the first")
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
        if arguments.only:
            names = [v["name"] for v in variants]
            if unknown := [x for x in arguments.only if x not in names]:
                raise ValueError(f"--only {unknown[0]}: the variants are {', '.join(names)}")
            variants = [variants[0], *(v for v in variants[1:] if v["name"] in arguments.only)]
        more = given(arguments.set)
        configs = {v["name"]: recipe_of(experiment, v, more, str(arguments.file)) for v in variants}
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")
    path = arguments.json or RESULTS / f"experiments_{name}.json"
    out = arguments.out or ROOT / "runs" / "experiments" / name
    before = _variants_in(path, arguments.minutes)
    finished = _finished(before, configs)
    plan = Experiment(experiment, configs, arguments.minutes, out, finished)
    runs = {variant: [*finished.get(variant, [])] for variant in configs}
    # Of variants that a call with --only leaves out.
    others = [x for x in before if x["name"] not in configs] if arguments.only else []
    result: Settings = {}
    for seed in arguments.seeds:
        for variant in configs:
            if all(run["seed"] != seed for run in runs[variant]):
                runs[variant].append(plan.run(variant, seed))
                runs[variant].sort(key=lambda run: run["seed"])
            result = {
                "experiment": path.stem.removeprefix("experiments_"),
                "about": experiment.get("about", ""),
                "recipe": experiment["recipe"],
                "minutes": arguments.minutes,
                "seeds": sorted({run["seed"] for each in runs.values() for run in each}),
                "commit": commit(),
                "circumstances": circumstances(),
                "variants": [
                    summary(v["name"], runs[v["name"]], runs[variants[0]["name"]])
                    | {"about": v.get("about", ""), "settings": _digest(configs[v["name"]])}
                    for v in variants
                ]
                + [
                    # The first variant may have more seeds than it had.
                    x | summary(x["name"], x["runs"], runs[variants[0]["name"]])
                    for x in others
                ],
            }
            if arguments.note:
                result["note"] = arguments.note
            write_result_file(path, rounded(result))
    print(table(result))


if __name__ == "__main__":
    main()
