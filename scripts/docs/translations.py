"""Translations in step with the English: which sections changed since they were translated.

``docs/zh/PATH`` translates ``docs/PATH``, and ``README.zh-CN.md`` translates ``README.md``, section
by section. ``docs/zh/sources.toml`` has a digest of every English section that was translated.

``python scripts/docs/translations.py``           names the sections that are not in step
``python scripts/docs/translations.py --reviewed how-it-works.md``
                                                  records that this page was translated anew
"""

import argparse
import hashlib
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tomli_w

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RECORD = DOCS / "zh" / "sources.toml"
PENDING = "> 本节的英文原文已有改动，译文待更新。"  # noqa: RUF001 - Chinese
"""The line below the heading of a section that is known not to be in step, for its readers."""


class Section(NamedTuple):
    """A heading with what stands below it, down to the next heading."""

    title: str
    level: int
    prose: str
    """With the heading, without code."""
    code: list[str]
    """Blocks of code, of output and of formulas."""


# What a page of the site has for itself: settings of a notebook, the table of contents, comments.
_OWN = re.compile(r"\A---\n.*?\n---\n|^```\{toctree\}.*?^```\n?|<!--.*?-->\n?", re.M | re.S)
_BLOCK = re.compile(
    r"^( *)(`{3,})[^\n]*\n.*?^\1\2 *$|^\$\$.*?\$\$[.,]?$|(?<=\n\n)(?: {4}[^\n]+\n)+", re.M | re.S
)
# Settings of a cell have the description of a picture, which is translated.
_SETTINGS = re.compile(r"(?<=ipython3\n)---\n.*?^---\n", re.M | re.S)
_LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s]+)\)")
_ROLE = re.compile(r"\{\w+\}`([^<`]+?) <([^>]+)>`")


def translations() -> dict[Path, Path]:
    """Return the translated pages with their sources."""
    pages = {path: DOCS / path.relative_to(DOCS / "zh") for path in (DOCS / "zh").rglob("*.md")}
    return {ROOT / "README.zh-CN.md": ROOT / "README.md"} | dict(sorted(pages.items()))


def sections(text: str) -> list[Section]:
    """Return the sections of a page in Markdown."""
    blocks: list[str] = []

    def cut(found: re.Match[str]) -> str:
        blocks.append(_SETTINGS.sub("", found[0]).strip("\n"))
        return f"\0{len(blocks) - 1}\0"

    text = _BLOCK.sub(cut, _OWN.sub("", text))
    parts = re.split(r"^(#+) +(.*)$", text, flags=re.M)[1:]
    return [
        Section(
            title,
            len(marks),
            re.sub(r"\0\d+\0", "", f"{title}\n{body}"),
            [blocks[int(number)] for number in re.findall(r"\0(\d+)\0", body)],
        )
        for marks, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


def digest(section: Section) -> str:
    """Return a short digest of a section; how its lines are broken does not matter."""
    content = [" ".join(section.prose.split()), *section.code]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:12]


def recorded() -> dict[str, dict[str, str]]:
    """Return the digest of each section of each page, as they were translated."""
    return tomllib.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}


def _links(section: Section, page: Path) -> set[str]:
    """Targets of links: files of the project by their path, a translation as its source."""
    made_from = translations()
    targets = {target for _, target in _ROLE.findall(section.prose)}
    for _, _, link in _LINK.findall(section.prose):
        if re.match(r"[a-z]+:", link):
            targets.add(link)
        elif file := link.partition("#")[0]:
            target = (page.parent / file).resolve()
            targets.add(str(made_from.get(target, target)))
    # Every page may lead to the landing page, and to itself in the other language.
    own = {page, made_from.get(page, page), DOCS / "index.md"}
    # Notebooks are downloaded in the language of the page.
    return {x.replace(".zh-CN", "") for x in targets if Path(x) not in own}


def _numbers(section: Section) -> Counter[str]:
    text = _LINK.sub(r"\2", _ROLE.sub(r"\1", section.prose))
    text = re.sub(r"`[^`]*`|\$[^$]+\$", "", text)
    return Counter(re.findall(r"(?<![A-Za-z\d])\d+(?:[.,]\d+)*", text))


def _names(section: Section) -> set[str]:
    """Code and formulas within the prose."""
    found = re.findall(r"`[^`]+`|\$[^$]+\$", _ROLE.sub("", section.prose))
    return {" ".join(name.split()) for name in found}


def _list(names: Counter[str]) -> str:
    return ", ".join(sorted(names))


def differences(page: Path) -> Iterator[str]:
    """Yield what a translation has not as its source has it."""
    source = translations()[page]
    name, known = page.relative_to(ROOT), recorded().get(str(source.relative_to(ROOT)), {})
    own, english = sections(page.read_text("utf-8")), sections(source.read_text("utf-8"))
    if [x.level for x in own] != [x.level for x in english]:
        titles = [[f"{'#' * x.level} {x.title}" for x in found] for found in (english, own)]
        yield f"{name}: other sections than its source: {titles[0]}, {titles[1]}"
        return
    for there, here in zip(english, own, strict=True):
        if PENDING in here.prose:
            continue
        where = f"{name}: {here.title!r} ({there.title!r})"
        if known.get(there.title) != digest(there):
            yield f"{where}: the source has changed since it was translated"
        if there.code != here.code:
            yield f"{where}: blocks of code or output differ from the source"
        for kind, a, b in (
            ("numbers", _numbers(there), _numbers(here)),
            ("names in code", Counter(_names(there)), Counter(_names(here))),
            ("links", Counter(_links(there, source)), Counter(_links(here, page))),
        ):
            if a != b:
                yield f"{where}: {kind}: not here [{_list(a - b)}], only here [{_list(b - a)}]"


def record(pages: list[Path]) -> None:
    """Record that these translations were made from their sources as they are."""
    table = recorded()
    for page in pages:
        source = translations()[page]
        found = sections(source.read_text("utf-8"))
        digests = {section.title: digest(section) for section in found}
        if len(digests) < len(found):
            raise ValueError(f"{source}: two sections have the same title; rename one")
        table[str(source.relative_to(ROOT))] = digests
    RECORD.write_text(tomli_w.dumps(dict(sorted(table.items()))), encoding="utf-8")


def main() -> int:
    """Name the sections that are not in step; return 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reviewed", nargs="+", default=[], metavar="PAGE", help="English pages")
    made_from = {
        str(source.relative_to(DOCS if source.is_relative_to(DOCS) else ROOT)): page
        for page, source in translations().items()
    }
    reviewed = parser.parse_args().reviewed
    if unknown := {*reviewed} - {*made_from}:
        parser.error(f"no translations of {sorted(unknown)}; there are {sorted(made_from)}")
    if reviewed:
        record([made_from[name] for name in reviewed])
    found = [problem for page in translations() for problem in differences(page)]
    print(*found, sep="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
