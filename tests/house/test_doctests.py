"""Examples in docstrings of public names, as the reference of the site shows them, are run."""

import doctest
import sys

import pytest

import transformer_xl

RUN = [
    name
    for name in transformer_xl.__all__
    if ">>>" in (getattr(getattr(transformer_xl, name), "__doc__", None) or "")
]


@pytest.mark.parametrize("name", RUN)
def test_the_example_of_a_public_name_is_true(name: str) -> None:
    thing = getattr(transformer_xl, name)
    names = vars(sys.modules[thing.__module__]).copy()
    (found,) = doctest.DocTestFinder(recurse=False).find(thing, name, globs=names)
    result = doctest.DocTestRunner().run(found)
    assert result.attempted
    assert not result.failed


def test_what_needs_no_files_of_a_user_has_an_example() -> None:
    # Trainings, corpora and checkpoints take a text or files; settings are on a page of their own.
    without = {"train", "prepare", "convert", "export", "save_state", "load_state", "__version__"}
    without |= {"LanguageModel", "Result", "Hypothesis", "Config"}
    without |= {name for name in transformer_xl.__all__ if name.endswith("Config")}
    assert {*RUN} | without == {*transformer_xl.__all__}
