"""Files that txl generate writes: text and music, by the ends of their names."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_xl.cli.printing import say
from transformer_xl.config import MusicConfig, replace_file, require, require_new_file
from transformer_xl.errors import DataError

MOST_FILES = 10_000
"""Texts that ``--out`` writes to files, at most."""


def of_music(paths: Iterable[Path]) -> list[Path]:
    """Return those of some files that are MIDI files, which end with the piece."""
    return [path for path in paths if MusicConfig.is_midi(path)]


def files_of(paths: Sequence[Path], n_texts: int, *, force: bool) -> list[list[Path]]:
    """Return the files of each text; of several, with its number, from 1.

    Raises:
        OSError: A file exists and is not to be overwritten, or cannot be written.
        DataError: A library is missing.
        SettingsError: There are too many, a file is named twice, or is none.
    """
    require(
        not paths or n_texts <= MOST_FILES,
        f"--out writes a file for each of {n_texts:,} texts, at most {MOST_FILES:,}",
    )
    require(Path("-") not in paths, "--out - is no file: without --out, the text is printed")
    for path in paths:
        require(
            path.suffix.lower() not in (".png", ".svg"),
            f"--out {path}: piano rolls are gone: --out writes text, and MIDI files of music",
        )
    # Two names may be those of one file.
    is_once = len({path.resolve() for path in paths}) == len(paths)
    require(is_once, f"--out {' '.join(map(str, paths))}: a file is named twice")
    numbers = [""] if n_texts == 1 else [f"-{n + 1}" for n in range(n_texts if paths else 0)]
    files = [[path.with_stem(path.stem + number) for path in paths] for number in numbers]
    for path in (path for of_text in files for path in of_text):
        require_new_file(path, force=force)
    if of_music(paths):
        from transformer_xl.tasks.music import mido_package

        mido_package()
    return files


def write_texts(
    files: Sequence[Sequence[Path]],
    texts: Sequence[Mapping[str, Any]],
    music: MusicConfig,
    *,
    length: int,
    force: bool,
) -> list[str]:
    """Write prompts with their texts, of at most ``length`` tokens; return the names of the files.

    If some cannot be written, the others are.

    Raises:
        OSError: A file cannot be written.
        DataError: A text is no music.
    """
    names: list[str] = []
    problems: list[str] = []
    for paths, each in zip(files, texts, strict=True):
        text, scores = f"{each['prompt']}{each['text']}", of_music(paths)
        for path in paths:
            if path not in scores:
                # Bytes of a prompt that are not UTF-8 are surrogates, and are restored.
                replace_file(path, f"{text}\n".encode("utf-8", "surrogateescape"))
                names.append(str(path))
        try:
            if scores:
                from transformer_xl.tasks.music import write_pieces

                # Each word of a text of music is a token.
                has_ended = len(each["text"].split()) < length
                write_pieces(text, scores, music, say, has_ended=has_ended, force=force)
                names += map(str, scores)
        except ValueError as error:
            problems.append(f"{' and '.join(map(str, scores))} not written: {error}")
    if names:
        say(f"wrote {', '.join(names)}")
    if problems:
        raise DataError("; ".join(problems))
    return names
