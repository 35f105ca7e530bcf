"""What quantized weights cost in accuracy, and what they save in memory and time.

    python benchmarks/weights.py runs/demo program.py
    python benchmarks/weights.py models/wt103 wiki.test.tokens --prepared --mem_len 1600
    python benchmarks/weights.py runs/demo program.py --streams 16 --threads 1

A model folder is read, and evaluated on a text with its weights in float32, bfloat16 and int8: the
loss of each, and how far it is from that of float32. Then the three take turns in writing: the time
of a step, which is a token for each stream, with the memory full. Products are computed in the
precision of the weights; in float32 nothing is rounded to bfloat16 on the way.
"""

import argparse
import sys
from pathlib import Path

import torch
from result_file import write_result_file

sys.path.insert(0, str(Path(__file__).parent))
from turns import circumstances, take_turns, work

from transformer_xl.data import load_vocab
from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.inference.generate import generate_batch
from transformer_xl.model import TransformerXL
from transformer_xl.model.compact import CompactTransformerXL, compact
from transformer_xl.model.pretrained import find_model_folder

WAYS = ("float32", "bfloat16", "int8")
REPEATS = 8


def nbytes(model: TransformerXL) -> int:
    """Return the size of the weights."""
    if isinstance(model, CompactTransformerXL):
        return model.nbytes
    return sum(x.nbytes for x in model.parameters())


def tokens_of(arguments: argparse.Namespace) -> list[int]:
    """Read the text that is evaluated and continued."""
    vocab = load_vocab(find_model_folder(arguments.folder))
    text = arguments.text.read_text("utf-8")
    return vocab.encode_lines(text, prepared=arguments.prepared)[: arguments.tokens]


def prepare(way: str, arguments: argparse.Namespace):
    """Fill the memories; return a function that writes a token to each stream."""
    model = compact(TransformerXL.from_pretrained(arguments.folder), way)
    mem_len = model.config.mem_len if arguments.mem_len is None else arguments.mem_len
    tokens = tokens_of(arguments)
    while len(tokens) <= mem_len:
        tokens = tokens + tokens
    texts = generate_batch(
        model, [tokens[: mem_len + 1]] * arguments.streams, mem_len=mem_len, seed=1
    )
    return lambda: next(texts)


def main() -> None:
    """Measure, print, and write the result to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--prepared", action="store_true")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--mem_len", type=int)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=WAYS)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.worker:
        work(prepare(arguments.worker, arguments), repeats=REPEATS)
        return
    exact = TransformerXL.from_pretrained(arguments.folder)
    tokens = tokens_of(arguments)
    how = WithMemory(segment_len=64, batch_size=4, mem_len=arguments.mem_len)
    losses, sizes = {}, {}
    for way in WAYS:
        model = compact(exact, way)
        losses[way], sizes[way] = evaluate(model, tokens, how).nll, nbytes(model) / 1e6
    names = ("prepared", "tokens", "mem_len", "streams", "threads")
    given = {name: getattr(arguments, name) for name in names}
    flags = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in given.items()
        if value
    ]
    positional = [str(arguments.folder), str(arguments.text)]
    result = take_turns(
        __file__,
        {way: [way, *positional, *flags] for way in WAYS},
        "float32",
        rounds=arguments.rounds,
        warm=2,
    )
    first = losses["float32"]
    result = circumstances() | {
        "parameters": sum(x.numel() for x in exact.parameters()),
        "tokens": len(tokens),
        "streams": arguments.streams,
        "mem_len": exact.config.mem_len if arguments.mem_len is None else arguments.mem_len,
        "nats_per_token": losses,
        "percent": {way: 100 * (loss / first - 1) for way, loss in losses.items()},
        "mb": sizes,
        **result,
    }
    for way in result["seconds"]:
        print(
            f"{way:9} {losses[way]:8.5f} nats  {losses[way] - first:+.5f} "
            f"({result['percent'][way]:+.3f} %)  {sizes[way]:8.1f} MB  "
            f"{1e3 * result['seconds'][way]:8.3f} ms a step, "
            f"{result['ratio'].get(way, 1.0):.2f} x that of float32"
        )
    if arguments.json:
        write_result_file(arguments.json, result)


if __name__ == "__main__":
    main()
