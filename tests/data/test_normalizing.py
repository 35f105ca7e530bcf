"""Text of any platform is the text with LF line ends, in UTF-8."""

import codecs
import gzip
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.config import DataConfig
from transformer_xl.data import train_vocab
from transformer_xl.data.normalizing import Normalizer
from transformer_xl.data.preparing import prepare

LINES = "to be,\nor not\n\nto be — naïve?\n"


def read(blocks):
    normalizer = Normalizer("a.txt", "--raw")
    return b"".join(normalizer.blocks(blocks)), dict(+normalizer.changes)


def blocks_of(data, draw):
    blocks = []
    while data:
        size = draw.choice((0, 1, 1, 2, 3, 50))
        blocks.append(data[:size])
        data = data[size:]
    return blocks


@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, b""], ids=repr)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=repr)
def test_a_text_is_the_same_whatever_its_line_ends_and_mark(mark, end):
    found, changes = read([mark + LINES.replace("\n", end).encode()])
    assert found == LINES.encode()
    kind = {"\r\n": "CR LF", "\r": "CR"}.get(end)
    assert {x: n for x, n in changes.items() if x.startswith("CR")} == ({kind: 4} if kind else {})
    assert bool(changes) == bool(mark or kind)


@given(
    st.text(alphabet="ab\r\n\ufeff\x0c\x85\u2028é", max_size=20),
    st.sampled_from([codecs.BOM_UTF8, b""]),
    st.integers(0, 1000),
)
def test_what_is_read_does_not_depend_on_the_blocks(text, mark, seed):
    data = mark + text.encode()
    whole = read([data])
    assert read(blocks_of(data, random.Random(seed))) == whole
    # All else is kept.
    text = text if mark else text.removeprefix("\ufeff")
    assert whole[0].decode() == text.replace("\r\n", "\n").replace("\r", "\n")


def test_a_prompt_is_normalized_as_the_text_was():
    for kind in ("bytes", "chars"):
        vocab = train_vocab(kind, [LINES])
        for text in (LINES, "\ufeff" + LINES.replace("\n", "\r\n"), LINES.replace("\n", "\r")):
            assert vocab.normalized(text)[0] == LINES
        # It is text already: no UTF-16, no bytes of another encoding.
        for text in ("a\0b\0", "\udcff\udcfea\udc00", "\ud800", ""):
            assert vocab.normalized(text) == (text, {})
    # One with CR is of raw text.
    vocab = train_vocab("chars", [LINES, "\r"])
    assert vocab.normalized("a\r\n") == ("a\r\n", {})


def test_changes_are_described_with_counts():
    assert Normalizer.describe(Normalizer("a").changes) == ""
    normalizer = Normalizer("a")
    normalizer.push(b"a\r\n" * 1200 + b"b\r")
    assert Normalizer.describe(normalizer.changes) == "1,200 CR LF to LF, 1 CR to LF"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("ab".encode("utf-16-le"), "byte 1 is zero.*iconv -f UTF-16 "),
        ("ab".encode("utf-16-be"), "byte 0 is zero"),
        (codecs.BOM_UTF32_LE + "ab".encode("utf-32-le"), "byte 0 is 0xff, as in UTF-16"),
        (codecs.BOM_UTF32_BE, "byte 0 is zero"),
        (codecs.BOM_UTF16_LE + "漢字".encode("utf-16-le"), "byte 0 is 0xff, as in UTF-16"),
        (codecs.BOM_UTF16_BE + "漢字".encode("utf-16-be"), "byte 0 is 0xfe, as in UTF-16"),
        (codecs.BOM_UTF8 + b"a\0", "byte 4 is zero"),
    ],
)
def test_zero_bytes_and_utf16_are_located(data, message):
    for seed in range(5):
        with pytest.raises(ValueError, match=rf"a\.txt: {message}.*; --raw"):
            read(blocks_of(data, random.Random(seed)))


@pytest.fixture
def made(tmp_path):
    """Prepare the text of files, whole."""

    def make(files, vocab="bytes", **settings):
        tmp_path.joinpath("texts").mkdir(exist_ok=True)
        for name, data in files.items():
            path = tmp_path / "texts" / name
            # One that is written anew is another one.
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
        config = DataConfig(
            path=":".join(str(tmp_path / "texts" / x) for x in files),
            vocab=vocab,
            cache_dir=str(tmp_path / "cache"),
            **{"valid_fraction": 0.0, "test_fraction": 0.0} | settings,
        )
        said = []
        corpus = prepare(config, said.append)
        return corpus, [line for line in said if "normalized" in line]

    return make


@pytest.mark.parametrize("vocab", ["bytes", "chars", "bpe"])
def test_a_line_ends_with_its_file(made, vocab):
    corpus, said = made({"a.txt": b"one two", "b.txt": b"", "c.txt": b"three four"}, vocab)
    assert corpus.raw("train") == b"one two\nthree four"
    assert said == [
        "normalized the text of 1 of 3 files: 1 line end added between files; --data.raw True "
        "reads every byte as it is"
    ]
    assert corpus.manifest.splits.train.text_files == ["a.txt", "c.txt"]


@pytest.mark.parametrize("vocab", ["bytes", "words"])
def test_a_corpus_is_the_same_whatever_platform_its_files_are_from(made, vocab):
    windows = LINES.replace("\n", "\r\n").encode()
    files = {
        "a.txt": windows,
        "b.txt": codecs.BOM_UTF8 + windows,
        "c.txt": LINES.encode(),
        "d.txt": LINES.replace("\n", "\r").encode(),
        "e.txt.gz": gzip.compress(windows),
    }
    corpus, said = made(files, vocab)
    plain, nothing = made({f"{name[0]}-plain.txt": LINES.encode() for name in files}, vocab)
    assert corpus.split("train").tolist() == plain.split("train").tolist()
    assert len(said) == 1
    assert nothing == []


def test_a_raw_text_keeps_every_byte(made):
    files = {"a.bin": b"\xef\xbb\xbfa\0\r\nb\r", "b.bin": b"c"}
    corpus, said = made(files, raw=True)
    assert (corpus.raw("train"), said) == (b"".join(files.values()), [])
    with pytest.raises(ValueError, match=r"a\.bin: byte 4 is zero.*--data\.raw True"):
        made(files)


def test_other_line_ends_of_unicode_and_bytes_of_other_encodings_are_kept(made):
    for number, data in enumerate(("a\x0cb\x85c\u2028d\n".encode(), b"voil\xe0\n")):
        corpus, said = made({f"{number}.txt": data})
        assert (corpus.raw("train"), said) == (data, [])


def test_a_corpus_that_is_found_again_says_what_was_normalized(made):
    normal, windows = {"a.txt": LINES.encode()}, {"b.txt": LINES.replace("\n", "\r\n").encode()}
    for files in (normal, windows):
        raw, _ = made(files, raw=True)
        corpus, _ = made(files)
        assert corpus.folder != raw.folder
        assert corpus.raw("train") == LINES.encode()
        again, said = made(files)
        assert again.folder == corpus.folder
        is_said = ["normalized the text: 4 CR LF to LF; --data.raw True reads every byte as it is"]
        assert said == ([] if files is normal else is_said)
        # The raw one is still there.
        assert made(files, raw=True)[0].raw("train") == next(iter(files.values()))


def test_errors_name_the_file_and_its_bytes_and_not_the_copy(made, tmp_path):
    path = tmp_path / "texts" / "a.txt"
    with pytest.raises(ValueError, match=rf"^{path} is not UTF-8 text: byte 3 is 0xff"):
        made({"a.txt": b"a\r\n\xff"}, "chars")
    with pytest.raises(ValueError, match=rf"^{path}: .*not in the vocabulary.*line 3"):
        made({"a.txt": b"a\r\n" * 2 + "ß\r\n".encode()}, "chars", tokenizer="shakespeare")


def test_a_file_of_a_byte_order_mark_is_empty(made):
    with pytest.raises(ValueError, match="there is no training text"):
        made({"a.txt": codecs.BOM_UTF8})
