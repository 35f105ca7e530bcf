"""Train each row with each seed, and search for its best attention length."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer
from torch import Tensor

from transformer_xl.config import Config
from transformer_xl.config.device import autocast, pick_device
from transformer_xl.config.files import replace_file
from transformer_xl.data import prepare
from transformer_xl.inference.evaluate import evaluate
from transformer_xl.model import LanguageModel, TransformerXL
from transformer_xl.studies.ablate.rows import Row, recipe_of
from transformer_xl.train import train
from transformer_xl.train.checkpoint import ENVIRONMENT_FILE, METRICS_FILE, RunFolder
from transformer_xl.train.metrics import read_metrics

MEASURED_FILE = "ablation.json"
_FACTORS = (0.5, 0.75, 1, 1.5, 2, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What an ablation runs and measures."""

    recipe: Config
    """What all rows share."""
    rows: tuple[Row, ...]
    """The rows."""
    seeds: tuple[int, ...] = (1,)
    """Each row is trained once with each."""
    steps: int | None = None
    """Steps of every run; None: as the recipe says."""
    minutes: float | None = None
    """Time of every run; None: as the recipe says."""
    attn_lens: tuple[int, ...] = ()
    """Attention lengths that are tried; empty: from half to three times that of training."""
    split: str = "valid"
    """Text on which all is measured."""
    tokens: int | None = None
    """Measure on the first so many tokens of it; None: on all."""

    def __post_init__(self) -> None:
        if len({*self.seeds}) < len(self.seeds) or not self.seeds:
            raise ValueError(f"seeds={self.seeds} must be different, and at least one")
        if any(length < 1 for length in self.attn_lens):
            raise ValueError(f"attn_lens={self.attn_lens} must be at least 1")
        if self.tokens is not None and self.tokens < 2:
            raise ValueError(f"tokens={self.tokens} must be at least 2")

    def config(self, row: Row, seed: int) -> Config:
        """Return the recipe of a run."""
        return recipe_of(row, self.recipe, seed, steps=self.steps, minutes=self.minutes)


def ablate(plan: Plan, folder: Path, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Train and measure every row with every seed, in turns of seeds; finished runs are skipped.

    Each run is a run folder, ``ROW/seed_N``, which the same call goes on with when it was stopped,
    and any other command of ``txl`` can use.

    Args:
        plan: What is run.
        folder: Where the runs lie.
        say: Tells what goes on.

    Returns:
        What was measured for each run, as in its ``ablation.json``.

    Raises:
        ValueError: A row does not fit the recipe; a folder holds a run of another recipe.
        OSError: A folder holds something else, or cannot be written.
    """
    runs = [(row, seed, plan.config(row, seed)) for seed in plan.seeds for row in plan.rows]
    places = [folder / row.name / f"seed_{seed}" for row, seed, _ in runs]
    for (_, _, config), place in zip(runs, places, strict=True):
        # All of them before the first one takes its time.
        RunFolder(place).check(config)
    found = []
    for n, ((row, seed, config), place) in enumerate(zip(runs, places, strict=True), 1):
        settings = _settings(plan, config)
        measured = _read_measured(place, settings)
        state = "was measured before" if measured else "begins"
        say(f"run {n} of {len(runs)}: {row.name}, seed {seed} {state}")
        if measured is None:
            train(config, place, quiet=True)
            measured = {
                "row": row.name,
                "seed": seed,
                "settings": settings,
                **_measure(place, row, config, settings, plan),
            }
            text = json.dumps(measured, indent=2) + "\n"
            replace_file(place / MEASURED_FILE, text.encode())
            # As it will be read the next time, with lists for tuples.
            measured = json.loads(text)
        say("   " + ", ".join(f"{x['attn_len']}: {x['nll']:.4f}" for x in measured["lengths"]))
        found.append(measured)
    return found


def _settings(plan: Plan, config: Config) -> dict[str, Any]:
    trained = config.train.segment_len + config.model.mem_len
    lengths = plan.attn_lens or [max(1, round(factor * trained)) for factor in _FACTORS]
    return {
        "trained_attn_len": trained,
        "attn_lens": sorted({*lengths, trained}),
        "split": plan.split,
        "tokens": plan.tokens,
    }


def _read_measured(place: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    try:
        measured = json.loads((place / MEASURED_FILE).read_text(encoding="utf-8"))
        return measured if measured["settings"] == settings else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _measure(
    place: Path, row: Row, config: Config, settings: dict[str, Any], plan: Plan
) -> dict[str, Any]:
    device = pick_device()
    corpus = prepare(config.data, lambda _: None)
    ids = corpus.split(plan.split)[: plan.tokens]
    model = TransformerXL.from_pretrained(place).to(device)
    lengths = []
    with autocast(config.train.precision, device):
        for attn_len in settings["attn_lens"]:
            nll = attention_length_nll(
                model, ids, attn_len, config.train.segment_len, config.eval.batch_size
            )
            lengths.append({"attn_len": attn_len, "nll": nll})
    environment = json.loads((place / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    records = read_metrics(place / METRICS_FILE)
    steps = max((record.get("step", 0) for record in records), default=0)
    return {
        "lengths": lengths,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "unit": "bits per token" if corpus.vocab.kind in ("chars", "bytes") else "perplexity",
        "model": asdict(model.config),
        "train": asdict(config.train),
        "environment": environment,
    }


def attention_length_nll(
    model: LanguageModel,
    ids: Sequence[int] | Integer[np.ndarray | Tensor, " length"],
    attn_len: int,
    segment_len: int,
    batch_size: int = 1,
) -> float:
    """Return the loss with an attention length, in nats per token.

    With recurrence each token sees exactly ``attn_len`` keys, itself included, through a memory of
    that length. Without, hidden states of a memory would look further back than the model ever
    did: the text is read in windows of ``attn_len`` tokens from nothing, of which the last quarter
    is predicted, so that each token sees at least three quarters of that length.
    """
    if model.config.mem_len:
        result = evaluate(
            model,
            ids,
            segment_len=segment_len,
            mem_len=attn_len,
            attn_len=attn_len,
            batch_size=batch_size,
        )
    else:
        stride = max(1, attn_len // 4)
        result = evaluate(
            model,
            ids,
            segment_len=stride,
            mem_len=0,
            ext_len=attn_len - stride,
            batch_size=batch_size,
        )
    return result.nll
