import json
import os
import tracemalloc

import numpy as np
import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data import corpus as corpus_module
from transformer_xl.data import text as text_module
from transformer_xl.data.corpus import VERIFIED, Corpus
from transformer_xl.data.locking import LOCK
from transformer_xl.data.preparing import prepare
from transformer_xl.errors import DataError

SAMPLE = "To be, or not to be:\n    that is the question — naïve?\n" * 40
SPLITS = ("train", "valid", "test")


@pytest.fixture
def sample(tmp_path):
    (tmp_path / "sample.txt").write_text(SAMPLE, encoding="utf-8")
    return {"path": str(tmp_path / "sample.txt"), "cache_dir": str(tmp_path / "cache")}


@pytest.mark.parametrize("vocab", ["bytes", "chars", "bpe"])
def test_the_splits_together_are_the_text(sample, vocab):
    size = 300 if vocab in ("words", "bpe") else None
    corpus = prepare(DataConfig(**sample, vocab=vocab, vocab_size=size))
    parts = [corpus.raw(name) for name in SPLITS]
    assert b"".join(parts) == SAMPLE.encode()
    for name, part in zip(SPLITS, parts, strict=True):
        tokens = corpus.split(name)
        assert isinstance(tokens, np.memmap)
        assert tokens.dtype == np.uint16
        assert len(tokens) == corpus.n_tokens(name)
        assert len(part) == corpus.n_bytes(name)
        assert corpus.vocab.token_bytes[tokens].sum() == len(part)


@pytest.mark.slow
def test_more_than_65536_symbols_take_32_bits(tmp_path):
    (tmp_path / "numbers.txt").write_text("3 69998 0\n")
    share = {"valid_fraction": 0.0, "test_fraction": 0.0}
    path = str(tmp_path / "numbers.txt")
    corpus = prepare(DataConfig(path=path, vocab="integers", vocab_size=70_000, **share))
    assert corpus.split("train").dtype == np.uint32
    assert corpus.split("train").tolist() == [3, 69_998, 0, corpus.vocab.eos_id]


def test_names_of_files_may_have_any_bytes(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / os.fsdecode(b"a\xff.txt")).write_text("text " * 100)
    (folder / "b.txt").write_text("more " * 100)
    settings = DataConfig(path=str(folder), cache_dir=str(tmp_path / "cache"))
    assert prepare(settings).checksums == prepare(settings).checksums


def test_preparing_twice_is_preparing_once(sample):
    said = []
    first = prepare(DataConfig(**sample), said.append)
    assert said
    said.clear()
    second = prepare(DataConfig(**sample), said.append)
    assert (second.folder, said) == (first.folder, [])
    # Where a text begins anew changes none of its symbols.
    third = prepare(DataConfig(**sample, reset_at="\n"), said.append)
    assert (third.folder, said) == (first.folder, [])


def test_checksums_are_those_of_what_was_read_wherever_it_is(sample, tmp_path):
    here = prepare(DataConfig(**sample)).checksums
    assert [*here] == ["vocab", "train", "valid", "test"]
    moved = tmp_path / "moved.txt"
    moved.write_text(SAMPLE, encoding="utf-8")
    assert prepare(DataConfig(**{**sample, "path": str(moved)})).checksums == here
    moved.write_text(SAMPLE.swapcase(), encoding="utf-8")
    changed = prepare(DataConfig(**{**sample, "path": str(moved)})).checksums
    assert (changed["vocab"], changed["train"] != here["train"]) == (here["vocab"], True)


def test_the_cache_can_be_named_by_a_variable(sample, tmp_path, monkeypatch):
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "elsewhere"))
    corpus = prepare(DataConfig(path=sample["path"]))
    assert corpus.folder.parent == tmp_path / "elsewhere"


def test_an_empty_split_is_named_when_it_is_read(sample):
    corpus = prepare(DataConfig(**sample, test_fraction=0.0))
    assert (corpus.n_tokens("test"), corpus.n_bytes("test")) == (0, 0)
    with pytest.raises(ValueError, match=r"no test split.*data\.test_fraction"):
        corpus.split("test")
    with pytest.raises(ValueError, match="'dev' is none of train, valid, test"):
        corpus.split("dev")


@pytest.mark.parametrize("text", ["", "x"])
def test_a_text_too_short_to_train_on_is_refused(tmp_path, text):
    (tmp_path / "short.txt").write_text(text)
    with pytest.raises(ValueError, match="there is no training text"):
        prepare(DataConfig(path=str(tmp_path / "short.txt")))


def test_a_file_that_is_no_text_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"abc\xe9")
    cache = tmp_path / "cache"
    config = DataConfig(path=str(tmp_path / "latin.txt"), vocab="chars", cache_dir=str(cache))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: byte 3 is 0xe9"):
        prepare(config)
    assert [x.name for x in cache.iterdir()] == [".locks"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("train.bin", lambda data: data[:-2]),
        ("train.bin", lambda data: bytes([data[0] ^ 1]) + data[1:]),
        ("valid.bin", lambda data: None),
        ("manifest.json", lambda data: data[:100]),
        ("manifest.json", lambda data: b"[]"),
        ("manifest.json", lambda data: data.replace(b'"hash": "', b'"hash": "0')),
        ("tokenizer.json", lambda data: data[:-10]),
        ("vocab.json", lambda data: None),
    ],
)
def test_a_damaged_corpus_is_named_with_the_remedy(sample, file, damage):
    folder = prepare(DataConfig(**sample)).folder
    data = damage((folder / file).read_bytes())
    (folder / file).unlink() if data is None else (folder / file).write_bytes(data)
    with pytest.raises(DataError, match=rf"{file}.*Delete the folder .* and prepare it again"):
        prepare(DataConfig(**sample))


def test_a_corpus_of_a_newer_version_is_refused(sample):
    folder = prepare(DataConfig(**sample)).folder
    # Whatever else has changed.
    (folder / "manifest.json").write_text(json.dumps({"format_version": 99, "dtype": "uint8"}))
    with pytest.raises(DataError, match="update transformer_xl"):
        Corpus(folder)


def test_a_cache_that_cannot_be_written_is_named(sample, tmp_path):
    (tmp_path / "file").write_text("no folder")
    config = DataConfig(path=sample["path"], cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cannot write to the cache.*--data\.cache_dir"):
        prepare(config)


@pytest.fixture
def hashed(monkeypatch):
    """The names of the files whose checksums were computed."""
    names = []
    checksum = corpus_module.checksum
    monkeypatch.setattr(
        corpus_module, "checksum", lambda path: (names.append(path.name), checksum(path))[1]
    )
    return names


def test_checksums_are_compared_once_until_a_file_changes(sample, hashed):
    folder = prepare(DataConfig(**sample)).folder
    hashed.clear()
    (folder / VERIFIED).unlink()
    prepare(DataConfig(**sample))
    assert sorted(hashed) == ["test.bin", "train.bin", "valid.bin"]
    for _ in range(2):
        prepare(DataConfig(**sample))
    prepare(DataConfig(**sample, verify="never"))
    assert len(hashed) == 3
    os.utime(folder / "train.bin", ns=(0, 1))
    prepare(DataConfig(**sample))
    assert len(hashed) == 6
    prepare(DataConfig(**sample))
    assert len(hashed) == 6
    prepare(DataConfig(**sample, verify="always"))
    assert len(hashed) == 9
    assert not (folder / LOCK).exists()


def test_where_nothing_can_be_written_checksums_are_compared_each_time(sample, hashed, monkeypatch):
    folder = prepare(DataConfig(**sample)).folder
    (folder / VERIFIED).unlink()
    hashed.clear()

    def refuse(*arguments):
        raise OSError("a file system to be read only")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    monkeypatch.setattr(corpus_module, "replace_file", refuse)
    for _ in range(2):
        prepare(DataConfig(**sample))
    assert len(hashed) == 6
    assert sorted(path.name for path in folder.iterdir()) == [
        *("manifest.json", "test.bin", "tokenizer.json", "train.bin", "valid.bin", "vocab.json")
    ]


def peak_of_preparing(folder, n_repeats, **settings):
    """Prepare a text of so many copies of the sample; return its bytes and the peak of memory."""
    path = folder / f"{n_repeats}.txt"
    path.write_text(SAMPLE * n_repeats, encoding="utf-8")
    # What was there before is not traced.
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    # Comparing checksums takes a buffer that would hide what grows.
    config = DataConfig(path=str(path), cache_dir=str(folder), verify="never", **settings)
    prepare(config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return path.stat().st_size, peak - before


@pytest.mark.parametrize(
    "vocab",
    ["bytes", *(pytest.param(x, marks=pytest.mark.slow) for x in ("chars", "words")), "bpe"],
)
def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch, vocab):
    # Learning byte-pair units may hold 256 blocks at once; both texts have more of them.
    monkeypatch.setattr(text_module, "BLOCK_BYTES", 1 << 8)
    settings = {"vocab": vocab} | ({"vocab_size": 300} if vocab in ("words", "bpe") else {})
    # What is imported and remembered at the first time belongs to no text.
    peak_of_preparing(tmp_path, 5, **settings)

    def growth(attempt):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        short, short_peak = peak_of_preparing(folder, 30, **settings)
        long, long_peak = peak_of_preparing(folder, 90, **settings)
        assert long - short > 125_000
        return (long_peak - short_peak) / (long - short)

    # Other threads are traced, too: what other tests left running may allocate, but not each time.
    assert any(growth(attempt) < 0.25 for attempt in range(3))
