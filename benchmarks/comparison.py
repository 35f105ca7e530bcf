"""Which model for which sequence? The contestants of txl compare on two corpora.

    python benchmarks/comparison.py python-stdlib --jobs 2
    python benchmarks/comparison.py ptb-char --path ../shared/data/ptb --jobs 2
    python benchmarks/comparison.py python-stdlib --jobs 2 --measure
    python benchmarks/comparison.py ptb-char --merge elsewhere/comparison_ptb-char.json
    python benchmarks/comparison.py --docs

Every run that has ended is in benchmarks/results/comparison_NAME.json at once, and is not made
again: the runs take hours, and may be made on several days. The number of threads of each run,
which is OMP_NUM_THREADS / jobs, belongs to its settings. A call with other seeds adds
to those of earlier calls with the same learning rate; the first is always that of the search. With
--merge, the runs of files that were made elsewhere are added. With --measure, nothing is trained:
FLOPs are counted anew, the time of a token and the size of the state are measured anew for the runs
of the first seed, and, if their models are still in their folders, what else they lack. With
--docs, the tables of docs/which-model.md and of its translation are written anew, between two
comments. With --larger, the networks have about ten times as many weights, for a GPU; with
--smaller a quarter, for the texts that benchmarks/recall.py and benchmarks/babilong.py write.

To go on with the runs of a machine with another processor, give the --precision of its runs, and
--paces with a corpus on which the time of all steps was measured there: how many steps take the
time of the comparison is then that of the other machine. Where bfloat16 is emulated, it is slow:
--later-precision float32 goes on with the search and the first seed, and trains the others in that.
"""

import argparse
import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import msgspec
from filelock import FileLock
from result_file import json_text, rounded
from revision import ROOT, commit
from turns import circumstances

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
    valid_nll,
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
    "recall": (str(ROOT / "benchmarks" / "recall.toml"), "Copy, recall and induction"),
    "babi": (str(ROOT / "benchmarks" / "babi.toml"), "bAbI questions hidden in books"),
}
"""By name: a recipe with the text and its vocabulary, and a title."""
SIZES = {"larger": (2, 2.5), "smaller": (0.5, 1)}
"""By name: factors of the widths and heads, and of the number of layers."""
MINUTES = 20.0
REFERENCE = "gpt-cache"
"""Losses at equal tokens and FLOPs are at its cost, if it has been run."""
MODELS = ("modern-xl", "txl", "txl-paper", "gpt", "gpt-cache", "lstm", "mamba2")


def resized(config: Config, width: float, depth: float) -> Config:
    """Return the recipe of a network of other widths, numbers of heads and numbers of layers."""
    model = config.model
    unused = {x.name for x in model.unused()}
    names = [name for name in ("d_model", "d_inner", "n_head") if name not in unused]
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
    lines = ",\n".join(json.dumps(run) for run in known["runs"])
    head = json_text({k: x for k, x in known.items() if k != "runs"})
    replace_file(path, f'{head[:-2]},\n "runs": [\n{lines}\n]\n}}\n'.encode())


def planned_before(path: Path, plan: Plan) -> tuple[list[str], list[Run]]:
    """Return what earlier calls planned: digests of other contestants, and runs of other seeds.

    The latter are long runs of the plan's contestants.
    """
    planned, cost = _planned(path), (plan.minutes, threads_of(plan.jobs))
    others = [x for x in planned if x["model"] not in plan.models]
    seeds = [
        x
        for x in planned
        if x["model"] in plan.models
        and x["phase"] == "run"
        and x["seed"] not in plan.seeds
        and _cost(x) == cost
    ]
    return [x["digest"] for x in others], msgspec.convert(seeds, list[Run])


def require_same_cost(path: Path, plan: Plan) -> None:
    """Check that runs of a plan may stand in the same tables as those of a file.

    Raises:
        ValueError: Runs of other contestants had another time, or other threads.
    """
    cost = plan.minutes, threads_of(plan.jobs)
    for run in _planned(path):
        if run["model"] in plan.models or run["phase"] != "run":
            continue
        if (other := _cost(run)) and other != cost:
            raise ValueError(
                f"{run['model']} in {path} was trained for {other[0]:g} minutes with {other[1]} "
                f"threads, and cannot stand beside runs of {cost[0]:g} minutes with {cost[1]}: set "
                "--minutes, --jobs or OMP_NUM_THREADS, or give --json another file"
            )


def _planned(path: Path) -> list[dict[str, Any]]:
    known = recorded(path)
    return [x for x in known["runs"] if x["digest"] in known["planned"]]


def _locked(path: Path) -> FileLock:
    """Return the lock of a file of results, which other calls may be writing."""
    return FileLock(path.with_name(f".{path.name}.lock"))


def _cost(run: dict[str, Any]) -> tuple[float, int] | None:
    """Return minutes and threads of a run; None if it failed."""
    machine = run["found"].get("machine")
    return machine and (run["minutes"], machine["threads"])


def merge(path: Path, files: Sequence[Path]) -> None:
    """Add the runs of other files of results.

    Of the long runs of a contestant, those with the best learning rate of all searches are planned,
    and of each seed one.

    Raises:
        ValueError: A file does not exist, or the planned runs had different times or threads.
    """
    with _locked(path):
        _merge(path, files)


def _merge(path: Path, files: Sequence[Path]) -> None:
    known = recorded(path)
    for file in files:
        if not file.is_file():
            raise ValueError(f"--merge {file}: there is no such file")
        other = recorded(file)
        have = {(run["model"], run["digest"]) for run in known["runs"]}
        new = [run for run in other["runs"] if (run["model"], run["digest"]) not in have]
        known["runs"] += new
        known["baselines"] = known["baselines"] or other["baselines"]
        for what in ("planned", "circumstances"):
            known[what] += [x for x in other[what] if x not in known[what]]
        print(f"{file}: {len(new)} runs were added")
    runs = msgspec.convert(known["runs"], list[Run])
    best: dict[str, Run] = {}
    for run in runs:
        if run.phase == "search" and run.digest in known["planned"]:
            best[run.model] = min(best.get(run.model, run), run, key=valid_nll)
    worse = {
        run.digest
        for run in runs
        if run.phase == "run" and run.factor != best.get(run.model, run).factor
    }
    known["planned"] = [x for x in known["planned"] if x not in worse]
    seeds: dict[tuple[str, int], str] = {}
    costs: dict[tuple[float, int], str] = {}
    for run in known["runs"]:
        if run["phase"] != "run" or run["digest"] not in known["planned"]:
            continue
        if seeds.setdefault((run["model"], run["seed"]), run["digest"]) != run["digest"]:
            print(f"{run['model']}, seed {run['seed']}: there is another run, which stays")
            known["planned"].remove(run["digest"])
        elif cost := _cost(run):
            costs.setdefault(cost, run["model"])
    if len(costs) > 1:
        each = ", ".join(f"{x} {m:g} minutes with {n} threads" for (m, n), x in costs.items())
        raise ValueError(f"--merge: runs of one table have the same time and threads, not {each}")
    write(path, known)


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
    if arguments.size:
        models = {name: resized(config, *SIZES[arguments.size]) for name, config in models.items()}
    plan = Plan(
        data=data,
        models=models,
        minutes=arguments.minutes,
        seeds=tuple(arguments.seeds),
        factors=tuple(arguments.rates),
        jobs=arguments.jobs,
        later_precision=arguments.later_precision,
    )
    path = arguments.json or results_file(name + _size(arguments))
    folder = arguments.out or ROOT / "runs" / "comparison" / (name + _size(arguments))
    about = {**circumstances(), "revision": commit()}
    require_same_cost(path, plan)
    comparison: Comparison | None = None
    rows: list[dict[str, Any]] = []

    def record(text: str) -> None:
        print(text, flush=True)
        if comparison is None:
            return
        with _locked(path):
            # Another call may have written since.
            known = recorded(path)
            known["circumstances"] = [x for x in known["circumstances"] if x != about] + [about]
            known["baselines"] = known["baselines"] or rows
            comparison.add(msgspec.convert(known["runs"], list[Run]))
            if not arguments.measure:
                others, seeds = planned_before(path, plan)
                now = comparison.planned()
                now += _alike(seeds, now, comparison)
                known["planned"] = others + [run.digest for run in now]
            known["runs"] = rounded(msgspec.to_builtins(comparison.runs))
            write(path, known)

    comparison = Comparison(plan, folder, record)
    comparison.add(msgspec.convert(recorded(path)["runs"], list[Run]))
    if arguments.paces:
        found = recorded(results_file(arguments.paces))
        # Those of calls with other settings are in the file, too.
        planned = [x for x in found["runs"] if x["digest"] in found["planned"]]
        paces = {x["model"]: x["found"] for x in planned if x["phase"] == "pace"}
        if missing := [x for x in models if x not in paces and not comparison.pace(x)]:
            raise ValueError(f"paces={arguments.paces}: it has none of {', '.join(missing)}")
        seconds = {name: x["seconds"] for name, x in paces.items() if name in models}
        ceilings = [x["ceiling_gflops"] for x in paces.values()]
        comparison.take_paces(seconds, ceilings[0])
    if arguments.measure:
        comparison.measure()
    else:
        if not recorded(path)["baselines"] and arguments.baselines:
            rows += rounded([asdict(row) for row in baselines(comparison.corpus)])
        comparison.go()
    record("done")


def _alike(seeds: list[Run], now: list[Run], comparison: Comparison) -> list[Run]:
    """Return the runs of other seeds that belong to the runs of this call.

    They have the learning rate that is chosen and the same network and steps, as far as that is
    known: a search may not have ended.
    """
    made = {run.model: run for run in now if run.phase == "run" and "training" in run.found}

    def belongs(run: Run) -> bool:
        same, factor = made.get(run.model, run), comparison.factor(run.model)
        return factor in (None, run.factor) and _network(run) == _network(same)

    return [run for run in seeds if belongs(run)]


def _network(run: Run) -> tuple[int, int]:
    return run.found["training"]["steps"], run.found["training"]["parameters"]


def _size(arguments: argparse.Namespace) -> str:
    return f"-{arguments.size}" if arguments.size else ""


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
    sizes = parser.add_mutually_exclusive_group()
    for size, about in (("larger", "ten times as many"), ("smaller", "a quarter of the")):
        sizes.add_argument(
            f"--{size}", dest="size", action="store_const", const=size, help=f"{about} weights"
        )
    parser.add_argument("--precision", choices=get_args(Rounded), help="of all runs")
    parser.add_argument(
        "--later-precision", choices=get_args(Rounded), help="of the seeds but the first"
    )
    parser.add_argument("--paces", choices=CORPORA, help="take the time of a step from its runs")
    parser.add_argument("--no-baselines", dest="baselines", action="store_false")
    parser.add_argument(
        "--measure", action="store_true", help="measure writing anew, train nothing"
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="add the runs of these, train nothing"
    )
    parser.add_argument("--json", type=Path, help="default benchmarks/results/comparison_NAME.json")
    parser.add_argument("--out", type=Path, help="run folders; default runs/comparison/NAME")
    parser.add_argument("--docs", action="store_true", help="write docs/which-model.md and end")
    arguments = parser.parse_args(words)
    if arguments.docs:
        write_page()
    elif arguments.corpus is None:
        parser.error("name a corpus, or --docs")
    elif arguments.merge:
        merge(arguments.json or results_file(arguments.corpus + _size(arguments)), arguments.merge)
    else:
        compare(arguments.corpus, arguments)


if __name__ == "__main__":
    main()
