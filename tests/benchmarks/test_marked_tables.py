"""The tables of pages are what the programs make of the files of results."""

from importlib import import_module
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_tables_of_a_page_are_what_its_program_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    program, page = import_module("result_tables"), import_module("marked_tables").page
    text = program.PAGE.read_text("utf-8")
    assert page(text, program.tables()) == text


def test_a_table_without_a_place_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    page = import_module("marked_tables").page
    text = "<!-- table: a -->\nold\n<!-- end -->\n"
    assert page(text, {"a": "new"}) == "<!-- table: a -->\nnew\n<!-- end -->\n"
    with pytest.raises(SystemExit, match="has places for"):
        page(text, {"a": "new", "b": "new"})
