"""How a corpus is built: in parts, by several processes, going on where it was stopped.

==============  ====================================================================================
``text/``       what had to be unpacked
``plan.json``   which text belongs to which part; parts end where no symbol crosses
``counts/``     how often each symbol occurs, by part
vocabulary      ``tokenizer.json`` and ``vocab.json``
``parts/``      the symbols of each part, with their number and checksum
``train.bin``   the parts one after another, checked as they are read; then ``valid``, ``test``
``manifest``    written last; what only served the building is removed then
==============  ====================================================================================

Every file appears when it is whole. What the parts are depends on the text alone, so that the
result does not depend on how many processes there were, or how often they were stopped.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from transformer_xl.config import FORMAT_VERSION, DataConfig
from transformer_xl.config.files import TEMPORARY, replace_file, require_space, write_atomically
from transformer_xl.data.catalogue import KNOWN_CORPORA, common_settings
from transformer_xl.data.counting import vocab_of_counts
from transformer_xl.data.hub import HUB_PREFIX
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.tasks import (
    Task,
    count_task,
    describe,
    encode_task,
    find_unknown,
    is_done,
    perform_all,
    token_dtype,
    unpack_task,
)
from transformer_xl.data.text import SPLITS, Span, TextFiles, divide, find_cut, read_blocks
from transformer_xl.data.unpacking import unpacking_of
from transformer_xl.data.vocab import Vocab, VocabKind, describe_unknown
from transformer_xl.data.vocab_files import bring, divided_as, load_vocab

Say = Callable[[str], None]
Splits = dict[str, list[Span]]

PART_BYTES = 16 << 20
"""Size of the text that is cut at once."""
LEARNED_BYTES = 64 << 20
"""How much of a long text byte-pair units are learned from, spread evenly over it."""
_COPY_BYTES = 1 << 17
_SECONDS_BETWEEN_LINES = 10.0
_SERVED = ("text", "counts", "parts")


def build(
    config: DataConfig, files: TextFiles, settings: dict[str, Any], folder: Path, say: Say
) -> None:
    """Fill a folder with a corpus, going on with what is there already.

    Args:
        config: The settings.
        files: Where the text is.
        settings: What of them the manifest records.
        folder: An existing folder that nobody else writes to.
        say: Takes a line of text for the user now and then.

    Raises:
        ValueError: The settings or the text do not fit.
        OSError: A file cannot be read or written.
        RuntimeError: A process that cut text was killed.
    """
    if not (folder / "manifest.json").is_file():
        manifest = _build(config, files, settings, folder, say)
        replace_file(folder / "manifest.json", json.dumps(manifest, indent=2).encode())
    for name in _SERVED:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("plan.json", *(f"{split}.json" for split in SPLITS)):
        (folder / name).unlink(missing_ok=True)
    # What killed ones were writing.
    for left in folder.glob(TEMPORARY):
        left.unlink(missing_ok=True)


def vocabulary_source(config: DataConfig) -> str:
    """Return where symbols are counted: ``train`` or ``all``."""
    known = KNOWN_CORPORA.get(config.name)
    return config.vocab_from or (known.counted if known else "train")


def _build(
    config: DataConfig, files: TextFiles, settings: dict[str, Any], folder: Path, say: Say
) -> dict[str, Any]:
    _require_use(config, files)
    files = _unpacked(config, files, folder, say)
    parts = _plan(config, files, folder)
    if not any(parts.values()) or not (parts["train"] or config.name in KNOWN_CORPORA):
        raise ValueError(
            f"there is nothing to train on: {files.description} is empty, or too short for "
            "the shares that are held out"
        )
    n_workers = _workers(config, parts)
    vocab = _vocabulary(config, parts, folder, n_workers, say)
    dtype = token_dtype(vocab)
    n_bytes = {name: sum(len(s) for part in parts[name] for s in part) for name in SPLITS}
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "dtype": dtype.name,
        "vocab": {"kind": vocab.kind, "size": len(vocab), "hash": vocab.hash},
        "splits": {},
        "source": {"name": config.name, "description": files.description},
        "settings": settings,
    }
    # Published corpora of words have a blank around each, marks included.
    is_prepared = common_settings(config.name).vocab == "words"
    for name in SPLITS:
        say(f"writing {name}: {n_bytes[name]:,} bytes of text")
        about = _write_split(
            name, parts[name], folder, dtype.itemsize, n_workers, say, is_prepared=is_prepared
        )
        spans = (span.path for part in parts[name] for span in part)
        about["text_files"] = [files.name(path) for path in dict.fromkeys(spans)]
        manifest["splits"][name] = about
        say(f"{name}: {about['tokens']:,} tokens, {about['bytes']:,} bytes")
    return manifest


def _require_use(config: DataConfig, files: TextFiles) -> None:
    """Refuse settings on which nothing depends with these files."""
    default = DataConfig()
    unused: dict[str, str] = {}
    for part in ("valid", "test"):
        if getattr(files, part) is not None:
            name = f"{part}_fraction"
            unused[name] = f"the {part} text is given: nothing is split off for it"
    if len(unused) == 2:
        unused["split_by"] = "valid and test text are given: nothing is split off"
    paths = [path for part in SPLITS for path in getattr(files, part) or ()]
    is_from_hub = config.name.startswith(HUB_PREFIX)
    if not is_from_hub and not {"lines", "parquet"} & {unpacking_of(x, config) for x in paths}:
        unused["json_field"] = "no file is JSON lines (.jsonl, .ndjson) or a Parquet table"
    for name, why in unused.items():
        value, usual = getattr(config, name), getattr(default, name)
        if value != usual:
            raise ValueError(
                f"data.{name}={value!r} has no effect: {why}; leave it at {usual!r}, or give "
                "another text"
            )


def _unpacked(config: DataConfig, files: TextFiles, folder: Path, say: Say) -> TextFiles:
    """Write out the text of files that are no plain text."""
    tasks: list[Task] = []
    origins: dict[Path, Path] = {}
    replaced: dict[str, tuple[Path, ...] | None] = {}
    for part in SPLITS:
        paths: tuple[Path, ...] | None = getattr(files, part)
        if paths is None:
            continue
        found = []
        for number, path in enumerate(paths):
            target = path
            if how := unpacking_of(path, config):
                target = folder / "text" / part / f"{number:06d}.txt"
                origins[target] = path
                tasks.append(unpack_task(path, target, how, config.json_field, part))
            found.append(target)
        replaced[part] = tuple(found)
    if not tasks:
        return files
    say(f"unpacking {len(tasks):,} files")
    n_workers = 1 if len(tasks) < 2 else config.workers or _cores()
    _perform(tasks, n_workers, "unpacked", [Path(x["path"]).stat().st_size for x in tasks], say)
    return dataclasses.replace(files, origins=origins, **cast(dict[str, Any], replaced))


def _plan(config: DataConfig, files: TextFiles, folder: Path) -> dict[str, list[list[Span]]]:
    """Divide the text into splits, and these into parts; the same every time."""
    path = folder / "plan.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: [[Span(Path(p), start, stop) for p, start, stop in part] for part in parts]
            for name, parts in stored.items()
        }
    except (OSError, ValueError):
        pass
    parts = {name: list(_parts(config, spans)) for name, spans in divide(config, files).items()}
    plan = {
        name: [[[str(s.path.absolute()), s.start, s.stop] for s in part] for part in listed]
        for name, listed in parts.items()
    }
    replace_file(path, json.dumps(plan).encode())
    return parts


def _parts(config: DataConfig, spans: Sequence[Span]) -> Iterator[list[Span]]:
    kind = divided_as(config.tokenizer) if config.tokenizer else config.vocab
    part: list[Span] = []
    room = PART_BYTES
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = span.stop
            if stop - start > room:
                stop = find_cut(kind, span, start + room)
            part.append(Span(span.path, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                yield part
                part, room = [], PART_BYTES
    if part:
        yield part


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _workers(config: DataConfig, parts: dict[str, list[list[Span]]]) -> int:
    # Starting processes takes longer than cutting a short text.
    return config.workers or (_cores() if len(parts["train"]) > 1 else 1)


def _vocabulary(
    config: DataConfig, parts: dict[str, list[list[Span]]], folder: Path, n_workers: int, say: Say
) -> Vocab:
    try:
        return load_vocab(folder)
    except (FileNotFoundError, RuntimeError):
        pass  # Not made yet, or not to its end.
    kind = config.vocab
    if config.tokenizer:
        say(f"taking the tokenizer {config.tokenizer}")
        vocab = bring(Path(config.tokenizer))
    elif kind in ("bytes", "bpe"):
        say(f"making a vocabulary of {kind}")
        learned = _learned(
            [part for name in SPLITS for part in parts[name]]
            if not parts["train"]
            else parts["train"]
        )
        texts = read_blocks(cast(VocabKind, kind), learned)
        vocab = train_vocab(cast(VocabKind, kind), texts, config.vocab_size)
    else:
        say(f"making a vocabulary of {kind}")
        vocab = _counted(config, parts, folder, n_workers, say)
        if kind == "chars" and vocab.unk_id is None and config.name not in KNOWN_CORPORA:
            say(
                f"note: the vocabulary is the {len(vocab):,} characters of this text: the model "
                "will not read others; with --data.vocab bytes (or bpe) it reads any text"
            )
    vocab.save(folder)
    return vocab


def _learned(parts: Sequence[Sequence[Span]]) -> list[Span]:
    """Choose the text from which byte-pair units are learned."""
    spans = [span for part in parts for span in part]
    total = sum(map(len, spans))
    if total <= LEARNED_BYTES:
        return spans
    chosen = []
    for part in parts:
        share = sum(map(len, part)) * LEARNED_BYTES // total
        for span in part:
            stop = find_cut("bpe", span, min(span.start + share, span.stop))
            chosen.append(Span(span.path, span.start, stop))
            share -= stop - span.start
            if share <= 0:
                break
    return chosen


def _counted(
    config: DataConfig, parts: dict[str, list[list[Span]]], folder: Path, n_workers: int, say: Say
) -> Vocab:
    place = folder / "counts"
    place.mkdir(exist_ok=True)
    tasks = {
        name: [
            count_task(config.vocab, spans, place / f"{name}-{number:06d}")
            for number, spans in enumerate(parts[name])
        ]
        for name in SPLITS
    }
    every = [task for name in SPLITS for task in tasks[name]]
    sizes = [sum(map(len, spans)) for name in SPLITS for spans in parts[name]]
    _perform(every, n_workers, "counted", sizes, say)
    # An alphabet of bytes or integers is no knowledge about a text.
    is_alphabet = config.vocab in ("integers", "authors-bytes")
    takes_all = is_alphabet or vocabulary_source(config) == "all" or not tasks["train"]
    counted = every if takes_all else tasks["train"]
    others = [] if takes_all else tasks["valid"] + tasks["test"]
    return vocab_of_counts(
        config.vocab,
        [Path(task["target"]) for task in counted],
        [Path(task["target"]) for task in others],
        config.vocab_size,
    )


def _perform(
    tasks: Sequence[Task], n_workers: int, done: str, sizes: Sequence[int], say: Say
) -> None:
    """Do the tasks that are left, and say how far they are."""
    size_of = {task["target"]: size for task, size in zip(tasks, sizes, strict=True)}
    left = [task for task in tasks if not is_done(task)]
    total = sum(sizes)
    ready = total - sum(size_of[task["target"]] for task in left)
    if ready:
        say(f"{done} before: {ready:,} of {total:,} bytes")
    began = said = time.monotonic()
    before = ready
    for task in perform_all(left, n_workers):
        ready += size_of[task["target"]]
        now = time.monotonic()
        if now - said > _SECONDS_BETWEEN_LINES:
            said = now
            speed = (ready - before) / 1e6 / (now - began)
            say(f"{done} {ready:,} of {total:,} bytes, {speed:.1f} MB/s")


def _write_split(
    name: str,
    parts: Sequence[Sequence[Span]],
    folder: Path,
    itemsize: int,
    n_workers: int,
    say: Say,
    *,
    is_prepared: bool,
) -> dict[str, Any]:
    described = folder / f"{name}.json"
    if described.is_file():
        return json.loads(described.read_text(encoding="utf-8"))
    place = folder / "parts" / name
    place.mkdir(parents=True, exist_ok=True)
    tasks = [
        encode_task(folder, spans, place / f"{number:06d}.bin", is_prepared=is_prepared)
        for number, spans in enumerate(parts)
    ]
    _perform(tasks, n_workers, f"cut {name},", [sum(map(len, spans)) for spans in parts], say)
    targets = [Path(task["target"]) for task in tasks]
    abouts = [describe(target) for target in targets]
    n_tokens = sum(about["tokens"] for about in abouts)
    if n_unknown := sum(about.get("unknown", 0) for about in abouts):
        found = find_unknown(load_vocab(folder), (span for spans in parts for span in spans))
        where = "" if found is None else f": {found[0]}: {describe_unknown(found[2], found[1])}"
        say(
            f"warning: {name}: {n_unknown:,} of {n_tokens:,} characters are not in the vocabulary "
            f"and become <unk>{where}"
        )
    require_space(folder, n_tokens * itemsize, f"the {name} split")
    digest = hashlib.sha256()
    path = folder / f"{name}.bin"

    def join(temporary: Path) -> None:
        with temporary.open("wb") as out:
            for target, about in zip(targets, abouts, strict=True):
                part_digest = hashlib.sha256()
                with target.open("rb") as part:
                    while block := part.read(_COPY_BYTES):
                        for x in (digest, part_digest):
                            x.update(block)
                        out.write(block)
                if part_digest.hexdigest() != about["sha256"]:
                    target.with_name(f"{target.name}.json").unlink()
                    raise _DamagedPart(target)

    try:
        write_atomically(path, join)
    except _DamagedPart as error:
        raise RuntimeError(
            f"{error.args[0]} is not as it was written: is the disk sound? The part was removed; "
            "prepare again, what else is done is kept"
        ) from error
    about = {
        "file": path.name,
        "tokens": n_tokens,
        "bytes": sum(about["bytes"] for about in abouts),
        "sha256": digest.hexdigest(),
    }
    replace_file(described, json.dumps(about).encode())
    shutil.rmtree(place)
    return about


class _DamagedPart(Exception):  # noqa: N818 - it is never seen
    """A part does not have its checksum any more."""
