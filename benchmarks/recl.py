"""Effective context lengths on a text whose true dependency length is known.

    python benchmarks/recl.py --out runs/recl --minutes 5 --json recl.json
    python benchmarks/recl.py --out /tmp/tiny --steps 20 --pairs 3000 --tokens 100

A program writes the text: each letter is the one 8, 16, ... or 64 characters before it, as the
mark in front of it says (`benchmarks/dependency_text.py`). Four models are trained on it,
one after the other, for the same time or steps: ours with recurrence; the same without; a
Transformer with learned absolute positions that reads one window (Al-Rfou); and an LSTM. Then the
relative effective context length of each is measured by the paper's definition (Appendix C), beside
that of an oracle that knows the rule, which must be the true one.
"""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_file import write_result_file

sys.path.insert(0, str(Path(__file__).parent))
from dependency_text import dependency_text, oracle_losses
from turns import circumstances

from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    TrainConfig,
)
from transformer_xl.config.device import keep_freed_memory
from transformer_xl.data import prepare
from transformer_xl.model import load_model
from transformer_xl.studies.recl import (
    context_losses,
    relative_effective_context_length,
    target_places,
)
from transformer_xl.train import train

TOPS = (0.1, 0.5, 1.0)
MODELS = ("recurrence", "none", "window", "lstm")


def recipe_of(name: str, arguments: argparse.Namespace, text: Path) -> Config:
    """Return the recipe of a model."""
    true = arguments.step * arguments.marks
    segment_len = true // 2
    width = {"n_layer": 2, "n_head": 4, "d_model": arguments.d_model}
    width |= {"d_inner": 2 * arguments.d_model, "dropout": 0.0}
    models = {
        "recurrence": ModelConfig(**width, mem_len=true),
        "none": ModelConfig(**width, mem_len=0),
        "window": ModelConfig(**width, mem_len=0, attn_type=3, n_positions=segment_len),
        "lstm": ModelConfig(
            kind="lstm", n_layer=2, d_model=arguments.d_model, mem_len=0, dropout=0.0
        ),
    }
    limits = {"steps": arguments.steps or 1_000_000}
    if not arguments.steps:
        limits |= {"minutes": arguments.minutes, "schedule": "constant_cooldown"}
    return Config(
        model=models[name],
        data=DataConfig(path=str(text), vocab="chars", valid_fraction=0.02, test_fraction=0.1),
        train=TrainConfig(
            **limits,
            batch_size=32,
            segment_len=segment_len,
            loss="half" if name == "window" else "full",
            lr=2e-3,
            beta2=0.98,
            warmup_steps=min(50, limits["steps"]),
            clip_norm=1.0,
            precision="float32",
            eval_every=0,
            seed=arguments.seed,
        ),
        eval=EvalConfig(batch_size=8),
        generate=GenerateConfig(prompt="0a", length=40),
    )


def main() -> None:
    """Train, measure, print, and write the result to a file if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the runs lie")
    parser.add_argument("--minutes", type=float, default=5.0, help="time of each training")
    parser.add_argument("--steps", type=int, help="steps of each training, instead of minutes")
    parser.add_argument("--pairs", type=int, default=200_000, help="length of the text, in pairs")
    parser.add_argument("--step", type=int, default=8, help="the distances are its multiples")
    parser.add_argument("--marks", type=int, default=8, help="how many distances there are")
    parser.add_argument("--d_model", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000, help="predicted characters")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()

    rule = {"step": arguments.step, "n_marks": arguments.marks}
    true = arguments.step * arguments.marks
    # The text says how it was made, so that another one is not taken for it.
    name = f"text_{arguments.pairs}_{arguments.step}_{arguments.marks}_{arguments.seed}.txt"
    file = arguments.out / name
    file.parent.mkdir(parents=True, exist_ok=True)
    text = dependency_text(arguments.pairs, **rule, seed=arguments.seed)
    file.write_text(text)

    contexts = range(arguments.step, 2 * true + 1, arguments.step)
    found: list[dict[str, Any]] = []
    losses = []
    for name in arguments.models:
        recipe = recipe_of(name, arguments, file)
        corpus = prepare(recipe.data)
        ids = corpus.split("test")
        places = target_places(len(ids), contexts, arguments.tokens)
        began = time.perf_counter()
        train(recipe, arguments.out / name, quiet=True)
        model = load_model(arguments.out / name)
        losses.append(
            context_losses(
                model,
                ids,
                places,
                contexts,
                segment_len=recipe.train.segment_len,
                window=recipe.train.segment_len if name in ("none", "window") else None,
            )
        )
        found.append(
            {
                "name": name,
                "parameters": sum(p.numel() for p in model.parameters()),
                "minutes": (time.perf_counter() - began) / 60,
                "nll": losses[-1].mean(1).tolist(),
            }
        )
        print(f"{name:12} trained; loss {found[-1]['nll'][0]:.3f} at {contexts[0]} characters, "
              f"{found[-1]['nll'][-1]:.3f} at {contexts[-1]}", file=sys.stderr)  # fmt: skip
    # The oracle apart: beside it, nobody would gain over the baseline.
    shown = corpus.vocab.decode(ids)
    oracle = oracle_losses(shown, places, contexts, **rule)
    for top in TOPS:
        group = relative_effective_context_length(np.stack(losses), contexts, top=top)
        for model, length in zip(found, group, strict=True):
            model.setdefault("recl", {})[f"{top:g}"] = asdict(length)
    alone = {
        f"{top:g}": asdict(relative_effective_context_length(oracle[None], contexts, top=top)[0])
        for top in TOPS
    }
    found.append({"name": "oracle", "nll": oracle.mean(1).tolist(), "recl": alone})
    print(f"| model | {' | '.join(f'r = {top:g}' for top in TOPS)} | loss |\n|---|--:|--:|--:|--:|")
    for model in found:
        lengths = (model["recl"][f"{top:g}"] for top in TOPS)
        cells = (f"{'≥ ' * length['is_bound']}{length['length']}" for length in lengths)
        print(f"| {model['name']} | {' | '.join(cells)} | {model['nll'][-1]:.3f} |")
    print(f"true length: {true}")
    if arguments.json:
        settings = {key: x for key, x in vars(arguments).items() if key not in ("out", "json")}
        result = circumstances() | {
            "settings": settings | {"models": list(arguments.models)},
            "true_length": true,
            "contexts": list(contexts),
            "threads": torch.get_num_threads(),
            "models": found,
        }
        write_result_file(arguments.json, result)


if __name__ == "__main__":
    main()
