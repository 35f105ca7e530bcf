"""The files of a corpus as plain text: unpacked, normalized, and separated by line ends."""

import contextlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from transformer_xl.config import DataConfig, Say, write_atomically
from transformer_xl.data.catalogue import KNOWN_CORPORA
from transformer_xl.data.normalizing import Normalizer
from transformer_xl.data.text import Span, TextFiles, read_text
from transformer_xl.data.unpacking import (
    COMPRESSED,
    RAW_REMEDY,
    text_blocks,
    unpacking_of,
)
from transformer_xl.data.vocab_files import divided_as
from transformer_xl.errors import DataError


def is_raw(config: DataConfig) -> bool:
    """Whether the bytes of files are read as they are, as those of published corpora are."""
    return config.raw or (config.name in KNOWN_CORPORA and config.name != "python-stdlib")


def plain_texts(
    config: DataConfig, files: TextFiles, folder: Path, say: Say
) -> tuple[TextFiles, Counter[str]]:
    """Return the files with those that are no plain text replaced by copies, and what was changed.

    A file without a last line end gets one where another file follows.
    """
    replaced = {part: list(paths) for part, paths in files.parts.items()}
    origins: dict[Path, Path] = {}
    n_packed = sum(bool(unpacking_of(x, config)) for paths in replaced.values() for x in paths)
    if n_packed:
        say(f"unpacking {n_packed:,} files")
    raw, ends_lines = is_raw(config), divided_as(config) in ("words", "integers")
    # The authors' bytes have no line ends.
    has_none = config.vocab == "authors-bytes" and config.tokenizer is None
    is_joined = not (raw or ends_lines or has_none)
    changed: list[Counter[str]] = []
    for part, paths in files.parts.items():
        is_followed = False
        for number, path in reversed([*enumerate(paths)]):
            changes, last = Counter[str](), b""
            source = path, unpacking_of(path, config), config.json_field, part, raw, changes
            if not (source[1] or raw):
                for block in text_blocks(*source):
                    last = block[-1:]
            adds_line_end = is_followed and is_joined
            if source[1] or changes or (adds_line_end and last not in (b"", b"\n")):
                target = folder / part / f"{number:06d}.txt"
                changes.clear()
                if _copied(text_blocks(*source), target, adds_line_end=adds_line_end):
                    changes["line end"] = 1
                changed.append(changes)
                origins[target], replaced[part][number] = path, target
                last = b"x" if target.stat().st_size else b""
            is_followed |= bool(last)
    changes = sum(changed, Counter[str]())
    if changes:
        n_files = sum(map(len, replaced.values()))
        say(
            f"normalized the text of {sum(map(bool, changed)):,} of {n_files:,} files: "
            f"{Normalizer.describe(changes)}; {RAW_REMEDY}"
        )
    parts = {part: tuple(paths) for part, paths in replaced.items()}
    return replace(files, origins=origins, **parts), changes


def _copied(blocks: Iterable[bytes], target: Path, *, adds_line_end: bool) -> bool:
    """Write a text to ``target``; return whether a line end was added."""
    last = b"\n"

    def write(temporary: Path) -> None:
        nonlocal last
        with temporary.open("wb") as out:
            for block in blocks:
                out.write(block)
                last = block[-1:] or last
            if adds_line_end and last != b"\n":
                out.write(b"\n")

    write_atomically(target, write)
    return adds_line_end and last != b"\n"


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
                raise DataError(str(error).replace(str(copy), str(origin))) from error
        raise
