"""Write the text of the shipped model `python-code`: sources of Python and of packages for it.

    python scripts/pretrained/python_code.py
    txl train python-code --out runs/pretrained/python-code/run

Everything is read from the running environment, which `make check` installs from constraints.txt:
the standard library, and each installed distribution whose metadata name a permissive licence, pip
among them, which nothing pins. Left out are tests, generated tables, files that mostly repeat
earlier ones, and whatever shares a window of 30 words and signs with the held-out package.
"""

import hashlib
import importlib.metadata as metadata
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from overlap import windows_of
from text_files import parser_for, require_new_files, write_files

OUT = Path("runs/pretrained/python-code/text")
"""Where the recipe `python-code` reads it."""
HELD_OUT = "networkx"
"""The distribution whose sources are the test text."""
VALIDATION = "werkzeug"
"""The distribution whose sources are the validation text."""
PARTS = {HELD_OUT: "test", VALIDATION: "validation"}
"""What the sources of a distribution are, if not the training text."""
WINDOW = 30
"""Words and signs in a window. A word is a run of letters, digits and underscores; a sign is any
other character but space."""
MOST_REPEATED = 0.5
"""A file is left out if more of its windows than this share stood in files before it."""
MOST_BYTES = 4_000_000
"""Text of one distribution; more of it is left out, so that no package dominates. The standard
library is taken whole."""
MOST_FILE_BYTES = 250_000
PERMISSIVE = re.compile(
    r"\b(0BSD|Apache|BSD|BSL|CC0|HPND|ISC|MIT|PSF|Python Software|Unlicense|Zlib)\b", re.I
)
NOT_PERMISSIVE = re.compile(r"\b(A?GPL|LGPL|MPL|EPL|CDDL|General Public|Mozilla|Proprietary)", re.I)
_WORD_OR_SIGN = re.compile(rb"\w+|[^\w\s]")
_SKIPPED_FOLDERS = {
    *("test", "tests", "testing", "_tests", "__pycache__", "site-packages", "idlelib", "lib2to3"),
    *("pydoc_data", "encodings", "ensurepip", "tkinter", "turtledemo", "dist-packages"),
    *("third_party", "_vendor", "vendor", "vendored", "lib-dynload", "distutils", "__phello__"),
}


@dataclass(frozen=True)
class Package:
    """A distribution and its sources."""

    name: str
    version: str
    licence: str
    files: tuple[Path, ...]
    others: tuple[Path, ...] = ()
    """Its other Python files, such as tests."""


def packages() -> list[Package]:
    """List the standard library and the permissively licensed distributions, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple(x for x in sorted(root.rglob("*.py")) if _is_source(x.relative_to(root)))
    version = sysconfig.get_python_version()
    found = {"": Package("Python", version, "PSF-2.0", files)}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        licence = _licence(distribution)
        is_permissive = PERMISSIVE.search(licence) and not NOT_PERMISSIVE.search(licence)
        if not is_permissive or name == "transformer-xl":
            continue
        listed = [x for x in distribution.files or [] if x.suffix == ".py"]
        sources, others = (
            tuple(sorted(Path(str(distribution.locate_file(x))) for x in group))
            for group in (
                [x for x in listed if _is_source(Path(x))],
                [x for x in listed if not _is_source(Path(x))],
            )
        )
        if sources:
            shown = _shown_licence(distribution)
            found[name] = Package(name, distribution.version, shown, sources, others)
    return [found[name] for name in sorted(found)]


def _licence(distribution: metadata.Distribution) -> str:
    about = distribution.metadata
    classifiers = [x for x in about.get_all("Classifier") or [] if x.startswith("License")]
    named = [x.rpartition("::")[2].strip() for x in classifiers]
    # Some put the whole text of the licence there.
    own = about.get("License-Expression") or (about.get("License") or "").partition("\n")[0][:60]
    return "; ".join(x for x in dict.fromkeys([own, *named]) if x)


def _shown_licence(distribution: metadata.Distribution) -> str:
    """Return the expression of the licence, or else its classifiers, or else its first line."""
    about = distribution.metadata
    classifiers = [x for x in about.get_all("Classifier") or [] if x.startswith("License ::")]
    named = [x.rpartition("::")[2].strip() for x in classifiers]
    named = [x for x in named if x not in ("OSI Approved", "DFSG approved")]
    return about.get("License-Expression") or "; ".join(named) or _licence(distribution)


def _is_source(path: Path) -> bool:
    parts = path.parts
    if any(x in _SKIPPED_FOLDERS or x.startswith((".", "config-")) for x in parts[:-1]):
        return False
    is_test = parts[-1].startswith("test_") or parts[-1].endswith("_test.py")
    return not is_test and not parts[-1].startswith("_sysconfigdata")


def windows(text: bytes) -> np.ndarray:
    """Return the hashes of all windows of a text, shape (words - WINDOW + 1,)."""
    return windows_of(_WORD_OR_SIGN.findall(text), WINDOW)


def is_written_by_people(text: bytes) -> bool:
    """Whether a file looks like a source that is read, and not like a table or generated code."""
    lines = text.splitlines()
    if not 200 <= len(text) <= MOST_FILE_BYTES or b"\0" in text:
        return False
    digits = sum(text.count(x) for x in b"0123456789")
    return (
        len(text) / len(lines) < 80
        and max(map(len, lines)) < 1000
        and digits < 0.12 * len(text)
        and sum(x > 127 for x in text) < 0.01 * len(text)
        and b"generated by" not in text[:2000].lower()
        and b"do not edit" not in text[:2000].lower()
    )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def select() -> Iterator[tuple[Package, list[tuple[Path, bytes]], int]]:
    """Yield each package with the texts that are kept of it and the number that overlap the test.

    The held-out package comes first; all of its Python files are compared, whether they are in the
    test text or not.
    """
    listed = sorted(packages(), key=lambda x: (x.name != HELD_OUT, x.name))
    seen: set[int] = set()
    if listed[0].name != HELD_OUT:
        raise ValueError(f"{HELD_OUT}, which is held out, is not installed: make check installs it")
    held_out: set[int] = set()
    for path in filter(Path.is_file, (*listed[0].files, *listed[0].others)):
        held_out.update(windows(path.read_bytes()).tolist())
    for package in listed:
        kept, total, overlapping = [], 0, 0
        # Not by name, so that what is left out of a large package is spread over it.
        for path in sorted(package.files, key=lambda x: _digest(x.parent.name)):
            if not path.is_file():
                continue
            text = path.read_bytes()
            try:
                text.decode()
            except UnicodeDecodeError:
                continue
            most = MOST_BYTES if package.name != "Python" else float("inf")
            if not is_written_by_people(text) or total + len(text) > most:
                continue
            found = windows(text).tolist()
            if package.name != HELD_OUT:
                if any(x in held_out for x in found):
                    overlapping += 1
                    continue
                if sum(x in seen for x in found) > MOST_REPEATED * len(found):
                    continue
            seen.update(found)
            kept.append((path, text))
            total += len(text)
        yield package, kept, overlapping


def texts() -> dict[str, bytes]:
    """Return the contents of train.txt, valid.txt, test.txt and sources.md."""
    groups: dict[tuple[str, Path], list[bytes]] = {}
    lines = ["| distribution | version | licence | bytes |", "|---|---|---|---|"]
    overlapping_files = 0
    for package, kept, overlapping in select():
        overlapping_files += overlapping
        n_bytes = sum(len(text) for _, text in kept)
        if n_bytes:
            part = PARTS.get(package.name)
            name = f"{package.name} ({part} text)" if part else package.name
            row = name, package.version, package.licence, f"{n_bytes:,}"
            lines.append(f"| {' | '.join(row)} |")
        for path, text in kept:
            groups.setdefault((package.name, path.parent), []).append(text.rstrip() + b"\n\n\n")
    order = sorted(groups, key=lambda x: _digest(f"{x[0]} {x[1].name}"))
    parts: dict[str, list[bytes]] = {"training": [], "validation": [], "test": []}
    for group in order:
        parts[PARTS.get(group[0], "training")] += groups[group]
    lines += [
        "",
        f"Left out, as they share {WINDOW} words and signs in a row with the test text, which is "
        f"of {HELD_OUT}, or with another Python file of it: {overlapping_files} files.",
    ]
    files = zip(("train.txt", "valid.txt", "test.txt"), parts.values(), strict=True)
    contents = {file: b"".join(pieces) for file, pieces in files}
    return contents | {"sources.md": ("\n".join(lines) + "\n").encode()}


def main() -> None:
    """Write the text."""
    parser = parser_for(__doc__, OUT, "the folder")
    given = parser.parse_args()
    names = ("train.txt", "valid.txt", "test.txt", "sources.md")
    try:
        require_new_files((given.out / name for name in names), force=given.force)
        write_files({given.out / name: content for name, content in texts().items()})
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
