"""Studies of the paper, ablations and effective context length; comparisons of models."""

from collections.abc import Iterable, Sequence


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, n_texts: int = 1) -> str:
    """Return a table in Markdown.

    Args:
        heads: The titles of the columns.
        rows: The cells of each row.
        n_texts: Columns from the left that hold text; the others are aligned right.
    """
    rule = "|" + "---|" * n_texts + "--:|" * (len(heads) - n_texts)
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])
