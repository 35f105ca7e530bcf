import os
import sys

import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data.finding import find_text
from transformer_xl.data.preparing import prepare
from transformer_xl.data.store import describe, is_url, list_objects, open_store
from transformer_xl.data.unpacking import MissingPackageError
from transformer_xl.errors import InputError


@pytest.fixture
def say():
    """Takes lines; `say.lines` are those that were said."""

    def take(line):
        take.lines.append(line)

    take.lines = []
    return take


def names(objects):
    return [x.name for x in objects]


def fill(put):
    for name in ("b.txt", "a.txt", "sub/c.txt", "image.png", ".hidden/x.txt"):
        put(f"texts/{name}", name.encode())


def test_a_folder_is_listed_sorted_with_its_subfolders(bucket, put, tmp_path, say):
    fill(put)
    found = list_objects(f"{bucket}/texts", tmp_path, say)
    assert names(found) == ["a.txt", "b.txt", "image.png", "sub/c.txt"]
    assert names(list_objects(f"{bucket}/texts/", tmp_path, say)) == names(found)
    assert [x.size for x in found] == [5, 5, 9, 9]
    assert all(x.in_folder and x.version and is_url(x.url) for x in found)
    assert describe(found[0].url).version == found[0].version


def test_a_pattern_takes_what_matches(bucket, put, tmp_path, say):
    fill(put)
    assert names(list_objects(f"{bucket}/texts/*.txt", tmp_path, say)) == ["a.txt", "b.txt"]
    deep = list_objects(f"{bucket}/texts/**/c*.txt", tmp_path, say)
    assert (names(deep), deep[0].in_folder) == (["sub/c.txt"], False)
    assert len(list_objects(f"{bucket}/texts/**/*.txt", tmp_path, say)) == 3
    hidden = list_objects(f"{bucket}/texts/.hidden/*.txt", tmp_path, say)
    assert names(hidden) == ["x.txt"]
    with pytest.raises(FileNotFoundError, match=r"nothing at .*\*\.rst"):
        list_objects(f"{bucket}/texts/*.rst", tmp_path, say)


def test_the_web_lists_what_its_pages_link_to(web, tmp_path, say):
    for name in ("a.txt", "b.txt", "sub/c.txt"):
        (web.folder / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (web.folder / "texts" / name).write_text(name)
    listed = list_objects(f"{web.url}/texts/", tmp_path, say)
    assert [(x.name, x.size) for x in listed] == [("a.txt", 5), ("b.txt", 5), ("sub/c.txt", 9)]
    pattern = list_objects(f"{web.url}/texts/*.txt", tmp_path, say)
    assert names(pattern) == ["a.txt", "b.txt"]
    (one,) = list_objects(f"{web.url}/texts/a.txt?signature=x", tmp_path, say)
    assert one.name == "a.txt"


def test_another_version_is_another_object_and_the_same_is_the_same(web, tmp_path, say):
    def seen():
        return list_objects(f"{web.url}/a.txt", tmp_path, say)[0].target(tmp_path)

    (web.folder / "a.txt").write_text("one")
    first = seen()
    assert seen() == first
    assert first.name.endswith("-a.txt")
    (web.folder / "a.txt").write_text("two")
    assert seen() != first


def test_a_server_that_tells_no_version_is_named(web, tmp_path, say):
    web.tells_version = False
    (web.folder / "a.txt").write_text("one")
    list_objects(f"{web.url}/a.txt", tmp_path, say)
    assert any("has no version: only another size" in line for line in say.lines)


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (404, FileNotFoundError, "there is nothing at http.*a.txt"),
        (403, PermissionError, "a.txt may not be read: 403.*Credentials are taken from"),
        (401, PermissionError, "may not be read"),
        (500, OSError, "cannot read http.*500"),
    ],
)
def test_what_a_server_refuses_is_said_in_our_words(web, tmp_path, say, status, error, message):
    # Fsspec asks twice, for the head and for the whole.
    web.statuses = [status] * 2
    with pytest.raises(error, match=message):
        list_objects(f"{web.url}/a.txt", tmp_path, say)


def test_without_a_network_what_was_there_the_last_time_is_taken(web, tmp_path, say):
    (web.folder / "a.txt").write_text("one")
    found = list_objects(f"{web.url}/a.txt", tmp_path, say)
    web.stop()
    assert list_objects(f"{web.url}/a.txt", tmp_path, say) == found
    assert "what was there the last time is taken" in say.lines[-1]
    with pytest.raises(OSError, match=r"cannot read http.*b\.txt: "):
        list_objects(f"{web.url}/b.txt", tmp_path, say)


@pytest.mark.parametrize("note", ["", "[1]", '[{"path": 1}]'])
def test_a_damaged_note_counts_for_nothing(web, tmp_path, say, note):
    (web.folder / "a.txt").write_text("one")
    list_objects(f"{web.url}/a.txt", tmp_path / "notes", say)
    next((tmp_path / "notes").iterdir()).write_text(note)
    web.stop()
    with pytest.raises(OSError, match="cannot read http"):
        list_objects(f"{web.url}/a.txt", tmp_path / "notes", say)


def test_what_cannot_be_opened_is_named_with_the_remedy(monkeypatch):
    with pytest.raises(InputError, match="Protocol not known: nope; there are s3, gs"):
        open_store("nope://bucket/a.txt")
    with pytest.raises(InputError, match="chains file systems"):
        open_store("zip://*.txt::https://example.org/a.zip")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingPackageError, match=r"s3://bucket/a.txt: Install s3fs"):
        open_store("s3://bucket/a.txt")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingPackageError, match="needs the package fsspec: pip install fsspec"):
        open_store("memory://bucket/a.txt")


def find(tmp_path, path, **settings):
    return find_text(DataConfig(path=path, **settings), tmp_path / "downloads", lambda line: None)


def test_urls_and_paths_are_divided_by_colons(web, bucket, put, tmp_path):
    fill(put)
    (web.folder / "w.txt").write_text("web")
    here = tmp_path / "here.txt"
    here.write_text("here")
    # Both a port and a name of an object have a colon.
    put("texts/12:30.txt", b"noon")
    parts = (f"{web.url}/w.txt", f"{bucket}/texts/12:30.txt", str(here), f"file://{here}")
    files = find(tmp_path, os.pathsep.join(parts))
    assert [files.name(path) for path in files.train] == ["w.txt", "12:30.txt", "here.txt"]
    assert find(tmp_path, f"file://{here}").train == (here,)
    assert find(tmp_path, f"{here}{os.pathsep}{web.url}/w.txt").train[0] == here


def test_what_is_held_out_by_url_is_not_trained_on(bucket, put, tmp_path):
    fill(put)
    files = find(tmp_path, f"{bucket}/texts/*.txt", valid_path=f"{bucket}/texts/b.txt")
    assert [files.name(path) for path in files.train] == ["a.txt"]
    assert [files.name(path) for path in files.valid or ()] == ["b.txt"]


def test_a_url_is_no_copy_of_a_known_corpus(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path takes a copy on this machine"):
        find(tmp_path, "https://example.org/ptb/", name="ptb-word")


def test_a_prepared_corpus_is_no_text(bucket, put, tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    corpus = prepare(DataConfig(path=str(tmp_path / "a.txt")))
    with pytest.raises(ValueError, match=r"is a prepared corpus, no text: .*--data\.corpus"):
        find(tmp_path, str(corpus.folder))
    for file in corpus.folder.iterdir():
        put(f"corpus/{file.name}", file.read_bytes())
    with pytest.raises(ValueError, match=r"is a prepared corpus, no text: .*--data\.corpus"):
        find(tmp_path, f"{bucket}/corpus")
