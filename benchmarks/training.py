"""Time and peak memory of a training step: ours, and other models with a memory.

    python benchmarks/training.py                      # the 12-layer shape, float32 and bfloat16
    python benchmarks/training.py --shape small --dropout 0.1 --rounds 9
    python benchmarks/training.py --ways ours gpt --base main
    python benchmarks/training.py --shape enwik8 --device cuda --ways ours ours_skew gpt

A step is forward, backward and AdamW, with a full memory; in bfloat16 under autocast, weights in
float32. Each model runs in a process of its own (so that its peak memory is its own); the processes
take turns, one step at a time (on a GPU five), and ratios are taken turn by turn, so that a machine
that slows down slows all of them. What the others are compared with is the first way that is one of
ours. One that fails is left out. The ceiling is the rate of one large matrix product, measured in
the same turns.
"""

from collections.abc import Callable

import contest
import torch
from peers import Peer
from shapes import SHAPES, Job


def prepare(peer: Peer, job: Job) -> Callable[[], object]:
    """Return a function that makes a training step."""
    optimizer = torch.optim.AdamW(peer.model.parameters(), fused=True)
    shape = job.shape
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1), device=job.device)
    in_bfloat16 = job.precision == "bfloat16"

    def step() -> None:
        if peer.is_captured:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(job.device, torch.bfloat16, enabled=in_bfloat16):
            loss = peer.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure and print."""
    precisions = ("float32", "bfloat16")
    parser = contest.parser(__doc__ or "", precisions=precisions, default=precisions)
    parser.add_argument("--dropout", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.worker:
        contest.serve(arguments.worker, prepare)
        return
    shape, rest = SHAPES[arguments.shape], (arguments.dropout, arguments.device, arguments.compile)
    jobs = [Job("training", shape, dtype, *rest) for dtype in arguments.dtypes]
    # A GPU that stood idle before each step would not be what a training finds.
    contest.run(__file__, arguments, jobs, repeats=1 if arguments.device == "cpu" else 5)


if __name__ == "__main__":
    main()
