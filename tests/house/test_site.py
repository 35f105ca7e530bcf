"""The site: pages are made from the program, tutorials have the outputs of their code."""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

import transformer_xl
from transformer_xl.cli import commands
from transformer_xl.config.recipes import recipe_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module", autouse=True)
def programs():
    """The programs that write the site, which are scripts and no package."""
    pytest.importorskip("myst_nb")
    sys.path.insert(0, str(ROOT / "scripts" / "docs"))
    yield
    sys.path.pop(0)


@pytest.fixture(scope="module")
def annotated():
    import annotated_pages

    return dict(annotated_pages.pages())


def test_every_symbol_of_the_paper_has_its_line_and_the_line_leads_back(annotated):
    import annotated_pages

    table = annotated["symbols.rst"]
    for symbol in annotated_pages.symbols():
        assert f'id="symbol-{symbol.id}"' in table
        assert symbol.lines
        for file, numbers in symbol.lines.items():
            name = annotated_pages.page_name(file)
            page = annotated[f"{name}.rst"]
            assert f'href="../symbols.html#symbol-{symbol.id}"' in page
            for number in numbers:
                assert f'href="{name}.html#L-{number}"' in table
                assert f'id="L-{number}"' in page


def test_a_line_that_is_gone_is_named(monkeypatch):
    import annotated_pages

    at = [{"file": "model/layer.py", "line": "a line of an earlier version"}]
    symbol = {"id": "x", "tex": "x", "meaning": "x", "section": "3.2", "at": at}
    monkeypatch.setattr(annotated_pages, "table", lambda: {"symbol": [symbol]})
    with pytest.raises(ValueError, match=r"model/layer\.py has 0 lines 'a line of an earlier"):
        annotated_pages.symbols()


def test_an_annotated_page_has_every_line_of_code(annotated):
    import annotated_pages

    for about in annotated_pages.table()["file"]:
        text = (annotated_pages.PACKAGE / about["path"]).read_text("utf-8")
        rows = annotated_pages.rows(text)
        shown = {number: line for row in rows for number, line in row.code}
        prose = " ".join(" ".join(row.prose) for row in rows)
        for number, line in enumerate(text.splitlines(), 1):
            if number in shown:
                assert shown[number] == line
            elif line.lstrip().startswith("#"):
                comment = line.lstrip("# ")
                assert re.sub(r"\W", "", comment) in re.sub(r"\W", "", prose), line


def test_every_public_name_command_recipe_and_setting_has_its_place():
    import reference_pages

    parts = reference_pages.api_parts()
    top = [name for part in parts if part.module == "transformer_xl" for name in part.names]
    assert sorted([*top, "__version__"]) == sorted(transformer_xl.__all__)
    assert all(name in reference_pages.help_of("") for name in commands())
    recipes, settings = reference_pages._recipes(), reference_pages._settings()
    assert all(f".. _recipe-{name}:" in recipes for name in recipe_names())
    help_text = reference_pages.help_of("train")
    named = re.findall(r"--((?:model|data|train|eval|generate)\.\w+)", help_text)
    assert len(named) > 100
    assert all(f".. confval:: {name}\n" in settings for name in named)


def test_tutorials_have_outputs_of_the_code_that_they_show():
    import tutorials

    names = {path.stem for path in tutorials.tutorials()}
    assert names == {path.stem for path in tutorials.OUTPUTS.glob("*.ipynb")}
    for path in tutorials.tutorials():
        notebook = tutorials.executed(path)
        stored = (tutorials.OUTPUTS / f"{path.stem}.ipynb").read_text("utf-8")
        assert len(stored) < 400_000, f"{path.name}: outputs are to be small"
        assert str(ROOT) not in stored
        outputs = [x for cell in notebook["cells"] for x in cell.get("outputs", ())]
        assert not [x for x in outputs if x["output_type"] == "error"]
        pictures = [x for x in outputs if any("image/" in kind for kind in x.get("data", {}))]
        text = path.read_text("utf-8")
        assert len(pictures) == text.count("    alt: "), f"{path.name}: a text for each picture"


def test_a_translated_tutorial_has_the_outputs_of_the_other_and_texts_for_its_pictures():
    import tutorials

    assert tutorials.translated()
    for path in tutorials.translated():
        source = tutorials.FOLDER / path.name
        cells = [tutorials.executed(x)["cells"] for x in (source, path)]
        outputs = [[c["outputs"] for c in own if c["cell_type"] == "code"] for own in cells]
        assert outputs[0] == outputs[1]
        texts = [re.findall(r"^    alt: (.*)", x.read_text("utf-8"), re.M) for x in (source, path)]
        assert len(texts[0]) == len(texts[1])
        assert not {*texts[0]} & {*texts[1]}


def test_changed_code_of_a_tutorial_needs_new_outputs(tmp_path, monkeypatch):
    import tutorials

    path = tutorials.tutorials()[0]
    changed = tmp_path / path.name
    changed.write_text(path.read_text("utf-8") + "\n```{code-cell} ipython3\n1 + 1\n```\n")
    with pytest.raises(ValueError, match="make docs-run"):
        tutorials.executed(changed)
    changed.write_text(path.read_text("utf-8") + "\nMore prose.\n")
    assert tutorials.executed(changed)["cells"][-1]["source"].endswith("More prose.")


def test_a_tutorial_is_executed_again_when_a_package_that_it_uses_has_changed(
    tmp_path, monkeypatch
):
    import nbformat
    import tutorials

    path = tutorials.tutorials()[0]
    notebook = nbformat.read(tutorials.OUTPUTS / f"{path.stem}.ipynb", as_version=4)
    used = notebook["metadata"]["transformer_xl"]
    assert {"config", "data", "model", "ops", "train"} <= {*used["packages"]}
    assert "interop" not in used["packages"]
    for name in (*used["packages"], "interop"):
        source = tutorials.PACKAGE / name
        shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    monkeypatch.setattr(tutorials, "PACKAGE", tmp_path)
    monkeypatch.setattr(tutorials, "OUTPUTS", tmp_path)
    used["digest"] = tutorials.digest(used["packages"])
    nbformat.write(notebook, tmp_path / f"{path.stem}.ipynb")
    (tmp_path / "interop" / "new.py").write_text("x = 1\n")
    assert tutorials.is_current(path)
    (tmp_path / "model" / "new.py").write_text("x = 1\n")
    assert not tutorials.is_current(path)


def test_the_inventories_are_those_that_the_program_writes():
    import inventories

    for name in inventories.PROJECTS:
        stored = (inventories.FOLDER / f"{name}.inv").read_bytes()
        assert inventories.entries_of(stored) == inventories.entries_of(inventories.inventory(name))


def test_every_page_is_in_the_table_of_contents():
    listed = set()
    for index in (DOCS / "index.md", DOCS / "zh" / "index.md"):
        for block in re.findall(r"```\{toctree\}\n(.*?)```", index.read_text("utf-8"), re.S):
            for entry in block.splitlines():
                if entry and not entry.startswith(":"):
                    listed |= {x.relative_to(DOCS) for x in index.parent.glob(f"{entry}.md")}
    pages = {path.relative_to(DOCS) for path in DOCS.rglob("*.md")} - {Path("index.md")}
    assert pages == listed


def test_formulas_become_mathml_and_dollars_in_code_stay():
    from docstrings import with_math
    from mathml import mathml

    assert with_math("$a_b$ and ``$x$``") == ":math:`a_b` and ``$x$``"
    assert "<msub><mi>a</mi><mi>b</mi></msub>" in mathml("a_b", is_block=False)


def test_links_out_of_the_documents_lead_to_pages_or_files():
    import outside_links

    text = (
        "[a](../src/transformer_xl/model/layer.py) [b](../README.md#x) [c](files.md) [d](../gone)"
    )
    expected = (
        "[a](generated/annotated/layer.rst) [b](path:../README.md) [c](files.md) [d](../gone)"
    )
    assert outside_links.rewritten(text, DOCS / "x.md", ROOT) == expected


def test_what_scrolls_can_be_reached_with_the_keyboard(tmp_path):
    from types import SimpleNamespace

    import page_fixes

    wide = '<div class="table-wrapper docutils container">'
    assert page_fixes.accessible(f"<pre>x</pre>{wide}") == (
        '<pre tabindex="0">x</pre><div tabindex="0" class="table-wrapper docutils container">'
    )
    page = tmp_path / "a.html"
    page.write_text('<aside class="sidebar-drawer"></aside><aside class="toc-drawer no-toc">')
    page_fixes._name_landmarks(SimpleNamespace(outdir=tmp_path), None)
    assert page.read_text().count("aria-label") == 2


def test_chinese_is_found_by_any_of_its_words():
    import languages

    search = languages.SearchBoth({})
    terms = ["Transformer", "的", "记", "忆", "的记", "记忆", "mem_len_2"]
    assert search.split("Transformer 的记忆 mem_len_2") == terms
    assert search.split("KV缓存") == ["KV", "缓", "存", "缓存"]
    # The browser leaves out terms of fewer than three letters.
    assert [search.stem(x) for x in ("layers", "记", "记忆")] == ["layer", "记__", "记忆_"]


def test_labels_of_a_chinese_page_are_chinese():
    import languages

    part = '<aside aria-label="On this page">'
    assert "本页内容" in languages.with_labels(f'<html lang="zh-CN">{part}')
    assert languages.with_labels(f'<html lang="en">{part}') == f'<html lang="en">{part}'


def test_a_broken_link_within_the_site_is_found(tmp_path):
    from site_links import broken

    (tmp_path / "a.html").write_text('<a href="b.html#x">1</a> <a href="b.html#y">2</a>')
    (tmp_path / "b.html").write_text('<p id="x"></p> <img src="c.png"> <a href="https://x.y">3</a>')
    assert broken(tmp_path) == ["a.html: b.html#y", "b.html: c.png"]


def test_the_stored_notebooks_are_notebooks_and_symbols_are_toml():
    for path in (DOCS / "tutorials" / "outputs").glob("*.ipynb"):
        assert json.loads(path.read_text("utf-8"))["nbformat"] == 4
    assert tomllib.loads((DOCS / "symbols.toml").read_text("utf-8")).keys() == {"file", "symbol"}
