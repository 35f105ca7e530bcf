"""The paper's ablations at any size: recurrence, encodings and loss, one table and one picture.

`rows` are the rows of Tables 6, 7 and 10, `running` trains and measures them, `table` sums up.
"""

from transformer_xl.studies.ablate.rows import ROWS, Row, recipe_of, rows_of
from transformer_xl.studies.ablate.running import Plan, ablate
from transformer_xl.studies.ablate.table import draw_ablation, markdown, summary

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
