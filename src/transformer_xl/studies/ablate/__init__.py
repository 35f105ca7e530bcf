"""The paper's ablations at any size: recurrence, encodings and loss, one table and one picture.

`rows` are the rows of Tables 6, 7 and 10, `running` trains and measures them, `table` sums up.
"""

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
