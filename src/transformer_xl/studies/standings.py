"""The result of a comparison: tables at equal time, tokens and FLOPs, and plots."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_xl.studies import markdown_table, save_figure

if TYPE_CHECKING:
    from transformer_xl.studies.compare import Run

Runs = Sequence["Run"]
Cost = Callable[["Run"], float]
"""What a run cost: tokens, FLOPs."""


def unit_of(runs: Runs) -> str:
    """Return the unit of the losses: ``bits per byte`` where it is known, else per token."""
    is_known = all(run.found["test"]["bits_per_byte"] is not None for run in runs)
    return "bits per byte" if is_known else "bits per token"


def bits(run: "Run", unit: str, split: str = "test") -> float:
    """Return the loss of a run in this unit."""
    return run.found[split][unit.replace(" ", "_")]


def tokens(run: "Run") -> float:
    """Return the tokens of a training."""
    return run.found["training"]["tokens"]


def flops(run: "Run") -> float:
    """Return the FLOPs of a training."""
    return 1e6 * run.found["training"]["mflop_per_token"] * tokens(run)


def standings(runs: Runs, reference: str | None = None) -> dict[str, Any]:
    """Sum up the runs of a comparison.

    Args:
        runs: All runs, those of the search included.
        reference: The contestant whose tokens and FLOPs the others are given. None: that with the
            fewest FLOPs, which the others were trained for, too.

    Returns:
        ``unit``, and ``models``: for each contestant, best first, its losses at equal time, mean
        and standard deviation over the seeds; the loss at the tokens, and at the FLOPs, of the
        ``reference`` (:func:`loss_at`); what it cost; and the ``failed`` runs.
    """
    failed = [run for run in runs if "failed" in run.found]
    done = [run for run in runs if "failed" not in run.found and run.phase != "pace"]
    by_name: dict[str, list[Run]] = {}
    for run in done:
        if run.phase == "run":
            by_name.setdefault(run.model, []).append(run)
    final = [run for long_runs in by_name.values() for run in long_runs]
    unit = unit_of(final) if final else "bits per token"
    curves = {
        name: [*_chosen_search(done, long_runs), *long_runs] for name, long_runs in by_name.items()
    }
    rows = [_row(long_runs, runs, unit) for long_runs in by_name.values()]
    costs = {name: statistics.fmean(map(flops, long_runs)) for name, long_runs in by_name.items()}
    reference = reference or min(costs, key=costs.__getitem__, default=None)
    at_reference = _at_costs(by_name[reference], curves, unit) if reference else {}
    for row in rows:
        row |= at_reference[row["model"]]
    return {
        "unit": unit,
        "reference": reference,
        "models": sorted(rows, key=lambda row: row["mean"]),
        "failed": [
            {x: getattr(run, x) for x in ("model", "phase", "factor", "seed")}
            | {"why": run.found["failed"]}
            for run in failed
        ],
        "machine": final[0].found["machine"] if final else None,
    }


def _row(long_runs: Runs, runs: Runs, unit: str) -> dict[str, Any]:
    """Sum up the long runs of a contestant."""
    losses = [bits(run, unit) for run in long_runs]
    trained = [run.found["training"] for run in long_runs]
    first = long_runs[0]
    factors = [x.factor for x in runs if x.phase == "search" and x.model == first.model]
    return {
        "model": first.model,
        "seeds": [run.seed for run in long_runs],
        "factor": first.factor,
        # A rate beyond those that were searched may be better.
        "at_edge": len({*factors}) > 1 and first.factor in (min(factors), max(factors)),
        "mean": statistics.fmean(losses),
        "std": statistics.stdev(losses) if len(losses) > 1 else None,
        "valid": statistics.fmean(bits(run, unit, "valid") for run in long_runs),
        "mem_len": first.found["test"]["mem_len"],
        **{x: trained[0][x] for x in ("parameters", "inside", "mflop_per_token")},
        "dtype": " and ".join(sorted({each["dtype"] for each in trained})),
        "tokens": statistics.fmean(map(tokens, long_runs)),
        # Not by the seconds that it took: the machine may have been busy.
        "tokens_per_second": statistics.fmean(
            tokens(run) / (60 * run.minutes) for run in long_runs
        ),
        "seconds": statistics.fmean(each["seconds"] for each in trained),
        "peak_mb": statistics.fmean(each["peak_mb"] for each in trained),
        "share_of_ceiling": _share(runs, long_runs),
        # Measured of the first seed only.
        **{
            x: next((run.found[x] for run in long_runs if x in run.found), None)
            for x in ("writing", "by_mem_len")
        },
    }


def _at_costs(
    long_runs: Runs, curves: Mapping[str, Runs], unit: str
) -> dict[str, dict[str, float | None]]:
    """Return the losses of all contestants at the tokens, and at the FLOPs, of one of them."""
    costs = {"at_tokens": tokens, "at_flops": flops}
    means = {what: statistics.fmean(map(cost, long_runs)) for what, cost in costs.items()}
    return {
        name: {what: loss_at(means[what], curve, cost, unit) for what, cost in costs.items()}
        for name, curve in curves.items()
    }


def _share(runs: Runs, long_runs: Runs) -> float | None:
    """Return the share of the machine's peak that a contestant uses at its pace."""
    paces = (run for run in runs if run.phase == "pace" and run.model == long_runs[0].model)
    pace = next(paces, None)
    if pace is None:
        return None
    seconds = 60 * statistics.fmean(run.minutes for run in long_runs)
    return statistics.fmean(map(flops, long_runs)) / seconds / 1e9 / pace.found["ceiling_gflops"]


def loss_at(there: float, curve: Runs, cost: Cost, unit: str) -> float | None:
    """Return the loss of a contestant at a cost, or None outside of what it was trained for.

    A curve has the run of the search and the long ones, all after a cooldown. Between the two costs
    the loss is interpolated linearly in the logarithms of both, as in a power law.
    """
    by_phase: dict[str, list[Run]] = {}
    for run in curve:
        by_phase.setdefault(run.phase, []).append(run)
    points = sorted(
        (statistics.fmean(map(cost, group)), statistics.fmean(bits(run, unit) for run in group))
        for group in by_phase.values()
    )
    costs, losses = np.log(np.array(points)).T
    # As good as equal: the runs of a contestant differ in their costs, too.
    if not costs[0] - 0.05 <= math.log(there) <= costs[-1] + 0.05:
        return None
    return float(np.exp(np.interp(math.log(there), costs, losses)))


def _chosen_search(done: Runs, long_runs: Runs) -> list["Run"]:
    """Return the runs of the search with the learning rates of the long ones."""
    return [
        run
        for run in done
        if run.phase == "search"
        and run.model == long_runs[0].model
        and run.factor == long_runs[0].factor
    ]


def markdown(result: Mapping[str, Any], baselines: Sequence[Mapping[str, Any]] = ()) -> str:
    """Format the standings as Markdown tables.

    Args:
        result: What :func:`standings` returned.
        baselines: Rows with ``name``, ``trained`` and ``bits``, of what needs no gradient.
    """
    unit, models = result["unit"], result["models"]
    heads = [
        *("model", f"{unit} at equal time", "seeds"),
        *(f"at the tokens of {result['reference'] or 'the first'}", "at its FLOPs"),
        *("learning rate x", "non-embedding parameters", "tokens"),
        *("tokens per second of training", "MFLOP per token", "share of the ceiling"),
        "peak memory",
    ]
    cells = [
        [
            row["model"],
            _number(row["mean"], ".4f") + ("" if row["std"] is None else f" ± {row['std']:.4f}"),
            f"{len(row['seeds'])}",
            *(_number(row[x], ".4f") for x in ("at_tokens", "at_flops")),
            f"{row['factor']:g}" + " (edge)" * row["at_edge"],
            f"{row['inside'] / 1e6:.2f} M",
            f"{row['tokens'] / 1e6:.2f} M",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['mflop_per_token']:.1f}",
            _number(row["share_of_ceiling"], ".2f"),
            f"{row['peak_mb']:.0f} MB",
        ]
        for row in models
    ]
    lines = [markdown_table(heads, cells)]
    for row in sorted(baselines, key=lambda row: row["bits"]):
        lines.append(f"| {_baseline(row)} | {row['bits']:.4f} |" + " |" * 10)
    parts = ["\n".join(lines)]
    by_dtype: dict[str, list[str]] = {}
    for row in models:
        by_dtype.setdefault(row["dtype"], []).append(row["model"])
    if len(by_dtype) > 1 or any(" and " in dtype for dtype in by_dtype):
        each = (f"{dtype} ({', '.join(names)})" for dtype, names in sorted(by_dtype.items()))
        parts.append(f"Precision of training: {', '.join(each)}.")
    if any(row["by_mem_len"] for row in models):
        parts.append(_by_mem_len(models))
    if any(row["writing"] for row in models):
        parts += _writing(models)
    if any(row["at_edge"] for row in models):
        parts.append(
            "(edge): the lowest or highest learning rate of the search was the best one; a rate "
            "beyond it may be better."
        )
    for row in result["failed"]:
        which = f"seed {row['seed']}"
        if row["phase"] == "search":
            which = f"learning rate x {row['factor']:g} of the search"
        parts.append(f"{row['model']}, {which}, failed: {row['why']}")
    return "\n\n".join(parts) + "\n"


def _baseline(row: Mapping[str, Any]) -> str:
    return row["name"] + ", given the training text" * row["trained"]


def verdict(result: Mapping[str, Any]) -> str:
    """Say in a sentence which contestant is best at equal time, and what is better than it."""
    best, *others = result["models"]
    unit = result["unit"]
    said = f"{best['model']} is best: {best['mean']:.2f} {unit}"
    if others:
        # As many digits as tell them apart.
        means = [best["mean"], others[0]["mean"]]
        digits = next((n for n in (2, 3) if f"{means[0]:.{n}f}" != f"{means[1]:.{n}f}"), 4)
        one, other = (f"{x:.{digits}f}" for x in means)
        said = f"{best['model']} is best: {one} beside {other} {unit} of {others[0]['model']}"
    better = [row for row in result["baselines"] if row["bits"] < best["mean"]]
    if better:
        row = min(better, key=lambda row: row["bits"])
        said += f"; but {_baseline(row)}, takes {row['bits']:.2f}"
    return said


def _by_mem_len(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the loss by memory length at evaluation, or by the context of a model without one."""
    by_name = {
        row["model"]: {x["context"]: x["nll"] / math.log(2) for x in row["by_mem_len"] or ()}
        for row in rows
    }
    lengths = sorted({n for found in by_name.values() for n in found})
    cells = []
    for name, losses in by_name.items():
        if losses:
            best = min(losses.values())
            each = [(_number(losses.get(n), ".3f"), losses.get(n) == best) for n in lengths]
            cells.append([name, *(f"**{cell}**" if is_best else cell for cell, is_best in each)])
    counts = [f"{n:,}" for n in lengths]
    heads = [f"bits per token with a memory, or a context, of {counts[0]}", *counts[1:]]
    note = (
        "Of one seed, on a part of the test text: the columns of a row can be compared with each "
        "other, not with the table above."
    )
    return f"{markdown_table(['model', *heads], cells)}\n\n{note}"


def _writing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the time of a token, and the size of the state, after ever more tokens."""
    by_name = {row["model"]: {x["tokens"]: x for x in row["writing"] or ()} for row in rows}
    counts = sorted({n for found in by_name.values() for n in found})
    times, sizes = [], []
    for name, by_count in by_name.items():
        if not by_count:
            continue
        # Runs of an earlier revision have fewer counts.
        each = [by_count.get(n, {}) for n in counts]
        step, called = (
            [_number(x.get(what), ".2f") for x in each] for what in ("ms_per_token", "ms_called")
        )
        first = next(iter(by_count.values()))
        # As runs of earlier versions call it.
        times.append([name, first.get("step") or first["stepper"], *step, *called])
        sizes.append([name, *(_number(x["state_bytes"] / 1e3 if x else None, ".1f") for x in each)])
    after = [f"after {n:,} tokens" for n in counts]
    heads = ["model", "step"]
    for what in (
        "ms of a token with this step",
        "ms with the model called for each token (eager)",
    ):
        heads += [f"{what} {after[0]}", *after[1:]]
    return [
        markdown_table(heads, times, n_texts=2),
        markdown_table(["model", f"kB of state {after[0]}", *after[1:]], sizes),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _whole_spans(spans: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Leave out the last span if it is shorter than the one before, cut off where pieces end.

    It may be a single position, whose loss is the mean over a few tokens.
    """
    widths = [x["last"] - x["first"] for x in spans[-2:]]
    return spans[:-1] if widths != sorted(widths) else spans


def draw(path: Path, runs: Runs) -> None:
    """Plot a comparison, .png or .svg: loss by tokens and FLOPs, by context, and by memory length.

    Raises:
        ImportError: matplotlib is missing.
        OSError: The file cannot be written.
    """
    # Without pyplot, which has global state and may need a display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

    done = [run for run in runs if "failed" not in run.found and run.phase != "pace"]
    final = [run for run in done if run.phase == "run"]
    unit = unit_of(final)
    figure = Figure(figsize=(11, 8), layout="constrained")
    ((by_tokens, by_flops), (from_start, by_memory)) = figure.subplots(2, 2)
    for n, name in enumerate(dict.fromkeys(run.model for run in final)):
        long_runs = [run for run in final if run.model == name]
        color = f"C{n}"
        for axes, cost in ((by_tokens, tokens), (by_flops, flops)):
            ends = []
            for group, fill in ((_chosen_search(done, long_runs), "none"), (long_runs, color)):
                costs, losses = [*map(cost, group)], [bits(run, unit) for run in group]
                axes.plot(costs, losses, "o", color=color, markersize=4, markerfacecolor=fill)
                if group:
                    ends.append((statistics.fmean(costs), statistics.fmean(losses)))
            axes.plot(*zip(*ends, strict=True), color=color, label=name)
        detailed = next((run.found for run in long_runs if "from_start" in run.found), None)
        if detailed is None:
            continue
        # Of spans and lengths, losses are known in nats per token.
        start = _whole_spans(detailed["from_start"])
        middle = [math.sqrt(x["first"] * x["last"]) for x in start]
        from_start.plot(middle, [x["nll"] / math.log(2) for x in start], color=color, label=name)
        lengths = detailed["by_mem_len"]
        if lengths:
            by_memory.plot(
                [max(x["context"], 32) for x in lengths],
                [x["nll"] / math.log(2) for x in lengths],
                marker=".",
                color=color,
                label=name,
            )
    labels = {
        by_tokens: ("tokens of training (hollow: runs of the search)", unit),
        by_flops: ("FLOPs of training (hollow: runs of the search)", unit),
        from_start: ("tokens since an empty memory", "bits per token"),
        by_memory: ("memory length, or context, at evaluation (0 at the left)", "bits per token"),
    }
    for axes, (x, y) in labels.items():
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    for axes in (by_tokens, by_flops):
        # About a decade, in which labels of all minor ticks overlap, and that of 1 is not enough.
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(9, 9)))
    # Without a memory, or far beyond it, some losses are many times the others.
    for axes in (from_start, by_memory):
        values = [y for line in axes.lines for y in np.asarray(line.get_ydata())]
        if values:
            axes.set_ylim(min(values) * 0.97, min(max(values), 2.2 * min(values)))
    by_tokens.legend(frameon=False, fontsize=8)
    save_figure(figure, path)
