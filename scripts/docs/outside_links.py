"""Links that lead from ``docs`` to other files of the project.

In the repository they open the file. On the site, annotated files have a page, and others are
copied to be downloaded.
"""

import re
from pathlib import Path
from typing import Any

import annotated_pages
from sphinx.application import Sphinx

_LINK = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def rewritten(text: str, page: Path, root: Path) -> str:
    """Return the text of a page with its links out of ``docs`` as those of the site.

    Args:
        text: The text, in Markdown.
        page: Its file.
        root: The folder of the project.
    """
    files = {
        str(annotated_pages.PACKAGE / x["path"]): x["path"] for x in annotated_pages.table()["file"]
    }
    docs = root / "docs"

    def link(found: re.Match[str]) -> str:
        target = (page.parent / found["up"] / found["path"]).resolve()
        if target.is_relative_to(docs) or not target.is_file():
            return found[0]
        to_docs = "../" * (len(page.relative_to(docs).parts) - 1)
        if (file := files.get(str(target))) is not None:
            return f"]({to_docs}generated/{annotated_pages.page_name(file)}.rst)"
        return f"](path:{found['up']}{found['path']})"

    return _LINK.sub(link, text)


def _rewrite(app: Sphinx, docname: str, content: list[str]) -> None:
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".md":
        content[0] = rewritten(content[0], path, Path(app.srcdir).parent)


def setup(app: Sphinx) -> dict[str, Any]:
    """Rewrite each page when it is read."""
    app.connect("source-read", _rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
