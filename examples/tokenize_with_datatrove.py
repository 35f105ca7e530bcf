"""Tokenize a corpus that outgrows one machine, on a cluster, with datatrove.

    pip install datatrove
    python examples/tokenize_with_datatrove.py texts/ --vocab bpe --vocab-size 32000 --workers 8
    python examples/tokenize_with_datatrove.py texts/ --slurm cpu --time 04:00:00 --workers 200

`prepare` divides its work into tasks, each of which reads a part of the text and writes one file.
Here they are performed by an executor of datatrove: processes of this machine, or jobs of a Slurm
partition. The result is the corpus that `txl prepare` makes, byte for byte, in the cache where
`txl train` with the same path, vocabulary and cache finds it. After a kill, the same command
resumes: tasks whose file exists are not repeated. On a cluster, the text, the cache (`--cache`) and
the logs are on a disk that all machines share.
"""

import argparse
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from transformer_xl.config import DataConfig
from transformer_xl.data import prepare
from transformer_xl.data.tasks import Task

SECONDS_BETWEEN_LOOKS = 5.0
"""How often the queue of Slurm is asked whether a job goes on."""


class Perform(PipelineStep):
    """Performs the task of its rank."""

    type = "transformer_xl"
    name = "tasks"

    def __init__(self, tasks: Sequence[Task]) -> None:
        super().__init__()
        self.tasks = tasks

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Write the file of a task."""
        # Jobs of Slurm unpickle this class, without what its file has imported.
        from transformer_xl.data.tasks import perform

        with self.track_time():
            perform(self.tasks[rank])
        yield from ()


def with_datatrove(
    settings: argparse.Namespace, tasks: Sequence[Task], n_workers: int
) -> Iterator[Task]:
    """Perform tasks with an executor of datatrove; yield them when all are done."""
    if not tasks:
        return
    logs = settings.logs / time.strftime("%Y%m%d-%H%M%S") / tasks[0].target.parent.name
    common: dict[str, Any] = {
        "pipeline": [Perform(tasks)],
        "tasks": len(tasks),
        "logging_dir": str(logs),
        # Only tasks that are not completed come here; their ranks are not those of an earlier call.
        "skip_completed": False,
    }
    if settings.slurm:
        executor = SlurmPipelineExecutor(
            **common,
            time=settings.time,
            partition=settings.slurm,
            workers=n_workers,
            env_command=settings.env_command,
        )
        executor.run()
        wait_for_slurm(executor, tasks, settings.absent_seconds)
    else:
        LocalPipelineExecutor(**common, workers=min(n_workers, len(tasks))).run()
    yield from tasks


def wait_for_slurm(
    executor: SlurmPipelineExecutor, tasks: Sequence[Task], absent_seconds: float
) -> None:
    """Wait until each task has written its file.

    Args:
        executor: Its job performs the tasks.
        tasks: The tasks.
        absent_seconds: The job has ended if the queue does not show it for so long. An answer may
            fail, and a shared disk may show new files late.

    Raises:
        RuntimeError: The job has ended before.
    """
    queue = ["squeue", "--noheader", "--jobs", str(executor.job_id)]
    seen = time.monotonic()
    while left := [task for task in tasks if not task.target.is_file()]:
        if subprocess.run(queue, capture_output=True, check=False).stdout.strip():
            seen = time.monotonic()
        elif time.monotonic() - seen > absent_seconds:
            raise RuntimeError(
                f"{len(left)} of {len(tasks)} tasks were not completed, the first is "
                f"{left[0].target}: see {executor.logging_dir.path}, and run the same command "
                "again to resume"
            )
        time.sleep(min(SECONDS_BETWEEN_LOOKS, absent_seconds))


def main() -> None:
    """Tokenize the text that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="a file, a folder or a pattern, as --data.path")
    parser.add_argument("--cache", type=Path, help="the cache of corpora, as --data.cache_dir")
    parser.add_argument("--vocab", default="bpe", help="kind of vocabulary, as --data.vocab")
    parser.add_argument("--vocab-size", type=int, help="size of the vocabulary")
    parser.add_argument("--tokenizer", help="an existing tokenizer, as --data.tokenizer")
    parser.add_argument("--workers", type=int, default=2, help="tasks at the same time")
    parser.add_argument("--logs", type=Path, default=Path("datatrove_logs"))
    parser.add_argument("--slurm", metavar="PARTITION", help="jobs of Slurm instead of processes")
    parser.add_argument("--time", default="01:00:00", help="time limit of a job of Slurm")
    parser.add_argument(
        "--absent-seconds",
        type=float,
        default=90,
        help="a job of Slurm has ended if squeue does not show it for so long",
    )
    parser.add_argument("--env-command", help="what a job of Slurm does first: source FILE")
    given = parser.parse_args()
    config = DataConfig(
        path=given.path,
        cache_dir=None if given.cache is None else str(given.cache.absolute()),
        vocab=given.vocab,
        vocab_size=given.vocab_size,
        tokenizer=given.tokenizer,
        workers=given.workers,
    )
    corpus = prepare(config, print, partial(with_datatrove, given))
    print(f"{corpus.folder}: {corpus.n_tokens('train'):,} tokens for training")


if __name__ == "__main__":
    main()
