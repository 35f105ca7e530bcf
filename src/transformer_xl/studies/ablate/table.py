"""What an ablation found: one table with the paper's columns, and one picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.config.files import write_atomically
from transformer_xl.studies.ablate.rows import ROWS

_NAMES = {"ours": "ours", "shaw": "Shaw et al.", "sinusoids": "Vaswani et al.",
          "learned": "Al-Rfou et al."}  # fmt: skip
_AS_GOOD = 1e-3
"""Nats within which a shorter attention length is as good as the best."""


def summary(measured: Sequence[Mapping[str, Any]], table: int = 6) -> list[dict[str, Any]]:
    """Sum up the runs of each row over its seeds.

    Args:
        measured: What :func:`transformer_xl.studies.ablate.ablate` returned.
        table: The table of the paper whose numbers stand beside.

    Returns:
        For each row: ``init`` and ``best`` as mean and standard deviation over the seeds (None
        for a single one), in perplexity or in bits per token as ``unit`` says; the shortest
        ``attn_len`` that reaches the best within 0.001 nats; the mean loss by length; the paper's.
    """
    found = []
    for row in ROWS:
        runs = [run for run in measured if run["row"] == row.name]
        if not runs:
            continue
        trained = runs[0]["settings"]["trained_attn_len"]
        lengths = [x["attn_len"] for x in runs[0]["lengths"]]
        nll = np.array([[x["nll"] for x in run["lengths"]] for run in runs])
        mean = nll.mean(0)
        best = int(np.flatnonzero(mean <= mean.min() + _AS_GOOD)[0])
        unit = runs[0]["unit"]
        init, best_init, paper_len = row.paper.get(table, (None, None, None))
        found.append(
            {
                "row": row.name,
                "recurrence": row.recurrence,
                "encoding": row.encoding,
                "loss": row.loss,
                "segment_len": runs[0]["train"]["segment_len"],
                "parameters": runs[0]["parameters"],
                "seeds": [run["seed"] for run in runs],
                "steps": [run["steps"] for run in runs],
                "unit": unit,
                "init": _spread(_in_unit(nll[:, lengths.index(trained)], unit)),
                "init_attn_len": trained,
                "best": _spread(_in_unit(nll[:, best], unit)),
                "attn_len": lengths[best],
                "curve": [
                    {"attn_len": length, "nll": x}
                    for length, x in zip(lengths, mean.tolist(), strict=True)
                ],
                "paper": {"init": init, "best": best_init, "attn_len": paper_len},
            }
        )
    return found


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a summary as a Markdown table with the paper's columns."""
    if not rows:
        return ""
    unit = rows[0]["unit"]
    lines = [
        f"| recurrence | encoding | loss | segment | {unit}, init | best | attention length "
        "| paper: init | best | attention length |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        paper = row["paper"]
        cells = [
            "yes" if row["recurrence"] else "no",
            _NAMES[row["encoding"]],
            row["loss"],
            f"{row['segment_len']:,}",
            _with_spread(row["init"]),
            _with_spread(row["best"]),
            f"{row['attn_len']:,}",
            *("" if paper[x] is None else f"{paper[x]:.2f}" for x in ("init", "best")),
            "" if paper["attn_len"] is None else str(paper["attn_len"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_ablation(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw each row's results with their spread, and its loss over the attention length.

    Args:
        path: The file; its suffix says the format, ``.png`` or ``.svg``.
        rows: A summary.

    Raises:
        ImportError: matplotlib is missing.
        OSError: The file cannot be written.
    """
    # Without pyplot nothing here touches the display or another figure of the process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.34 * max(len(rows), 6)), layout="constrained")
    bars, curves = figure.subplots(1, 2, width_ratios=(3, 2))
    names = [row["row"] for row in rows]
    unit = rows[0]["unit"]
    for kind, marker, label in (
        ("init", "o", "at the length of training"),
        ("best", "D", "at the best length"),
    ):
        values = [row[kind]["mean"] for row in rows]
        errors = [row[kind]["std"] or 0.0 for row in rows]
        bars.errorbar(values, names, xerr=errors, fmt=marker, capsize=3, label=label, alpha=0.8)
    bars.invert_yaxis()
    bars.set_xlabel(f"{unit}, with the standard deviation over seeds")
    bars.legend(frameon=False)
    for row in rows:
        lengths = [x["attn_len"] for x in row["curve"]]
        values = _in_unit(np.array([x["nll"] for x in row["curve"]]), unit)
        curves.plot(lengths, values, marker=".", label=row["row"])
    curves.set_xlabel("attention length")
    curves.legend(frameon=False, fontsize=6)
    for axes in (bars, curves):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    form = path.suffix.removeprefix(".") or "png"
    metadata = {"Date": None} if form == "svg" else {}
    write_atomically(
        path,
        lambda temporary: figure.savefig(temporary, format=form, dpi=150, metadata=metadata),
    )


def _in_unit(nll: np.ndarray, unit: str) -> np.ndarray:
    return nll / math.log(2) if unit == "bits per token" else np.exp(np.minimum(nll, 700))


def _spread(values: np.ndarray) -> dict[str, float | None]:
    std = float(values.std(ddof=1)) if len(values) > 1 else None
    return {"mean": float(values.mean()), "std": std}


def _with_spread(value: Mapping[str, float | None]) -> str:
    mean, std = value["mean"], value["std"]
    assert mean is not None
    digits = 4 if mean < 10 else 2
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")
