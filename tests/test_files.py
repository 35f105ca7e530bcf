"""Files and folders are there as a whole or not at all."""

import errno
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from transformer_xl.config import files
from transformer_xl.config.files import (
    is_disk_full,
    new_folder,
    remove_temporary,
    replace_file,
    require_new,
    require_new_file,
    require_space,
    write_atomically,
)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 100 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_what_is_written_is_there_and_nothing_else(tmp_path):
    replace_file(tmp_path / "new" / "a.txt", b"one")
    replace_file(tmp_path / "new" / "a.txt", b"two")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.txt"]
    assert (tmp_path / "new" / "a.txt").read_bytes() == b"two"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_writer_that_fails_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("before")

    def write(temporary):
        temporary.write_text("half")
        raise error("stop")

    with pytest.raises(error):
        write_atomically(path, write)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "before")]


def test_the_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    seen = []
    monkeypatch.setattr(files, "sync", lambda temporary: seen.append((temporary, path.exists())))
    replace_file(path, b"x")
    assert [is_there for _, is_there in seen] == [False]


def test_a_writer_that_is_killed_leaves_nothing_but_a_temporary_folder(tmp_path):
    # safetensors writes a temporary file of its own beside the file.
    path = tmp_path / "a.safetensors"
    child = os.fork()
    if not child:

        def write(temporary):
            (temporary.parent / ".tmpabc123").write_bytes(b"half")
            temporary.write_bytes(b"half")
            os._exit(1)

        try:
            write_atomically(path, write)
        finally:
            # A failure must not run the tests a second time, in the child.
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert len([*tmp_path.iterdir()]) == 1
    remove_temporary(tmp_path, "b.safetensors")
    assert len([*tmp_path.iterdir()]) == 1
    remove_temporary(tmp_path, "a.safetensors")
    assert not [*tmp_path.iterdir()]


def test_a_folder_appears_as_a_whole_and_nothing_else(tmp_path):
    folder = tmp_path / "new" / "folder"
    with new_folder(folder) as unfinished:
        (unfinished / "sub").mkdir()
        (unfinished / "sub" / "a").write_text("x")
        assert not folder.exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["folder"]
    assert (folder / "sub" / "a").read_text() == "x"


def test_a_link_to_an_empty_folder_is_kept_and_what_cannot_be_replaced_is_refused(
    tmp_path, monkeypatch
):
    (tmp_path / "empty").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "empty")
    with new_folder(link) as unfinished:
        (unfinished / "a").write_text("x")
    assert link.is_symlink()
    assert (tmp_path / "empty" / "a").read_text() == "x"
    (tmp_path / "nothing").symlink_to(tmp_path / "missing")
    with pytest.raises(OSError, match="nothing is a symbolic link to nothing: delete it"):
        require_new(tmp_path / "nothing")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    with pytest.raises(OSError, match=r"volume is a mount point, .* give a folder in it"):
        require_new(tmp_path / "volume")
    (tmp_path / "to_volume").symlink_to(tmp_path / "volume")
    (tmp_path / "volume").mkdir()
    with pytest.raises(OSError, match=r"to_volume is a mount point"):
        require_new(tmp_path / "to_volume")
    # Not a link on one disk to a folder on another one.
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "link")
    (tmp_path / "elsewhere").mkdir()
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")
    require_new(link)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_folder_that_fails_is_not_there_at_all(tmp_path, error):
    def fill(folder):
        (folder / "a").write_text("half")
        raise error("stop")

    with pytest.raises(error), new_folder(tmp_path / "folder") as unfinished:
        fill(unfinished)
    assert not [*tmp_path.iterdir()]


def test_a_folder_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    seen = []
    monkeypatch.setattr(files, "sync", lambda path: seen.append((path, folder.exists())))
    with new_folder(folder) as unfinished:
        (unfinished / "a").write_text("x")
    assert seen == [(unfinished / "a", False), (unfinished, False), (tmp_path, True)]


@pytest.mark.parametrize("writer", ["bytes", "safetensors"])
def test_a_disk_that_is_really_full_is_named(small_disk, writer):
    path = small_disk / "a.bin"
    replace_file(path, b"before")
    write = {
        "bytes": lambda temporary: temporary.write_bytes(bytes(200_000)),
        "safetensors": lambda temporary: save_file({"x": torch.zeros(50_000)}, temporary),
    }[writer]
    with pytest.raises(OSError, match=r"the disk is full: .*a\.bin was not written"):
        write_atomically(path, write)
    assert [(p.name, p.read_bytes()) for p in small_disk.iterdir()] == [("a.bin", b"before")]


def test_a_file_in_the_way_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*file/a\.txt: (File exists|Not a directory)"):
        replace_file(tmp_path / "file" / "a.txt", b"x")


def test_a_full_disk_is_recognized_through_what_libraries_make_of_it():
    words = os.strerror(errno.ENOSPC)
    assert is_disk_full(OSError(errno.ENOSPC, words))
    assert is_disk_full(SafetensorError(f"Error while serializing: I/O error: {words}"))
    caused = RuntimeError("unexpected pos 576 vs 534")
    caused.__context__ = OSError(errno.ENOSPC, words)
    assert is_disk_full(caused)
    assert not is_disk_full(OSError(errno.EACCES, os.strerror(errno.EACCES)))
    assert not is_disk_full(RuntimeError("unexpected pos 576 vs 534"))


def test_room_is_asked_for_before_it_is_needed(tmp_path):
    require_space(tmp_path, 1, "a byte")
    with pytest.raises(OSError, match=r"this run needs 1,000,000,000,000 MB and .* MB free; make"):
        require_space(tmp_path, 10**18, "this run")


def test_what_is_no_file_is_never_replaced_by_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to-nothing").symlink_to("nothing")
    for name, what in (("pipe", "a named pipe"), ("to-nothing", "symbolic link to nothing")):
        for force in (False, True):
            with pytest.raises(OSError, match=what):
                require_new_file(tmp_path / name, force=force)
        with pytest.raises(OSError, match=what):
            replace_file(tmp_path / name, b"content")
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "to-nothing").is_symlink()
    assert not (tmp_path / "nothing").exists()


def test_a_place_that_cannot_be_written_to_is_named_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for require in (require_new, require_new_file):
        with pytest.raises(NotADirectoryError, match=r"/file is a file, not a folder"):
            require(tmp_path / "file" / "new")
    # As on a disk that is read-only, where not even root may write.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for require in (require_new, require_new_file):
        for path in (tmp_path / "new", tmp_path / "a" / "new"):
            with pytest.raises(PermissionError, match=r"or its disk is read-only; give another"):
                require(path)
            assert not path.exists()


def test_a_link_is_not_replaced_unasked(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    with pytest.raises(FileExistsError, match="--force overwrites it"):
        require_new_file(tmp_path / "link")
    with pytest.raises(OSError, match=f"link is a symbolic link.* give {tmp_path / 'mine'}"):
        require_new_file(tmp_path / "link", force=True)


@pytest.mark.parametrize(
    "name",
    [b"\xff\xfe", b"a\nb", b"a" * 255, "é".encode() * 127, b" a ", b"-x", b"\x1b[31m"],
    ids=["bytes", "newline", "255", "255 of UTF-8", "blanks", "dash", "escape"],
)
@pytest.mark.skipif(os.name == "nt", reason="names are not bytes")
def test_any_name_that_the_system_takes_is_written_and_read(tmp_path, name):
    from transformer_xl.model.pretrained import read_tensors, write_tensors

    folder = tmp_path / os.fsdecode(name)
    path = folder / os.fsdecode(name)
    write_tensors({"a": torch.ones(2)}, path, {"key": "value"})
    tensors, about = read_tensors(path)
    assert (tensors["a"].tolist(), about) == ([1, 1], {"key": "value"})
    assert [x.name for x in folder.iterdir()] == [path.name]


@pytest.mark.skipif(os.name == "nt", reason="needs pipes and links")
def test_only_a_regular_file_is_opened(tmp_path, monkeypatch):
    path, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    path.write_bytes(b"content")
    link.symlink_to(path)
    os.mkfifo(pipe)
    assert files.read_small_file(path) == files.read_small_file(link) == b"content"
    for other, kind in ((pipe, "a named pipe"), (tmp_path, "a folder")):
        with pytest.raises(files.NotRegularError, match=f"is {kind}"):
            files.open_regular(other)
    with pytest.raises(files.NotRegularError, match="is a device"):
        files.open_regular(files.Path("/dev/null"))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(b"content")
    (tmp_path / "to").symlink_to(tmp_path / "inner")
    assert files.read_small_file(tmp_path / "to" / "file") == b"content"
    # What takes the place of a file after it was looked at is not followed either.
    for look in (files.kind_other_than_file, lambda path, follow: None):
        monkeypatch.setattr(files, "kind_other_than_file", look)
        for place in (link, tmp_path / "to" / "file"):
            with pytest.raises(files.NotRegularError, match="is a symbolic link"):
                files.open_regular(place, follow=False)
        with pytest.raises(files.NotRegularError, match="not a regular file"):
            files.open_regular(pipe, follow=False)
        with files.open_regular(tmp_path / "inner" / "file", follow=False) as opened:
            assert opened.read() == b"content"
    with pytest.raises(ValueError, match="has more than 3 bytes"):
        files.read_small_file(path, 3)


@pytest.mark.skipif(not files.Path("/dev/fd").exists(), reason="needs paths of open files")
def test_a_file_that_is_exchanged_while_it_is_opened_is_not_read(tmp_path, monkeypatch):
    from transformer_xl.model import pretrained

    path, other = tmp_path / "file", tmp_path / "other"
    pretrained.write_tensors({"a": torch.ones(2)}, path, {})
    pretrained.write_tensors({"a": torch.zeros(2)}, other, {})

    def exchange(path, opened):
        other.replace(path)
        return files.same_file(path, opened)

    monkeypatch.setattr(pretrained, "same_file", exchange)
    assert pretrained.read_tensors(path)[0]["a"].tolist() == [1, 1]
