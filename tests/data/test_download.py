import errno
import hashlib
import io
import os
import socket
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data import finding
from transformer_xl.data.catalogue import KNOWN_CORPORA, KnownCorpus, RemoteFile, Source
from transformer_xl.data.download import download
from transformer_xl.data.finding import find_text

TEXT = b"What light through yonder window breaks?\n"
SHA256 = f"sha256:{hashlib.sha256(TEXT).hexdigest()}"
MD5 = f"md5:{hashlib.md5(TEXT).hexdigest()}"


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        # As the host of WikiText does.
        if "urllib" in self.headers["User-Agent"]:
            self.send_error(403)
        else:
            super().do_GET()

    def log_message(self, *about):
        pass


@pytest.fixture
def site(tmp_path):
    """A folder that a web server on this machine shows, and its address."""
    folder = tmp_path / "web"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def nowhere():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def corpus_of(*remotes):
    parts = dict(zip(("train", "valid", "test"), remotes, strict=False))
    return KnownCorpus(summary="a toy", files=parts)


@pytest.fixture
def fetch(tmp_path):
    """Downloads a file into one folder; `fetch.said` is what the user was told."""

    def run(remote):
        return download(remote, tmp_path / "downloads", corpus_of(remote), "toy", run.said.append)

    run.said = []
    return run


def plain(url, checksum=SHA256, name="input.txt"):
    return RemoteFile(name=name, sources=(Source(f"{url}/input.txt"),), checksum=checksum)


def left(tmp_path):
    return sorted(path.name for path in (tmp_path / "downloads").iterdir() if path.name != "lock")


@pytest.mark.parametrize("checksum", [SHA256, MD5])
def test_a_download_is_checked_and_made_once(site, fetch, tmp_path, checksum):
    folder, url = site
    (folder / "input.txt").write_bytes(TEXT)
    (file,) = fetch(plain(url, checksum))
    assert file.read_bytes() == TEXT
    assert fetch.said == [f"downloading {url}/input.txt"]
    (folder / "input.txt").unlink()
    assert fetch(plain(url, checksum)) == (file,)
    assert len(fetch.said) == 1


def test_a_full_disk_is_named_and_no_other_address_is_tried(site, fetch, tmp_path, monkeypatch):
    folder, url = site
    (folder / "input.txt").write_bytes(TEXT)

    def full(*about):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pooch.HTTPDownloader.__call__", full)
    sources = tuple(Source(f"{url}/{name}.txt") for name in ("input", "mirror"))
    with pytest.raises(OSError, match="the disk is full"):
        fetch(RemoteFile(name="input.txt", sources=sources, checksum=SHA256))
    assert len(fetch.said) == 1
    assert left(tmp_path) == []


def test_what_has_another_checksum_is_refused_and_not_kept(site, fetch, tmp_path):
    folder, url = site
    (folder / "input.txt").write_bytes(b"something else")
    with pytest.raises(OSError, match=r"(?s)path takes.*has the checksum sha256:.*, not sha256:"):
        fetch(plain(url))
    assert left(tmp_path) == []


def test_mirrors_are_tried_in_turn(site, fetch):
    folder, url = site
    (folder / "input.txt").write_bytes(b"not it")
    (folder / "mirror.txt").write_bytes(TEXT)
    urls = (f"{nowhere()}/input.txt", f"{url}/gone", f"{url}/input.txt", f"{url}/mirror.txt")
    remote = RemoteFile(name="input.txt", sources=tuple(map(Source, urls)), checksum=SHA256)
    (file,) = fetch(remote)
    assert file.read_bytes() == TEXT
    assert [line.split()[2].rstrip(":") for line in fetch.said if "cannot use" in line] == [
        *urls[:3]
    ]


def test_without_a_network_one_error_names_the_addresses_and_what_helps(fetch, tmp_path):
    urls = [f"{nowhere()}/{name}" for name in ("one", "two")]
    remote = RemoteFile(name="input.txt", sources=tuple(map(Source, urls)), checksum=SHA256)
    with pytest.raises(OSError, match=r"Without a network, --data\.path takes") as caught:
        fetch(remote)
    # What helps stands first, and each address once: here, or on the way, but not in both.
    advice, *tried = str(caught.value).splitlines()
    assert "input.txt or a folder with it" in advice
    assert [line.split()[2].rstrip(":") for line in tried] == urls
    assert fetch.said == [f"downloading {url}" for url in urls]
    assert left(tmp_path) == []


def zipped(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)


def tarred(path, members):
    with tarfile.open(path, "w:gz") as file:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize(("suffix", "write"), [("zip", zipped), ("tar.gz", tarred)])
def test_files_come_out_of_archives_and_the_archive_is_fetched_once(site, fetch, suffix, write):
    folder, url = site
    write(folder / f"all.{suffix}", {"x/a.txt": TEXT, "x/b.txt": b"two", "x/evil.txt": b"no"})
    archive = f"{url}/all.{suffix}"
    for name, data in (("a.txt", TEXT), ("b.txt", b"two")):
        remote = RemoteFile(name=name, sources=(Source(archive, f"x/{name}"),))
        (file,) = fetch(remote)
        assert file.read_bytes() == data
    assert fetch.said.count(f"downloading {archive}") == 1


@pytest.mark.parametrize(("suffix", "write"), [("zip", zipped), ("tar.gz", tarred)])
def test_a_pattern_takes_all_shards_and_nothing_from_outside(site, fetch, tmp_path, suffix, write):
    folder, url = site
    shards = {f"top/train/news-{n}-of-3": f"{n}\n".encode() for n in range(3)}
    evil = {"top/train/../../news-9-of-3": b"x", "/top/train/news-8-of-3": b"x"}
    write(folder / f"all.{suffix}", {**shards, **evil, "top/other/news-7-of-3": b"x"})
    pattern = "train/news-*-of-3"
    remote = RemoteFile(name=pattern, sources=(Source(f"{url}/all.{suffix}", f"top/{pattern}"),))
    files = fetch(remote)
    assert [file.read_bytes() for file in files] == [b"0\n", b"1\n", b"2\n"]
    assert fetch(remote) == files
    assert fetch.said.count(f"downloading {url}/all.{suffix}") == 1
    assert sorted(path.name for path in tmp_path.rglob("news-*")) == [
        f"news-{n}-of-3" for n in range(3)
    ]
    files[1].unlink()
    assert fetch(remote) == files


def test_links_in_an_archive_are_no_files(site, fetch, tmp_path):
    folder, url = site
    with tarfile.open(folder / "all.tar.gz", "w:gz") as file:
        link = tarfile.TarInfo("input.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        file.addfile(link)
    source = Source(f"{url}/all.tar.gz", "input.txt")
    with pytest.raises(OSError, match=r"the archive holds no input\.txt"):
        fetch(RemoteFile(name="input.txt", sources=(source,)))


@pytest.mark.parametrize("damage", [b"", b"no archive", b"PK\3\4 is how they begin"])
def test_a_damaged_archive_is_another_failure_of_its_address(site, fetch, damage):
    folder, url = site
    (folder / "all.zip").write_bytes(damage)
    (folder / "input.txt").write_bytes(TEXT)
    sources = (Source(f"{url}/all.zip", "input.txt"), Source(f"{url}/input.txt"))
    (file,) = fetch(RemoteFile(name="input.txt", sources=sources, checksum=SHA256))
    assert file.read_bytes() == TEXT


@pytest.fixture
def known(site, monkeypatch):
    folder, url = site
    (folder / "input.txt").write_bytes(TEXT)
    monkeypatch.setattr(finding, "KNOWN_CORPORA", {"toy": corpus_of(plain(url))})
    return folder / "input.txt"


def find(tmp_path, said, **settings):
    return find_text(DataConfig(name="toy", **settings), tmp_path / "downloads", said.append)


def test_a_copy_at_hand_is_taken_as_file_or_folder(known, tmp_path):
    said = []
    for path in (known, known.parent):
        assert find(tmp_path, said, path=str(path)).train == (known,)
    assert said == []
    assert find(tmp_path, said).train == (tmp_path / "downloads" / "toy" / "input.txt",)


def test_a_copy_that_differs_gives_a_warning(known, tmp_path):
    known.write_bytes(b"something else")
    said = []
    find(tmp_path, said, path=str(known))
    assert "differs from the published input.txt of toy" in said[0]
    assert "delete data.name in the recipe, or give --data.name ''" in said[0]


def test_checksums_are_those_of_the_real_files(shared):
    found = {}
    for line in (shared / "data" / "SHA256SUMS").read_text().splitlines():
        checksum, name = line.split()
        found.setdefault(f"sha256:{checksum}", name)
    known = {
        f"{name}/{remote.name}": remote.checksum
        for name, corpus in KNOWN_CORPORA.items()
        for remote in corpus.files.values()
        if remote.checksum.startswith("sha256:")
    }
    assert len(known) == 12
    assert set(known.values()) <= found.keys()
