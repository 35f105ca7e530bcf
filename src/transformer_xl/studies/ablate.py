"""The ablations of the paper (Tables 6, 7 and 10) at any size: recurrence, encodings and loss.

Each row is trained with several seeds; for each, the best attention length is searched.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
from jaxtyping import Integer
from torch import Tensor

from transformer_xl import WithMemory, evaluate
from transformer_xl.config import (
    Config,
    EvalConfig,
    Precision,
    pick_device,
    replace_file,
    require,
)
from transformer_xl.data import Corpus, prepare
from transformer_xl.errors import SettingsError
from transformer_xl.model import LanguageModel, TransformerXL
from transformer_xl.studies import markdown_table
from transformer_xl.train import RunFolder, train

TABLES = (6, 7, 10)
"""Tables of the paper that hold ablations."""
MEASURED_FILE = "ablation.json"
_ATTN_TYPES = {"ours": 0, "shaw": 1, "sinusoids": 2, "learned": 3}
_AUTHORS = {"ours": "ours", "shaw": "Shaw et al.", "sinusoids": "Vaswani et al.",
            "learned": "Al-Rfou et al."}  # fmt: skip
_FACTORS = (0.5, 0.75, 1, 1.5, 2, 3)
_AS_GOOD = 1e-3
"""Tolerance, in nats, within which the shortest attention length counts as the best."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of the ablation."""

    name: str
    """Recurrence or not, encoding and loss; also the name of its folder. Encodings: ours, relative;
    shaw, learned relative; sinusoids, Vaswani's; learned, Al-Rfou's."""
    paper: dict[int, tuple[float | None, float, int | None]] = field(default_factory=dict)
    """By table: perplexity at the training length, best perplexity, and its attention length."""
    longer: float = 1.0
    """Factor of the segment length, for the same GPU memory as with recurrence."""


ROWS = (
    Row("recurrence-ours-full",
        {6: (27.02, 26.77, 500), 7: (None, 25.2, None), 10: (27.02, 26.77, 500)}),
    Row("recurrence-shaw-full", {6: (27.94, 27.94, 256), 7: (None, 25.7, None)}),
    Row("recurrence-ours-half", {6: (28.69, 28.33, 460), 10: (28.69, 28.33, 460)}),
    Row("none-ours-full", {6: (29.59, 29.02, 260), 7: (None, 27.1, None)}),
    Row("none-ours-half", {6: (30.10, 30.10, 120)}),
    Row("none-shaw-full", {6: (29.75, 29.75, 120)}),
    Row("none-shaw-half", {6: (30.50, 30.50, 120)}),
    Row("none-sinusoids-half", {6: (30.97, 30.97, 120)}),
    Row("none-learned-half", {6: (31.16, 31.16, 120)}),
    # 176 and 172 tokens instead of 128, in the same memory.
    Row("longer-ours-full", {10: (28.43, 27.98, 400)}, 176 / 128),
    Row("longer-ours-half", {10: (28.83, 28.83, 120)}, 172 / 128),
)  # fmt: skip
"""All rows, in the order of the paper."""


def rows_of(table: int, names: Sequence[str] = ()) -> list[Row]:
    """Return the rows of a table, or those of these names.

    Raises:
        SettingsError: There is no such table or row.
    """
    by_name = {row.name: row for row in ROWS}
    if unknown := [name for name in names if name not in by_name]:
        raise SettingsError(f"{unknown[0]!r} is no row; there are {', '.join(by_name)}")
    if names:
        return [by_name[name] for name in dict.fromkeys(names)]
    if table not in TABLES:
        raise SettingsError(
            f"table={table} has no ablations; choose from {', '.join(map(str, TABLES))}"
        )
    return [row for row in ROWS if table in row.paper]


def apply_row(row: Row, recipe: Config, seed: int) -> Config:
    """Return the shared recipe with the recurrence, encoding and loss of a row.

    Args:
        row: The row.
        recipe: The recipe that all rows share, with recurrence.
        seed: Seed of the weights and of dropout.

    Raises:
        SettingsError: The recipe has no attention or no memory, or the settings are inconsistent.
    """
    model = recipe.model
    if model.kind != "transformer_xl":
        raise SettingsError(f"model.kind={model.kind!r} has no recurrence or encoding to take away")
    if not model.mem_len:
        raise SettingsError(
            "model.mem_len=0: the recipe has no recurrence to take away; give it a memory, as long "
            "as the segment in the paper"
        )
    recurrence, encoding, loss = row.name.split("-")
    has_memory = recurrence == "recurrence"
    segment_len = round(recipe.train.segment_len * row.longer)
    mem_len = model.mem_len if has_memory else 0
    attn_type = _ATTN_TYPES[encoding]
    return replace(
        recipe,
        model=replace(
            model,
            attn_type=attn_type,
            n_positions=segment_len + mem_len if attn_type in (1, 3) else None,
            # Absolute encodings have no biases of attention.
            tie_biases=model.tie_biases or attn_type in (2, 3),
            mem_len=mem_len,
            enhanced_recurrence=model.enhanced_recurrence and has_memory,
            ext_len=0,
            attn_len=None,
            layer_attn_lens=(),
            clamp_len=None,
        ),
        train=replace(
            recipe.train,
            segment_len=segment_len,
            loss=loss,
            seed=seed,
            # Without a curriculum, as rows differ in their lengths.
            stages=(),
            reset_memory=recipe.train.reset_memory if has_memory else 0.0,
            random_mem_len=recipe.train.random_mem_len if has_memory else None,
        ),
        # Attention lengths are searched after training.
        eval=EvalConfig(batch_size=recipe.eval.batch_size),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The runs and measurements of an ablation."""

    recipe: Config
    """The recipe that all rows share."""
    rows: tuple[Row, ...]
    seeds: tuple[int, ...] = (1,)
    """Each row is trained once with each."""
    attn_lens: tuple[int, ...] = ()
    """Attention lengths to evaluate; empty: 0.5 to 3 times that of training."""
    split: str = "valid"
    tokens: int | None = None
    """Evaluate on this many tokens from the start of the split; None: on all."""

    def __post_init__(self) -> None:
        rules = (
            (
                len({*self.seeds}) == len(self.seeds) > 0,
                f"seeds={self.seeds} must be different, and at least one",
            ),
            (
                min(self.attn_lens, default=1) > 0,
                f"attn_lens={self.attn_lens} must be at least 1",
            ),
            (self.tokens is None or self.tokens > 1, f"tokens={self.tokens} must be at least 2"),
        )
        for holds, rule in rules:
            require(holds, rule)


class Length(msgspec.Struct):
    """The loss of a model at an attention length, in nats per token."""

    attn_len: int
    nll: float


class Settings(msgspec.Struct):
    """What a measurement depends on beside the run."""

    trained_attn_len: int
    attn_lens: list[int]
    split: str
    tokens: int | None
    checksums: dict[str, str]
    """Of the text."""


class Measured(msgspec.Struct, kw_only=True):
    """The measurement of a run, as in its ``ablation.json``."""

    row: str
    seed: int
    settings: Settings
    segment_len: int
    lengths: list[Length]
    unit: str
    """``perplexity`` or ``bits per token``."""


def ablate(plan: Plan, folder: Path, say: Callable[[str], None] = print) -> list[Measured]:
    """Train and evaluate every row with every seed, seed by seed; finished runs are skipped.

    Each has a run folder, ``ROW/seed_N``, in ``folder``. The same call resumes interrupted runs.

    Returns:
        The measurements of each run.

    Raises:
        ValueError: A row does not fit the recipe; a folder holds a run of another recipe or text.
        OSError: A folder holds something else, or cannot be written.
    """
    runs = [
        (row, apply_row(row, plan.recipe, seed), folder / row.name / f"seed_{seed}")
        for seed in plan.seeds
        for row in plan.rows
    ]
    for _, config, place in runs:
        # Before the first run starts.
        RunFolder(place).check(config)
    corpus = prepare(plan.recipe.data, lambda _: None)
    all_measured = []
    for n, (row, config, place) in enumerate(runs, 1):
        trained = config.train.segment_len + config.model.mem_len
        lengths = plan.attn_lens or [max(1, round(factor * trained)) for factor in _FACTORS]
        settings = Settings(
            trained_attn_len=trained,
            attn_lens=sorted({*lengths, trained}),
            split=plan.split,
            tokens=plan.tokens,
            # Of another text, training says so.
            checksums=dict(corpus.checksums),
        )
        measured = None
        with suppress(OSError, msgspec.DecodeError):
            measured = msgspec.json.decode((place / MEASURED_FILE).read_bytes(), type=Measured)
        is_known = measured is not None and measured.settings == settings
        state = "was measured before" if is_known else "begins"
        say(f"run {n} of {len(runs)}: {row.name}, seed {config.train.seed} {state}")
        if measured is None or not is_known:
            train(config, place, quiet=True)
            measured = Measured(
                row=row.name,
                seed=config.train.seed,
                settings=settings,
                segment_len=config.train.segment_len,
                lengths=_lengths(place, config, corpus, settings),
                unit="bits per token" if corpus.vocab.kind in ("chars", "bytes") else "perplexity",
            )
            content = msgspec.json.format(msgspec.json.encode(measured))
            replace_file(place / MEASURED_FILE, content + b"\n")
        say("   " + ", ".join(f"{x.attn_len}: {x.nll:.4f}" for x in measured.lengths))
        all_measured.append(measured)
    return all_measured


def _lengths(place: Path, config: Config, corpus: Corpus, settings: Settings) -> list[Length]:
    device = pick_device()
    ids = corpus.split(settings.split)[: settings.tokens]
    model = TransformerXL.from_pretrained(place).to(device)
    sizes = config.train.segment_len, config.eval.batch_size
    with Precision(config.train.precision, device).autocast():
        return [Length(x, attention_length_nll(model, ids, x, *sizes)) for x in settings.attn_lens]


def attention_length_nll(
    model: LanguageModel,
    ids: Sequence[int] | Integer[np.ndarray | Tensor, " length"],
    attn_len: int,
    segment_len: int,
    batch_size: int = 1,
) -> float:
    """Return the loss at an attention length, in nats per token.

    With recurrence, each token sees exactly ``attn_len`` keys, counting its own, with a memory of
    that length. Without recurrence, cached states would extend the context beyond that of training;
    instead, the text is read in windows of ``attn_len`` tokens, of which the last quarter is
    predicted, so that each token sees at least three quarters of ``attn_len``.
    """
    how = WithMemory(batch_size=batch_size, segment_len=segment_len, mem_len=attn_len)
    if model.config.mem_len:
        how = replace(how, attn_len=attn_len)
    else:
        stride = max(1, attn_len // 4)
        how = replace(how, segment_len=stride, mem_len=0, ext_len=attn_len - stride)
    return evaluate(model, ids, how).nll


class Spread(msgspec.Struct):
    """Mean and standard deviation over seeds; None for a single one."""

    mean: float
    std: float | None

    def __str__(self) -> str:
        digits = 4 if self.mean < 10 else 2
        return f"{self.mean:.{digits}f}" + ("" if self.std is None else f" ± {self.std:.{digits}f}")


class Summary(msgspec.Struct, kw_only=True):
    """A row over its seeds, to compare with the paper."""

    row: str
    segment_len: int
    seeds: list[int]
    unit: str
    init: Spread
    """At the attention length of training, in ``unit``."""
    best: Spread
    attn_len: int
    """The shortest one within 0.001 nats of the best."""
    curve: list[Length]
    """The mean losses."""
    paper: tuple[float | None, float | None, int | None]
    """As ``init``, ``best`` and ``attn_len``."""


def summary(measured: Sequence[Measured], table: int = 6) -> list[Summary]:
    """Aggregate the runs of :func:`ablate` over seeds, to compare with a table of the paper."""
    rows = []
    for row in ROWS:
        runs = [run for run in measured if run.row == row.name]
        if not runs:
            continue
        first, unit = runs[0], runs[0].unit
        lengths = [x.attn_len for x in first.lengths]
        nll = np.array([[x.nll for x in run.lengths] for run in runs])
        mean = nll.mean(0)
        best = int(np.flatnonzero(mean <= mean.min() + _AS_GOOD)[0])
        rows.append(
            Summary(
                row=row.name,
                segment_len=first.segment_len,
                seeds=[run.seed for run in runs],
                unit=unit,
                init=_spread(nll[:, lengths.index(first.settings.trained_attn_len)], unit),
                best=_spread(nll[:, best], unit),
                attn_len=lengths[best],
                curve=[*map(Length, lengths, mean.tolist())],
                paper=row.paper.get(table, (None, None, None)),
            )
        )
    return rows


def markdown(rows: Sequence[Summary]) -> str:
    """Format a summary as a Markdown table with the columns of the paper."""
    if not rows:
        return ""
    heads = [
        *("recurrence", "encoding", "loss", "segment", f"{rows[0].unit}, init", "best"),
        *("attention length", "paper: init", "best", "attention length"),
    ]
    cells = []
    for row in rows:
        recurrence, encoding, loss = row.row.split("-")
        *paper, attn_len = row.paper
        cells.append(
            [
                "yes" if recurrence == "recurrence" else "no",
                _AUTHORS[encoding],
                loss,
                *(f"{row.segment_len:,}", str(row.init), str(row.best), f"{row.attn_len:,}"),
                *("" if x is None else f"{x:.2f}" for x in paper),
                str(attn_len or ""),
            ]
        )
    return markdown_table(heads, cells, n_texts=3) + "\n"


def _spread(nll: np.ndarray, unit: str) -> Spread:
    is_bits = unit == "bits per token"
    values = nll / math.log(2) if is_bits else np.exp(np.minimum(nll, 700))
    return Spread(values.mean().item(), values.std(ddof=1).item() if len(values) > 1 else None)
