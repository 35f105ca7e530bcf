"""The rows of the paper's ablation tables, and the recipe that each stands for."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from transformer_xl.config import Config, EvalConfig

Encoding = Literal["ours", "shaw", "sinusoids", "learned"]
_ATTN_TYPES = {"ours": 0, "shaw": 1, "sinusoids": 2, "learned": 3}
TABLES = (6, 7, 10)
"""Tables of the paper that hold ablations."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of the ablation."""

    name: str
    """What it is called, also as a folder."""
    recurrence: bool
    """Whether the memory is on."""
    encoding: Encoding
    """ours: relative; shaw: learned relative; sinusoids: Vaswani's; learned: Al-Rfou's."""
    loss: Literal["full", "half"]
    """Of all tokens of a segment, or of its second half."""
    paper: dict[int, tuple[float | None, float, int | None]] = field(default_factory=dict)
    """By table: perplexity at the training length, the best one, and the length of that."""
    longer: float = 1.0
    """How much longer a segment is, in the GPU memory that a memory would have taken."""


ROWS = (
    Row("recurrence-ours-full", True, "ours", "full",
        {6: (27.02, 26.77, 500), 7: (None, 25.2, None), 10: (27.02, 26.77, 500)}),
    Row("recurrence-shaw-full", True, "shaw", "full",
        {6: (27.94, 27.94, 256), 7: (None, 25.7, None)}),
    Row("recurrence-ours-half", True, "ours", "half",
        {6: (28.69, 28.33, 460), 10: (28.69, 28.33, 460)}),
    Row("none-ours-full", False, "ours", "full",
        {6: (29.59, 29.02, 260), 7: (None, 27.1, None)}),
    Row("none-ours-half", False, "ours", "half", {6: (30.10, 30.10, 120)}),
    Row("none-shaw-full", False, "shaw", "full", {6: (29.75, 29.75, 120)}),
    Row("none-shaw-half", False, "shaw", "half", {6: (30.50, 30.50, 120)}),
    Row("none-sinusoids-half", False, "sinusoids", "half", {6: (30.97, 30.97, 120)}),
    Row("none-learned-half", False, "learned", "half", {6: (31.16, 31.16, 120)}),
    # 176 and 172 tokens instead of 128, in the same memory.
    Row("longer-ours-full", False, "ours", "full", {10: (28.43, 27.98, 400)}, 176 / 128),
    Row("longer-ours-half", False, "ours", "half", {10: (28.83, 28.83, 120)}, 172 / 128),
)  # fmt: skip
"""All rows, in the order of the paper."""


def rows_of(table: int, names: Sequence[str] = ()) -> list[Row]:
    """Return the rows of a table, or those of these names.

    Raises:
        ValueError: There is no such table or row.
    """
    by_name = {row.name: row for row in ROWS}
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"{unknown[0]!r} is no row; there are {', '.join(by_name)}")
    if names:
        return [by_name[name] for name in dict.fromkeys(names)]
    if table not in TABLES:
        raise ValueError(
            f"table={table} has no ablations; choose from {', '.join(map(str, TABLES))}"
        )
    return [row for row in ROWS if table in row.paper]


def recipe_of(
    row: Row,
    recipe: Config,
    seed: int,
    *,
    steps: int | None = None,
    minutes: float | None = None,
) -> Config:
    """Return what a row trains: the recipe with its recurrence, encoding, loss and seed.

    Args:
        row: The row.
        recipe: What all rows share: the sizes, the text and the optimization.
        seed: Seed of the weights and of dropout.
        steps: Steps of every run. None: as the recipe says.
        minutes: Time of every run. None: as the recipe says.

    Raises:
        ValueError: The recipe leaves nothing to take away, or the settings do not fit.
    """
    # Lengths are what rows differ in; each keeps its own from the beginning.
    model, train = recipe.model, replace(recipe.train, stages=())
    if not model.has_attention:
        raise ValueError(f"model.kind={model.kind!r} has no recurrence or encoding to take away")
    if not model.mem_len:
        raise ValueError(
            "model.mem_len=0: the recipe has no recurrence to take away; give it a memory, as long "
            "as the segment in the paper"
        )
    segment_len = round(train.segment_len * row.longer)
    mem_len = model.mem_len if row.recurrence else 0
    has_table = row.encoding in ("shaw", "learned")
    limits = {"minutes": minutes} if minutes is not None else {}
    if steps is not None:
        limits |= {"steps": steps}
        # A run that ends by steps has no other end.
        limits |= {"minutes": None} if minutes is None else {}
    return replace(
        recipe,
        model=replace(
            model,
            attn_type=_ATTN_TYPES[row.encoding],
            n_positions=segment_len + mem_len if has_table else None,
            mem_len=mem_len,
            enhanced_recurrence=model.enhanced_recurrence and row.recurrence,
            ext_len=0,
            attn_len=None,
            clamp_len=None,
        ),
        train=replace(train, segment_len=segment_len, loss=row.loss, seed=seed, **limits),
        # Lengths are searched afterwards.
        eval=EvalConfig(batch_size=recipe.eval.batch_size),
    )
