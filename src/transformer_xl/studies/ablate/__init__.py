"""The ablations of the paper (Tables 6, 7 and 10) at any size: recurrence, encodings and loss."""

from transformer_xl.studies.ablate.running import (
    ROWS,
    Plan,
    Row,
    ablate,
    draw_ablation,
    markdown,
    recipe_of,
    rows_of,
    summary,
)

__all__ = [
    "ROWS",
    "Plan",
    "Row",
    "ablate",
    "draw_ablation",
    "markdown",
    "recipe_of",
    "rows_of",
    "summary",
]
