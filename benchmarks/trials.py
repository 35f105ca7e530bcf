"""What each component of a recipe brings: trainings at equal time without it, or with another one.

    python benchmarks/trials.py python-stdlib --minutes 3
    python benchmarks/trials.py ptb-char --minutes 3

A trial is the recipe modern-xl with some settings changed. As in `txl compare`, it makes as many
steps as take the time, which was measured for all in turns. Losses are those of the validation
text, in bits per token, of the model alone. p is that of Welch's t-test (two-sided) of the seeds of
a trial against those of the recipe.

Writes `results/TABLE_CORPUS.json`, and that table of docs/experiments.md.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from marked_tables import page
from result_file import rounded, write_result_file
from scipy.stats import ttest_ind
from turns import circumstances

from transformer_xl.config import load_recipe, replace_file
from transformer_xl.studies import markdown_table
from transformer_xl.studies.compare import Comparison, Plan

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "experiments.md"
RECIPE = "modern-xl"
SHORT = load_recipe(RECIPE).train.stages[:-1]
"""Lengths of segments and memories, without those of the last stage."""
TRIALS: dict[str, dict[str, dict[str, dict[str, Any]]]] = {
    "trials": {
        RECIPE: {},
        "without key_offset": {"model": {"key_offset": False}},
        "without scalable_softmax": {"model": {"scalable_softmax": None}},
        "a memory of 128, not random": {
            "model": {"mem_len": 128},
            "train": {"stages": SHORT, "random_mem_len": None},
        },
        "memories up to 256": {
            "model": {"mem_len": 256},
            "train": {"stages": (*SHORT, (0.45, 128, 256))},
        },
        "memories up to 512": {
            "model": {"mem_len": 512},
            "train": {"stages": (*SHORT, (0.45, 128, 512))},
        },
        "with embedding_residual": {"model": {"embedding_residual": True}},
        "without input_recurrence": {"model": {"input_recurrence": False}},
    },
    "lengths": {
        RECIPE: {},
        "the first layer sees 256 positions": {"model": {"layer_attn_lens": (256, 2048)}},
        "the first layer sees 128 positions": {"model": {"layer_attn_lens": (128, 2048)}},
        "the second layer sees 256 positions": {"model": {"layer_attn_lens": (2048, 256)}},
        "the first layer sees 256 positions, all of the memory is read": {
            "model": {"layer_attn_lens": (256, 2048)},
            "train": {"random_mem_len": None},
        },
    },
}
"""By table and name: the settings that a trial changes, by section."""
CORPORA = {"python-stdlib": RECIPE, "ptb-char": "ptb-char-cpu"}
"""By name: the recipe whose text and vocabulary they are."""
LEVEL = 0.05


def rows_of(losses: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each trial: mean, standard deviation, difference to the recipe, and p."""
    base, rows = losses[RECIPE], []
    for name, values in losses.items():
        row = {"trial": name, "seeds": len(values), "losses": values}
        row["mean"] = statistics.fmean(values)
        row["std"] = statistics.stdev(values) if len(values) > 1 else None
        row["difference"] = row["mean"] - statistics.fmean(base)
        row["p"] = None
        if name != RECIPE and min(len(values), len(base)) > 1:
            row["p"] = float(ttest_ind(values, base, equal_var=False).pvalue)
        rows.append(row)
    return rows


def verdict(row: Mapping[str, Any]) -> str:
    """Return what a row says about the recipe."""
    if row["p"] is None:
        return ""
    if row["p"] >= LEVEL:
        return "within the spread"
    return "better" if row["difference"] < 0 else "worse"


def table(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """Format the rows of each corpus as one table in Markdown, in the order of the first."""
    heads, by_trial = ["trial"], {}
    for corpus, rows in found.items():
        heads += [f"{corpus}: seeds", "bits per token", "difference", "p", ""]
        for row in sorted(rows, key=lambda row: row["mean"]):
            by_trial.setdefault(row["trial"], {})[corpus] = [
                f"{row['seeds']}",
                f"{row['mean']:.4f}" + ("" if row["std"] is None else f" ± {row['std']:.4f}"),
                f"{row['difference']:+.4f}",
                "" if row["p"] is None else f"{row['p']:.3f}",
                verdict(row),
            ]
    return markdown_table(
        heads,
        (
            [name, *(cell for corpus in found for cell in own.get(corpus, [""] * 5))]
            for name, own in by_trial.items()
        ),
    )


def main() -> None:
    """Make the trials that have not been made, and print their table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("corpus", choices=CORPORA)
    parser.add_argument("--path", help="files of the corpus, where they cannot be downloaded")
    parser.add_argument("--table", choices=TRIALS, default="trials", help="of the page")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tokens", type=int, help="of the validation text, from its start")
    parser.add_argument("--out", type=Path, default=Path("runs/trials"))
    given = parser.parse_args()
    recipe = load_recipe(RECIPE)
    models = {name: recipe.changed(changes, print) for name, changes in TRIALS[given.table].items()}
    plan = Plan(
        data=replace(load_recipe(CORPORA[given.corpus]).data, path=given.path),
        models=models,
        minutes=given.minutes,
        seeds=tuple(given.seeds),
        factors=(1.0,),
        eval_tokens=given.tokens,
        counts=False,
    )
    comparison = Comparison(plan, given.out / given.corpus, print)
    comparison.go()
    losses = {
        name: [
            run.found["valid"]["bits_per_token"]
            for run in comparison.planned()
            if (run.model, run.phase) == (name, "run") and "valid" in run.found
        ]
        for name in models
    }
    rows = rows_of({name: x for name, x in losses.items() if x})
    paces = {run.model: run.found["seconds"] for run in comparison.planned() if run.phase == "pace"}
    rows = [row | {"seconds": paces[row["trial"]]} for row in rows]
    print(table({given.corpus: rows}))
    about = circumstances() | {"corpus": given.corpus, "minutes": given.minutes}
    path = RESULTS / f"{given.table}_{given.corpus}.json"
    write_result_file(path, rounded(about | {"rows": rows}))
    write_page()


def write_page() -> None:
    """Write the tables of the page from the files of results."""
    tables = {}
    for name in TRIALS:
        files = [RESULTS / f"{name}_{corpus}.json" for corpus in CORPORA]
        found = [json.loads(path.read_text("utf-8")) for path in files if path.exists()]
        tables[name] = table({x["corpus"]: x["rows"] for x in found})
    replace_file(PAGE, page(PAGE.read_text("utf-8"), tables).encode())


if __name__ == "__main__":
    main()
