"""Repairs of pages as Sphinx and its theme write them: accessibility, links of the source pages."""

import re
from pathlib import Path
from typing import Any

import languages
from sphinx.application import Sphinx

_BACK = re.compile(r'(<a class="viewcode-back" href=")([^"#]*)#([^"]+)(")')

_LANDMARKS = {
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<aside class="toc-drawer': '<aside aria-label="On this page" class="toc-drawer',
}
"""Parts of a page of the theme that have the same role, and their names."""

_PARAMETERS = re.compile(r"<dl>\s*(<dd>.*?)</dl>", re.S)


def accessible(html: str) -> str:
    """Return HTML that assistive technology understands.

    Blocks that scroll can be reached with the keyboard. Parameters of a signature on lines of their
    own are no definition list, which would lack its terms.
    """

    def lines(found: re.Match[str]) -> str:
        inner = found[1].replace("<dd>", "<span>").replace("</dd>", "</span>")
        return f'<span class="sig-lines">{inner}</span>'

    html = _PARAMETERS.sub(lines, html).replace("<pre>", '<pre tabindex="0">')
    return html.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')


def _with_links(app: Sphinx, page: str, html: str) -> str:
    """Correct links from source pages to the reference.

    Where objects of one file are documented below two modules, Sphinx takes the first for all.
    """
    builder, objects = app.builder, app.env.domains.python_domain.objects

    def link(found: re.Match[str]) -> str:
        parts = found[3].split(".")
        for n in range(1, len(parts)):
            suffix = "." + ".".join(parts[n:])
            for name, entry in objects.items():
                if not entry.aliased and name.endswith(suffix):
                    address = builder.get_relative_uri(page, entry.docname)
                    if address == found[2]:
                        return f"{found[1]}{address}#{entry.node_id}{found[4]}"
        return found[0]

    return _BACK.sub(link, html)


def _repair(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if "body" in context:
        context["body"] = accessible(context["body"])
        if page.startswith("_modules/"):
            context["body"] = _with_links(app, page, context["body"])
    if (navigation := context.get("furo_navigation_tree")) is not None:
        level = 'role="heading" aria-level="2"'
        context["furo_navigation_tree"] = navigation.replace('role="heading"', level)


def _name_landmarks(app: Sphinx, error: Exception | None) -> None:
    """Name the parts of pages that the theme writes around their bodies."""
    pages = [] if error is not None else Path(app.outdir).rglob("*.html")
    for page in pages:
        text = named = page.read_text("utf-8")
        for part, with_name in _LANDMARKS.items():
            named = named.replace(part, with_name)
        named = languages.with_labels(named)
        if named != text:
            page.write_text(named, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Repair each page after the theme has added its parts."""
    app.connect("html-page-context", _repair, priority=900)
    app.connect("build-finished", _name_landmarks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
