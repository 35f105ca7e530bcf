"""Time and memory of evaluating a text in segments with a memory: ours, and other models.

    python benchmarks/evaluation.py                    # T=128, M=2048, one stream
    python benchmarks/evaluation.py --mem_lens 512 1024 2048 4096 8192 --ways ours gpt
    python benchmarks/evaluation.py --lengths 64 512 --batches 1 8

A step reads a segment and predicts it, without gradients. Ours and the plain GPT keep keys and
values of the memory; the others project it again for each segment, as their code does. In bfloat16
a step runs under one autocast for all segments, so that weights are converted once;
``bfloat16_weights`` have been converted for good. How steps take turns: see training.py.
"""

from collections.abc import Callable
from dataclasses import replace

import contest
import torch
from peers import Peer
from shapes import SHAPES, Job


def prepare(peer: Peer, job: Job) -> Callable[[], object]:
    """Return a function that reads a segment and predicts it."""
    torch.set_grad_enabled(False)
    if job.precision == "bfloat16":
        torch.autocast(job.device, torch.bfloat16).__enter__()
    shape = job.shape
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1), device=job.device)
    return lambda: peer.loss(tokens[:, :-1], tokens[:, 1:])


def main() -> None:
    """Measure and print."""
    parser = contest.parser(
        __doc__ or "",
        precisions=("float32", "bfloat16", "bfloat16_weights", "int8_weights"),
        default=("float32", "bfloat16"),
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[128], help="tokens at once")
    parser.add_argument("--mem_lens", nargs="+", type=int, default=[2048])
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="streams")
    arguments = parser.parse_args()
    if arguments.worker:
        contest.serve(arguments.worker, prepare)
        return
    jobs = [
        Job(
            "evaluation",
            replace(SHAPES[arguments.shape], length=length, mem_len=mem_len, batch=batch),
            dtype,
            device=arguments.device,
            compiled=arguments.compile,
        )
        for dtype in arguments.dtypes
        for length in arguments.lengths
        for mem_len in arguments.mem_lens
        for batch in arguments.batches
    ]
    contest.run(__file__, arguments, jobs, repeats=3)


if __name__ == "__main__":
    main()
