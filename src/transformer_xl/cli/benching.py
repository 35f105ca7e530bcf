"""The command bench."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from transformer_xl.cli.fitting import FittedRecipe
from transformer_xl.cli.given import (
    READ_BY_SEGMENTS,
    Given,
    LoadsModels,
    Recipe,
    nothing,
    refuse_others,
)
from transformer_xl.cli.loading import is_model, recipe_or_model, require_model
from transformer_xl.cli.printing import say, say_if_slow, show
from transformer_xl.config import Config, EvalConfig, GenerateConfig, ModelConfig
from transformer_xl.config.checks import Count, no_type_check, require
from transformer_xl.config.files import replace_file, require_new_file

_ENWIK8 = ModelConfig(vocab_size=204, clamp_len=820)
"""The paper's model of 12 layers for enwik8."""
_TABLE_9 = "evaluation-speed"
_SET_BY_TABLE_9 = ("attn_type", "n_positions", "mem_len", "attn_len")
"""Settings of the model that differ between the two methods, and between the rows."""
_TOP, _WHERE = 20, 4
"""Operators shown, and parts of the model for each."""
_TEXTS = ("", "shape", "dtype", "part", "operator", "mostly in")
"""Columns of text."""


@no_type_check
@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSpeed:
    """Measurement of the paper's Table 9: options of ``txl bench evaluation-speed``."""

    attn_lens: tuple[Count, ...] = (800, 1800, 2800, 3800)
    """Keys that each token attends to: the paper's."""
    segment_len: Count = 128
    """Segment length of the model with memory; the default is the authors'."""
    batch_size: Count = 1
    """Batch size of the model with memory."""
    windows: tuple[Count, ...] = (1, 4)
    """Batch sizes of windows: all are tried, the fastest counts."""
    rounds: Count = 3
    """Measured rounds, after one warm-up round."""
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    """Precision of the matrix products."""
    out: Path | None = None
    """Also write the result to this JSON file."""


@dataclass(kw_only=True)
class Bench(FittedRecipe, LoadsModels):
    """Measure the speed of training, evaluation and generation with a recipe on this machine.

    The tokens are random and the memory is full, so no text is needed. Speeds are compared with
    the machine's peak: training and evaluation with its measured matmul FLOP/s, generation with
    its measured memory bandwidth.

    evaluation-speed in place of a recipe measures the paper's Table 9: how many times slower a
    sliding window evaluates than a memory. A model without memory reads a window again for every
    token (Al-Rfou et al., 2018); Transformer-XL reads each token once. Both attend to the same
    number of keys, have the same shape and random weights, and are timed alternately. The shape is
    the paper's 12-layer enwik8 model; --model changes it, but for positions, memory and attention
    length, which --attn_lens sets.

    Examples:
      txl bench demo
      txl bench mine.toml --train.precision float32 --model.mem_len 1024 --json
      txl bench demo --profile
      txl bench evaluation-speed
      txl bench evaluation-speed --attn_lens 200 400 --model.n_layer 4 --model.d_model 128
      txl bench evaluation-speed --out table-9.json --precision bfloat16
    """

    recipe: Recipe
    """A recipe by its name or file, a model by its folder or name, or evaluation-speed."""
    steps: int | None = None
    """Measured steps, after two warm-up steps; None: 7."""
    profile: Annotated[
        tuple[Path, ...] | None,
        tyro.conf.arg(metavar="[FILE.json]", help_behavior_hint="(optional)"),
    ] = None
    """Profile a training step by operator and part instead; also write it to the file, if given."""
    eval: Given[EvalConfig] = field(default_factory=nothing)
    windows: Annotated[Given[EvaluationSpeed], tyro.conf.OmitArgPrefixes] = field(
        default_factory=nothing
    )

    def config(self) -> Config:
        """Return the recipe with the given settings, without those that are not measured."""
        recipe = recipe_or_model(self.recipe)
        evaluation = EvalConfig(**{name: getattr(recipe.eval, name) for name in READ_BY_SEGMENTS})
        return self.changed(replace(recipe, eval=evaluation, generate=GenerateConfig()))

    def run(self) -> None:
        """Measure and print."""
        from transformer_xl.config.device import prepare_process

        self._check()
        file: Path | None = self.windows.get("out") or next(iter(self.profile or ()), None)
        if file:
            require_new_file(file, force=True)
        if is_model(self.recipe):
            require_model(self.recipe)
        prepare_process()
        result = self._measure_windows() if self.recipe == _TABLE_9 else self._measure()
        if file:
            replace_file(file, (dumps(result, indent=2) + "\n").encode())
            say(f"wrote {file}")
        if self.json:
            show(result, as_json=True)

    def _check(self) -> None:
        """Refuse options that have no effect on this measurement."""
        if self.recipe != _TABLE_9:
            refuse_others(self.windows, "", (), f"it is an option of txl bench {_TABLE_9}")
            why = "evaluation is measured with segments and one memory length; for windows use "
            refuse_others(self.eval, "eval.", READ_BY_SEGMENTS, f"{why}txl bench {_TABLE_9}")
            n_files = len(self.profile or ())
            require(n_files < 2, f"--profile takes one file, not {n_files}")
            return
        options = {"steps": self.steps, "profile": self.profile}
        for section in ("data", "train", "eval"):
            refuse_others(getattr(self, section), f"{section}.", (), f"{_TABLE_9} takes no recipe")
        names = tuple(x.name for x in fields(ModelConfig) if x.name not in _SET_BY_TABLE_9)
        why = f"{_TABLE_9} sets positions and memory for each of --attn_lens"
        refuse_others(self.model, "model.", names, why)
        given = {name: value for name, value in options.items() if value is not None}
        refuse_others(given, "", (), f"{_TABLE_9} takes no recipe")

    def _measure_windows(self) -> dict[str, Any]:
        from transformer_xl.apps.bench import evaluation_speed

        options = {name: value for name, value in self.windows.items() if name != "out"}
        result = evaluation_speed(replace(_ENWIK8, **self.model), say=say, **options)
        _show_slowdowns(result)
        return result

    def _measure(self) -> dict[str, Any]:
        from transformer_xl.apps.bench import measure, profile, with_vocabulary

        steps, config = 7 if self.steps is None else self.steps, self.config()
        if not config.model.vocab_size:
            config = with_vocabulary(config)
            say(
                f"vocab_size={config.model.vocab_size} is assumed, as the recipe takes it from its "
                "text; --model.vocab_size changes it"
            )
        say_if_slow(config.train.precision)
        if self.profile is None:
            result = measure(config, steps)
            _show_speed(result)
        else:
            result = profile(config, steps)
            _show_profile(result)
        return result


def _show_speed(result: dict[str, Any]) -> None:
    limit, trained = result["ceiling"], result["training"]
    rows = []
    for name in ("training", "evaluation", "generation"):
        part = result[name]
        ms, low, high = (1e3 * x for x in (part["seconds"], *part["seconds_range"]))
        speed = f"{part['tokens_per_second']:,.0f}"
        if "share_of_ceiling" in part:
            share = f"{part['share_of_ceiling']:.0%} of peak matmul FLOP/s"
        else:
            share = f"{part['share_of_reading']:.0%} of memory bandwidth"
        taken = f"{ms:,.1f} ({low:,.1f} to {high:,.1f})"
        rows.append((name, _shape(part), part["dtype"], taken, speed, share))
    columns = ("", "shape", "dtype", "ms (range)", "tokens/s", "share of peak")
    _table(_title(result), columns, rows)
    say(
        f"measured peak: {limit['gflop_per_s']:,.0f} GFLOP/s for {limit['dtype']} matmul, "
        f"{limit['reading_gb_per_s']:.1f} GB/s memory bandwidth\n"
        f"peak memory: {trained['peak_mb']:,.0f} MB while training, "
        f"{trained['mb_at_first']:,.0f} MB before"
    )


def _show_slowdowns(result: dict[str, Any]) -> None:
    rows = [
        (
            f"{row['attn_len']:,}",
            f"{1e3 * row['window']['seconds']:,.2f}",
            f"{row['window']['batch_size']}",
            f"{1e3 * row['memory']['seconds']:,.4f}",
            f"{row['slowdown']:,.0f}",
            "" if row["paper"] is None else f"{row['paper']:,}",
        )
        for row in result["rows"]
    ]
    columns = ("keys", "window, ms/token", "batch", "memory, ms/token", "slowdown", "paper")
    _table(f"{_title(result)}, {result['dtype']}", columns, rows)


def _show_profile(result: dict[str, Any]) -> None:
    plain, profiled = 1e3 * result["seconds"], 1e3 * result["seconds_profiled"]
    title = (
        f"{_title(result)}\n"
        f"training {_shape(result)} in {result['dtype']}: {plain:,.1f} ms a step, "
        f"under the profiler {profiled:,.1f} ms"
    )
    parts = [
        (x["part"], *_time(x), f"{x['forward_ms']:,.1f}", f"{x['backward_ms']:,.1f}")
        for x in result["parts"]
    ]
    _table(title, ("part", "ms", "share", "forward", "backward"), parts)
    # An operator in all parts, and the parts in which it takes most of the time.
    sums: dict[str, Counter[str]] = {}
    where: dict[str, Counter[str]] = {}
    for row in result["operators"]:
        name = row["operator"]
        sums.setdefault(name, Counter()).update({x: row[x] for x in ("ms", "share", "calls")})
        where.setdefault(name, Counter()).update({row["part"]: row["ms"]})
    operators = []
    for name in sorted(sums, key=lambda name: (sums[name]["ms"], name), reverse=True)[:_TOP]:
        most = (f"{part} {x:,.1f}" for part, x in where[name].most_common(_WHERE) if x >= 0.05)
        calls = f"{sums[name]['calls']:,.0f}"
        operators.append((name, *_time(sums[name]), calls, ", ".join(most)))
    columns = ("operator", "ms", "share", "calls", "mostly in")
    _table("operators (self time)", columns, operators)


def _time(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['ms']:,.1f}", f"{row['share']:.1%}"


def _title(result: dict[str, Any]) -> str:
    return (
        f"{result['n_layer']} layers of width {result['d_model']}, "
        f"vocabulary of {result['vocab_size']:,}; {result['device']}, "
        f"{result['threads']} threads, torch {result['torch']}, {result['attention']} attention"
    )


def _shape(part: dict[str, Any]) -> str:
    return f"B={part['batch_size']} T={part['segment_len']} M={part['mem_len']}"


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    say(title)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify = "left" if column in _TEXTS else "right"
        table.add_column(column, justify=justify, no_wrap=column != "mostly in")
    for row in rows:
        table.add_row(*row)
    console = Console(stderr=True, highlight=False)
    # In a file, tables are not fitted to the width of a terminal.
    if not console.is_terminal:
        console.width = 200
    console.print(table)
