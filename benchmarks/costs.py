"""What a training step, an evaluated segment and a generated token cost, counted and not timed.

    python benchmarks/costs.py                 # compare with benchmarks/results/costs.json
    python benchmarks/costs.py --write         # commit new figures

Seconds vary on a busy machine by more than a regression; counts do not. Rules:

* The model is that of the recipe ``demo``, in float32, with a full memory and one thread.
* ``calls`` are the calls of Python functions of this package in one step.
* ``operators`` are the operators that PyTorch executes, without those that only make a view.
* ``megabytes`` are the sizes of their inputs and outputs: what is read and written if no cache
  holds it.
* ``gigaflops`` are those of matrix products and attention, by PyTorch's formulas.
* Products are computed by PyTorch's default library, so that counts are equal on all processors.

``tests/benchmarks/test_costs.py`` fails if a count exceeds the committed one by more than 10 %.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from random_steps import full_memory, reading_step
from result_file import write_result_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import transformer_xl
from transformer_xl.config import Config
from transformer_xl.config.recipes import load_recipe
from transformer_xl.data import Segments
from transformer_xl.inference.generate import generate
from transformer_xl.model import TransformerXL
from transformer_xl.ops import products
from transformer_xl.train import Network, TrainState, train_step
from transformer_xl.train.optim import Optimizer, new_average

FILE = Path(__file__).parent / "results" / "costs.json"
TOLERANCE = 0.1
"""Relative increase of a count that is reported."""

_PACKAGE = str(Path(transformer_xl.__file__).parent)

Counts = dict[str, float]


class _Operators(TorchDispatchMode):
    """Counts operators, their floating-point operations, and the bytes of inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.n_bytes, self.n_flops = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operator and count it."""
        found = func(*args, **(kwargs or {}))
        if flops := flop_registry.get(func.overloadpacket):
            self.n_flops += flops(*args, **(kwargs or {}), out_val=found)
        if not func.is_view:
            self.n += 1
            leaves = tree_leaves((args, kwargs, found))
            self.n_bytes += sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
        return found


def count(step: Callable[[], object], warm_up: int = 3) -> Counts:
    """Return the counts of one step, after some that are not counted."""
    for _ in range(warm_up):
        step()
    n_calls = 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal n_calls
        n_calls += event == "call" and frame.f_code.co_filename.startswith(_PACKAGE)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(before)
    with _Operators() as operators:
        step()
    return {
        "calls": n_calls,
        "operators": operators.n,
        "megabytes": round(operators.n_bytes / 1e6, 3),
        "gigaflops": round(operators.n_flops / 1e9, 4),
    }


def training(config: Config) -> tuple[TransformerXL, Callable[[], object]]:
    """Return a model with a function that makes a training step on random tokens."""
    settings, model_config = config.train, config.model
    # As at the end of a run: with the lengths of the last stage, and averaged weights.
    is_averaged = settings.average != "none"
    settings = replace(settings, stages=(), average_start=0.0 if is_averaged else None)
    config = replace(config, train=settings)
    torch.manual_seed(settings.seed)
    model = TransformerXL(model_config).train()
    B, T = settings.batch_size, settings.segment_len
    tokens = torch.randint(model_config.vocab_size, (8 * B * T + 1,)).numpy()
    state = TrainState(
        model=model,
        optimizer=Optimizer(model, settings),
        segments=Segments(tokens, B, T, model_config.ext_len),
        mems=[full_memory(model, B, model_config.mem_len)],
        total_steps=settings.steps,
        corpus={},
        average=new_average(model, settings),
    )
    network = Network(model, settings, state.world)
    return model, lambda: train_step(config, state, network)


def costs() -> dict[str, Counts]:
    """Return the counts of training, evaluation and generation."""
    torch.set_num_threads(1)
    products.takes_onednn = lambda *_: False
    # Also of attention: with AVX-512, an AMD processor computes it in other steps.
    products.onednn_is_faster = lambda: False
    recipe = load_recipe("demo")
    config = replace(
        recipe,
        model=replace(recipe.model, vocab_size=4096),
        train=replace(recipe.train, precision="float32", compile=False),
    )
    model, train = training(config)
    found = {"training": count(train)}
    model.eval()
    tokens = torch.randint(4096, (1, config.train.segment_len + 1))
    with torch.no_grad():
        found["evaluation"] = count(reading_step(model, tokens[:, :-1], tokens[:, 1:]))
    memory = full_memory(model, 1, config.model.mem_len)
    written = generate(model, [0], mems=memory, seed=0)
    return found | {"generation": count(lambda: next(written))}


def increases(found: dict[str, Counts], committed: dict[str, Counts]) -> dict[str, str]:
    """Return the counts that exceed the committed ones by more than the tolerance."""
    return {
        f"{work} {name}": f"{n:,} instead of {committed[work][name]:,}"
        for work, counts in found.items()
        for name, n in counts.items()
        if n > committed[work][name] * (1 + TOLERANCE)
    }


def main() -> None:
    """Count, and compare or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the figures to compare with")
    arguments = parser.parse_args()
    found = costs()
    print(json.dumps(found, indent=1))
    if arguments.write:
        values = {"torch": torch.__version__, "costs": found}
        write_result_file(FILE, values)
        return
    larger = increases(found, json.loads(FILE.read_text())["costs"])
    for name, how in larger.items():
        print(f"{name}: {how}")
    sys.exit(bool(larger))


if __name__ == "__main__":
    main()
