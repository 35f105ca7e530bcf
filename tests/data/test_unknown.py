"""What a text holds without a symbol is named, counted, and placed; and what to do is said."""

import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data import prepare, train_vocab


def test_another_text_for_a_vocabulary_is_refused_with_place_and_remedy(tmp_path):
    train_vocab("chars", ["ab \n"]).save(tmp_path)
    (tmp_path / "other.txt").write_text("ab\n" * 60 + "aé ß é\n" + "ab\n" * 60, encoding="utf-8")
    config = DataConfig(
        path=str(tmp_path / "other.txt"), tokenizer=str(tmp_path), cache_dir=str(tmp_path / "cache")
    )
    with pytest.raises(
        ValueError, match=r"other\.txt: not in.*'é', 'ß' \(3 in all.* line 61\)"
    ) as e:
        prepare(config)
    assert "--data.vocab bytes" in str(e.value)


def test_what_of_another_text_becomes_unknown_is_told(tmp_path):
    train_vocab("chars", ["ab \n"], held_out=["x"]).save(tmp_path)
    (tmp_path / "other.txt").write_text("ab\n" * 60 + "aé ß é\n" + "ab\n" * 60, encoding="utf-8")
    said = []
    prepare(
        DataConfig(
            path=str(tmp_path / "other.txt"),
            tokenizer=str(tmp_path),
            cache_dir=str(tmp_path / "cache"),
        ),
        said.append,
    )
    (warning,) = [line for line in said if line.startswith("warning")]
    assert "train: 3 of " in warning
    assert "'é', 'ß' (3 in all, the first in line 61)" in warning
