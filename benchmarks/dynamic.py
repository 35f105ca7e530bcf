"""What dynamic evaluation is worth: trained models with fixed weights, and learning as they read.

    python benchmarks/dynamic.py runs/ptb-char runs/enwik8 --json dynamic.json
    python benchmarks/dynamic.py runs/demo --tokens 5000 --tuned_on 2000 --lrs 1e-4 --decays 0

For each run, learning rate and decay are chosen on the first tokens of its validation text. Then
the test text (where there is none, what follows of the validation text) is scored once with fixed
weights and once learning: one stream, the same segments, the same memory, float32. The trained
models stay as they are.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from result_file import write_result_file
from turns import circumstances

from transformer_xl.config.device import keep_freed_memory
from transformer_xl.config.recipes import load_recipe
from transformer_xl.data import prepare
from transformer_xl.inference.evaluate import Dynamic, WithMemory, evaluate, gradient_squares
from transformer_xl.model import load_model
from transformer_xl.train.checkpoint import RECIPE_FILE

TRAINING_TOKENS = 50_000
"""Tokens of the training text from which the size of gradients is known."""


def measured(run: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Choose the settings of a run on its validation text, and score its test text."""
    recipe = load_recipe(run / RECIPE_FILE)
    corpus = prepare(recipe.data, print)
    model = load_model(run)
    segment_len = recipe.eval.segment_len or recipe.train.segment_len
    squares = gradient_squares(
        model, corpus.split("train")[:TRAINING_TOKENS], segment_len=segment_len
    )
    valid = corpus.split("valid")
    tuned_on = valid[: arguments.tuned_on]
    test = corpus.split("test") if recipe.data.test_fraction else valid[arguments.tuned_on :]
    test = test[: arguments.tokens]

    def nll(ids: Any, how: Dynamic | WithMemory) -> float:
        return evaluate(model, ids, how).nll

    lengths = {"segment_len": segment_len}

    tried = []
    for lr, decay in product(arguments.lrs, arguments.decays):
        dynamic = Dynamic(rule="rms", lr=lr, decay=decay, squares=squares, **lengths)
        tried.append({"lr": lr, "decay": decay, "nll": nll(tuned_on, dynamic)})
        print(f"{run.name}: lr {lr:g}, decay {decay:g}: {tried[-1]['nll']:.4f} nats")
    best = min(tried, key=lambda each: each["nll"])
    chosen = Dynamic(rule="rms", lr=best["lr"], decay=best["decay"], squares=squares, **lengths)
    return {
        "run": run.name,
        "segment_len": segment_len,
        "mem_len": model.config.mem_len,
        "tuned_on": len(tuned_on),
        "tried": tried,
        "lr": best["lr"],
        "decay": best["decay"],
        "tokens": len(test) - 1,
        "fixed": nll(test, WithMemory(**lengths)),
        "dynamic": nll(test, chosen),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--tokens", type=int, default=50_000, help="of the test text, at most")
    parser.add_argument("--tuned_on", type=int, default=10_000, help="tokens of validation text")
    parser.add_argument("--lrs", type=float, nargs="+", default=[5e-5, 2e-4, 8e-4])
    parser.add_argument("--decays", type=float, nargs="+", default=[0.0, 0.02])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    rows = []
    for run in arguments.runs:
        rows.append(measured(run, arguments))
        if arguments.json:
            content = {**circumstances(), "rows": rows}
            write_result_file(arguments.json, content)
    print("| run | tokens | lr | decay | fixed, nats | dynamic, nats | difference |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['run']} | {row['tokens']:,} | {row['lr']:g} | {row['decay']:g} | "
            f"{row['fixed']:.4f} | {row['dynamic']:.4f} | {row['dynamic'] - row['fixed']:+.4f} |"
        )


if __name__ == "__main__":
    main()
