"""The gains of longer contexts as a picture, like Figure 3 of the paper.

Needs matplotlib when something is drawn, and not before.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformer_xl.config.files import write_atomically
from transformer_xl.studies.recl.definition import THRESHOLD, Recl


def draw_gains(
    path: Path,
    contexts: Sequence[int],
    results: Mapping[float, Mapping[str, Recl]],
    threshold: float = THRESHOLD,
) -> None:
    """Draw the relative gain of each step over the context it begins at, a panel for each r.

    Args:
        path: The file; its suffix says the format, ``.png`` or ``.svg``.
        contexts: The context lengths.
        results: For each share r of the tokens, the results of the models by name.
        threshold: The smallest gain that counts.

    Raises:
        ImportError: matplotlib is missing.
        OSError: The file cannot be written.
    """
    # Without pyplot nothing here touches the display or another figure of the process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(results), 3.4), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (top, models) in zip(panels, results.items(), strict=True):
        for name, result in models.items():
            line = axes.plot(contexts[:-1], [100 * gain for gain in result.gains], label=name)
            axes.axvline(result.length, color=line[0].get_color(), linestyle=":", linewidth=1)
        axes.axhline(100 * threshold, color="0.5", linestyle="--", linewidth=1)
        axes.set_title(f"the hardest {top:.0%} of the tokens" if top < 1 else "all tokens")
        axes.set_xlabel("context c in tokens; dotted: effective length")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("perplexity gained by a step more, %")
    panels[0].legend(frameon=False)
    form = path.suffix.removeprefix(".") or "png"
    metadata = {"Date": None} if form == "svg" else {}
    write_atomically(
        path,
        lambda temporary: figure.savefig(temporary, format=form, dpi=150, metadata=metadata),
    )
