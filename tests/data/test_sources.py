import dataclasses
import hashlib
import socket
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data import sources
from transformer_xl.data.sources import KNOWN_CORPORA, KnownCorpus, RemoteFile, find_text, list_text

TEXT = b"What light through yonder window breaks?\n"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A corpus `toy` of one file, published by a web server on this machine."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "input.txt").write_bytes(TEXT)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/input.txt"
    remote = RemoteFile("input.txt", url, hashlib.sha256(TEXT).hexdigest())
    toy = KnownCorpus(summary="a toy", terms="none", files={"train": remote})
    monkeypatch.setattr(sources, "KNOWN_CORPORA", {**KNOWN_CORPORA, "toy": toy})
    yield site / "input.txt"
    server.shutdown()
    server.server_close()


def find(tmp_path, said=None, **settings):
    say = (lambda line: None) if said is None else said.append
    return find_text(DataConfig(**settings), tmp_path / "downloads", say)


def test_a_download_is_checked_and_made_once(published, tmp_path):
    said = []
    (file,) = find(tmp_path, said, name="toy").train
    assert file.read_bytes() == TEXT
    assert len(said) == 1
    assert said[0].startswith("downloading http")
    published.unlink()
    assert find(tmp_path, said, name="toy").train == (file,)
    assert len(said) == 1


def test_a_damaged_download_is_made_again(published, tmp_path):
    (file,) = find(tmp_path, name="toy").train
    file.write_bytes(b"damaged")
    find(tmp_path, name="toy")
    assert file.read_bytes() == TEXT


def test_what_has_another_checksum_is_refused_and_not_kept(published, tmp_path):
    published.write_bytes(b"something else")
    with pytest.raises(OSError, match=r"has the SHA-256 .*, not .*--data\.path a folder with"):
        find(tmp_path, name="toy")
    assert list((tmp_path / "downloads" / "toy").iterdir()) == []


def test_without_a_network_the_error_says_what_helps(published, tmp_path, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/input.txt"
    toy = sources.KNOWN_CORPORA["toy"]
    remote = dataclasses.replace(toy.files["train"], url=url)
    gone = dataclasses.replace(toy, files={"train": remote})
    monkeypatch.setattr(sources, "KNOWN_CORPORA", {"toy": gone})
    with pytest.raises(OSError, match=r"cannot download .*Without a network, --data\.path takes"):
        find(tmp_path, name="toy")
    assert list((tmp_path / "downloads" / "toy").iterdir()) == []


def test_a_copy_at_hand_is_taken_as_file_or_folder(published, tmp_path):
    said = []
    for path in (published, published.parent):
        assert find(tmp_path, said, name="toy", path=str(path)).train == (published,)
    assert said == []


def test_a_copy_that_differs_gives_a_warning(published, tmp_path):
    published.write_bytes(b"something else")
    said = []
    find(tmp_path, said, name="toy", path=str(published))
    assert "differs from the published input.txt" in said[0]


def test_a_folder_without_the_copy_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ptb\.train\.txt.*published at https"):
        find(tmp_path, name="ptb-word", path=str(tmp_path))


def test_an_unknown_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'war-and-peace' is no known corpus.*tiny-shakespeare"):
        find(tmp_path, name="war-and-peace")


def test_known_corpora_are_the_published_ones(shared):
    sums = dict(
        reversed(line.split()) for line in (shared / "data" / "SHA256SUMS").read_text().splitlines()
    )
    for corpus in KNOWN_CORPORA.values():
        for remote in corpus.files.values():
            folder = "ptb" if remote.name.startswith("ptb") else "tinyshakespeare"
            assert sums[f"{folder}/{remote.name}"] == remote.sha256
            assert remote.url.startswith("https://")
            assert remote.url.endswith("/" + remote.name)


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
    found = list_text(tmp_path, said.append)
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["a.py", "a/z.md", "b.txt"]
    assert said == [
        f"skipped 3 files of {tmp_path} that are empty or no text: empty, image.png, latin"
    ]


def test_a_character_at_the_end_of_the_probe_makes_no_binary_file(tmp_path):
    (tmp_path / "long").write_text("é" * 10_000 + "x", encoding="utf-8")
    (tmp_path / "odd").write_text("x" + "é" * 10_000, encoding="utf-8")
    assert len(list_text(tmp_path, print)) == 2


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


def test_a_python_without_sources_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Python sources in"):
        find(tmp_path, name="python-stdlib", path=str(tmp_path))
