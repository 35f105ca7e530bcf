"""Checkpoints: what was saved is read, whole or not at all, and a failure costs no older one."""

import errno
import os
import stat
from pathlib import Path

import pytest
import torch

from transformer_xl.config import FORMAT_VERSION
from transformer_xl.config.distributed import World
from transformer_xl.train.checkpoint import checkpoints as module
from transformer_xl.train.checkpoint.checkpoints import (
    Checkpoints,
    read_about,
    read_metadata,
    read_tensors,
    read_whole,
)

SHARD = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def values(step):
    return {"a.weight": torch.full((3, 2), float(step)), "b": torch.tensor([step])}


def save(folder, *steps, keep=10, **options):
    """Write checkpoints that differ."""
    with Checkpoints(folder, World()) as checkpoints:
        for step in steps:
            checkpoints.save(step, values(step), {"step": step}, keep, **options)


def loaded(folder):
    """The step of the newest intact checkpoint, by what is about it and by its tensors."""
    said = []
    found = Checkpoints(folder, World()).newest(said.append)
    rooms = {name: torch.zeros_like(x) for name, x in values(0).items()}
    read_tensors(found, rooms, World())
    step = read_about(found)["step"]
    assert all(torch.equal(rooms[name], x) for name, x in values(step).items())
    return step, said


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


def test_what_was_saved_is_loaded(folder):
    assert Checkpoints(folder, World()).newest() is None
    save(folder, 3, 12)
    assert loaded(folder) == (12, [])
    assert {name: x.size for name, x in read_metadata(folder / "step_00000012").items()} == {
        "a.weight": torch.Size([3, 2]),
        "b": torch.Size([1]),
    }
    assert read_whole(folder / "step_00000003", "a.")["weight"].unique().tolist() == [3]


def test_no_file_of_a_checkpoint_can_hold_a_program(folder):
    save(folder, 1)
    assert names(folder / "step_00000001") == ["checksums.json", SHARD, "state.json"]


def test_files_have_the_mode_that_the_umask_gives(folder):
    before = os.umask(0o027)
    try:
        save(folder, 1)
    finally:
        os.umask(before)
    for path in (folder / "step_00000001").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path


def test_a_file_without_permission_is_not_called_damaged(folder, monkeypatch):
    save(folder, 1, 2)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(module, "checksum", refuse)
    with pytest.raises(PermissionError, match=r"Permission denied.*step_00000002"):
        loaded(folder)


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(folder, monkeypatch):
    seen = []

    def sync(path):
        seen.append((path.name.split("-")[0], names(folder)[-1][:4]))

    monkeypatch.setattr(module, "sync", sync)
    save(folder, 1)
    assert seen == [("shard", ".unf"), (".unfinished", ".unf"), ("checkpoints", "step")]


def test_before_it_counts_it_can_be_read(folder):
    found = []

    def read(place: Path) -> None:
        found.append((read_whole(place, "b")[""].tolist(), names(folder)))

    save(folder, 4, before_rename=read)
    assert found == [([4], [".unfinished-step_00000004"])]


def test_only_the_newest_are_kept(folder):
    save(folder, 5, 10, 100, 1000, keep=2)
    assert names(folder) == ["step_00000100", "step_00001000"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((SHARD, damage) for damage in (cut, flip, empty, remove)),
        ("state.json", flip),
        ("checksums.json", empty),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, name, damage):
    save(folder, 1, 2)
    damage(folder / "step_00000002" / name)
    step, said = loaded(folder)
    assert step == 1
    (line,) = said
    assert "step_00000002/" in line
    assert "is damaged; trying the checkpoint before it" in line


@pytest.mark.parametrize("content", ["[]", "[1, 2]", "{}", '{"../../x": "0"}', "null"])
def test_checksums_of_another_kind_are_damage(folder, content):
    save(folder, 1, 2)
    (folder / "step_00000002" / "checksums.json").write_text(content)
    assert loaded(folder)[0] == 1


def test_it_is_an_error_when_all_checkpoints_are_damaged(folder):
    save(folder, 1, 2)
    for path in folder.glob("*/state.json"):
        cut(path)
    with pytest.raises(
        RuntimeError, match=r"every checkpoint in .* is damaged: restore .* or delete"
    ):
        Checkpoints(folder, World()).newest(lambda line: None)


def test_a_run_that_went_back_keeps_what_it_saves_from_then_on(folder):
    save(folder, 10, 20, keep=2)
    cut(folder / "step_00000020" / SHARD)
    assert loaded(folder)[0] == 10
    save(folder, 15, keep=1)
    assert names(folder) == ["step_00000015"]


def test_a_checkpoint_of_a_newer_version_is_not_guessed_at(folder, monkeypatch):
    monkeypatch.setattr(module, "FORMAT_VERSION", FORMAT_VERSION + 1)
    save(folder, 1)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=f"format {FORMAT_VERSION + 1}; .*update transformer_xl"):
        Checkpoints(folder, World()).newest()


def test_tensors_of_another_model_are_an_error(folder):
    save(folder, 1)
    for rooms in ({"c": torch.zeros(1)}, {"b": torch.zeros(5)}):
        with pytest.raises(RuntimeError, match=r"does not fit this run: .*Give the recipe"):
            read_tensors(folder / "step_00000001", rooms, World())


def failing(*about, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "place",
    [
        (module, "save_file"),
        (module, "replace_file"),
        (module, "checksum"),
        (module, "sync"),
    ],
)
def test_a_full_disk_is_said_and_costs_no_older_checkpoint(folder, monkeypatch, place):
    save(folder, 1, keep=1)
    monkeypatch.setattr(*place, failing)
    message = r"step 2 could not be written to .*checkpoints: the disk is full. The ones before it"
    with pytest.raises(OSError, match=message):
        save(folder, 2, keep=1)
    monkeypatch.undo()
    assert loaded(folder) == (1, [])
    save(folder, 3, keep=1)
    assert names(folder) == ["step_00000003"]


def test_a_file_without_a_checksum_is_not_read(folder):
    save(folder, 1, 2)
    (folder / "step_00000002" / "shard-00002-model-00001-of-00001.safetensors").write_bytes(
        (folder / "step_00000001" / SHARD).read_bytes()
    )
    step, said = loaded(folder)
    assert step == 1
    assert "shard-00002-model-00001-of-00001.safetensors is damaged" in said[0]
