"""The Brown corpus: tokens without their tags, a line for each paragraph, rare words unknown."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

TAGGED = "\n\n\tThe/at jury/nn said/vbd ``/`` 1/2/cd ''/'' ./.\n\n\n\tOf/in it/ppo\nall/abn\n\n\n"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module("brown")


def test_a_text_is_paragraphs_of_words_without_tags_and_a_mark(program: ModuleType) -> None:
    tokens = [*program.tokens_of(TAGGED)]
    assert tokens == [
        *("The", "jury", "said", "``", "1/2", "''", ".", "\n"),
        *("Of", "it", "all", "\n", "<text>", "\n"),
    ]
    assert program.line_text(tokens) == "The jury said `` 1/2 '' .\nOf it all\n<text>\n"


def test_words_that_occur_up_to_three_times_in_all_texts_are_unknown(
    program: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="has 0 texts"):
        program.tokens_in(tmp_path)
    for n in range(program.N_TEXTS):
        words = "the/at four/cd" if n < 4 else "the/at three/cd" if n < 7 else "the/at"
        genre, number = divmod(n, 90)
        (tmp_path / f"c{'abcdef'[genre]}{number:02}").write_text(words)
    tokens = program.tokens_in(tmp_path)
    assert tokens[:5] == ["the", "four", "\n", "<text>", "\n"]
    assert tokens[20:25] == ["the", "<unk>", "\n", "<text>", "\n"]
    assert tokens.count("<unk>") == 3
    assert len(tokens) == 4 * 493 + 5 * 7
