"""Scores of many documents, or texts that continue them, in parts that any engine performs.

A file of documents is divided into tasks, each of which reads some of them and writes one file. A
task that has left its file is not repeated, so a killed call is resumed by the same call. Results
depend on the task and not on who performs it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
import torch

from transformer_xl.config import GenerateConfig
from transformer_xl.config.checks import Count, Length, check, no_type_check, require
from transformer_xl.config.device import pick_device
from transformer_xl.config.files import open_regular, read_small_file, replace_file
from transformer_xl.data import load_vocab
from transformer_xl.inference.answers import by_length, losses
from transformer_xl.inference.generate import (
    GenerationBatch,
    Sampler,
    Sampling,
    from_pretrained,
    random_numbers,
    seed_of,
)
from transformer_xl.model.compact import Weights
from transformer_xl.model.limits import require_mem_len, require_remembering
from transformer_xl.model.pretrained import find_model_folder, weights_checksum, weights_path
from transformer_xl.model.segment import Lengths

_ABOUT = "about.json"
_SCORE_OF_NONE = {"tokens": 0, "nll": None, "nll_sum": 0.0}
"""The score of an empty document."""
_LONGEST_LINE = 64 << 20
"""Bytes of a document, at most."""


class Document(msgspec.Struct):
    """A line of the source; other fields are ignored. Of another line the result is an error."""

    text: str
    id: str | int | None = None
    """A name; None: its number in the file, from 0."""


@no_type_check
@dataclass(frozen=True, kw_only=True)
class Work:
    """What is done with the documents, and with which model."""

    model: str
    """A model folder, a run folder, or the name of a model."""
    kind: Literal["score", "generate"] = "score"
    """Whether documents are scored, or continued."""
    batch_size: Count = 16
    """Documents that are read together."""
    per_task: Count = 256
    """Documents of a task."""
    weights: Weights = "float32"
    """Precision of the weights."""
    mem_len: Length | None = None
    """Memory length. None: as the model was trained."""
    threads: Count = 1
    """Threads of the model in each process: sums depend on their number, in their last bits."""
    generation: GenerateConfig = field(default_factory=GenerateConfig)
    """Settings of sampling; document n is continued with the seed plus n."""

    def __post_init__(self) -> None:
        check(self)
        require(
            self.generation.beam_size is None,
            f"beam_size={self.generation.beam_size}: documents are continued by sampling; leave "
            "it out",
        )
        require(
            self.kind == "score" or self.generation.length > 0,
            f"length={self.generation.length} leaves nothing to generate: documents need a length "
            "above 0",
        )
        require(
            self.kind == "generate" or self.generation == GenerateConfig(),
            "settings of sampling have no effect on scores: leave them out, or kind='generate'",
        )
        require(
            self.generation.prompt == GenerateConfig().prompt,
            f"prompt={self.generation.prompt!r} has no effect: documents are continued themselves; "
            "leave it out, or write it into the documents",
        )


class Task(NamedTuple):
    """Some documents of a source, and the file for what is found."""

    source: Path
    start: int
    """Where the first document begins, in bytes."""
    first: int
    """Its number."""
    n: int
    """How many there are."""
    target: Path


Executor = Callable[[Work, Sequence[Task], int], Iterator[Task]]
"""Performs tasks with so many workers, and yields each that is done."""


class Performer:
    """A model that performs tasks; each worker has one.

    Raises:
        OSError: The model cannot be read.
        RuntimeError: It is damaged.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._model, self._vocab = from_pretrained(work.model, pick_device(), work.weights)
        self._model.eval()
        require_mem_len(self._model, work.mem_len)
        self._lengths = Lengths.of(self._model.config, mem_len=work.mem_len, ext_len=0)
        if work.kind == "score":
            require_remembering(self._model, self._lengths)

    def __call__(self, task: Task) -> None:
        """Perform a task: write its file, a line for each document, in their order.

        Raises:
            OSError: A file cannot be read or written.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(self._work.threads)
        try:
            self._perform(task)
        finally:
            torch.set_num_threads(before)

    def _perform(self, task: Task) -> None:
        is_scored, found = self._work.kind == "score", list[dict[str, Any]]()
        texts: dict[int, list[int]] = {}
        for number, document in enumerate(_documents(task), task.first):
            if isinstance(document, str):
                found.append({"id": number, "error": document})
                continue
            found.append({"id": number if document.id is None else document.id})
            try:
                text = [*self._vocab.encode(document.text)]
            except ValueError as error:
                found[-1]["error"] = str(error)
                continue
            if text:
                texts[len(found) - 1] = text
            else:
                found[-1] |= _SCORE_OF_NONE if is_scored else {"error": "the document is empty"}
        rows, read = [*texts], [*texts.values()]
        for batch in by_length(read, self._work.batch_size) if read else ():
            some = [read[n] for n in batch]
            results = (
                self._scores(some)
                if is_scored
                else self._texts(some, [task.first + rows[n] for n in batch])
            )
            for n, result in zip(batch, results, strict=True):
                found[rows[n]] |= result
        lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in found)
        replace_file(task.target, "".join(lines).encode("utf-8", "surrogatepass"))

    def _scores(self, texts: list[list[int]]) -> list[dict[str, Any]]:
        scored = [text for text in texts if len(text) > 1]
        size = self._work.batch_size
        found = iter(losses(self._model, scored, self._lengths, batch_size=size) if scored else ())
        results = []
        for text in texts:
            nll = float(next(found).sum()) if len(text) > 1 else 0.0
            mean = nll / (len(text) - 1) if len(text) > 1 else None
            # The first token is predicted from nothing.
            results.append({"tokens": len(text), "nll": mean, "nll_sum": nll})
        return results

    def _texts(self, texts: list[list[int]], numbers: list[int]) -> list[dict[str, Any]]:
        settings = self._work.generation
        sampler = Sampler(Sampling(**settings.sampling), self._model.config.vocab_size, self._vocab)
        seeds = [seed_of(settings.seed, n) for n in numbers]
        batch = GenerationBatch(
            self._model,
            texts,
            settings.length,
            None,
            sampler,
            [random_numbers(seed) for seed in seeds],
            self._work.mem_len,
        )
        written = batch.decode(self._vocab, settings.stop)
        return [{"text": x, "seed": seed} for x, seed in zip(written, seeds, strict=True)]


def tasks_of(work: Work, source: Path, out: Path) -> list[Task]:
    """Divide a file into tasks; note in the folder ``out`` what is done.

    Args:
        work: What is done.
        source: JSON lines, each with a ``text``, and perhaps an ``id``.
        out: A folder, that of an earlier call with the same arguments or a new one.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: The folder has the results of something else, the file has no line, or one of
            more than 64 MiB.
    """
    folder = find_model_folder(work.model)
    tasks, digest = _divided(source, out, work.per_task)
    # A setting of which earlier versions knew nothing is noted where it is set.
    settings = {name: x for name, x in asdict(work).items() if name != "mem_len" or x is not None}
    about = {
        "work": settings,
        "weights": weights_checksum(weights_path(folder)),
        "vocab": load_vocab(folder).hash,
        "source": digest,
    }
    content = json.dumps(about, indent=2, default=list).encode()
    path = out / _ABOUT
    if path.exists():
        require(
            read_small_file(path) == content,
            f"{out} has results of another model, source or settings: give another folder",
        )
    else:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return tasks


def here(work: Work, tasks: Sequence[Task], n_workers: int) -> Iterator[Task]:
    """Perform tasks in this process."""
    perform = Performer(work)
    for task in tasks:
        perform(task)
        yield task


def process(
    work: Work,
    source: Path | str,
    out: Path | str,
    *,
    executor: Executor = here,
    workers: int = 1,
) -> list[Path]:
    """Score or continue the documents of a file; return the files with the results, in order.

    Args:
        work: What is done.
        source: As for :func:`tasks_of`.
        out: As for :func:`tasks_of`; after a kill the same call resumes.
        executor: What performs the tasks.
        workers: How many it performs at once.

    Raises:
        OSError: A file cannot be read or written.
        RuntimeError: The executor has left tasks undone; the same call performs them.
        ValueError: As :func:`tasks_of`.
    """
    about = Path(out) / _ABOUT
    is_new = not about.exists()
    tasks = tasks_of(work, Path(source), Path(out))
    if left := [task for task in tasks if not task.target.is_file()]:
        try:
            for _ in executor(work, left, workers):
                pass
        except BaseException:
            if is_new and len(left) == sum(not task.target.is_file() for task in tasks):
                # A call that could not begin keeps no other out.
                about.unlink(missing_ok=True)
            raise
    if undone := [task.target.name for task in tasks if not task.target.is_file()]:
        raise RuntimeError(f"{len(undone)} of {len(tasks)} parts are missing, first {undone[0]}")
    return [task.target for task in tasks]


def _divided(source: Path, out: Path, per_task: int) -> tuple[list[Task], str]:
    """Divide a file into tasks; return its SHA-256, too."""
    tasks, first, digest = [], 0, hashlib.sha256()
    with open_regular(source) as file:
        while True:
            start, n = file.tell(), 0
            for line in islice(_lines(file, source), per_task):
                digest.update(line)
                n += 1
            if not n:
                break
            target = out / f"part-{len(tasks):06}.jsonl"
            tasks.append(Task(source.absolute(), start, first, n, target.absolute()))
            first += n
    require(bool(tasks), f"{source} has no document")
    return tasks, digest.hexdigest()


def _documents(task: Task) -> Iterator[Document | str]:
    """Yield the documents of a task, and of lines that are none, why."""
    decoder = msgspec.json.Decoder(Document)
    with open_regular(task.source) as file:
        file.seek(task.start, os.SEEK_SET)
        for number, line in enumerate(islice(_lines(file, task.source), task.n), task.first):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                yield f'line {number + 1} is no document, such as {{"text": "..."}}: {error}'


def _lines(file: BinaryIO, source: Path) -> Iterator[bytes]:
    while line := file.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"{source} has a line of more than {_LONGEST_LINE:,} bytes: split it")
        yield line
