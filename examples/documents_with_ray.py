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
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from transformer_xl import GenerateConfig, from_pretrained, load_vocab
from transformer_xl.config.device import pick_device
from transformer_xl.config.files import replace_file
from transformer_xl.inference.answers import losses
from transformer_xl.inference.generate import Sampling, generate_batch, seed_of
from transformer_xl.model.pretrained import ModelFolder
from transformer_xl.model.segment import Lengths

LONGEST_LINE = 64 << 20
"""Bytes of a document, at most."""


@dataclass
class Document:
    """A line of the source; other fields are ignored."""

    text: str
    id: str | int | None = None
    """A name; None: its number in the file, from 0."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is done with the documents, and with which model."""

    model: str
    kind: str
    batch_size: int
    per_task: int
    weights: str = "float32"
    mem_len: int | None
    threads: int
    generation: GenerateConfig


class Worker:
    """A process with a model, which performs tasks."""

    def __init__(self, work: Work, source: Path) -> None:
        self._work, self._source = work, source
        self._model, self._vocab = from_pretrained(work.model, pick_device(), work.weights)
        self._lengths = Lengths.of(self._model.config, mem_len=work.mem_len, ext_len=0)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Perform tasks, for Ray Data; return their numbers."""
        for first, start, target in zip(*map(batch.get, ("first", "start", "target")), strict=True):
            self.perform(int(first), int(start), Path(str(target)))
        return {"first": batch["first"]}

    def perform(self, first: int, start: int, target: Path) -> None:
        """Write the results of documents from number ``first`` on, which begins at ``start``."""
        # Sums depend on the number of threads, in their last bits.
        before = torch.get_num_threads()
        torch.set_num_threads(self._work.threads)
        try:
            results: list[dict[str, Any]] = []
            texts: dict[int, list[int]] = {}
            for number, line in enumerate(self._lines(start), first):
                results.append({"id": number})
                try:
                    document = msgspec.json.decode(line, type=Document)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    about = f"line {number + 1} is no document"
                    results[-1]["error"] = f'{about}, such as {{"text": "..."}}: {error}'
                    continue
                results[-1]["id"] = number if document.id is None else document.id
                try:
                    texts[number - first] = [*self._vocab.encode(document.text)]
                except ValueError as error:
                    results[-1]["error"] = str(error)
            rows = sorted((row for row in texts if texts[row]), key=lambda row: len(texts[row]))
            is_scored = self._work.kind == "score"
            empty = {"tokens": 0, "nll": None, "nll_sum": 0.0}
            for row in texts.keys() - rows:
                results[row] |= empty if is_scored else {"error": "the document is empty"}
            for place in range(0, len(rows), self._work.batch_size):
                batch = rows[place : place + self._work.batch_size]
                ids = [texts[row] for row in batch]
                found = self._scores(ids) if is_scored else self._continued(ids, first, batch)
                for row, result in zip(batch, found, strict=True):
                    results[row] |= result
        finally:
            torch.set_num_threads(before)
        lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in results)
        replace_file(target, "".join(lines).encode("utf-8", "surrogatepass"))

    def _lines(self, start: int) -> Iterator[bytes]:
        with self._source.open("rb") as file:
            file.seek(start)
            yield from islice(file, self._work.per_task)

    def _scores(self, texts: list[list[int]]) -> list[dict[str, Any]]:
        """Return the number of tokens of each text, and its loss in nats."""
        # The first token is predicted from nothing.
        longer = [ids for ids in texts if len(ids) > 1]
        size = self._work.batch_size
        nll = iter(losses(self._model, longer, self._lengths, batch_size=size) if longer else ())
        sums = [float(next(nll).sum()) if len(ids) > 1 else 0.0 for ids in texts]
        return [
            {
                "tokens": len(ids),
                "nll": total / (len(ids) - 1) if len(ids) > 1 else None,
                "nll_sum": total,
            }
            for ids, total in zip(texts, sums, strict=True)
        ]

    def _continued(
        self, texts: list[list[int]], first: int, rows: list[int]
    ) -> list[dict[str, Any]]:
        """Return what continues each text; document n is continued with the seed plus n."""
        settings = self._work.generation
        seeds = [seed_of(settings.seed, first + row) for row in rows]
        batch = generate_batch(
            self._model,
            texts,
            Sampling(**settings.sampling),
            length=settings.length,
            seed=seeds,
            mem_len=self._work.mem_len,
        )
        written = batch.decode(self._vocab, settings.stop)
        return [{"text": x, "seed": seed} for x, seed in zip(written, seeds, strict=True)]


def tasks_of(source: Path, out: Path, per_task: int) -> tuple[list[dict[str, Any]], str]:
    """Divide a file into tasks: the number and place of the first document, and a file each.

    Returns:
        The tasks, and the SHA-256 of the file.
    """
    tasks, digest, n = [], hashlib.sha256(), 0
    with source.open("rb") as file:
        while True:
            start, first = file.tell(), n
            for line in islice(_limited(file), per_task):
                digest.update(line)
                n += 1
            if n == first:
                break
            target = out.absolute() / f"part-{len(tasks):06}.jsonl"
            tasks.append({"first": first, "start": start, "target": str(target)})
    if not tasks:
        raise SystemExit(f"{source} has no document")
    return tasks, digest.hexdigest()


def _limited(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise SystemExit(
                f"{file.name} has a line of more than {LONGEST_LINE:,} bytes: split it"
            )
        yield line


def note(work: Work, digest: str, out: Path) -> Path | None:
    """Note in the folder what is done; return the file if it is new.

    Raises:
        SystemExit: The folder has the results of something else.
    """
    folder, path = ModelFolder.find(work.model), out / "about.json"
    settings = {name: x for name, x in asdict(work).items() if name != "mem_len" or x is not None}
    about = {
        "work": settings,
        "weights": folder.weights.checksum,
        "vocab": load_vocab(folder.path).hash,
        "source": digest,
    }
    content = json.dumps(about, indent=2, default=list).encode()
    if path.exists():
        if path.read_bytes() != content:
            raise SystemExit(
                f"{out} has results of another model, source or settings: give another folder"
            )
        return None
    out.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
    return path


def with_ray(
    worker: dict[str, Any], tasks: list[dict[str, Any]], address: str | None, n_workers: int
) -> None:
    """Perform tasks with Ray Data."""
    import ray

    ray.init(address=address, **({} if address else {"num_cpus": n_workers}))
    try:
        done = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map_batches(
            Worker,
            fn_constructor_kwargs=worker,
            batch_size=1,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=min(n_workers, len(tasks))),
        )
        for _ in done.iter_rows():
            pass
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
    settings = parser.parse_args()
    names = ("length", "temperature", "top_p", "seed", "stop")
    drawing = {name: x for name in names if (x := getattr(settings, name)) is not None}
    if settings.kind == "score" and drawing:
        parser.error(f"{', '.join(drawing)} have no effect on scores: leave them out")
    if drawing.get("length") == 0 or min(settings.per_task, settings.batch_size) < 1:
        parser.error("--length, --per-task and --batch-size must be at least 1")
    own = ("model", "kind", "batch_size", "per_task", "mem_len", "threads")
    options = {name: getattr(settings, name) for name in own}
    work = Work(**options, generation=GenerateConfig(**drawing))
    tasks, digest = tasks_of(settings.documents, settings.out, work.per_task)
    new = note(work, digest, settings.out)
    left = [task for task in tasks if not Path(task["target"]).is_file()]
    worker = {"work": work, "source": settings.documents.absolute()}
    try:
        if left and settings.workers:
            with_ray(worker, left, settings.address, settings.workers)
        elif left:
            here = Worker(**worker)
            for task in left:
                here.perform(task["first"], task["start"], Path(task["target"]))
    except BaseException:
        if new is not None and not any(Path(task["target"]).is_file() for task in tasks):
            # A call that could not begin keeps no other out.
            new.unlink()
        raise
    names = [Path(task["target"]).name for task in tasks]
    print(f"{settings.out}: {len(names)} files, {names[0]} to {names[-1]}")


if __name__ == "__main__":
    main()
