"""Texts and corpora at URLs: on a web server of this machine, and in a store in memory."""

import os
import shutil
import sys

import numpy as np
import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data.finding import find_text
from transformer_xl.data.preparing import prepare
from transformer_xl.data.store import local_copy
from transformer_xl.errors import DataError, InputError

SPLITS = ("train", "valid", "test")
TEXTS = {f"{name}.txt": f"the text of {name}\n" * 50 for name in "abc"}


@pytest.fixture
def texts(web):
    folder = web.folder / "texts"
    for name, text in {**TEXTS, "sub/d.txt": "deep\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "image.bin").write_bytes(b"\0\xff")
    return folder


@pytest.fixture
def copy_of(tmp_path):
    """Makes a local copy; `copy_of.lines` are those that were said."""

    def run(url):
        return local_copy(url, tmp_path / "downloads", run.lines.append)

    run.lines = []
    return run


def names_below(folder):
    return sorted(str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file())


def test_objects_patterns_and_folders_are_copied(web, texts, bucket, put, copy_of):
    for name in ("a.txt", "b.txt", "c.txt", "image.bin", "sub/d.txt"):
        put(f"texts/{name}", (texts / name).read_bytes())
    for url in (f"{web.url}/texts", f"{bucket}/texts"):
        assert copy_of(f"{url}/a.txt").read_text() == TEXTS["a.txt"]
        assert names_below(copy_of(f"{url}/*.txt")) == ["a.txt", "b.txt", "c.txt"]
        everything = ["a.txt", "b.txt", "c.txt", "image.bin", "sub/d.txt"]
        assert names_below(copy_of(f"{url}/")) == everything
    assert names_below(copy_of(f"{bucket}/texts/**/*.txt"))[-1] == "sub/d.txt"
    assert copy_of(f"{web.url}/texts/a.txt?signature=x").name == "a.txt"


def test_what_is_there_in_this_version_is_not_downloaded_again(web, texts, copy_of):
    first = copy_of(f"{web.url}/texts/*.txt")
    web.sent.clear()
    assert copy_of(f"{web.url}/texts/*.txt") == first
    # A download that was interrupted.
    (first / "b.txt").unlink()
    assert copy_of(f"{web.url}/texts/*.txt") == first
    assert [name for name, n in web.sent.items() if n and name[-4:] == ".txt"] == ["texts/b.txt"]
    (texts / "b.txt").write_text("other")
    assert (copy_of(f"{web.url}/texts/*.txt") / "b.txt").read_text() == "other"
    assert (first / "b.txt").read_text() == TEXTS["b.txt"]


def test_what_changes_while_it_is_read_is_refused(web, texts, copy_of, tmp_path):
    web.on_get = lambda name: (texts / "a.txt").write_text("changed")
    with pytest.raises(OSError, match=r"a\.txt changed while it was read; try again"):
        copy_of(f"{web.url}/texts/a.txt")
    assert not list(tmp_path.rglob("downloads/objects/*/*"))


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (404, FileNotFoundError, "there is nothing at http.*a.txt"),
        (403, OSError, "cannot read http.*a.txt: 403.*Credentials are taken from"),
        (500, OSError, "cannot read http.*500"),
    ],
)
def test_what_a_server_refuses_is_named(web, copy_of, status, error, message):
    # fsspec requests the head, and then the whole.
    web.statuses = [status] * 2
    with pytest.raises(error, match=message):
        copy_of(f"{web.url}/a.txt")


def test_what_cannot_be_opened_is_named_with_the_remedy(bucket, put, copy_of, monkeypatch):
    with pytest.raises(InputError, match="Protocol not known: nope; there are s3, gs"):
        copy_of("nope://bucket/a.txt")
    with pytest.raises(InputError, match="chains file systems"):
        copy_of("zip://*.txt::https://example.org/a.zip")
    put("a.txt", b"text")
    with pytest.raises(FileNotFoundError, match=r"nothing at .*\*\.rst"):
        copy_of(f"{bucket}/*.rst")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError, match=r"s3://bucket/a.txt: Install s3fs"):
        copy_of("s3://bucket/a.txt")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(DataError, match="needs the package fsspec: pip install fsspec"):
        copy_of(f"{bucket}/a.txt")


def test_a_name_that_leads_out_of_the_folder_is_refused(copy_of, monkeypatch, bucket, put):
    from fsspec.implementations.memory import MemoryFileSystem

    put("texts/a.txt", b"text")
    about = {"size": 4, "type": "file"}
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "isdir", lambda self, path: True)
        patch.setattr(MemoryFileSystem, "find", lambda self, path: [f"{path}/../../a.txt"])
        patch.setattr(MemoryFileSystem, "info", lambda self, path: about)
        with pytest.raises(InputError, match="has a name that leads out of the folder"):
            copy_of(f"{bucket}/texts/")


def find(tmp_path, path, **settings):
    return find_text(DataConfig(path=path, **settings), tmp_path / "downloads", lambda line: None)


def test_urls_and_paths_are_divided_by_colons(web, bucket, put, tmp_path):
    (web.folder / "w.txt").write_text("web")
    here = tmp_path / "here.txt"
    here.write_text("here")
    # Both a port and a name of an object have a colon.
    put("texts/12:30.txt", b"noon")
    parts = (f"{web.url}/w.txt", f"{bucket}/texts/12:30.txt", str(here), f"file://{here}")
    files = find(tmp_path, os.pathsep.join(parts))
    assert [path.name for path in files.train] == ["w.txt", "12:30.txt", "here.txt"]
    assert find(tmp_path, f"file://{here}").train == (here,)
    assert find(tmp_path, f"{here}{os.pathsep}{web.url}/w.txt").train[0] == here


def test_a_url_is_no_copy_of_a_known_corpus(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path takes a copy on this machine"):
        find(tmp_path, "https://example.org/ptb/", name="ptb-word")


@pytest.mark.parametrize("path", ["texts/*.txt", "texts/"])
def test_a_text_at_a_url_is_the_text_in_a_folder(web, texts, tmp_path, path):
    shutil.rmtree(texts / "sub")
    settings = {"vocab": "words", "split_by": "file", "valid_fraction": 0.3, "test_fraction": 0.3}
    corpora = [
        prepare(DataConfig(path=x, cache_dir=str(tmp_path / "cache"), **settings))
        for x in (f"{web.url}/{path}", str(texts))
    ]
    assert corpora[0].manifest.splits == corpora[1].manifest.splits


def test_a_prepared_corpus_at_a_url_is_the_corpus(web, tmp_path):
    (tmp_path / "text.txt").write_text("What light through yonder window breaks?\n" * 400)
    corpus = prepare(DataConfig(path=str(tmp_path / "text.txt"), vocab="chars"))
    shutil.copytree(corpus.folder, web.folder / "corpus")

    def opened(**settings):
        settings = {"vocab": "chars", "corpus": f"{web.url}/corpus", **settings}
        return prepare(DataConfig(cache_dir=str(tmp_path / "cache"), **settings))

    copy = opened()
    assert copy.checksums == corpus.checksums
    for name in SPLITS:
        assert np.array_equal(copy.split(name), corpus.split(name))
    with pytest.raises(ValueError, match=r"data\.vocab=bytes, but data\.corpus=.* has chars: set"):
        opened(vocab="bytes")
    with pytest.raises(ValueError, match=r"data\.name='enwik8', but .* was made with '':"):
        opened(name="enwik8")
    with pytest.raises(FileNotFoundError, match=r"nothing at http.*/nowhere"):
        opened(corpus=f"{web.url}/nowhere")
    data = (web.folder / "corpus" / "train.bin").read_bytes()
    (web.folder / "corpus" / "train.bin").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(DataError, match=r"train\.bin is damaged: .*checksum"):
        opened()


def test_a_prepared_corpus_is_no_text_and_may_be_anywhere_on_the_disk(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    corpus = prepare(DataConfig(path=str(tmp_path / "a.txt")))
    with pytest.raises(ValueError, match=r"is a prepared corpus, not a text: .*--data\.corpus"):
        find(tmp_path, str(corpus.folder))
    shutil.copytree(corpus.folder, tmp_path / "shared")
    for place in (str(tmp_path / "shared"), f"file://{tmp_path / 'shared'}"):
        assert prepare(DataConfig(corpus=place)).folder == tmp_path / "shared"
