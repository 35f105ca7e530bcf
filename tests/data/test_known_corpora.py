"""Real data: the counts that are published, and the folders as people have them."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from transformer_xl.data.catalogue import KNOWN_CORPORA
from transformer_xl.data.preparing import prepare
from transformer_xl.data.text import SPLITS
from transformer_xl.interop.convert.torch_files import Instance
from transformer_xl.interop.convert.vocabularies import vocab_from_object

FOLDERS = {
    "tiny-shakespeare": "tinyshakespeare",
    "ptb-word": "ptb",
    "ptb-char": "ptb",
}


@pytest.fixture
def known(shared):
    """Prepares a corpus with its common settings from the real files; `known.said` is heard."""

    def run(name, **settings):
        run.said = []
        path = str(shared / "data" / FOLDERS.get(name, name))
        common = KNOWN_CORPORA[name].settings
        config = replace(common, **{"name": name, "path": path, **settings})
        return prepare(config, run.said.append)

    return run


def counts(corpus):
    return (len(corpus.vocab), *map(corpus.n_tokens, SPLITS))


def warnings(known):
    return [line for line in known.said if line.startswith("warning")]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("tiny-shakespeare", (65, 1_003_854, 111_540, 0)),
        ("ptb-word", (10_000, 929_589, 73_760, 82_430)),
        pytest.param("ptb-char", (50, 5_017_482, 393_042, 442_423), marks=pytest.mark.slow),
        pytest.param("wikitext-2", (33_278, 2_088_628, 217_646, 245_569), marks=pytest.mark.slow),
    ],
)
def test_symbols_are_as_many_as_published(known, name, published):
    corpus = known(name)
    assert counts(corpus) == published
    assert warnings(known) == []


@pytest.mark.slow
def test_of_wikitext_103_the_held_out_parts_are_read_without_the_rest(known):
    corpus = known("wikitext-103")
    assert counts(corpus)[1:] == (0, 217_646, 245_569)
    (warning,) = warnings(known)
    assert "holds no wiki.train.tokens: there is no training text" in warning
    with pytest.raises(ValueError, match="no train split"):
        corpus.split("train")


def test_wikitext_103_counts_its_training_text_alone(known, shared, tmp_path):
    for part in ("valid", "test"):
        shutil.copy(shared / "data" / "wikitext-103" / f"{part}.txt", tmp_path)
    (tmp_path / "train.txt").write_text(" = Title = \n The cat sat . \n")
    corpus = known("wikitext-103", path=str(tmp_path))
    assert corpus.vocab.symbols == ["=", "<eos>", "Title", "The", "cat", "sat", ".", "<unk>"]
    assert counts(corpus)[1:] == (9, 217_646, 245_569)


def test_a_part_of_enwik8_is_split_by_the_same_shares(known, shared):
    data = (shared / "data" / "enwik8" / "enwik8.first4154327").read_bytes()
    corpus = known("enwik8")
    assert counts(corpus) == (256, 3_738_894, 207_716, 207_717)
    assert b"".join(corpus.raw(name) for name in SPLITS) == data
    (warning,) = warnings(known)
    assert "is a part of enwik8, 4,154,327 of 100,000,000 bytes" in warning


@pytest.mark.slow
def test_the_authors_enwik8_has_no_line_breaks_and_their_numbers(known, shared):
    data = (shared / "data" / "enwik8" / "enwik8.first4154327").read_bytes()
    corpus = known("enwik8", vocab="authors-bytes")
    parts = [data[:3_738_894], data[3_738_894:3_946_610], data[3_946_610:]]
    assert [corpus.raw(name) for name in SPLITS] == [part.replace(b"\n", b"") for part in parts]
    assert len(corpus.vocab) == len(set(data)) - 1
    # As their code counts: most frequent first, equal ones as they come.
    seen: dict[int, int] = {}
    for byte in data.replace(b"\n", b""):
        seen[byte] = seen.get(byte, 0) + 1
    names = [str(byte) for byte in sorted(seen, key=seen.__getitem__, reverse=True)]
    theirs = Instance("utils.vocabulary.Vocab", {"idx2sym": names, "lower_case": False})
    # So a converted checkpoint of theirs can be evaluated on this corpus.
    assert corpus.vocab.hash == vocab_from_object(theirs, Path("vocab"), dataset="enwik8").hash
    assert corpus.vocab.encode("a\nb") == corpus.vocab.encode("ab")


@pytest.mark.slow
def test_a_part_of_text8_has_27_characters(known):
    assert counts(known("text8")) == (27, 6_190_042, 343_891, 343_892)


@pytest.mark.slow
def test_of_lm1b_validation_and_test_are_apart(known, tmp_path):
    corpus = known("lm1b")
    assert counts(corpus)[1:] == (0, 322_706, 318_286)
    assert corpus.split("valid").tolist().count(corpus.vocab.eos_id) == 12_216
    assert corpus.split("test").tolist().count(corpus.vocab.eos_id) == 12_105
    # As the archive is laid out.
    top = tmp_path / "1-billion-word-language-modeling-benchmark-r13output"
    for kind, n in (("training", 3), ("heldout", 4)):
        folder = top / f"{kind}-monolingual.tokenized.shuffled"
        folder.mkdir(parents=True)
        for number in range(n):
            stem = "heldout-" if kind == "heldout" else ""
            of = "00050" if kind == "heldout" else "00100"
            (folder / f"news.en{'.' if stem else '-'}{stem}{number:05}-of-{of}").write_text(
                f"{kind} shard {number}\n"
            )
    for path in (tmp_path, top):
        corpus = known("lm1b", path=str(path))
        text = {name: corpus.vocab.decode(corpus.split(name)) for name in SPLITS}
        assert text["train"] == "".join(f"training shard {n}\n" for n in range(3))
        assert text["test"] == "<unk> shard 0\n"
        assert text["valid"] == "<unk> shard 1\n"


@pytest.mark.slow
def test_chorales_are_integers_with_an_end_for_each(known):
    corpus = known("jsb-chorales")
    assert (len(corpus.vocab), corpus.vocab.kind) == (48, "integers")
    ends = [corpus.split(name).tolist().count(corpus.vocab.eos_id) for name in SPLITS]
    assert ends == [229, 76, 77]
    assert [len(corpus.split(name)) for name in SPLITS] == [221_141, 73_708, 75_677]
    text = corpus.vocab.decode(corpus.split("test")[:16])
    assert text == "65 60 57 53 65 60 57 53 65 60 57 53 65 60 57 53"
    assert corpus.vocab.encode(text) == corpus.split("test")[:16].tolist()
    assert corpus.vocab.symbols[:2] == ["-1", "36"]
