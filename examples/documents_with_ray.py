"""Score or continue many documents with Ray Data: each worker has one model.

    pip install 'transformer-xl[ray]'
    python examples/documents_with_ray.py score runs/demo documents.jsonl scores --workers 8
    python examples/documents_with_ray.py generate runs/demo documents.jsonl texts --length 100

`documents.jsonl` has a JSON object in each line, with a `text` and perhaps an `id`. The documents
are divided into tasks, each of which leaves one file in the folder. Files and lines have the order
of the documents, and are those that one process writes (`--workers 0`). A worker that dies is
started again, and its task repeated; after a kill of all, the same command resumes. On a cluster
(`--address auto`) the model, the documents and the folder are on a disk that all machines share.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformer_xl.config import GenerateConfig
from transformer_xl.inference.documents import Performer, Task, Work, here, process


class Worker:
    """A process with a model."""

    def __init__(self, work: Work) -> None:
        self._perform = Performer(work)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Perform tasks; return their numbers."""
        for source, start, first, n, target in zip(*map(batch.get, Task._fields), strict=True):
            paths = Path(str(source)), Path(str(target))
            self._perform(Task(paths[0], int(start), int(first), int(n), paths[1]))
        return {"first": batch["first"]}


def with_ray(
    settings: argparse.Namespace, work: Work, tasks: Sequence[Task], n_workers: int
) -> Iterator[Task]:
    """Perform tasks with Ray Data; yield each that is done."""
    import ray

    ray.init(address=settings.address, **({} if settings.address else {"num_cpus": n_workers}))
    try:
        rows = [
            each._asdict() | {"source": str(each.source), "target": str(each.target)}
            for each in tasks
        ]
        done = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            Worker,
            fn_constructor_kwargs={"work": work},
            batch_size=1,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=min(n_workers, len(tasks))),
        )
        by_first = {task.first: task for task in tasks}
        for row in done.iter_rows():
            yield by_first[int(row["first"])]
    finally:
        ray.shutdown()


def main() -> None:
    """Process the documents that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["score", "generate"])
    parser.add_argument("model", help="a model folder, a run folder, or the name of a model")
    parser.add_argument("documents", type=Path, help="JSON lines, each with a text")
    parser.add_argument("out", type=Path, help="a folder for the results")
    parser.add_argument("--workers", type=int, default=2, help="0: this process alone")
    parser.add_argument("--address", help="of a Ray cluster; none: one on this machine")
    parser.add_argument("--per-task", type=int, default=256, help="documents of a task")
    parser.add_argument("--batch-size", type=int, default=16, help="documents read together")
    parser.add_argument("--mem-len", type=int, help="memory length; none: as the model was trained")
    parser.add_argument("--threads", type=int, default=1, help="of the model, in each worker")
    parser.add_argument("--length", type=int, help="tokens that continue a document")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, help="of the first document; the next has one more")
    parser.add_argument("--stop", nargs="*", help="texts that end a continuation")
    given = parser.parse_args()
    names = ("length", "temperature", "top_p", "seed", "stop")
    drawing = {name: x for name in names if (x := getattr(given, name)) is not None}
    work = Work(
        model=given.model,
        kind=given.kind,
        batch_size=given.batch_size,
        per_task=given.per_task,
        mem_len=given.mem_len,
        threads=given.threads,
        generation=GenerateConfig(**drawing),
    )
    executor = partial(with_ray, given) if given.workers else here
    paths = process(work, given.documents, given.out, executor=executor, workers=given.workers)
    print(f"{given.out}: {len(paths)} files, {paths[0].name} to {paths[-1].name}")


if __name__ == "__main__":
    main()
