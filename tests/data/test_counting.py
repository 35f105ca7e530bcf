from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import DataConfig
from transformer_xl.data import making_vocab
from transformer_xl.data.making_vocab import count_part, train_vocab, vocab_of_counts
from transformer_xl.data.preparing import prepare
from transformer_xl.data.text import Span
from transformer_xl.interop.convert.torch_files import Instance
from transformer_xl.interop.convert.vocabularies import vocab_from_object

PARTS = st.lists(
    st.lists(st.text(alphabet="ab\u00e9\u6f22 \r", max_size=8), min_size=1).map("\n".join),
    min_size=1,
    max_size=9,
).map(lambda parts: [f"{part}\n" for part in parts])


def test_the_authors_bytes_keep_their_numbers_and_their_name():
    vocab = making_vocab.authors_bytes([98, 10, 97])
    assert (vocab.encode("a\nb"), vocab.decode([0, 1])) == ([1, 0], "ba")
    # What was prepared before is still found, and fits converted checkpoints.
    assert vocab.hash == "74cba45c2c644afd6261aca47207253e9cb1137a67c6811bfc227513e68922bc"
    theirs = {"vocab": Instance("vocabulary.Vocab", {"idx2sym": ["98", "97"]}), "dataset": "enwik8"}
    assert vocab_from_object(theirs, Path("here")).hash == vocab.hash


def counted(folder, kind, texts, name):
    paths = []
    for number, text in enumerate(texts):
        file = folder / f"{name}{number}"
        file.write_bytes(text.encode())
        paths.append(folder / f"{name}{number}.counts")
        count_part(kind, [Span(file, 0, len(text.encode()))], paths[-1])
    return paths


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    train=PARTS,
    held_out=PARTS,
    kind=st.sampled_from(["words", "chars"]),
    size=st.none() | st.integers(3, 6),
)
def test_counting_in_parts_is_counting_the_whole(tmp_path_factory, train, held_out, kind, size):
    folder = tmp_path_factory.mktemp("counts")
    known, others = (
        counted(folder, kind, texts, name) for texts, name in ((train, "t"), (held_out, "h"))
    )
    found = vocab_of_counts(kind, known, others, size)
    assert found.hash == train_vocab(kind, train, size, held_out).hash


@pytest.mark.parametrize("source", ["train", "all"])
def test_symbols_are_counted_where_the_settings_say(tmp_path, source):
    (tmp_path / "train").write_text("a a b\n")
    (tmp_path / "valid").write_text("c c c c\n")
    corpus = prepare(
        DataConfig(
            path=str(tmp_path / "train"),
            valid_path=str(tmp_path / "valid"),
            test_fraction=0,
            vocab="words",
            vocab_from=source,
            cache_dir=str(tmp_path / "cache"),
        )
    )
    first = {"train": ["a", "b", "<eos>", "<unk>"], "all": ["c", "a", "<eos>", "b"]}
    assert corpus.vocab.symbols == first[source]
