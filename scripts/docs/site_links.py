"""Checks that every link within the built site leads somewhere: ``site_links.py build/docs``.

Sphinx checks those it knows as references; this finds the others, such as those of symbols to their
lines, in what a reader gets.
"""

import re
import sys
from pathlib import Path
from urllib.parse import unquote


def broken(site: Path) -> list[str]:
    """Return the links whose file or anchor does not exist, each with its page."""
    pages = {page.resolve(): page.read_text("utf-8") for page in site.rglob("*.html")}
    ids = {page: {*re.findall(r'\bid="([^"]+)"', text)} for page, text in pages.items()}
    found = []
    for page, text in pages.items():
        for link in {*re.findall(r'<(?:a|img|link|script) [^>]*(?:href|src)="([^"]+)"', text)}:
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = unquote(link.partition("?")[0]).partition("#")
            file = (page.parent / target).resolve() if target else page
            is_there = file.exists() and (not anchor or anchor in ids.get(file, {anchor}))
            if not is_there:
                found.append(f"{page.relative_to(site.resolve())}: {link}")
    return sorted(found)


def main() -> int:
    """Print broken links; return 1 if there are any."""
    found = broken(Path(sys.argv[1]))
    if found:
        print(*found[:20], f"{len(found)} links lead nowhere", sep="\n", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
