"""Which model for which sequence? The contestants of txl compare on two corpora.

    python benchmarks/comparison.py python-stdlib --jobs 2
    python benchmarks/comparison.py ptb-char --path ../shared/data/ptb --jobs 2
    python benchmarks/comparison.py --docs

Every run that has ended is in benchmarks/results/comparison_NAME.json at once, and is not made
again: the runs take hours, and may be made on several days. The number of threads of each run,
which is OMP_NUM_THREADS / jobs, belongs to its settings. The contestants of a call stand in the
tables with the runs of that call, the others with those of the call before. With --docs, the tables
of docs/which-model.md and of its translation are written anew, between two comments. With --larger,
the networks have about ten times as many weights, for a GPU.
"""

import argparse
import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch
from filelock import FileLock
from result_file import json_text, rounded
from revision import ROOT, commit

from transformer_xl.config import Config, DataConfig
from transformer_xl.config.device import Rounded
from transformer_xl.config.files import replace_file
from transformer_xl.config.recipes import load_recipe
from transformer_xl.studies.baselines import baselines
from transformer_xl.studies.compare import (
    FACTORS,
    Comparison,
    Plan,
    Run,
    load_contestants,
    threads_of,
)
from transformer_xl.studies.standings import draw, markdown, standings

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "which-model.md"
TRANSLATED = ROOT / "docs" / "zh" / PAGE.name
PHRASES = Path(__file__).with_name("comparison_zh.toml")
"""What stands in the tables, in English and Chinese."""
BEGIN, END = "<!-- benchmarks/comparison.py -->", "<!-- end -->"
CORPORA = {
    "python-stdlib": ("compare-txl", "Source code of the Python standard library, by bytes"),
    "ptb-char": ("ptb-char-cpu", "Penn Treebank, by characters"),
    "wikitext-2": ("wikitext-2-cpu", "WikiText-2, by words"),
    "chorales": ("jsb-chorales-cpu", "Chorales of Bach, as integers"),
}
"""By name: a recipe with the text and its vocabulary, and a title."""
LARGER = 2, 2.5
"""Factors of the widths and heads, and of the number of layers, of larger networks."""
MINUTES = 20.0
REFERENCE = "gpt-cache"
"""Losses at equal tokens and FLOPs are at its cost, if it has been run."""
MODELS = ("modern-xl", "txl", "txl-paper", "gpt", "gpt-cache", "lstm")


def resized(config: Config, width: float, depth: float) -> Config:
    """Return the recipe of a network of other widths, numbers of heads and numbers of layers."""
    model = config.model
    names = {"d_model", "d_inner", "n_head"} & {field.name for field in fields(model)}
    wide = {name: round(width * getattr(model, name)) for name in names}
    return replace(config, model=replace(model, n_layer=round(depth * model.n_layer), **wide))


def results_file(name: str) -> Path:
    """Return where the runs of a corpus are recorded."""
    return RESULTS / f"comparison_{name}.json"


def recorded(path: Path) -> dict[str, Any]:
    """Return what a file holds of a comparison; nothing if it does not exist."""
    if not path.is_file():
        return {"circumstances": [], "planned": [], "baselines": [], "runs": []}
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, known: dict[str, Any]) -> None:
    """Write a file of results, with a line for each run."""
    head = [f' "{name}": {json_text(x, 1)},' for name, x in known.items() if name != "runs"]
    runs = ",\n".join(json.dumps(run, separators=(",", ":")) for run in known["runs"])
    replace_file(path, "\n".join(["{", *head, ' "runs": [', runs, "]", "}\n"]).encode())


def others_planned(path: Path, plan: Plan) -> list[str]:
    """Return the digests of the runs that earlier calls planned of other contestants.

    Raises:
        ValueError: They had another time, or other threads, so that no table can hold both.
    """
    known = recorded(path)
    others = [x for x in known["runs"] if x["digest"] in known["planned"]]
    others = [x for x in others if x["model"] not in plan.models]
    cost = plan.minutes, threads_of(plan.jobs)
    for run in others:
        machine = run["found"].get("machine")
        if run["phase"] != "run" or not machine:
            continue
        if (other := (run["minutes"], machine["threads"])) != cost:
            raise ValueError(
                f"{run['model']} in {path} was trained for {other[0]:g} minutes with {other[1]} "
                f"threads, and cannot stand beside runs of {cost[0]:g} minutes with {cost[1]}: set "
                "--minutes, --jobs or OMP_NUM_THREADS, or give --json another file"
            )
    return [run["digest"] for run in others]


def compare(name: str, arguments: argparse.Namespace) -> None:
    """Make the runs of a corpus that are missing."""
    data: DataConfig = load_recipe(CORPORA[name][0]).data
    if arguments.path:
        data = replace(data, path=arguments.path)
    models = load_contestants(arguments.models)
    if arguments.precision:
        models = {
            name: replace(config, train=replace(config.train, precision=arguments.precision))
            for name, config in models.items()
        }
    if arguments.larger:
        models = {name: resized(config, *LARGER) for name, config in models.items()}
    plan = Plan(
        data=data,
        models=models,
        minutes=arguments.minutes,
        seeds=tuple(arguments.seeds),
        factors=tuple(arguments.rates),
        jobs=arguments.jobs,
    )
    size = "-larger" * arguments.larger
    path = arguments.json or results_file(name + size)
    folder = arguments.out or ROOT / "runs" / "comparison" / (name + size)
    about = {"revision": commit(), "threads": torch.get_num_threads()}
    others_planned(path, plan)
    comparison: Comparison | None = None
    rows: list[dict[str, Any]] = []

    def record(text: str) -> None:
        print(text, flush=True)
        if comparison is None:
            return
        with FileLock(path.with_name(f".{path.name}.lock")):
            # Another call may have written since.
            known = recorded(path)
            known["circumstances"] = [x for x in known["circumstances"] if x != about] + [about]
            known["baselines"] = known["baselines"] or rows
            comparison.add(msgspec.convert(known["runs"], list[Run]))
            now = [run.digest for run in comparison.planned()]
            known["planned"] = others_planned(path, plan) + now
            known["runs"] = rounded(msgspec.to_builtins(comparison.runs))
            write(path, known)

    comparison = Comparison(plan, folder, record)
    comparison.add(msgspec.convert(recorded(path)["runs"], list[Run]))
    if not recorded(path)["baselines"] and arguments.baselines:
        rows += rounded([asdict(row) for row in baselines(comparison.corpus)])
    comparison.go()
    record("done")


def section(name: str) -> str:
    """Return the tables of a corpus."""
    known = recorded(results_file(name))
    runs = msgspec.convert(known["runs"], list[Run])
    # Not those of other settings, which the file may hold, too.
    runs = [run for run in runs if run.digest in known["planned"]]
    final = {run.model for run in runs if run.phase == "run"}
    parts = [f"### {CORPORA[name][1]}"]
    if not final:
        parts.append("No long run has ended yet.")
        return "\n\n".join(parts)
    # Of a contestant whose long runs are missing, nothing is said.
    own = [run for run in runs if run.model in final]
    result = standings(own, reference=REFERENCE if REFERENCE in final else None)
    key = result["unit"].replace(" ", "_")
    rows = [{**x, "bits": x[key]} for x in known["baselines"] if x[key] is not None]
    where = result["machine"]
    minutes = next(run.minutes for run in own if run.phase == "run")
    searched = next((run.minutes for run in own if run.phase == "search"), None)
    revisions = ", ".join(dict.fromkeys(x["revision"] for x in known["circumstances"]))
    picture = PAGE.parent / "images" / f"comparison-{name}.svg"
    draw(picture, own)
    missing = [x for x in MODELS if x not in final]
    parts += [
        markdown(result, rows),
        f"![Loss by tokens, by FLOPs, by context and by memory length]"
        f"({picture.relative_to(PAGE.parent)})",
        f"As many steps as take {minutes:g} minutes for each run, {where['threads']} thread"
        f"{'s' * (where['threads'] != 1)}, {where['processor']}, torch {where['torch']}, revision "
        f"{revisions}; "
        + (f"learning rates searched with runs of {searched:g} minutes. " if searched else "")
        + f"Command: `{_command(name, minutes, where['threads'], known)}`; runs: "
        f"[comparison_{name}.json](../benchmarks/results/comparison_{name}.json).",
    ]
    if missing:
        parts.append(f"Not run: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _command(name: str, minutes: float, threads: int, known: dict[str, Any]) -> str:
    """Return the command that finds the recorded runs, with as many threads for each."""
    # Calls with other numbers of threads may be recorded, too.
    counts = [threads, *(x["threads"] for x in known["circumstances"])]
    in_all = max(x for x in counts if x % threads == 0)
    longer = f" --minutes {minutes:g}" * (minutes != MINUTES)
    words = f"{name}{longer} --jobs {in_all // threads}"
    return f"OMP_NUM_THREADS={in_all} python benchmarks/comparison.py {words}"


def write_page() -> None:
    """Write the tables into the page and its translation."""
    sections = [section(name) for name in CORPORA if recorded(results_file(name))["runs"]]
    english = "\n\n".join([BEGIN, *sections, ""])
    phrases = tomllib.loads(PHRASES.read_text(encoding="utf-8"))
    chinese = english
    # Longer ones first: some are parts of others.
    for phrase in sorted(phrases, key=len, reverse=True):
        chinese = chinese.replace(phrase, phrases[phrase])
    for page, tables in ((PAGE, english), (TRANSLATED, chinese)):
        text = page.read_text(encoding="utf-8")
        head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
        replace_file(page, f"{head}{tables}{tail}".encode())


def main(words: Sequence[str] | None = None) -> None:
    """Run a comparison, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("corpus", nargs="?", choices=CORPORA)
    parser.add_argument("--path", help="a local copy of the text")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    about = "seeds of the trainings; learning rates are searched with the first"
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help=about)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--rates", type=float, nargs="+", default=FACTORS, help="factors to search")
    parser.add_argument("--larger", action="store_true", help="ten times as many weights")
    parser.add_argument("--precision", choices=get_args(Rounded), help="of all runs")
    parser.add_argument("--no-baselines", dest="baselines", action="store_false")
    parser.add_argument("--json", type=Path, help="default benchmarks/results/comparison_NAME.json")
    parser.add_argument("--out", type=Path, help="run folders; default runs/comparison/NAME")
    parser.add_argument("--docs", action="store_true", help="write docs/which-model.md and end")
    arguments = parser.parse_args(words)
    if arguments.docs:
        write_page()
    elif arguments.corpus is None:
        parser.error("name a corpus, or --docs")
    else:
        compare(arguments.corpus, arguments)


if __name__ == "__main__":
    main()
