"""The result of a comparison: a table at equal time, tokens and FLOPs, and a plot."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from transformer_xl.config import write_atomically
from transformer_xl.studies import markdown_table
from transformer_xl.studies.contestant import Found

if TYPE_CHECKING:
    from transformer_xl.studies.compare import Run

Runs = Sequence["Run"]
Cost = Callable[["Run"], float]
"""What a run cost: tokens, FLOPs."""


def unit_of(runs: Runs) -> str:
    """Return the unit of the losses: ``bits per byte`` where it is known, else per token."""
    is_known = runs and all(run.found["test"]["bits_per_byte"] is not None for run in runs)
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


def standings(runs: Runs) -> Found:
    """Sum up the runs of a comparison, those of the search included.

    Returns:
        ``unit``, and ``models``: for each contestant, best first, its losses at equal time, mean
        and standard deviation over the seeds; the loss at the tokens, and at the FLOPs, of the
        ``reference``, the contestant with the fewest FLOPs, which the others were trained for, too
        (:func:`loss_at`); what it cost; and the ``failed`` runs.
    """
    by_name = _long_runs(runs)
    final = [run for long_runs in by_name.values() for run in long_runs]
    unit = unit_of(final)
    means = {
        name: (statistics.fmean(map(tokens, x)), statistics.fmean(map(flops, x)))
        for name, x in by_name.items()
    }
    reference = min(means, key=lambda name: means[name][1], default=None)
    rows = []
    for long_runs in by_name.values():
        curve = [*_chosen_search(runs, long_runs), *long_runs]
        n_tokens, n_flops = means[str(reference)]
        row = _row(long_runs, unit)
        row["at_tokens"] = loss_at(n_tokens, curve, tokens, unit)
        row["at_flops"] = loss_at(n_flops, curve, flops, unit)
        rows.append(row)
    return {
        "unit": unit,
        "reference": reference,
        "models": sorted(rows, key=lambda row: row["mean"]),
        "failed": [
            {x: getattr(run, x) for x in ("model", "phase", "factor", "seed")}
            | {"why": run.found["failed"]}
            for run in runs
            if "failed" in run.found
        ],
        "machine": final[0].found["machine"] if final else None,
    }


def _long_runs(runs: Runs) -> dict[str, list["Run"]]:
    """Return the runs after the search, by contestant, without those that failed."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        if run.phase == "run" and "failed" not in run.found:
            by_name.setdefault(run.model, []).append(run)
    return by_name


def _row(long_runs: Runs, unit: str) -> Found:
    """Sum up the long runs of a contestant."""
    losses = [bits(run, unit) for run in long_runs]
    first, trained = long_runs[0], [run.found["training"] for run in long_runs]
    # Not by the seconds that it took: the machine may have been busy.
    seconds = 60 * statistics.fmean(run.minutes for run in long_runs)
    return {
        "model": first.model,
        "seeds": [run.seed for run in long_runs],
        "factor": first.factor,
        "mean": statistics.fmean(losses),
        "std": statistics.stdev(losses) if len(losses) > 1 else None,
        "valid": statistics.fmean(bits(run, unit, "valid") for run in long_runs),
        # Runs of earlier versions do not have it.
        "with_counts": statistics.fmean(bits(run, unit, "with_counts") for run in long_runs)
        if all("with_counts" in run.found for run in long_runs)
        else None,
        "mem_len": first.found["test"]["mem_len"],
        **{x: trained[0][x] for x in ("parameters", "inside", "mflop_per_token")},
        "dtype": " and ".join(sorted({each["dtype"] for each in trained})),
        "tokens": statistics.fmean(map(tokens, long_runs)),
        "tokens_per_second": statistics.fmean(map(tokens, long_runs)) / seconds,
        "seconds": statistics.fmean(each["seconds"] for each in trained),
    }


def loss_at(there: float, curve: Runs, cost: Cost, unit: str) -> float | None:
    """Return the loss of a contestant at a cost, or None outside of what it was trained for.

    A curve has the run of the search and the long ones, all after a cooldown. Between the two costs
    the loss is interpolated linearly in the logarithms of both, as in a power law.
    """
    points = []
    for phase in ("search", "run"):
        if group := [run for run in curve if run.phase == phase]:
            losses = [bits(run, unit) for run in group]
            points.append((statistics.fmean(map(cost, group)), statistics.fmean(losses)))
    costs, losses = np.log(np.array(sorted(points))).T
    # As good as equal: the runs of a contestant differ in their costs, too.
    if not costs[0] - 0.05 <= math.log(there) <= costs[-1] + 0.05:
        return None
    return float(np.exp(np.interp(math.log(there), costs, losses)))


def _chosen_search(runs: Runs, long_runs: Runs) -> list["Run"]:
    """Return the runs of the search with the learning rates of the long ones."""
    chosen = "search", long_runs[0].model, long_runs[0].factor
    return [x for x in runs if (x.phase, x.model, x.factor) == chosen and "failed" not in x.found]


def markdown(result: Found, baselines: Sequence[Found] = ()) -> str:
    """Format the standings as a Markdown table.

    Args:
        result: What :func:`standings` returned.
        baselines: Rows with ``name``, ``trained`` and ``bits``, of what needs no gradient.
    """
    heads = [
        *("model", f"{result['unit']} at equal time", "with counts", "seeds"),
        *(f"at the tokens of {result['reference'] or 'the first'}", "at its FLOPs"),
        *("learning rate x", "non-embedding parameters", "tokens"),
        *("tokens per second of training", "MFLOP per token", "precision"),
    ]
    cells = [
        [
            row["model"],
            _number(row["mean"], ".4f") + ("" if row["std"] is None else f" ± {row['std']:.4f}"),
            _number(row["with_counts"], ".4f"),
            f"{len(row['seeds'])}",
            *(_number(row[x], ".4f") for x in ("at_tokens", "at_flops")),
            f"{row['factor']:g}",
            f"{row['inside'] / 1e6:.2f} M",
            f"{row['tokens'] / 1e6:.2f} M",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['mflop_per_token']:.1f}",
            row["dtype"],
        ]
        for row in result["models"]
    ]
    lines = [markdown_table(heads, cells)]
    for row in sorted(baselines, key=lambda row: row["bits"]):
        name = row["name"] + ", given the training text" * row["trained"]
        lines.append(f"| {name} | {row['bits']:.4f} |" + " |" * 10)
    parts = ["\n".join(lines)]
    for row in result["failed"]:
        which = f"seed {row['seed']}"
        if row["phase"] == "search":
            which = f"learning rate x {row['factor']:g} of the search"
        parts.append(f"{row['model']}, {which}, failed: {row['why']}")
    return "\n\n".join(parts) + "\n"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(path: Path, runs: Runs) -> None:
    """Plot the losses of a comparison by tokens and by FLOPs, .png or .svg.

    Raises:
        ImportError: matplotlib is missing.
        OSError: The file cannot be written.
    """
    import matplotlib as mpl

    # Without pyplot, which has global state and may need a display.
    from matplotlib.figure import Figure

    by_name = _long_runs(runs)
    unit = unit_of([run for long_runs in by_name.values() for run in long_runs])
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, cost in zip(figure.subplots(1, 2), (tokens, flops), strict=True):
        for n, (name, long_runs) in enumerate(by_name.items()):
            ends = []
            for group, fill in ((_chosen_search(runs, long_runs), "none"), (long_runs, f"C{n}")):
                costs, losses = [*map(cost, group)], [bits(run, unit) for run in group]
                axes.plot(costs, losses, "o", color=f"C{n}", markersize=4, markerfacecolor=fill)
                if group:
                    ends.append((statistics.fmean(costs), statistics.fmean(losses)))
            axes.plot(*zip(*ends, strict=True), color=f"C{n}", label=name)
        axes.set_xscale("log")
        what = "tokens" if cost is tokens else "FLOPs"
        axes.set_xlabel(f"{what} of training (hollow: runs of the search)")
        axes.set_ylabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    form = path.suffix.removeprefix(".")
    # The same figure, the same bytes: the names of clip paths and markers are random otherwise.
    with mpl.rc_context({"svg.hashsalt": "transformer_xl"}):
        about = {"Date": None} if form == "svg" else {}
        write_atomically(path, lambda x: figure.savefig(x, format=form, dpi=150, metadata=about))
