"""Preparing a corpus: texts are located, tokenized and cached.

A corpus is built in parts, by several processes, and an interrupted build resumes:

==============  ====================================================================================
``text/``       text of files that had to be decompressed
``plan.json``   which text belongs to which part; no token crosses the end of a part
``counts/``     counts of each symbol, by part
vocabulary      ``tokenizer.json`` and ``vocab.json``
``parts/``      the tokens of each part, with their number and checksum
``train.bin``   the concatenated parts, verified while read; then ``valid`` and ``test``
``manifest``    written last; temporary files are removed then
==============  ====================================================================================

All files are written atomically. The parts depend on the text alone, so that the result depends
neither on the number of processes nor on interruptions.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from transformer_xl.config import FORMAT_VERSION, DataConfig
from transformer_xl.config.checks import names_nearest
from transformer_xl.config.files import (
    checksum,
    remove_temporary,
    replace_file,
    require_space,
    write_atomically,
)
from transformer_xl.config.locking import Say
from transformer_xl.data.catalogue import KNOWN_CORPORA, common_settings
from transformer_xl.data.corpus import Corpus, StoredCorpus
from transformer_xl.data.finding import fetch_text, find_text
from transformer_xl.data.hub import HUB_PREFIX
from transformer_xl.data.locking import LOCK, locked
from transformer_xl.data.making_vocab import count_part, train_vocab, vocab_of_counts
from transformer_xl.data.normalizing import describe_changes
from transformer_xl.data.plain_texts import (
    CHANGES,
    is_current,
    is_raw,
    named_by_origin,
    plain_texts,
)
from transformer_xl.data.store import is_url, local_path
from transformer_xl.data.tasks import (
    Executor,
    Task,
    encode_part,
    find_unknown,
    perform_all,
    token_dtype,
)
from transformer_xl.data.text import SPLITS, Span, TextFiles, divide, find_cut, read_blocks
from transformer_xl.data.unpacking import RAW_REMEDY, MissingPackageError, unpacking_of
from transformer_xl.data.vocab import VOCAB_FILE, Vocab, VocabKind, describe_unknown
from transformer_xl.data.vocab_files import (
    BroughtVocab,
    bring,
    divided_as,
    is_vocabulary,
    load_vocab,
    tokenizer_path,
)

PART_BYTES = 16 << 20
"""Bytes of text in a part."""
LEARNED_BYTES = 64 << 20
"""Bytes of a long text, spread evenly over it, from which byte-pair units are learned."""
_COPY_BYTES = 1 << 17
_SECONDS_BETWEEN_LINES = 10.0
_SERVED = ("text", "counts", "parts")
_ONE_WEEK = 7 * 24 * 60 * 60


def cache_folder(config: DataConfig) -> Path:
    """Return the cache folder of corpora and downloads."""
    given = config.cache_dir
    if given is None:
        given = os.environ.get("TXL_CACHE") or "~/.cache/transformer_xl"
    return Path(given).expanduser()


@names_nearest
def prepare(
    config: DataConfig,
    progress: Callable[[str], None] | None = None,
    executor: Executor | None = None,
) -> Corpus:
    """Return the corpus that the settings describe, building it unless it is cached.

    An interrupted build resumes. If another process builds the same corpus, this one waits.

    Args:
        config: The text, its tokenization and its splits.
        progress: Called with lines of text about the progress.
        executor: Performs the tasks, each of which writes a file for a part of the text.
            None: processes on this machine. ``examples/tokenize_with_datatrove.py`` uses those of
            a cluster; the corpus is the same.

    Raises:
        ValueError: The settings or the text do not fit.
        OSError: A file is missing, a download failed, the cache cannot be written.
        RuntimeError: The corpus in the cache is damaged, or a worker process was killed.

    Example:
        >>> from pathlib import Path
        >>> Path("mine.txt").write_text("To be, or not to be. " * 500)
        10500
        >>> len(prepare(DataConfig(path="mine.txt", vocab="chars")).vocab)
        10
    """
    if not isinstance(config, DataConfig):
        raise ValueError(f"config={config!r:.60} is no DataConfig: that of a recipe is its .data")
    if config.vocab == "features":
        raise ValueError(
            "data.vocab=features: arrays are read as they are, and no text is prepared; txl train "
            "and txl eval open their folder"
        )
    say = progress or (lambda line: None)
    cache = cache_folder(config).absolute()
    corpus = (
        _prepared(config, cache, say) if config.corpus else _built(config, cache, say, executor)
    )
    if config.verify == "always":
        corpus.verify()
    elif config.verify == "once":
        corpus.verify_once(say)
    return corpus


def _built(config: DataConfig, cache: Path, say: Say, executor: Executor | None) -> Corpus:
    """Open the corpus in the cache; build it if it is not there."""
    files = find_text(config, cache / "downloads", say)
    settings = _settings(config)
    title = re.sub(r"[^\w.+-]", "_", config.name or files.root.name or "text")
    # Of the text as it is, as in earlier versions, and of one that is normalized.
    of_raw, of_normalized = (
        cache / f"{title}-{_key(settings | more, files)}" for more in ({}, {"text": "normalized"})
    )
    building = cache / f".building-{(of_raw if is_raw(config) else of_normalized).name}"

    def found() -> Path | None:
        if not is_raw(config) and of_normalized.is_dir():
            return of_normalized
        return of_raw if of_raw.is_dir() and is_current(of_raw, config, files, say) else None

    while (folder := found()) is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(cache, building)
            building.mkdir(exist_ok=True)
        except OSError as error:
            raise OSError(
                f"cannot write to the cache {cache_folder(config)}: {error.strerror or error}; "
                "choose another folder with --data.cache_dir or the variable TXL_CACHE"
            ) from error
        with locked(building, say) as is_ours:
            if is_ours and found():
                # Another process has just finished it.
                shutil.rmtree(building, ignore_errors=True)
            elif is_ours:
                try:
                    fetched = fetch_text(config, files, say)
                    manifest = _Builder(config, building, say, executor).build(fetched, settings)
                except MissingPackageError:
                    raise
                except ValueError:
                    # A text that does not fit will not fit later. An executor may raise for any
                    # reason.
                    if executor is None:
                        shutil.rmtree(building, ignore_errors=True)
                    raise
                folder = of_normalized if manifest.get(CHANGES) else of_raw
                # The lock file moves with the folder, so that waiting processes notice.
                try:
                    building.rename(folder)
                except OSError:
                    if not folder.is_dir():
                        raise
                    # Another process has made the same, with the other data.raw.
                    shutil.rmtree(building, ignore_errors=True)
                (folder / LOCK).unlink(missing_ok=True)
                # What was normalized has been said.
                return Corpus(folder)
    corpus = Corpus(folder)
    if described := describe_changes(Counter(corpus.manifest.get(CHANGES))):
        say(f"normalized the text: {described}; {RAW_REMEDY}")
    return corpus


def _prepared(config: DataConfig, cache: Path, say: Say) -> Corpus:
    """Open the corpus that ``data.corpus`` names, if it was made with the same settings."""
    place = local_path(config.corpus or "")
    if is_url(place):
        corpus = StoredCorpus(place, cache / "downloads", say)
    else:
        corpus = Corpus(Path(place).expanduser())
    given = f"data.corpus={config.corpus!r}"
    # The manifest omits where symbols are counted if that is the training text.
    default = dataclasses.asdict(DataConfig())
    made = default | {"vocab_from": "train", "vocab": config.vocab}
    made |= corpus.manifest.get("settings", {})
    name = corpus.manifest.get("source", {}).get("name", config.name)
    if config.name not in ("", name):
        raise ValueError(
            f"data.name={config.name!r}, but {given} was made with "
            f"data.name={name!r}: set that, or give another corpus"
        )
    if config.tokenizer:
        if bring(tokenizer_path(config.tokenizer)).hash != corpus.vocab.hash:
            raise ValueError(
                f"data.tokenizer={config.tokenizer!r} is not the vocabulary of {given}: leave it "
                "out, or give another corpus"
            )
    elif made["vocab"] not in ("brought", config.vocab):
        raise ValueError(
            f"data.vocab={config.vocab}, but {given} has {made['vocab']}: set data.vocab to "
            f"{made['vocab']}"
        )
    names = ["path", "valid_path", "test_path", "json_field", "split_by", "valid_fraction"]
    names += ["test_fraction"] + ["vocab_size", "vocab_from"] * (not config.tokenizer)
    for name in names if corpus.manifest.get("settings") else ():
        value = getattr(config, name)
        if value not in (default[name], made[name]):
            raise ValueError(
                f"data.{name}={value!r}, but {given} was made with {made[name]!r}: leave it at "
                f"{default[name]!r}, or give another corpus"
            )
    return corpus


def _settings(config: DataConfig) -> dict[str, Any]:
    """Return the settings on which the tokens depend, among them the paths as they are given.

    Settings added in later versions are omitted at their defaults, so that older corpora are
    still found.
    """
    left_out = {"cache_dir", "workers", "vocab_from", "json_field", "tokenizer", "reset_at"}
    # Whether the text is raw is in the names of folders.
    left_out |= {"completion_at", "corpus", "verify", "raw"}
    given = dataclasses.asdict(config)
    if config.vocab == "bpe" and not config.tokenizer:
        # Units of their own, in no longer one.
        left_out -= {name for name in ("reset_at", "completion_at") if given[name] is not None}
    settings = {name: value for name, value in given.items() if name not in left_out}
    if config.tokenizer:
        folder = tokenizer_path(config.tokenizer)
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        if not file.is_file():
            raise FileNotFoundError(
                f"data.tokenizer={config.tokenizer!r}: there is no file {file}. A run keeps its "
                "vocabulary: to continue or evaluate one, give --data.tokenizer RUN/model/last"
            )
        settings["tokenizer"] = checksum(file)
        if is_vocabulary(folder):
            # Rules for joining symbols and for ends of lines.
            settings["tokenizer_rules"] = checksum(folder / VOCAB_FILE)
        settings["vocab"] = "brought"
    if config.vocab not in ("words", "bpe", "integers") or config.tokenizer:
        settings["vocab_size"] = None
    if config.vocab in ("words", "chars") and vocabulary_source(config) != "train":
        settings["vocab_from"] = vocabulary_source(config)
    if config.json_field != DataConfig().json_field:
        settings["json_field"] = config.json_field
    return settings


def _key(settings: dict[str, Any], files: TextFiles) -> str:
    identity = [
        [x.url, x.size, x.version]
        if (x := files.stored.get(path))
        else [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
        for paths in files.parts.values()
        for path in paths
    ]
    definition = json.dumps([FORMAT_VERSION, settings, identity], sort_keys=True)
    return hashlib.sha256(definition.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _remove_abandoned(cache: Path, ours: Path) -> None:
    """Remove interrupted builds that were not resumed for a week."""
    for folder in cache.glob(".building-*"):
        # It may have just been renamed by its process.
        with contextlib.suppress(FileNotFoundError):
            if folder != ours and time.time() - folder.stat().st_mtime > _ONE_WEEK:
                shutil.rmtree(folder, ignore_errors=True)


def vocabulary_source(config: DataConfig) -> str:
    """Return where symbols are counted: ``train`` or ``all``."""
    known = KNOWN_CORPORA.get(config.name)
    return config.vocab_from or (known.counted if known else "train")


class _Builder:
    """Builds a corpus in a folder, resuming from the files that exist.

    Parts are lists of spans, by split.
    """

    def __init__(
        self, config: DataConfig, folder: Path, say: Say, executor: Executor | None
    ) -> None:
        self.config, self.folder, self.say = config, folder, say
        self.executor = executor or perform_all
        self.origins: dict[Path, Path] = {}
        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        self.n_workers = config.workers or cores

    def build(self, files: TextFiles, settings: dict[str, Any]) -> dict[str, Any]:
        """Write all files; the manifest, which records ``settings``, is the last.

        Returns:
            The manifest.
        """
        path = self.folder / "manifest.json"
        if not path.is_file():
            with named_by_origin(self.origins):
                manifest = self._write(files) | {"settings": settings}
            replace_file(path, json.dumps(manifest, indent=2).encode())
        for name in _SERVED:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in ("plan", *SPLITS):
            (self.folder / f"{name}.json").unlink(missing_ok=True)
        remove_temporary(self.folder)
        return json.loads(path.read_bytes())

    def _write(self, files: TextFiles) -> dict[str, Any]:
        """Write all files but the manifest; return the manifest without the settings."""
        _require_use(self.config, files)
        texts = self.folder / "text"
        files, changes = plain_texts(self.config, files, texts, self._perform, self.say)
        self.origins.update(files.origins)
        parts = self._plan(files)
        if not any(parts.values()) or not (parts["train"] or self.config.name in KNOWN_CORPORA):
            raise ValueError(
                f"there is no training text: {files.description} is empty, or too short for "
                "the fractions that are held out"
            )
        if len(parts["train"]) < 2 and not self.config.workers:
            # For a short text, starting processes takes longer than tokenizing.
            self.n_workers = 1
        vocab = self._vocabulary(parts)
        dtype = token_dtype(vocab)
        splits = {}
        for name in SPLITS:
            spans = [span for part in parts[name] for span in part]
            self.say(f"writing {name}: {sum(map(len, spans)):,} bytes of text")
            about = self._write_split(name, parts[name], dtype.itemsize)
            paths = dict.fromkeys(span.path for span in spans)
            splits[name] = about | {"text_files": [files.name(path) for path in paths]}
            self.say(f"{name}: {about['tokens']:,} tokens, {about['bytes']:,} bytes")
        return {
            "format_version": FORMAT_VERSION,
            "dtype": dtype.name,
            "vocab": {"kind": vocab.kind, "size": len(vocab), "hash": vocab.hash},
            "splits": splits,
            "source": {"name": self.config.name, "description": files.description},
            **({} if is_raw(self.config) else {CHANGES: changes}),
        }

    def _plan(self, files: TextFiles) -> dict[str, list[list[Span]]]:
        """Divide the text into splits and parts, deterministically."""
        path = self.folder / "plan.json"
        try:
            return {
                name: [[Span(Path(p), start, stop) for p, start, stop in part] for part in parts]
                for name, parts in json.loads(path.read_bytes()).items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            pass  # It does not exist or is damaged.
        parts = {
            name: _parts(self.config, spans) for name, spans in divide(self.config, files).items()
        }
        plan = {
            name: [[(str(x.path.absolute()), x.start, x.stop) for x in part] for part in each]
            for name, each in parts.items()
        }
        replace_file(path, json.dumps(plan).encode())
        return {
            name: [[Span(Path(p), start, stop) for p, start, stop in part] for part in each]
            for name, each in plan.items()
        }

    def _vocabulary(self, parts: dict[str, list[list[Span]]]) -> Vocab:
        try:
            return load_vocab(self.folder)
        except (FileNotFoundError, RuntimeError):
            pass  # It does not exist or is incomplete.
        config, kind = self.config, self.config.vocab
        if config.tokenizer:
            self.say(f"using the tokenizer {config.tokenizer}")
            vocab = bring(tokenizer_path(config.tokenizer))
        else:
            self.say(f"learning a vocabulary of {kind}")
            if kind in ("bytes", "bpe"):
                learned = _learned(parts["train"] or parts["valid"] + parts["test"])
                apart = [x for x in (config.reset_at, config.completion_at) if x is not None]
                blocks = read_blocks(kind, learned)
                vocab = train_vocab(kind, blocks, config.vocab_size, apart=apart)
            else:
                vocab = self._counted(parts)
            if kind == "chars" and vocab.unk_id is None and config.name not in KNOWN_CORPORA:
                self.say(
                    f"note: the vocabulary is the {len(vocab):,} characters of this text: the "
                    "model cannot encode others; --data.vocab bytes (or bpe) encodes any text"
                )
        vocab.save(self.folder)
        return vocab

    def _counted(self, parts: dict[str, list[list[Span]]]) -> Vocab:
        config, folder = self.config, self.folder / "counts"
        tasks = {
            name: [
                _task(count_part, (config.vocab, x), x, folder / f"{name}-{number:06d}.json")
                for number, x in enumerate(parts[name])
            ]
            for name in SPLITS
        }
        self._perform([task for name in SPLITS for task in tasks[name]], "counted")
        # Vocabularies of bytes or integers do not depend on the text.
        is_alphabet = config.vocab in ("integers", "authors-bytes")
        takes_all = is_alphabet or vocabulary_source(config) == "all" or not tasks["train"]
        counts = {name: [task.target for task in tasks[name]] for name in SPLITS}
        counted, others = counts["train"], counts["valid"] + counts["test"]
        if takes_all:
            counted, others = counted + others, []
        return vocab_of_counts(config.vocab, counted, others, config.vocab_size)

    def _perform(self, tasks: Sequence[Task], done: str) -> None:
        """Perform the remaining tasks, and report the progress."""
        left = [task for task in tasks if not task.target.is_file()]
        total = sum(task.size for task in tasks)
        before = ready = total - sum(task.size for task in left)
        if ready:
            self.say(f"{done} before: {ready:,} of {total:,} bytes")
        began = said = time.monotonic()
        for task in self.executor(left, self.n_workers):
            ready += task.size
            now = time.monotonic()
            if now - said > _SECONDS_BETWEEN_LINES:
                said = now
                speed = (ready - before) / 1e6 / (now - began)
                self.say(f"{done} {ready:,} of {total:,} bytes, {speed:.1f} MB/s")
        if missing := [task.target for task in left if not task.target.is_file()]:
            raise RuntimeError(
                f"{len(missing)} of {len(tasks)} tasks left no file, the first is {missing[0]}: "
                "see the messages of what performed them; completed parts are kept"
            )

    def _write_split(self, name: str, parts: list[list[Span]], itemsize: int) -> dict[str, Any]:
        described, path = self.folder / f"{name}.json", self.folder / f"{name}.bin"
        if described.is_file():
            return json.loads(described.read_text(encoding="utf-8"))
        place = self.folder / "parts" / name
        # In published corpora of words, spaces separate all tokens, punctuation included.
        is_prepared = common_settings(self.config.name).vocab == "words"
        tasks = [
            _task(encode_part, (self.folder, x, is_prepared), x, place / f"{number:06d}.bin.json")
            for number, x in enumerate(parts)
        ]
        self._perform(tasks, f"cut {name},")
        abouts = [json.loads(task.target.read_text(encoding="utf-8")) for task in tasks]
        n_tokens, n_bytes, n_unknown = (
            sum(about.get(key, 0) for about in abouts) for key in ("tokens", "bytes", "unknown")
        )
        if n_unknown:
            spans = (span for part in parts for span in part)
            found = find_unknown(load_vocab(self.folder), spans)
            where = ""
            if found is not None:
                file, line, unknown = found
                where = f": {self.origins.get(file, file)}: {describe_unknown(unknown, line)}"
            self.say(
                f"warning: {name}: {n_unknown:,} of {n_tokens:,} characters are not in the "
                f"vocabulary and become <unk>{where}"
            )
        require_space(self.folder, n_tokens * itemsize, f"the {name} split")
        digest = hashlib.sha256()

        def join(temporary: Path) -> None:
            with temporary.open("wb") as out:
                for task, about in zip(tasks, abouts, strict=True):
                    part_path, part_digest = task.target.with_suffix(""), hashlib.sha256()
                    with part_path.open("rb") as part:
                        while block := part.read(_COPY_BYTES):
                            digest.update(block)
                            part_digest.update(block)
                            out.write(block)
                    if part_digest.hexdigest() != about["sha256"]:
                        task.target.unlink()
                        raise RuntimeError(
                            f"{part_path} does not match its checksum: check the disk. The part "
                            "was removed; prepare again, all other parts are kept"
                        )

        write_atomically(path, join)
        about = {"file": path.name, "tokens": n_tokens, "bytes": n_bytes}
        about |= {"sha256": digest.hexdigest()}
        replace_file(described, json.dumps(about).encode())
        shutil.rmtree(place, ignore_errors=True)
        return about


def _require_use(config: DataConfig, files: TextFiles) -> None:
    """Refuse settings that have no effect with these files."""
    default = DataConfig()
    given = [name for name in ("valid", "test") if name in files.parts]
    unused = {
        f"{name}_fraction": f"the {name} text is given, so none is split off" for name in given
    }
    if len(given) == 2:
        unused["split_by"] = "valid and test text are given, so none is split off"
    if is_raw(dataclasses.replace(config, raw=False)):
        unused["raw"] = "the texts of known corpora are never changed"
    paths = [path for paths in files.parts.values() for path in paths]
    is_from_hub = config.name.startswith(HUB_PREFIX)
    if not is_from_hub and not {"lines", "parquet"} & {unpacking_of(x, config) for x in paths}:
        unused["json_field"] = "no file is in JSON lines (.jsonl, .ndjson) or Parquet"
    for name, why in unused.items():
        value, usual = getattr(config, name), getattr(default, name)
        if value != usual:
            raise ValueError(
                f"data.{name}={value!r} has no effect: {why}; leave it at {usual!r}, or give "
                "another text"
            )


def _divided_as(config: DataConfig) -> VocabKind | Literal["authors-bytes"]:
    """Return the kind by whose rules a text is divided into parts."""
    if not config.tokenizer:
        # Features have no text, and are refused before.
        return cast(VocabKind | Literal["authors-bytes"], config.vocab)
    kind = divided_as(config.tokenizer)
    if kind == "brought":
        vocab = bring(tokenizer_path(config.tokenizer))
        kind = "words" if isinstance(vocab, BroughtVocab) and vocab.encodes_lines else kind
    return kind


def _parts(config: DataConfig, spans: Sequence[Span]) -> Iterator[list[Span]]:
    kind = None
    part: list[Span] = []
    left = PART_BYTES
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = span.stop
            if stop - start > left:
                # Most texts are short, and loading a tokenizer takes time.
                kind = kind or _divided_as(config)
                stop = find_cut(kind, span, start + left)
            part.append(Span(span.path, start, stop))
            left -= stop - start
            start = stop
            if left <= 0:
                yield part
                part, left = [], PART_BYTES
    if part:
        yield part


def _learned(parts: Sequence[Sequence[Span]]) -> list[Span]:
    """Select the text from which byte-pair units are learned."""
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


def _task(do: Callable[..., None], given: tuple[Any, ...], part: list[Span], path: Path) -> Task:
    return Task(do, given, path, sum(map(len, part)))
