"""The files of a corpus as plain text: unpacked, normalized, and divided by line ends."""

import contextlib
import dataclasses
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from transformer_xl.config import DataConfig
from transformer_xl.config.files import replace_file
from transformer_xl.config.locking import Say
from transformer_xl.data.catalogue import KNOWN_CORPORA
from transformer_xl.data.finding import fetch_text
from transformer_xl.data.normalizing import describe_changes
from transformer_xl.data.tasks import Task
from transformer_xl.data.text import Span, TextFiles, read_text
from transformer_xl.data.unpacking import (
    COMPRESSED,
    RAW_REMEDY,
    changes_of,
    has_text,
    unpack,
    unpacking_of,
)
from transformer_xl.data.vocab_files import divided_as

CHANGES = "text_changes"
"""What normalization changed in the text, in the manifest of a corpus that is not raw."""


def is_raw(config: DataConfig) -> bool:
    """Whether the bytes of files are read as they are, as those of published corpora are."""
    return config.raw or (config.name in KNOWN_CORPORA and config.name != "python-stdlib")


def is_current(folder: Path, config: DataConfig, files: TextFiles, say: Say) -> bool:
    """Whether a corpus of the text as it is, perhaps of an earlier version, needs no other text.

    That it needs none is noted in its manifest: the text is looked through once.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return True  # Opening it tells what is damaged.
    if is_raw(config) or not isinstance(manifest, dict) or CHANGES in manifest:
        return True
    say("looking through the text once for line ends to normalize")
    if not _is_normal(config, fetch_text(config, files, say)):
        return False
    with contextlib.suppress(OSError):
        replace_file(path, json.dumps(manifest | {CHANGES: {}}, indent=2).encode())
    return True


def plain_texts(
    config: DataConfig,
    files: TextFiles,
    folder: Path,
    perform: Callable[[Sequence[Task], str], None],
    say: Say,
) -> tuple[TextFiles, Counter[str]]:
    """Return the files with those that are no plain text replaced by copies, and what was changed.

    A file without a last line end gets one where another file follows.
    """
    tasks: list[Task] = []
    replaced = {part: list(paths) for part, paths in files.parts.items()}
    n_packed = 0
    for part, paths in files.parts.items():
        is_followed, is_joined = False, not is_raw(config) and _needs_line_ends(config)
        for number, path in reversed([*enumerate(paths)]):
            how, size = unpacking_of(path, config), path.stat().st_size
            adds_line_end = is_followed and is_joined
            changes, last = Counter[str](), b""
            if not (how or is_raw(config)):
                changes, last = changes_of(path, how, config.json_field, part)
                is_followed |= bool(last)
            elif is_joined and not is_followed:
                is_followed = has_text(path, how, config.json_field, part)
            if how or changes or (adds_line_end and last not in (b"", b"\n")):
                target = folder / part / f"{number:06d}.txt"
                given = (path, how, config.json_field, part, is_raw(config), adds_line_end)
                tasks.append(Task(unpack, given, target, size))
                replaced[part][number] = target
                n_packed += bool(how)
    if not tasks:
        return files, Counter()
    if n_packed:
        say(f"unpacking {n_packed:,} files")
    perform(tasks[::-1], "unpacked")
    made = [Counter[str](json.loads(x.target.with_suffix(".json").read_bytes())) for x in tasks]
    changes = sum(made, Counter[str]())
    if changes:
        n_files = sum(map(len, replaced.values()))
        say(
            f"normalized the text of {sum(map(bool, made)):,} of {n_files:,} files: "
            f"{describe_changes(changes)}; {RAW_REMEDY}"
        )
    origins = {task.target: task.given[0] for task in tasks}
    parts = {part: tuple(paths) for part, paths in replaced.items()}
    return dataclasses.replace(files, origins=origins, **parts), changes


@contextlib.contextmanager
def named_by_origin(origins: Mapping[Path, Path]) -> Iterator[None]:
    """Name, in errors about copies, the files that they were made of."""
    try:
        yield
    except ValueError as error:
        for copy, origin in origins.items():
            if str(copy) in str(error):
                if not origin.name.lower().endswith(COMPRESSED):
                    # Bytes that are not UTF-8 have another place in it.
                    deque(read_text(Span(origin, 0, origin.stat().st_size)), maxlen=0)
                raise ValueError(str(error).replace(str(copy), str(origin))) from error
        raise


def _is_normal(config: DataConfig, files: TextFiles) -> bool:
    """Whether the files are read as they are: normalizing them changes nothing."""
    for part, paths in files.parts.items():
        is_open = False
        for path in paths:
            how = unpacking_of(path, config)
            changes, last = changes_of(path, how, config.json_field, part)
            if changes or (last and is_open and _needs_line_ends(config)):
                return False
            is_open = last != b"\n" if last else is_open
    return True


def _needs_line_ends(config: DataConfig) -> bool:
    """Whether the last line of a file would go on in the next file without a line end."""
    kind = divided_as(config.tokenizer) if config.tokenizer else config.vocab
    # The others end the lines of each file, or have no line ends.
    return kind not in ("words", "integers", "authors-bytes")
