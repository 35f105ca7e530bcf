"""Order and writing of texts: nothing is overwritten unasked, no part is empty or half written."""

import argparse
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from transformer_xl.config.files import replace_file, require_new_file


def parser_for(description: str | None, out: Path, writes: str) -> argparse.ArgumentParser:
    """Return a parser of the place to write to, and of whether files there are overwritten."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", default=out, help=f"{writes} to write")
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    return parser


def require_new_files(paths: Iterable[Path], *, force: bool) -> None:
    """Require that files can be written, before anything is read; ``force``: they may exist.

    Raises:
        OSError: One exists, or its folder cannot be written to.
    """
    for path in paths:
        require_new_file(path, force=force)


def write_files(files: Mapping[Path, bytes]) -> None:
    """Write files atomically, none of them if one has no text.

    Raises:
        OSError: One cannot be written.
        ValueError: One has no text.
    """
    empty = [str(path) for path, content in files.items() if not content.strip()]
    if empty:
        raise ValueError(
            f"nothing for {', '.join(empty)}, so that no file was written: is the source complete?"
        )
    for path, content in files.items():
        replace_file(path, content)


def shuffled(copies: Mapping[str, int]) -> list[str]:
    """Return texts, each as often as is said, in an order that depends on nothing but them."""
    drawn = [
        (hashlib.sha256(f"{n}{text}".encode()).digest(), text)
        for text, times in copies.items()
        for n in range(times)
    ]
    return [text for _, text in sorted(drawn)]
