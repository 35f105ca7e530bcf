import bz2
import gzip
import json
import lzma

import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data.preparing import prepare

TEXT = "To be, or not to be:\n    that is the question — naïve?\n" * 40


def whole(path, cache, **settings):
    config = DataConfig(
        path=str(path), cache_dir=str(cache), valid_fraction=0, test_fraction=0, **settings
    )
    return prepare(config)


def text_of(corpus):
    return corpus.vocab.decode(corpus.split("train"))


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
def test_compressed_text_is_the_text(tmp_path, suffix, compress):
    (tmp_path / f"text.txt{suffix}").write_bytes(compress(TEXT.encode()))
    corpus = whole(tmp_path / f"text.txt{suffix}", tmp_path / "cache")
    assert corpus.raw("train") == TEXT.encode()
    assert corpus.manifest.splits.train.text_files == [f"text.txt{suffix}"]
    # What was unpacked served the building only.
    names = {path.name for path in corpus.folder.iterdir()}
    bins = {"train.bin", "valid.bin", "test.bin"}
    assert names == {*bins, "manifest.json", "tokenizer.json", "verified.json", "vocab.json"}


@pytest.mark.parametrize(
    "data", [b"", gzip.compress(TEXT.encode())[:-20], b"no gzip at all"], ids=len
)
def test_a_damaged_compressed_file_is_an_error_and_leaves_nothing(tmp_path, data):
    (tmp_path / "text.gz").write_bytes(data)
    message = r"text\.gz is damaged" if data else "there is no training text"
    with pytest.raises(ValueError, match=message):
        whole(tmp_path / "text.gz", tmp_path / "cache", vocab="words")
    assert not list((tmp_path / "cache").glob("text*"))


def test_zstd_with_its_package(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    data = zstandard.compress(lines({"text": TEXT}, {"text": "more"}).encode())
    (tmp_path / "a.jsonl.zst").write_bytes(data)
    assert text_of(whole(tmp_path / "a.jsonl.zst", tmp_path / "cache")) == TEXT + "more\n"
    (tmp_path / "b.zst").write_bytes(b"no zstd")
    with pytest.raises(ValueError, match=r"b\.zst is damaged"):
        whole(tmp_path / "b.zst", tmp_path / "cache")


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def integers(path, cache, **settings):
    return whole(path, cache, vocab="integers", **settings)


def test_integers_come_from_text_and_json_alike(tmp_path):
    sequences = [[3, -1, 12], [0], [12, 12, 7]]
    (tmp_path / "a.txt").write_text("3 -1  12\n0\n12 12 7")
    (tmp_path / "b.json").write_text(json.dumps(sequences))
    (tmp_path / "c.json").write_text(json.dumps({"train": sequences}))
    (tmp_path / "d.json").write_text(json.dumps([[[3, -1], [12]], [[0]], [[12], [12, 7]]]))
    for name in "abcd":
        (path,) = tmp_path.glob(f"{name}.*")
        corpus = integers(path, tmp_path / "cache")
        assert corpus.vocab.symbols == ["-1", "0", "3", "7", "12", "<eos>"]
        assert text_of(corpus) == "3 -1 12\n0\n12 12 7\n"
        assert corpus.vocab.encode("12 7\n") == [4, 3, corpus.vocab.eos_id]
        assert corpus.vocab.token_bytes is None


def test_json_may_bring_its_held_out_parts(tmp_path):
    parts = {"train": [[1, 2]], "valid": [[2, 3]], "test": [[1]], "about": {"of": 3}}
    (tmp_path / "a.json").write_text(json.dumps(parts))
    config = DataConfig(
        path=str(tmp_path / "a.json"), vocab="integers", cache_dir=str(tmp_path / "c")
    )
    corpus = prepare(config)
    texts = [corpus.vocab.decode(corpus.split(name)) for name in ("train", "valid", "test")]
    assert texts == ["1 2\n", "2 3\n", "1\n"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"1 two 3", "'two' is no integer"),
        ("a.txt", b"1 007", "'007' is no integer"),
        ("a.txt", b"-0", "'-0' is no integer"),
        ("a.json", b"[[1, 2.5]]", r"got `float` - at `\$\[0\]\[1\]`"),
        ("a.json", b'[[1, "x"]]', "got `str`"),
        ("a.json", b"[[1, true]]", "got `bool`"),
        ("a.json", b"{", "truncated"),
        ("a.json", b'"x"', "holds no sequences of integers"),
    ],
)
def test_what_is_no_integer_is_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        integers(tmp_path / name, tmp_path / "cache")
