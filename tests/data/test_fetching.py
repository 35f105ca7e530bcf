import itertools
import os
import signal
import subprocess
import sys
import threading

import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data.corpus import raw_split
from transformer_xl.data.preparing import prepare
from transformer_xl.data.store import StoredObject, describe, fetch, list_objects

TEXT = bytes(range(256)) * 40


def fetched(web, folder, name="a.txt", said=None):
    x = describe(f"{web.url}/{name}")
    fetch({x.target(folder): x}, folder, (lambda line: None) if said is None else said.append)
    return x.target(folder)


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("tells_size", [True, False])
def test_an_object_is_fetched_once_and_whole(web, tmp_path, has_ranges, tells_size):
    web.has_ranges, web.tells_size = has_ranges, tells_size
    (web.folder / "a.txt").write_bytes(TEXT)
    first = fetched(web, tmp_path / "objects")
    assert first.read_bytes() == TEXT
    web.sent.clear()
    assert fetched(web, tmp_path / "objects") == first
    # A server that tells no size for the head is asked for the whole, which nobody reads.
    assert web.sent["a.txt"] <= (0 if tells_size else len(TEXT))


def test_a_fetch_that_was_stopped_leaves_whole_files_and_goes_on(web, texts, tmp_path):
    objects = list_objects(f"{web.url}/texts/*.txt", tmp_path, print)
    wanted = {x.target(tmp_path): x for x in objects}
    content = (texts / "b.txt").read_bytes()
    (texts / "b.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"nothing at .*b\.txt"):
        fetch(wanted, tmp_path, print)
    whole = {path for path in wanted if path.exists()}
    assert all(path.stat().st_size == wanted[path].size for path in whole)
    (texts / "b.txt").write_bytes(content)
    web.sent.clear()
    fetch(wanted, tmp_path, print)
    assert len([name for name, n in web.sent.items() if n]) == 3 - len(whole)
    assert all(path.is_file() for path in wanted)


def test_what_changes_while_it_is_read_is_refused(web, tmp_path):
    (web.folder / "a.txt").write_bytes(TEXT)
    web.on_get = lambda name: (web.folder / "a.txt").write_bytes(TEXT[::-1])
    with pytest.raises(OSError, match=r"a\.txt changed while it was read; try again"):
        fetched(web, tmp_path / "objects")
    assert [path.name for path in (tmp_path / "objects").iterdir()] == ["lock"]
    assert fetched(web, tmp_path / "objects").read_bytes() == TEXT[::-1]


def test_what_does_not_fit_on_the_disk_is_refused_first(web, tmp_path):
    x = StoredObject(f"{web.url}/a.txt", "a.txt", 1 << 60, "")
    with pytest.raises(OSError, match=r"fetched from .*a\.txt needs .* MB free; make room"):
        fetch({tmp_path / "file": x}, tmp_path, lambda line: None)


def corpus_of(web, tmp_path, path="texts/*.txt", **settings):
    said = []
    settings = {"cache_dir": str(tmp_path / "cache"), **settings}
    return prepare(DataConfig(path=f"{web.url}/{path}", **settings), said.append), said


@pytest.fixture
def texts(web):
    folder = web.folder / "texts"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"the text of {name}\n" * 50)
    (folder / "image.bin").write_bytes(b"\0\xff")
    return folder


def test_a_text_at_a_url_is_the_text_in_a_folder(web, texts, tmp_path):
    for path in ("texts/*.txt", "texts/"):
        corpus, said = corpus_of(web, tmp_path, path, vocab="words")
        here = prepare(DataConfig(path=str(texts), vocab="words"))
        for name in ("train", "valid", "test"):
            ours, theirs = (x.manifest["splits"][name] for x in (corpus, here))
            assert ours == theirs
        assert path != "texts/" or "image.bin" in "".join(said)


def test_a_prepared_text_is_not_fetched_again_even_when_its_objects_are_gone(web, texts, tmp_path):
    first, _ = corpus_of(web, tmp_path)
    for file in (tmp_path / "cache" / "downloads" / "objects").iterdir():
        file.unlink()
    web.sent.clear()
    again, said = corpus_of(web, tmp_path)
    assert again.folder == first.folder
    assert said == []
    assert not [name for name in web.sent if name.endswith(".txt")]


def test_an_object_that_changed_is_another_corpus_and_the_others_are_kept(web, texts, tmp_path):
    first, _ = corpus_of(web, tmp_path)
    (texts / "b.txt").write_text("the text of B\n" * 50)
    web.sent.clear()
    second, _ = corpus_of(web, tmp_path)
    assert second.folder != first.folder
    assert b"text of B" in raw_split(second, "train")
    assert [name for name in web.sent if name.endswith(".txt")] == ["texts/b.txt"]


def test_files_of_a_store_are_held_out_by_their_names(web, texts, tmp_path):
    settings = {"split_by": "file", "valid_fraction": 0.3, "test_fraction": 0.3}
    found = [corpus_of(web, tmp_path, **settings)[0]]
    (texts / "a.txt").write_text("another text of a\n" * 45)
    found.append(corpus_of(web, tmp_path, **settings)[0])
    first, second = (
        [x.manifest["splits"][name]["text_files"] for name in ("train", "valid", "test")]
        for x in found
    )
    assert sorted(itertools.chain.from_iterable(first)) == ["a.txt", "b.txt", "c.txt"]
    assert first == second


def test_packed_text_and_integers_come_from_a_store_too(web, tmp_path):
    import gzip

    (web.folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "hello world"}\n' * 30))
    corpus, _ = corpus_of(web, tmp_path, "a.jsonl.gz", valid_fraction=0.0, test_fraction=0.0)
    assert raw_split(corpus, "train") == b"hello world\n" * 30
    (web.folder / "b.json").write_text('{"train": [[1, 2, 3]], "valid": [[3, 1]], "test": [[2]]}')
    corpus, _ = corpus_of(web, tmp_path, "b.json", vocab="integers")
    assert [corpus.n_tokens(name) for name in ("train", "valid", "test")] == [4, 3, 2]


def test_a_folder_without_text_is_refused(web, tmp_path):
    (web.folder / "images").mkdir()
    (web.folder / "images" / "a.png").write_bytes(b"\0\xff")
    with pytest.raises(ValueError, match="holds no text files"):
        corpus_of(web, tmp_path, "images/")


STARTED = """
import sys
from transformer_xl.config import DataConfig
from transformer_xl.data.preparing import prepare
print(prepare(DataConfig(path=sys.argv[1], cache_dir=sys.argv[2])).folder)
"""


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_ranks_that_start_together_fetch_once_though_one_is_killed(web, texts, tmp_path):
    (texts / "long.txt").write_bytes(b"a long text\n" * 2_000_000)
    is_fetching, may_go_on = threading.Event(), threading.Event()

    def hold(name):
        if name == "texts/long.txt":
            is_fetching.set()
            may_go_on.wait(60)

    web.on_get = hold
    arguments = [sys.executable, "-c", STARTED, f"{web.url}/texts/*.txt", str(tmp_path / "cache")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start():
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment)

    with start() as killed:
        assert is_fetching.wait(60)
        ranks = [start() for _ in range(3)]
        killed.send_signal(signal.SIGKILL)
    may_go_on.set()
    folders = {rank.communicate(timeout=120)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert len(folders) == 1
    size = (texts / "long.txt").stat().st_size
    # It was on its way to the one that was killed, and to one other.
    assert size <= web.sent["texts/long.txt"] <= 2 * size
    left = [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]
    assert left == []
