"""Docstrings as reStructuredText: formulas between dollar signs become math."""

import re
from typing import Any

from sphinx.application import Sphinx

_LITERAL = re.compile(r"``[^`]*``|`[^`]*`")
_INLINE = re.compile(r"(?<![\\$])\$(?!\$)([^$]+?)\$(?!\$)", re.S)
_BLOCK = re.compile(r"^([ ]*)\$\$(.*?)\$\$[ ]*$", re.S | re.M)


def with_math(text: str) -> str:
    r"""Return a docstring with its formulas as math of reStructuredText.

    Example:
        >>> with_math("Length $n_1$.")
        'Length :math:`n_1`.'
    """

    def block(found: re.Match[str]) -> str:
        indent, tex = found[1], " ".join(found[2].split())
        return f"\n{indent}.. math::\n\n{indent}   {tex}\n"

    text = _BLOCK.sub(block, text)
    parts, end = [], 0
    for literal in _LITERAL.finditer(text):
        parts += [_inline(text[end : literal.start()]), literal[0]]
        end = literal.end()
    return "".join([*parts, _inline(text[end:])])


def _inline(text: str) -> str:
    # The asterisks of glob patterns in the help of settings.
    text = re.sub(r"(?<=/)\*", r"\\*", text)
    return _INLINE.sub(lambda found: f":math:`{' '.join(found[1].split())}`", text)


def _process(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    lines[:] = with_math("\n".join(lines)).splitlines()


def setup(app: Sphinx) -> dict[str, Any]:
    """Convert every docstring that autodoc reads, before napoleon divides it into sections."""
    app.connect("autodoc-process-docstring", _process, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
