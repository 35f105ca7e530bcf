"""English and Chinese on one site: links between a page and its translation, words, search."""

import re
from itertools import pairwise
from typing import Any

from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.search import languages
from sphinx.search.en import SearchEnglish

CODE = "zh-CN"
HOME = "zh/index"
WORDS = {
    "Back to top": "回到顶部",
    "Home": "首页",
    "Made with ": "本站使用 ",
    "Next": "下一页",
    "On this page": "本页内容",
    "Pages": "页面",
    "Previous": "上一页",
    "Search": "搜索",
    "Skip to content": "跳到正文",
    "Toggle Light / Dark / Auto color theme": "切换浅色、深色或自动主题",
    "Toggle site navigation sidebar": "显示或隐藏页面列表",
    "Toggle table of contents sidebar": "显示或隐藏本页内容",
    '<a href="https://www.sphinx-doc.org/">Sphinx</a> and ': (
        '<a href="https://www.sphinx-doc.org/">Sphinx</a> 和 '
    ),
}
"""What the theme writes beside a page."""

_HAN = r"\u3400-\u9fff"


class SearchBoth(SearchEnglish):
    """Search in English words, and in Chinese characters and pairs of neighbours.

    Chinese has no spaces between words. Every pair of neighbouring characters is indexed, and a
    query is cut in the same way: a page that has all pairs of a query is found, whatever the words
    are. It needs no dictionary, neither here nor in the browser, where Sphinx's own search for
    Chinese (by jieba) does not cut a query at all.

    Sphinx's program in the browser lets pages be without terms of fewer than three letters, so
    these are filled up.
    """

    lang = "en+zh"
    js_splitter_code = f"""
function splitQuery(query) {{
  const parts = query.match(/[{_HAN}]+|(?:(?![{_HAN}])[\\p{{Letter}}\\p{{Number}}_])+/gu) || [];
  return parts.flatMap((part) => {{
    const letters = Array.from(part);
    if (letters.length < 2 || !/[{_HAN}]/.test(part)) return part;
    return letters.slice(1).map((letter, n) => letters[n] + letter);
  }});
}}
window.Stemmer = class extends EnglishStemmer {{
  constructor() {{
    super();
    const stem = this.stemWord;
    this.stemWord = (word) => (/[{_HAN}]/.test(word) ? word.padEnd(3, "_") : stem.call(this, word));
  }}
}};
"""

    def split(self, input: str) -> list[str]:
        """Return words, and single characters and pairs of Chinese."""
        terms = []
        for part in re.findall(rf"[{_HAN}]+|[^\W{_HAN}]+", input):
            is_chinese = re.match(rf"[{_HAN}]", part)
            terms += [*part, *map("".join, pairwise(part))] if is_chinese else [part]
        return terms

    def stem(self, word: str) -> str:
        """Return the stem of an English word."""
        return word.ljust(3, "_") if re.match(rf"[{_HAN}]", word) else super().stem(word)


def _is_chinese(page: str) -> bool:
    return page.startswith("zh/")


def _translated(message: str) -> str:
    return WORDS.get(message, message)


def with_labels(html: str) -> str:
    """Return a page whose labels for assistive technology are in its language."""
    if f'lang="{CODE}"' not in html[:200]:
        return html
    return re.sub(r'(?<=aria-label=")[^"]+', lambda found: _translated(found[0]), html)


def _contents(app: Sphinx, page: str, **options: Any) -> str:
    """Return the table of contents of the Chinese pages."""
    env, builder = app.env, app.builder
    toctrees = [
        env.resolve_toctree(page, builder, node, **options)
        for node in env.get_doctree(HOME).findall(addnodes.toctree)
    ]
    return "".join(builder.render_partial(x)["fragment"] for x in toctrees if x is not None)


def _in_its_language(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Link a page with its translation; around a Chinese page, have everything in Chinese."""
    builder, is_chinese = app.builder, _is_chinese(page)
    other = page.removeprefix("zh/") if is_chinese else f"zh/{page}"
    if other in app.env.all_docs and page in app.env.all_docs:
        code, name = ("en", "English") if is_chinese else (CODE, "中文")
        address = builder.get_relative_uri(page, other)
        about = f'href="{address}" hreflang="{code}"'
        context["metatags"] += f'<link rel="alternate" {about}>'
        link = f'<p class="translation"><a {about} lang="{code}">{name}</a></p>'
        context["body"] = link + context["body"]
    # What comes before and after is of the same language.
    around = builder.relations.get(page, [None] * 3)
    for name, target in zip(("prev", "next"), around[1:], strict=True):
        if target and _is_chinese(target) != is_chinese:
            context[name] = None
    if is_chinese:
        context |= {"language": CODE, "master_doc": HOME, "_": _translated, "gettext": _translated}
        context["toctree"] = lambda **options: _contents(app, page, **options)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the search, and look at each page before the theme does."""
    languages[SearchBoth.lang] = SearchBoth
    app.connect("html-page-context", _in_its_language, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
