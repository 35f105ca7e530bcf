"""Studies of the paper, ablations and effective context length; comparisons of models."""

from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.config.checks import require
from transformer_xl.config.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_predicted(tokens: int | None) -> None:
    """Require that of so many tokens at least one is predicted; None: of all there are.

    Raises:
        ValueError: None is.
    """
    require(tokens is None or tokens >= 2, f"tokens={tokens} must be at least 2")


def save_figure(figure: "Figure", path: Path) -> None:
    """Save a figure in the format of the suffix, .png or .svg; the same figure, the same bytes."""
    import matplotlib as mpl

    form = path.suffix.removeprefix(".") or "png"
    metadata = {"Date": None} if form == "svg" else {}

    def save(temporary: Path) -> None:
        # The names of clip paths and markers are random otherwise.
        with mpl.rc_context({"svg.hashsalt": "transformer_xl"}):
            figure.savefig(temporary, format=form, dpi=150, metadata=metadata)

    write_atomically(path, save)
