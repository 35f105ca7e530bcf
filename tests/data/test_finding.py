import gzip
import os
import shutil

import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data.finding import find_text, list_text
from transformer_xl.data.preparing import prepare


def find(tmp_path, said=None, **settings):
    say = (lambda line: None) if said is None else said.append
    return find_text(DataConfig(**settings), tmp_path / "downloads", say)


def list_folder(path, said=None):
    return list_text(path, DataConfig(), (lambda line: None) if said is None else said.append)


def test_a_path_that_is_wrong_for_a_known_corpus_is_told_what_helps(tmp_path):
    nowhere = tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError) as caught:
        find(tmp_path, name="tiny-shakespeare", path=str(nowhere))
    assert str(caught.value).startswith(f"there is no file or folder {nowhere}: ")
    assert "input.txt or a folder with it" in str(caught.value)
    assert str(caught.value).count("https://") == 1
    with pytest.raises(FileNotFoundError, match=r"holds no input\.txt.*--data\.name ''"):
        find(tmp_path, name="tiny-shakespeare", path=str(tmp_path))


def test_a_folder_is_read_in_order_without_what_is_no_text(tmp_path):
    for name, data in {
        "b.txt": b"b",
        "a/z.md": "ä".encode(),
        "a.py": b"a",
        "empty": b"",
        "image.png": b"\x89PNG\0",
        "latin": b"abc\xe9",
        ".hidden": b"x",
        ".git/config": b"x",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
    said = []
    found = list_folder(tmp_path, said)
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["a.py", "a/z.md", "b.txt"]
    assert said == [
        f"skipped 3 files of {tmp_path} that are empty or not text: empty, image.png, latin"
    ]


def test_a_character_at_the_end_of_the_probe_makes_no_binary_file(tmp_path):
    (tmp_path / "long").write_text("é" * 10_000 + "x", encoding="utf-8")
    (tmp_path / "odd").write_text("x" + "é" * 10_000, encoding="utf-8")
    assert len(list_folder(tmp_path)) == 2


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        find(tmp_path, path=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="holds no text files"):
        find(tmp_path, path=str(tmp_path))


def test_nothing_is_trained_on_that_is_held_out(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name)
    files = find(
        tmp_path,
        path=str(tmp_path),
        valid_path=str(tmp_path / "b"),
        test_path=str(tmp_path / "." / "c"),
    )
    assert files.train == (tmp_path / "a",)
    assert files.valid == (tmp_path / "b",)
    with pytest.raises(ValueError, match="nothing but what"):
        find(tmp_path, path=str(tmp_path / "a"), valid_path=str(tmp_path / "a"))


def test_the_python_library_is_there_and_is_a_library(tmp_path):
    files = find(tmp_path, name="python-stdlib")
    names = [file.relative_to(files.root).as_posix() for file in files.train]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [n for n in names if "test" in n.split("/")[:-1] or "site-packages" in n]
    assert 4e6 < sum(file.stat().st_size for file in files.train) < 12e6


@pytest.fixture
def folder(tmp_path):
    for name in ("a.txt", "b.txt", "c.md", "sub/d.txt"):
        file = tmp_path / "texts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "texts"


def names(files):
    return [files.name(path) for path in files.train]


def test_a_pattern_takes_what_matches_in_order(folder, tmp_path):
    assert names(find(tmp_path, path=str(folder / "*.txt"))) == ["a.txt", "b.txt"]
    deep = find(tmp_path, path=str(folder / "**" / "*.txt"))
    assert names(deep) == ["a.txt", "b.txt", "sub/d.txt"]
    with pytest.raises(FileNotFoundError, match=r"no file matches the pattern .*\*\.rst"):
        find(tmp_path, path=str(folder / "*.rst"))


def test_several_paths_keep_their_order_and_count_once(folder, tmp_path):
    paths = [folder / "sub", folder / "c.md", folder / "*.txt", folder / "a.txt"]
    files = find(tmp_path, path=os.pathsep.join(map(str, paths)))
    assert names(files) == ["sub/d.txt", "c.md", "a.txt", "b.txt"]


@pytest.mark.parametrize("given", ["a.txt:", ":a.txt", "a.txt::b.txt"])
def test_an_empty_path_among_several_is_refused(folder, tmp_path, monkeypatch, given):
    monkeypatch.chdir(folder)
    given = given.replace(":", os.pathsep)
    with pytest.raises(ValueError, match=f"'{given}' has an empty path"):
        find(tmp_path, path=given)


@pytest.mark.parametrize("key", ["path", "valid_path", "test_path"])
def test_an_empty_path_is_not_the_current_folder(folder, tmp_path, monkeypatch, key):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=rf"data\.{key}='' is not a file or folder.*None"):
        find(tmp_path, **{"name": "python-stdlib", key: ""})


def test_compressed_files_count_by_what_is_in_them(tmp_path):
    with gzip.open(tmp_path / "text.gz", "wb") as file:
        file.write(b"text")
    with gzip.open(tmp_path / "image.gz", "wb") as file:
        file.write(b"\x89PNG\0")
    (tmp_path / "damaged.gz").write_bytes(b"\x1f\x8bxx")
    said = []
    assert list_folder(tmp_path, said) == (tmp_path / "text.gz",)
    assert "damaged.gz, image.gz" in said[0]


def test_a_prepared_corpus_is_no_text_and_may_be_anywhere_on_the_disk(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    corpus = prepare(DataConfig(path=str(tmp_path / "a.txt")))
    with pytest.raises(ValueError, match=r"is a prepared corpus, not a text: .*--data\.corpus"):
        find(tmp_path, path=str(corpus.folder))
    shutil.copytree(corpus.folder, tmp_path / "shared")
    again = {"corpus": str(tmp_path / "shared")}
    assert prepare(DataConfig(**again)).folder == tmp_path / "shared"
    with pytest.raises(ValueError, match=r"data\.vocab=chars, but data\.corpus=.* has bytes: set"):
        prepare(DataConfig(**again, vocab="chars"))
    with pytest.raises(ValueError, match=r"data\.name='enwik8', but .* was made with '':"):
        prepare(DataConfig(**again, name="enwik8"))


@pytest.mark.parametrize(
    "settings", [{"path": "s3://b/texts/"}, {"path": "s3://b/x", "name": "ptb-word"}]
)
def test_a_url_is_to_be_downloaded(tmp_path, settings):
    with pytest.raises(
        ValueError, match=r"'s3://b/.*' is a URL: give the path of a file or folder"
    ):
        find(tmp_path, **settings)
    with pytest.raises(ValueError, match=r"'s3://b/corpus' is a URL: give the path"):
        prepare(DataConfig(corpus="s3://b/corpus"))
