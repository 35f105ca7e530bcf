"""Examples in docstrings, as the reference of the site shows them, are run."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import transformer_xl

SOURCE = Path(transformer_xl.__file__).parents[1]
FILES = [
    # What is exported is traced, which does not go with the check of shapes.
    pytest.param(file, marks=[pytest.mark.compile] * ("export" in file.parts))
    for path in sorted(SOURCE.glob("transformer_xl/**/*.py"))
    if ">>>" in path.read_text("utf-8") and (file := path.relative_to(SOURCE))
]


def _module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_examples_of_a_file_are_true(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestFinder(exclude_empty=True).find(import_module(_module(file)))
    examples = [x for x in found if x.examples]
    n_shown = (SOURCE / file).read_text("utf-8").count(">>> ")
    assert sum(len(x.examples) for x in examples) == n_shown
    for example in examples:
        result = doctest.DocTestRunner().run(example)
        assert not result.failed, example.name


def test_every_public_name_has_an_example() -> None:
    for name in {*transformer_xl.__all__} - {"__version__"}:
        assert ">>>" in (getattr(transformer_xl, name).__doc__ or ""), name
