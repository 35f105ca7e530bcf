"""Time and memory of the adaptive softmax: forward and backward for one step.

    python benchmarks/adaptive_softmax.py                  # WikiText-103's vocabulary, 4,096 tokens
    python benchmarks/adaptive_softmax.py --div_val 1 --rounds 3

Three ways: ours, which makes gradients chunk by chunk; all at once, as the authors' code does it
(the same weights; all logits of a cluster are kept for the backward pass, and each cluster of a
single table is a slice of it); and torch.nn.AdaptiveLogSoftmaxWithLoss. The last has no tied
weights, no biases and no projection of the head: a little less to do. Targets follow Zipf's law.
Memory is what a way takes beyond its weights and inputs: gradients are part of it.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from result_file import write_result_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from turns import circumstances, take_turns, work

from transformer_xl.config import ModelConfig
from transformer_xl.model import AdaptiveEmbedding, AdaptiveSoftmax, Embedding

WAYS = ("ours", "all_at_once", "torch")
CUTOFFS = (20_000, 40_000, 200_000)


def config(arguments: argparse.Namespace) -> ModelConfig:
    """Return the settings of a model with WikiText-103's clusters."""
    return ModelConfig(
        vocab_size=arguments.vocab_size,
        d_model=arguments.d_model,
        n_head=16,
        cutoffs=CUTOFFS,
        div_val=arguments.div_val,
        tie_projections=(False, True, True, True),
    )


def all_at_once(softmax: AdaptiveSoftmax, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return -log p with all logits of a cluster in one table that autograd keeps."""
    nll = torch.zeros_like(targets, dtype=hidden.dtype)
    head = None
    for i, cluster in enumerate(softmax.clusters):
        if softmax.weight is None:
            weight = softmax.weights[i]
        else:
            weight = softmax.weight[cluster.start : cluster.stop]
        bias = softmax.bias[cluster.start : cluster.stop]
        if i == 0:
            weight = torch.cat([weight, softmax.cluster_weight])
            bias = torch.cat([bias, softmax.cluster_bias])
        proj = softmax.projs[i]
        rows = ((targets >= cluster.start) & (targets < cluster.stop)).nonzero()[:, 0]
        x = hidden if i == 0 else hidden[rows]
        x = proj(x)
        log_probs = F.log_softmax(F.linear(x, weight, bias), -1)
        if head is None:
            head, log_probs = log_probs, log_probs[rows]
        own = log_probs.gather(1, (targets[rows] - cluster.start)[:, None])[:, 0]
        if i:
            own = own + head[rows, softmax.clusters[0].stop + i - 1]
        nll = nll.index_copy(0, rows, -own)
    return nll


def prepare(way: str, arguments: argparse.Namespace):
    """Build a way; return a function that makes a step."""
    torch.manual_seed(0)
    settings = config(arguments)
    power = torch.rand(arguments.tokens, dtype=torch.float64) * math.log(settings.vocab_size + 1)
    targets = power.exp().long().sub(1).clamp(0, settings.vocab_size - 1)
    hidden = torch.randn(arguments.tokens, settings.d_model, requires_grad=True)
    if way == "torch":
        module = nn.AdaptiveLogSoftmaxWithLoss(
            settings.d_model, settings.vocab_size, list(CUTOFFS), div_value=arguments.div_val
        )
        forward = lambda: module(hidden, targets).loss  # noqa: E731
    else:
        embedding = (AdaptiveEmbedding if settings.div_val > 1 else Embedding)(settings)
        module = AdaptiveSoftmax(settings, embedding)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(0, 0.02)
        if way == "ours":
            forward = lambda: module.nll(hidden, targets).mean()  # noqa: E731
        else:
            forward = lambda: all_at_once(module, hidden, targets).mean()  # noqa: E731

    def step() -> float:
        hidden.grad = None
        module.zero_grad()
        loss = forward()
        loss.backward()
        return loss.item()

    return step


def main() -> None:
    """Measure, print, and write the result to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab_size", type=int, default=267_735)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--d_model", type=int, default=1024)
    parser.add_argument("--div_val", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=WAYS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(prepare(arguments.worker, arguments))
        return
    names = ("vocab_size", "tokens", "d_model", "div_val")
    shape = {name: getattr(arguments, name) for name in names}
    flags = [f"--{name}={value}" for name, value in shape.items()]
    losses = {way: prepare(way, arguments)() for way in WAYS[:2]}
    if not math.isclose(losses["ours"], losses["all_at_once"], rel_tol=1e-5):
        sys.exit(f"the ways do not agree: {losses}")
    result = take_turns(
        __file__, {way: [way, *flags] for way in WAYS}, "ours", rounds=arguments.rounds, warm=1
    )
    result = circumstances() | {"shape": shape} | result
    for way in result["seconds"]:
        ratio = result["ratio"].get(way, 1.0)
        print(
            f"{way:12} {result['seconds'][way]:7.3f} s  {ratio:5.2f} x ours  "
            f"{result['mb_taken'][way]:7.0f} MB"
        )
    if arguments.json:
        write_result_file(arguments.json, result)


if __name__ == "__main__":
    main()
