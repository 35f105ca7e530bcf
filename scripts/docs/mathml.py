"""Formulas as MathML, written by docutils when the site is built.

MathJax would be fetched from a network, or a megabyte of it committed; every current browser
displays MathML by itself, and screen readers read it.
"""

import re
from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

_LOGGER = logging.getLogger(__name__)


def mathml(tex: str, *, is_block: bool) -> str:
    """Return a formula as a ``<math>`` element.

    Args:
        tex: The formula in LaTeX, without delimiters.
        is_block: Whether it stands on lines of its own.

    Raises:
        docutils.utils.math.MathError: The formula has a command that docutils does not know.
    """
    tex = tex.replace(r"\dots", r"\ldots")
    # An accent takes indices below itself, unless it is a group of two, of which one is empty.
    tex = re.sub(r"\\(tilde|hat) ?([A-Za-z])", r"{\\\1 \2 {}}", tex)
    if is_block and "\\\\" in tex:
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}" if r"\begin" not in tex else tex
    return re.sub(r">\s+<", "><", latex2mathml.tex2mathml(tex, as_block=is_block))


def _written(node: nodes.Element, *, is_block: bool) -> str:
    try:
        return mathml(node.astext(), is_block=is_block)
    except MathError as error:
        _LOGGER.warning("%s in %r", error, node.astext(), location=node)
        return f"<code>{escape(node.astext())}</code>"


def _visit_inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(_written(node, is_block=False))
    raise nodes.SkipNode


def _visit_block(translator: Any, node: nodes.math_block) -> None:
    # Wide formulas are scrolled on a phone, also with the keyboard.
    translator.body.append('<div class="formula" tabindex="0" role="group" aria-label="formula">')
    translator.body.append(_written(node, is_block=True))
    translator.body.append("</div>")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer, which the configuration selects as ``mathml``."""
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
