"""Time and memory of writing text one token at a time: ours, and other models with a memory.

    python benchmarks/generation.py                    # M=2048, one stream
    python benchmarks/generation.py --mem_lens 512 1024 2048 4096 8192 --ways ours gpt
    python benchmarks/generation.py --batches 1 8 64 --ways ours gpt

A step reads one token of each stream and takes the likeliest next one. Ours and the plain GPT keep
keys and values of the memory; the others project it again for each token, as their code does. No
step can be shorter than it takes to read the weights and what is kept once: so many bytes are read
in the same turns, and the last column says how many times that long a step takes. Weights in int8
are ours alone. How steps take turns: see training.py.
"""

from collections.abc import Callable
from dataclasses import replace

import contest
import torch
from peers import Peer
from shapes import SHAPES, Job


def prepare(peer: Peer, job: Job) -> Callable[[], object]:
    """Return a function that writes one token in each stream."""
    torch.set_grad_enabled(False)
    if job.precision == "bfloat16":
        torch.autocast(job.device, torch.bfloat16).__enter__()
    token = torch.zeros(job.shape.batch, 1, dtype=torch.int64, device=job.device)

    def step() -> None:
        nonlocal token
        token = peer.scores(token).argmax(-1, keepdim=True)

    return step


def main() -> None:
    """Measure and print."""
    parser = contest.parser(
        __doc__ or "",
        precisions=("float32", "bfloat16", "bfloat16_weights", "int8_weights"),
        default=("float32", "bfloat16_weights", "int8_weights"),
    )
    parser.add_argument("--mem_lens", nargs="+", type=int, default=[2048])
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="streams")
    arguments = parser.parse_args()
    if arguments.worker:
        contest.serve(arguments.worker, prepare)
        return
    jobs = [
        Job(
            "generation",
            replace(SHAPES[arguments.shape], length=1, mem_len=mem_len, batch=batch),
            dtype,
            device=arguments.device,
            compiled=arguments.compile,
        )
        for dtype in arguments.dtypes
        for mem_len in arguments.mem_lens
        for batch in arguments.batches
    ]
    contest.run(__file__, arguments, jobs, repeats=8)


if __name__ == "__main__":
    main()
