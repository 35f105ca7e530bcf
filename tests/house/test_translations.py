"""Translations: in step with the English section by section, and typeset as Chinese is."""

# ruff: noqa: RUF001 - marks of Chinese

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs" / "zh").rglob("*.md"))]

HAN = r"[\u4e00-\u9fff]"
# Marks as wide as a letter of Chinese, and curved quotation marks.
WIDE = r"[\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f\u201c\u201d]"
RULES = {
    "a space between Chinese and Latin letters or digits": rf"{HAN}[\w`$]|[\w`$%]{HAN}",
    "no space beside a full-width mark": rf"\S {WIDE}|{WIDE} \S",
    # Brackets of a formula, or of (a) in a list, are narrow.
    "full-width marks in Chinese": rf"{HAN} ?[,;:!?\"']|[,;:!?\"'] ?{HAN}|{HAN}[().]|\({HAN}",
    "no italics, which Chinese has not": rf"\*{HAN}+\*",
}


@pytest.fixture(scope="module", autouse=True)
def programs():
    """The programs that write the site, which are scripts and no package."""
    sys.path.insert(0, str(ROOT / "scripts" / "docs"))
    yield
    sys.path.pop(0)


def test_each_section_of_a_translation_is_in_step_with_its_source() -> None:
    from translations import PENDING, differences, translations

    for page in PAGES:
        source = translations()[page].relative_to(ROOT)
        found = list(differences(page))
        assert not found, "\n".join(
            [
                *found,
                "Translate what has changed, then: python scripts/docs/translations.py --reviewed "
                f"{str(source).removeprefix('docs/')}",
                f"Or put this line below the heading of the translation: {PENDING}",
            ]
        )


def _mistakes(text: str) -> Iterator[str]:
    """Lines of Chinese prose that break a rule of typography."""
    text = re.sub(r"\A---\n.*?\n---\n|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^( *)```.*?^\1``` *$|^\$\$.*?\$\$.?$", "", text, flags=re.M | re.S)
    text = re.sub(r"\{\w+\}`([^`<]+?) <[^>]+>`", r"\1", text)
    text = re.sub(r"`[^`]+`|\$[^$]+\$", "`", text)
    text = re.sub(r"!?\[([^]]*)\]\([^)\s]+\)", r"\1", text)
    is_text = False
    for line in text.splitlines():
        was_text, is_text = is_text, bool(re.match(r"[^#|>*\s\d-]", line))
        if was_text and is_text:
            yield f"a paragraph is one line, as a line break is shown as a space: {line}"
        if not re.search(HAN, line):
            continue
        for part in line.removeprefix("* ").split("|"):
            pieces = part.split("**")
            for before, bold, after in zip(pieces[::2], pieces[1::2], pieces[2::2], strict=False):
                # Between a mark and a letter, Markdown takes ** for the other end of bold text.
                if re.search(rf"{WIDE}$", bold) and re.match(r"[^\W_]", after):
                    yield f"bold text with a mark at its end: {before}**{bold}**{after}"
            plain = "".join(pieces).strip()
            for rule, pattern in RULES.items():
                # \w is Latin and digits here.
                pattern = pattern.replace(r"\w", "A-Za-z0-9")
                if found := re.search(pattern, plain):
                    yield f"{rule}: {found[0]!r} in {plain}"


def test_chinese_is_typeset_as_chinese_is() -> None:
    found = [
        f"{page.relative_to(ROOT)}: {mistake}"
        for page in PAGES
        for mistake in _mistakes(page.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


def test_mistakes_of_chinese_are_found() -> None:
    right = (
        "用 `mem_len` 设置（见[记忆](a.md)）：**默认**为 8，即 $x$ 的 (a + b) 倍，占 5%。\n\n"
        "| 一 | two |\n"
    )
    assert not list(_mistakes(right))
    wrong = {
        "用`x`设置": "a space",
        "记忆 memory是": "a space",
        "记忆 （memory）": "no space",
        "记忆, 片段": "full-width",
        "记忆(memory)": "full-width",
        "完成。\n下一行": "one line",
        "**完成。**下": "bold text",
        "*记忆*": "no italics",
    }
    for text, rule in wrong.items():
        assert any(rule in found for found in _mistakes(text)), text


def test_a_changed_section_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import translations

    docs = tmp_path / "docs"
    (docs / "zh").mkdir(parents=True)
    source, page = docs / "a.md", docs / "zh" / "a.md"
    source.write_text("# One\n\nText of 3.\n\n## Two\n\n```sh\nls\n```\n\nMore `x`, 10.\n")
    page.write_text("# 一\n\n3 的内容。\n\n## 二\n\n```sh\nls\n```\n\n更多 `x`，10。\n", "utf-8")
    for name, value in {"ROOT": tmp_path, "DOCS": docs, "RECORD": docs / "sources.toml"}.items():
        monkeypatch.setattr(translations, name, value)
    translations.record([page])
    assert not list(translations.differences(page))

    # Other line breaks are no other text.
    text = source.read_text()
    source.write_text(text.replace("Text of", "Text\nof"))
    assert not list(translations.differences(page))
    source.write_text(text.replace("More", "Much more"))
    (found,) = translations.differences(page)
    assert "'二' ('Two'): the source has changed" in found
    translated = page.read_text("utf-8")
    page.write_text(translated.replace("## 二\n", f"## 二\n\n{translations.PENDING}\n"), "utf-8")
    assert not list(translations.differences(page))

    source.write_text(text)
    for old, new, kind in (("ls", "pwd", "blocks"), ("10", "11", "numbers"), ("`x`", "", "names")):
        page.write_text(translated.replace(old, new), "utf-8")
        (found,) = translations.differences(page)
        assert kind in found
    page.write_text(translated + "\n### 三\n", "utf-8")
    (found,) = translations.differences(page)
    assert "other sections" in found
