"""Preparing a corpus: texts are located, tokenized and cached.

A corpus is built in a temporary folder, which is renamed when it is complete:

==============  ====================================================================================
``text/``       text of files that had to be decompressed or normalized
vocabulary      ``tokenizer.json`` and ``vocab.json``
``train.bin``   the tokens (`tokenizing`); then ``valid`` and ``test``
``manifest``    written last; temporary files are removed then
==============  ====================================================================================

What a killed process has finished is used by the next one, and the files have the same bytes.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from transformer_xl.config import (
    FORMAT_VERSION,
    DataConfig,
    Say,
    checksum,
    remove_temporary,
    replace_file,
)
from transformer_xl.data.catalogue import KNOWN_CORPORA
from transformer_xl.data.corpus import MANIFEST, Corpus, manifest_of
from transformer_xl.data.finding import HUB_PREFIX, find_text, require_path
from transformer_xl.data.imported import ImportedVocab
from transformer_xl.data.locking import once
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.normalizing import Normalizer
from transformer_xl.data.plain_text import is_raw, named_by_origin, plain_texts
from transformer_xl.data.text import (
    SPLITS,
    Span,
    TextFiles,
    divide,
    line_start,
    parts_of,
    read_blocks,
    read_bytes,
)
from transformer_xl.data.tokenizing import find_unknown, write_split
from transformer_xl.data.unpacking import RAW_REMEDY, unpacking_of
from transformer_xl.data.vocab import VOCAB_FILE, Vocab
from transformer_xl.data.vocab_files import bring, load_vocab, tokenizer_path
from transformer_xl.errors import DataError, SettingsError

LEARNED_BYTES = 64 << 20
"""Bytes of a long text, spread evenly over it, from which byte-pair units are learned."""
PART_BYTES = 16 << 20
"""Bytes of a part of a long text, of which the beginning is learned from."""
_SHORT_BYTES = 16 << 20
"""Bytes of a text that one thread tokenizes unless ``data.workers`` is set."""

_KEYS = ("name", "path", "valid_path", "test_path", "split_by", "valid_fraction", "test_fraction")
_KEYS += ("vocab", "vocab_size")


def prepare(config: DataConfig, progress: Callable[[str], None] | None = None) -> Corpus:
    """Return the corpus that the settings describe, building it unless it is cached.

    A build that was interrupted goes on. If another process builds the same corpus, this one waits.

    Args:
        config: The text, its tokenization and its splits.
        progress: Called with lines of text about the progress.

    Raises:
        SettingsError: The settings do not fit each other, or the corpus.
        DataError: The text does not fit the settings, or the corpus in the cache is damaged.
        OSError: A file is missing, a download failed, the cache cannot be written.

    Example:
        >>> from pathlib import Path
        >>> Path("mine.txt").write_text("To be, or not to be. " * 500)
        10500
        >>> len(prepare(DataConfig(path="mine.txt", vocab="chars")).vocab)
        10
    """
    if config.vocab == "features":
        raise SettingsError(
            "data.vocab=features: arrays are read as they are, and no text is prepared; txl train "
            "and txl eval open their folder"
        )
    say = progress or (lambda line: None)
    cache = config.cache_folder.absolute()
    corpus = _opened(config) if config.corpus else _built(config, cache, say)
    if config.verify == "always":
        corpus.verify()
    elif config.verify == "once":
        corpus.verify_once(say)
    return corpus


def _built(config: DataConfig, cache: Path, say: Say) -> Corpus:
    """Open the corpus in the cache; build it if it is not there."""
    files = find_text(config, cache / "downloads", say)
    settings = _settings(config)
    title = re.sub(r"[^\w.+-]", "_", config.name or files.root.name or "text")
    identity = [
        [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
        for paths in files.parts.values()
        for path in paths
    ]
    text = {} if is_raw(config) else {"text": "normalized"}
    definition = json.dumps([FORMAT_VERSION, settings | text, identity], sort_keys=True)
    key = hashlib.sha256(definition.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    folder, building = cache / f"{title}-{key}", cache / f".building-{title}-{key}"
    is_new = False

    def build() -> None:
        nonlocal is_new
        try:
            building.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"cannot write to the cache {config.cache_folder}: {error.strerror or error}; "
                "choose another folder with --data.cache_dir or the variable TXL_CACHE"
            ) from error
        if not (building / MANIFEST).is_file():
            try:
                _build(config, files, building, settings, say)
            except ValueError:
                # A text that does not fit will not fit later.
                shutil.rmtree(building, ignore_errors=True)
                raise
        shutil.rmtree(building / "text", ignore_errors=True)
        for name in SPLITS:
            (building / f"{name}.json").unlink(missing_ok=True)
        remove_temporary(building)
        building.rename(folder)
        is_new = True

    activity = "another process is preparing this corpus"
    once(cache / ".locks" / folder.name, say, activity, find=folder.is_dir, make=build)
    corpus = Corpus(folder)
    described = Normalizer.describe(Counter(corpus.manifest.text_changes))
    # What was normalized in a new one has been reported.
    if described and not is_new:
        say(f"normalized the text: {described}; {RAW_REMEDY}")
    return corpus


def _opened(config: DataConfig) -> Corpus:
    """Open the corpus that ``data.corpus`` names, if it was made with the same settings."""
    require_path(config.corpus or "")
    corpus = Corpus(Path(config.corpus or "").expanduser())
    default = dataclasses.asdict(DataConfig())
    # The manifest omits where symbols are counted if that is the training text.
    made = default | {"vocab_from": "train", "vocab": config.vocab}
    made |= corpus.manifest.settings
    made["name"] = corpus.manifest.source.get("name", config.name)
    if config.tokenizer:
        if bring(config.tokenizer).hash != corpus.vocab.hash:
            raise SettingsError(
                f"data.tokenizer={config.tokenizer!r} is not the vocabulary of "
                f"data.corpus={config.corpus!r}: leave it out, or give another corpus"
            )
    elif made["vocab"] not in ("brought", config.vocab):
        raise SettingsError(
            f"data.vocab={config.vocab}, but data.corpus={config.corpus!r} has {made['vocab']}: "
            f"set data.vocab to {made['vocab']}"
        )
    names = ["name"]
    if corpus.manifest.settings:
        names += ["path", "valid_path", "test_path", "json_field", "split_by", "valid_fraction"]
        names += ["test_fraction"] + ["vocab_size", "vocab_from"] * (not config.tokenizer)
    for name in names:
        value = getattr(config, name)
        if value not in (default[name], made[name]):
            raise SettingsError(
                f"data.{name}={value!r}, but data.corpus={config.corpus!r} was made with "
                f"{made[name]!r}: leave it at {default[name]!r}, or give another corpus"
            )
    return corpus


def _settings(config: DataConfig) -> dict[str, object]:
    """Return the settings on which the tokens depend, among them the paths as they are given.

    Settings added in later versions are omitted at their defaults, so that older corpora are
    still found. Whether the text is raw is in the names of folders.
    """
    settings = {name: getattr(config, name) for name in _KEYS}
    is_bpe = config.vocab == "bpe" and not config.tokenizer
    # Units of their own, in no longer one.
    apart = {name: getattr(config, name) for name in ("reset_at", "completion_at") if is_bpe}
    settings |= {name: value for name, value in apart.items() if value is not None}
    if config.tokenizer:
        path = tokenizer_path(config.tokenizer)
        settings["tokenizer"] = checksum(path / "tokenizer.json" if path.is_dir() else path)
        if path.is_dir():
            # Rules for joining symbols and for ends of lines.
            settings["tokenizer_rules"] = checksum(path / VOCAB_FILE)
        settings["vocab"] = "brought"
    if config.vocab not in ("words", "bpe", "integers") or config.tokenizer:
        settings["vocab_size"] = None
    if config.vocab in ("words", "chars") and vocabulary_source(config) != "train":
        settings["vocab_from"] = vocabulary_source(config)
    if config.json_field != DataConfig().json_field:
        settings["json_field"] = config.json_field
    return settings


def vocabulary_source(config: DataConfig) -> str:
    """Return where symbols are counted: ``train`` or ``all``."""
    known = KNOWN_CORPORA.get(config.name)
    return config.vocab_from or (known.counted if known else "train")


def _build(
    config: DataConfig, files: TextFiles, folder: Path, settings: Mapping[str, object], say: Say
) -> None:
    """Write all files of a corpus; the manifest, which records ``settings``, is the last."""
    _require_use(config, files)
    files, changes = plain_texts(config, files, folder / "text", say)
    with named_by_origin(files.origins):
        spans = divide(config, files)
        if not any(spans.values()) or not (spans["train"] or config.name in KNOWN_CORPORA):
            raise DataError(
                f"there is no training text: {files.description} is empty, or too short for "
                "the fractions that are held out"
            )
        try:
            vocab = load_vocab(folder)
        except (FileNotFoundError, DataError):  # It is not there, or incomplete.
            vocab = _vocabulary(config, spans, say)
            vocab.save(folder)
        splits = {
            name: _split(config, folder / f"{name}.bin", vocab, spans[name], files, say)
            for name in SPLITS
        }
    source = {"name": config.name, "description": files.description}
    others = {} if is_raw(config) else {"text_changes": changes}
    manifest = manifest_of(vocab, splits, source, **others, settings=settings)
    replace_file(folder / MANIFEST, manifest)


def _vocabulary(config: DataConfig, spans: dict[str, list[Span]], say: Say) -> Vocab:
    if config.tokenizer:
        say(f"using the tokenizer {config.tokenizer}")
        return bring(config.tokenizer)
    kind = config.vocab
    assert kind != "features"
    say(f"learning a vocabulary of {kind}")
    held_out = spans["valid"] + spans["test"]
    if kind == "authors-bytes":
        counts = Counter[int]()
        for span in spans["train"] + held_out:
            for block in read_bytes(span):
                counts.update(block)
        return ImportedVocab.of_bytes([x for x, _ in counts.most_common() if x != ord("\n")])
    counted, others = spans["train"] or held_out, held_out if spans["train"] else []
    if kind == "integers" or (kind != "bpe" and vocabulary_source(config) == "all"):
        counted, others = spans["train"] + held_out, []
    if kind in ("bytes", "bpe"):
        counted = [] if kind == "bytes" else _learned(counted)
    apart = [x for x in (config.reset_at, config.completion_at) if x is not None]
    vocab = train_vocab(
        kind,
        read_blocks(kind, counted),
        config.vocab_size,
        () if kind in ("bytes", "bpe") else read_blocks(kind, others),
        apart,
    )
    if kind == "chars" and vocab.unk_id is None and config.name not in KNOWN_CORPORA:
        say(
            f"note: the vocabulary is the {len(vocab):,} characters of this text: the "
            "model cannot encode others; --data.vocab bytes (or bpe) encodes any text"
        )
    return vocab


def _learned(spans: Sequence[Span]) -> list[Span]:
    """Select the text from which byte-pair units are learned."""
    total = sum(map(len, spans))
    if total <= LEARNED_BYTES:
        return list(spans)
    chosen = []
    for part in parts_of(spans, PART_BYTES):
        share = sum(map(len, part)) * LEARNED_BYTES // total
        for span in part:
            stop = line_start(span, min(span.start + share, span.stop))
            chosen.append(Span(span.path, span.start, stop))
            share -= stop - span.start
            if share <= 0:
                break
    return chosen


def _split(
    config: DataConfig, path: Path, vocab: Vocab, spans: list[Span], files: TextFiles, say: Say
) -> dict[str, object]:
    """Write the tokens of a split; return its entry of the manifest."""
    name, n_bytes, n_threads = path.stem, sum(map(len, spans)), config.workers or 1
    if n_bytes > _SHORT_BYTES and not config.workers:
        has_affinity = hasattr(os, "sched_getaffinity")
        n_threads = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    say(f"writing {name}: {n_bytes:,} bytes of text")
    # In published corpora of words, spaces separate all tokens, punctuation included.
    published = KNOWN_CORPORA.get(config.name)
    is_prepared = published is not None and published.settings.vocab == "words"
    about = write_split(path, vocab, spans, say, is_prepared=is_prepared, n_threads=n_threads)
    if n_unknown := about.unknown:
        where = ""
        if (place := find_unknown(vocab, spans)) is not None:
            file, line, unknown = place
            where = f": {files.origins.get(file, file)}: {Vocab.describe_unknown(unknown, line)}"
        say(
            f"warning: {name}: {n_unknown:,} of {about.tokens:,} characters are not in the "
            f"vocabulary and become <unk>{where}"
        )
    say(f"{name}: {about.tokens:,} tokens, {about.bytes:,} bytes")
    paths = dict.fromkeys(span.path for span in spans)
    keys = ("file", "tokens", "bytes", "sha256")
    entry: dict[str, object] = {key: getattr(about, key) for key in keys}
    return entry | {"text_files": [files.name(path) for path in paths]}


def _require_use(config: DataConfig, files: TextFiles) -> None:
    """Raise an error for settings that have no effect with these files."""
    why = {f"{x}_fraction": f"the {x} text is given" for x in ("valid", "test") if x in files.parts}
    if len(why) == 2:
        why["split_by"] = "valid and test text are given"
    if is_raw(dataclasses.replace(config, raw=False)):
        why["raw"] = "the texts of known corpora are never changed"
    kinds = {unpacking_of(path, config) for paths in files.parts.values() for path in paths}
    if not config.name.startswith(HUB_PREFIX) and "records" not in kinds:
        why["json_field"] = "no file is in JSON lines (.jsonl, .ndjson) or Parquet"
    for name, reason in why.items():
        value, usual = getattr(config, name), getattr(DataConfig(), name)
        if value != usual:
            raise SettingsError(
                f"data.{name}={value!r} has no effect: {reason}; leave it at {usual!r}, or give "
                "another text"
            )
