"""Write docs/reproduction.md: the paper's tables, and what was found of them here.

    python benchmarks/reproduction.py            # writes the page and its curves
    python benchmarks/reproduction.py --check    # says whether they are up to date

The paper's numbers, those of its code and of others are in `benchmarks/reproduction/*.toml`, ours
in `benchmarks/results/runs/*.json` (see `benchmarks/record.py`). The page holds nothing else, so it
is as the files are: a test compares them.
"""

import argparse
import json
import math
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from drawing import lines_svg
from marked_tables import row as row_of

from transformer_xl.studies.ablate import Summary, markdown, rows_of
from transformer_xl.train.figures import number

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "benchmarks" / "reproduction"
RESULTS = ROOT / "benchmarks" / "results" / "runs"
PAGE = Path("docs") / "reproduction.md"
CURVES = Path("docs") / "images" / "runs"
NOT_RUN = "not run"

_INTRODUCTION = """# Reproduction

The paper's tables: its numbers (arXiv 1901.02860v3), those of the authors' code where somebody ran
it, those of others, and ours. A number of ours stands here only where a recorded run gave it;
everything else is *not run*. This page is made by `python benchmarks/reproduction.py` of the files
in `benchmarks/reproduction/` and `benchmarks/results/runs/`. To add a run:

```
txl train ptb-char-cpu --out runs/ptb-char-cpu
python benchmarks/record.py runs/ptb-char-cpu ptb-char-cpu
python benchmarks/reproduction.py
```

"""


def pages(tables: Path = TABLES, results: Path = RESULTS) -> dict[Path, str]:
    """Return the text of the page and of each curve, by their paths in the repository."""
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(results.glob("*"))}
    sections = []
    used: set[str] = set()
    for path in sorted(tables.glob("*.toml")):
        table = tomllib.loads(path.read_text("utf-8"))
        own = _belonging(table, found)
        used |= own.keys()
        sections.append("\n".join(_section(table, own)))
    if unused := sorted(found.keys() - used):
        names = ", ".join(f"`{name}`" for name in unused)
        others = {name: found[name] for name in unused}
        lines = ["## Other runs", "", f"Recorded, but in no table above: {names}.", ""]
        sections.append("\n".join([*lines, *_curves(others)]))
    files = {PAGE: _INTRODUCTION + "\n".join(sections).rstrip() + "\n"}
    for name, result in found.items():
        if drawn := _drawn(result):
            files[CURVES / f"{name}.svg"] = drawn
    return files


def _belonging(
    table: Mapping[str, Any], found: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the results that a table shows, by name."""
    kind = table.get("kind", "run")
    if kind == "run":
        names = [_name(row) for row in table["rows"]]
        return {name: found[name] for name in names if name in found}
    return {
        name: result
        for name, result in found.items()
        if result["kind"] == kind and result.get("table", table["table"]) == table["table"]
    }


def _section(table: Mapping[str, Any], own: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    number = f"Table {table['table']}: " if "table" in table else ""
    yield f"## {number}{table['title']}"
    yield ""
    kind = table.get("kind", "run")
    unit = [f"{table['unit'].capitalize()}."] if kind == "run" else []
    yield " ".join([*unit, *([table["note"]] if "note" in table else [])])
    yield ""
    yield from _KINDS[kind](table, own)


def _name(row: Mapping[str, Any]) -> str:
    """Return the result that a row shows: that of its recipe, or another one of the same recipe."""
    return row.get("result", row.get("recipe", ""))


def _runs(table: Mapping[str, Any], own: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    yield from _header("model", "parameters", "paper", "authors' code", "others", "ours",
                       "time and machine", "command")  # fmt: skip
    for row in table["rows"]:
        result = own.get(_name(row))
        command = f"`txl train {row['recipe']} --out DIR`" if "recipe" in row else ""
        ours, spent, size = NOT_RUN if "recipe" in row else "", "", row.get("parameters", "")
        if result:
            ours = f"**{_measured(result, table['unit'])}**"
            spent = _spent(result)
            size = size or f"{result['parameters'] / 1e6:,.1f} M"
            command = f"`{result['command']}`" if result.get("command") else command
        cells = (row["model"], size, row.get("paper", ""), row.get("authors", ""))
        yield row_of(*cells, row.get("others", ""), ours, spent, command)
    yield ""
    yield from _curves(own)


def _measured(result: Mapping[str, Any], unit: str) -> str:
    test = result["results"]["test"]
    value = test["ppl"] if unit == "perplexity" else number(test, "bits_per_token")
    split = "" if test["split"] == "test" else f" ({test['split']})"
    return f"{value:,.2f}{split}" if unit == "perplexity" else f"{value:.4f}{split}"


def _spent(result: Mapping[str, Any]) -> str:
    minutes, machine = result["minutes"], result["machine"]
    time = f"{minutes:,.0f} min" if minutes >= 10 else f"{minutes:,.1f} min"
    return f"{time}, {_machine(machine)}"


def _machine(machine: Mapping[str, Any]) -> str:
    if machine.get("gpu"):
        return machine["gpu"]
    n = machine.get("threads")
    threads = "" if n is None else f", {n} thread{'s' * (n != 1)}"
    return f"{machine.get('processor', 'unknown')}{threads}"


def _ablations(table: Mapping[str, Any], own: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    if own:
        for name, result in own.items():
            machine = _machine(result["machine"])
            yield f"`{name}`: {result['minutes']:,.0f} minutes in all, {machine};"
            yield f"`{result.get('command') or table['command']}`."
            yield from _noted(result)
            yield ""
            yield markdown(msgspec.convert(result["rows"], list[Summary]))
            yield f"![Bits per token over the attention length]({_picture(name)})"
            yield ""
        return
    yield from _header("recurrence", "encoding", "loss", "paper: init", "best",
                       "attention length", "ours")  # fmt: skip
    for row in rows_of(table["table"]):
        init, best, length = row.paper[table["table"]]
        known = (f"{x:.2f}" if x is not None else "" for x in (init, best))
        recurrence, encoding, loss = row.name.split("-")
        has_memory = "yes" if recurrence == "recurrence" else "no"
        cells = (has_memory, encoding, loss, *known, length or "")
        yield row_of(*cells, NOT_RUN)
    yield ""
    yield f"`{table['command']}`"
    yield ""


def _lengths(table: Mapping[str, Any], own: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    yield from _header("model", "parameters", "paper, r = 0.1 / 0.5 / 1", "ours")
    for row in table["rows"]:
        yield row_of(row["model"], row.get("parameters", ""), row["paper"], NOT_RUN)
    yield ""
    yield f"`{table['command']}`"
    yield ""
    for name, result in own.items():
        true = result.get("true_length")
        known = f" The true length of this text is {true}." if true else ""
        command = result.get("command") or table["command"]
        yield f"`{name}`, {_machine(result['machine'])}: `{command}`.{known}"
        yield from _noted(result)
        yield ""
        tops = list(result["models"][0]["recl"])
        last = result["contexts"][-1]
        yield from _header("model", *(f"r = {top}" for top in tops), f"nats with {last} tokens")
        for model in result["models"]:
            lengths = (model["recl"][top] for top in tops)
            shown = (f"{'≥ ' * x['is_bound']}{x['length']:,}" for x in lengths)
            yield row_of(model["name"], *shown, f"{model['nll'][-1]:.3f}")
        yield ""
        yield f"![Nats per token over the tokens of context]({_picture(name)})"
        yield ""


def _speeds(table: Mapping[str, Any], own: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    yield from _header("", "paper, one GPU", *([f"ours: `{name}`" for name in own] or ["ours"]))
    for row in table["rows"]:
        slowdowns = [{x["attn_len"]: x["slowdown"] for x in y["rows"]} for y in own.values()]
        known = (x.get(row["length"]) for x in slowdowns)
        ours = [NOT_RUN if x is None else f"**{x:,.0f}**" for x in known]
        yield row_of(row["model"], f"{row['paper']:,}", *(ours or [NOT_RUN]))
    yield ""
    for name, result in own.items():
        shape = f"{result['n_layer']} layers of width {result['d_model']}, {result['dtype']}"
        yield f"`{name}`: {shape}, {_machine(result['machine'])}."
        yield from _noted(result)
    yield f"`{table['command']}`"
    yield ""


_KINDS = {"run": _runs, "ablation": _ablations, "recl": _lengths, "evaluation_speed": _speeds}


def _curves(own: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    for name, result in own.items():
        if not _has_curve(result):
            continue
        yield f"![Bits per token of {name} over the steps]({_picture(name)})"
        yield ""
        yield f"`{name}`: {result['steps']:,} steps, {result['parameters']:,} parameters."
        yield from _noted(result)
        yield ""


def _picture(name: str) -> str:
    return f"images/runs/{name}.svg"


def _noted(result: Mapping[str, Any]) -> list[str]:
    return [result["note"]] if "note" in result else []


def _has_curve(result: Mapping[str, Any]) -> bool:
    return any(result.get("curve", {}).values())


def _drawn(result: Mapping[str, Any]) -> str | None:
    """Return the picture of a result, if there is something to see."""
    if _has_curve(result):
        # The first steps fall from so high that the rest would be a flat line below them.
        return lines_svg({k: line for k, line in result["curve"].items() if line}, after=1 / 20)
    if result["kind"] == "ablation":
        return lines_svg({
            row["row"]: [[x["attn_len"], x["nll"] / math.log(2)] for x in row["curve"]]
            for row in result["rows"]
        })  # fmt: skip
    if result["kind"] == "recl":
        return lines_svg({
            model["name"]: [*zip(result["contexts"], model["nll"], strict=True)]
            for model in result["models"]
        })  # fmt: skip
    return None


def _header(*names: str) -> list[str]:
    return [row_of(*names), f"|{'---|' * len(names)}"]


def main() -> None:
    """Write the files, or compare them with what is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if they differ")
    arguments = parser.parse_args()
    old = []
    for path, text in pages().items():
        file = ROOT / path
        if arguments.check:
            old += [str(path)] if not file.is_file() or file.read_text("utf-8") != text else []
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
        print(f"wrote {path}")
    if old:
        sys.exit(f"not up to date: {', '.join(old)}; run python benchmarks/reproduction.py")


if __name__ == "__main__":
    main()
