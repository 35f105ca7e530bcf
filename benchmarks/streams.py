"""What evaluating a text in several parts side by side costs in accuracy, and gains in time.

    python benchmarks/streams.py runs/demo --tokens 30000

One stream is the definition: the whole text is before each token. With several, each part first
reads the mem_len tokens before it. Layers see further back than that, so a difference remains at
the beginning of each part.
"""

import argparse

from transformer_xl.config.recipes import load_recipe
from transformer_xl.data import prepare
from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.model import TransformerXL
from transformer_xl.train.checkpoint import RECIPE_FILE, RunFolder


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--segment_len", type=int, default=64)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    arguments = parser.parse_args()
    recipe = load_recipe(RunFolder(arguments.run).path / RECIPE_FILE)
    corpus = prepare(recipe.data, print)
    model = TransformerXL.from_pretrained(arguments.run)
    ids = corpus.split(arguments.split)[: arguments.tokens]
    print(f"{len(ids):,} tokens, mem_len {model.config.mem_len}, {model.config.n_layer} layers")
    print("| streams | nats per token | difference | tokens a second |\n|---|---|---|---|")
    first = None
    for batch_size in arguments.streams:
        result = evaluate(
            model, ids, WithMemory(segment_len=arguments.segment_len, batch_size=batch_size)
        )
        first = first or result.nll
        print(
            f"| {batch_size} | {result.nll:.6f} | {result.nll - first:+.6f} "
            f"| {result.tokens_per_second:,.0f} |"
        )


if __name__ == "__main__":
    main()
