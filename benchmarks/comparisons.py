r"""The comparison of docs/which-model.md: its files of results, its table and its chart.

    txl compare modern-xl --models modern-xl,gpt-modern,txl,txl-paper,gpt,lstm \
        --minutes 10 --seeds 1 2 3 --rates 0.5 1 2 --out runs/compare/python-stdlib
    python benchmarks/comparisons.py record runs/compare/python-stdlib
    python benchmarks/comparisons.py write      # the table and the chart of the page

`record` takes the folder of a comparison that has ended, whose name is that of the corpus, and
evaluates the models that have a memory on the test text with memories of different lengths. It
writes `results/comparison_CORPUS.json`: the standings, the baselines, the losses of each run, and
those by memory length.
"""

# ruff: noqa: RUF001 - Chinese punctuation

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from marked_tables import page, row, table
from result_file import rounded, write_result_file
from turns import circumstances

from transformer_xl.config import Precision, pick_device
from transformer_xl.config.files import replace_file
from transformer_xl.config.recipes import recipe_of
from transformer_xl.data import prepare
from transformer_xl.inference.evaluate import evaluate_by
from transformer_xl.model import load_model

ROOT = Path(__file__).parents[1]
PAGES = {"en": ROOT / "docs" / "which-model.md", "zh": ROOT / "docs" / "zh" / "which-model.md"}
CHART = ROOT / "docs" / "images" / "memory-lengths.svg"
RESULTS = ROOT / "benchmarks" / "results"
CORPORA = {
    "python-stdlib": {"en": "Python source, bits per byte", "zh": "Python 源代码，每字节比特数"},
    "ptb-char": {"en": "Penn Treebank, bits per character", "zh": "Penn Treebank，每字符比特数"},
    "brown": {"en": "Brown, perplexity", "zh": "Brown，困惑度"},
}
"""The corpora by name, with the unit in which the pages give their losses."""
WORDS = {
    "en": (
        "model",
        "equal time",
        "equal tokens; FLOPs",
        "with counts",
        ", given the training text",
    ),
    "zh": ("模型", "同等时间", "同等 token 数；FLOPs", "加计数", "，读过训练文本"),
}
MEM_LENS = (128, 256, 512, 1024, 2048, 4096, 8192)
MODELS = ("modern-xl", "gpt-modern", "txl")
"""Those of the chart."""


def recorded(folder: Path, n_tokens: int | None) -> dict[str, Any]:
    """Return what is kept of a comparison, with the losses by memory length, in bits per token."""
    result = json.loads((folder / "comparison.json").read_text("utf-8"))
    runs = json.loads((folder / "runs.json").read_text("utf-8"))
    losses = [
        {x: run[x] for x in ("model", "phase", "factor", "seed", "minutes")}
        | {split: run["found"][split]["bits_per_token"] for split in ("valid", "test")}
        | {x: run["found"]["training"][x] for x in ("steps", "tokens")}
        for run in runs
        if "test" in run["found"]
    ]
    memory: dict[str, dict[str, float]] = {}
    for path in (path for name in MODELS for path in sorted((folder / name).glob("seed_*"))):
        label = f"{path.parent.name}/{path.name.split('-')[0]}"
        if label in memory:
            raise ValueError(f"{folder} has two runs of {label}: which one is in the standings?")
        memory[label] = by_memory(path, n_tokens)
    paces = {run["model"]: run["found"]["seconds"] for run in runs if run["phase"] == "pace"}
    return circumstances() | result | {"paces": paces, "runs": losses, "memory": memory}


def by_memory(folder: Path, n_tokens: int | None) -> dict[str, float]:
    """Return the loss of a run on the test text, in bits per token, by memory length."""
    recipe = recipe_of(folder)
    assert recipe is not None
    corpus = prepare(recipe.data, lambda _: None)
    device = pick_device()
    model = load_model(folder / "model" / "best").to(device)
    ids, found = corpus.split(corpus.held_out)[: n_tokens and n_tokens + 1], {}
    for mem_len in MEM_LENS:
        settings = replace(recipe.eval, mem_len=mem_len)
        sizes: dict[str, Any] = {"n_bytes": 0, "segment_len": recipe.train.segment_len}
        with Precision(recipe.train.precision, device).autocast():
            result = evaluate_by(settings, model, ids, vocab=None, **sizes)
        found[str(mem_len)] = result.bits_per_token
    return found


def loss(bits: float | None, corpus: str) -> str:
    """Write a loss in the unit of the page."""
    if bits is None:
        return "-"
    return f"{2**bits:.0f}" if corpus == "brown" else f"{bits:.3f}"


def spread(x: Mapping[str, Any], corpus: str) -> str:
    """Write the loss of a contestant at equal time, with the deviation between its seeds."""
    if x["std"] is None:
        return loss(x["mean"], corpus)
    std = 2 ** x["mean"] * math.log(2) * x["std"] if corpus == "brown" else x["std"]
    return f"{loss(x['mean'], corpus)} ± {std:{'.0f' if corpus == 'brown' else '.3f'}}"


def comparison(found: Mapping[str, Mapping[str, Any]], language: str = "en") -> str:
    """Return the table: a row for each model, three columns for each corpus."""
    of_models, *kinds, trained = WORDS[language]
    colon = {"en": ": ", "zh": "："}[language]
    names = [CORPORA[name][language] + colon for name in found]
    heads = "|".join([of_models, *(name + kind for name in names for kind in kinds)])
    cells: dict[str, dict[str, list[str]]] = {}
    for name, result in found.items():
        for x in result["models"]:
            others = "; ".join(loss(x[at], name) for at in ("at_tokens", "at_flops"))
            own = [spread(x, name), others, loss(x["with_counts"], name)]
            cells.setdefault(x["model"], {})[name] = own
        for x in result["baselines"]:
            label = x["name"] + trained * x["trained"]
            cells.setdefault(label, {})[name] = [loss(x["bits"], name), "", ""]
    missing = ["-", "", ""]
    return table(
        heads,
        (
            row(label, *(cell for name in found for cell in own.get(name, missing)))
            for label, own in cells.items()
        ),
        n_texts=1,
    )


def draw(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the losses by memory length, a line for each seed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found), 3.6), layout="constrained")
    (row_of_axes,) = figure.subplots(1, len(found), squeeze=False)
    for axes, (name, result) in zip(row_of_axes, found.items(), strict=True):
        for label, losses in result["memory"].items():
            model, _, seed = label.partition("/")
            shown = model if seed == "seed_1" else None
            points = [*map(int, losses)], [*losses.values()]
            axes.plot(*points, "o-", color=f"C{MODELS.index(model)}", markersize=3, label=shown)
        axes.set_xscale("log", base=2)
        axes.set_xticks(MEM_LENS, [f"{x:,}" for x in MEM_LENS], fontsize=7)
        axes.set_title(CORPORA[name]["en"].split(",")[0], fontsize=9)
        axes.set_xlabel("memory length at evaluation, tokens")
        axes.set_ylabel("bits per token, test text")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    with mpl.rc_context({"svg.hashsalt": "transformer_xl"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Record a comparison, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="write the file of a comparison")
    record.add_argument("folder", type=Path)
    record.add_argument("--tokens", type=int, help="of the test text, for the memory lengths")
    commands.add_parser("write", help="write the table and the chart of the pages")
    given = parser.parse_args()
    if given.command == "record":
        path = RESULTS / f"comparison_{given.folder.name}.json"
        write_result_file(path, rounded(recorded(given.folder, given.tokens)))
        return
    paths = {name: RESULTS / f"comparison_{name}.json" for name in CORPORA}
    found = {name: json.loads(x.read_text("utf-8")) for name, x in paths.items() if x.exists()}
    for language, path in PAGES.items():
        text = page(path.read_text("utf-8"), {"comparison": comparison(found, language)})
        replace_file(path, text.encode())
    draw({name: x for name, x in found.items() if x["memory"]}, CHART)


if __name__ == "__main__":
    main()
