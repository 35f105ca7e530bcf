"""The run folder: nothing in it is lost, and nobody else's folder is touched."""

import errno
import json
import os
import subprocess

import pytest
import torch

from transformer_xl import checkpoint
from transformer_xl.checkpoint import RunFolder
from transformer_xl.config import FORMAT_VERSION, ModelConfig
from transformer_xl.data import load_vocab, train_vocab
from transformer_xl.nn import TransformerXL
from transformer_xl.recipes import load_recipe

SMALL = ModelConfig(vocab_size=256, n_layer=1, n_head=1, d_model=4, d_inner=4)


@pytest.fixture
def model():
    return TransformerXL(SMALL)


@pytest.fixture
def vocab():
    return train_vocab("bytes", [])


@pytest.fixture
def run(tmp_path, toy_recipe):
    folder = RunFolder(tmp_path / "run")
    folder.begin(toy_recipe(model={"vocab_size": 30}), 10)
    yield folder
    folder.close()


def save(run, model, *steps, keep=10):
    """Write checkpoints that differ."""
    for step in steps:
        with torch.no_grad():
            model.content_bias.fill_(step)
        run.save(step, model, {"step": step}, keep)


def loaded(run):
    """The step of the newest intact checkpoint, by its state and by its weights."""
    model, said = TransformerXL(SMALL), []
    state = run.load(model, said.append)
    assert model.content_bias.unique().tolist() == [state["step"]]
    return state["step"], said


def names(run):
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


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


def other_json(path):
    path.write_text("[]")


def test_what_was_saved_is_loaded(run, model):
    assert run.load(model) is None
    save(run, model, 3, 12)
    assert loaded(run) == (12, [])


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(run, model, monkeypatch):
    seen = []

    def sync(path):
        seen.append((path.name.split("-")[0], names(run)[-1][:4]))

    monkeypatch.setattr(checkpoint, "sync", sync)
    save(run, model, 1)
    assert seen == [("state.pt", ".unf"), (".unfinished", ".unf"), ("checkpoints", "step")]


def test_only_the_newest_are_kept(run, model):
    save(run, model, 5, 10, 100, 1000, keep=2)
    assert names(run) == ["step_00000100", "step_00001000"]


@pytest.mark.parametrize("damage", [cut, flip, empty, remove])
@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "checksums.json"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(run, model, name, damage):
    save(run, model, 1, 2)
    damage(run.path / "checkpoints" / "step_00000002" / name)
    step, said = loaded(run)
    assert step == 1
    (line,) = said
    assert f"step_00000002/{name if damage != flip else ''}" in line
    assert "is damaged; going back to the checkpoint before it" in line


def test_checksums_of_another_kind_are_damage(run, model):
    save(run, model, 1, 2)
    other_json(run.path / "checkpoints" / "step_00000002" / "checksums.json")
    assert loaded(run)[0] == 1


def test_it_is_an_error_when_all_checkpoints_are_damaged(run, model):
    save(run, model, 1, 2)
    for path in (run.path / "checkpoints").glob("*/state.pt"):
        cut(path)
    with pytest.raises(
        RuntimeError, match=r"every checkpoint in .* is damaged: restore .* or delete"
    ):
        run.load(model)


def test_a_run_that_went_back_keeps_what_it_saves_from_then_on(run, model):
    save(run, model, 10, 20, keep=2)
    cut(run.path / "checkpoints" / "step_00000020" / "state.pt")
    assert loaded(run)[0] == 10
    save(run, model, 15, keep=1)
    assert names(run) == ["step_00000015"]


def test_a_step_that_is_saved_again_replaces_what_was_there(run, model):
    save(run, model, 7)
    cut(run.path / "checkpoints" / "step_00000007" / "state.pt")
    save(run, model, 7)
    assert loaded(run) == (7, [])
    assert names(run) == ["step_00000007"]


def test_a_checkpoint_of_a_newer_version_is_not_guessed_at(run, model, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", FORMAT_VERSION + 1)
    save(run, model, 1)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=f"format {FORMAT_VERSION + 1}; .*update transformer_xl"):
        run.load(model)


def test_what_a_killed_program_left_is_removed(run, model, toy_recipe):
    save(run, model, 1)
    run.close()
    for place in ("checkpoints", "model/best"):
        left = run.path / place / ".unfinished-123"
        left.mkdir(parents=True)
        (left / "state.pt").write_bytes(b"half")
    run.begin(toy_recipe(model={"vocab_size": 30}), 10)
    assert not [*run.path.rglob(".unfinished*")]
    assert loaded(run) == (1, [])


@pytest.mark.parametrize("failing", ["save", "save_weights"])
def test_a_full_disk_is_said_and_costs_no_older_checkpoint(run, model, monkeypatch, failing):
    save(run, model, 1, keep=1)

    def full(*about):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((torch, "save") if failing == "save" else (checkpoint, failing)), full)
    message = r"step 2 could not be written to .*checkpoints: the disk is full. The ones before it"
    with pytest.raises(OSError, match=message):
        save(run, model, 2, keep=1)
    monkeypatch.undo()
    assert names(run) == ["step_00000001"]
    assert loaded(run) == (1, [])


@pytest.mark.parametrize("kilobytes", [10, 15, 20, 25])
def test_a_disk_that_is_really_full_costs_no_older_checkpoint(
    tmp_path, toy_recipe, model, kilobytes
):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        run = RunFolder(disk / "run")
        run.begin(toy_recipe(model={"vocab_size": 30}), 10)
        save(run, model, 1)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "filler").write_bytes(bytes(free - kilobytes * 1000))
        with pytest.raises(OSError, match=r"step 2 could not be written .*the disk is full"):
            run.save(2, model, {"step": 2, "optimizer": torch.zeros(4000)}, 10)
        assert names(run) == ["step_00000001"]
        assert loaded(run) == (1, [])
        run.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_run_that_cannot_fit_is_refused_before_it_begins(tmp_path, toy_recipe):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(OSError, match=r"this run needs .* MB and .* free; make room"):
        run.begin(toy_recipe(), 10**15)
    assert not run.holds_run
    # What is left is no reason to refuse the next try.
    run.check(toy_recipe())


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_file_in_the_way_is_an_error_that_names_it(tmp_path, toy_recipe, place):
    (tmp_path / "file").write_text("mine")
    run = RunFolder(tmp_path / place)
    with pytest.raises(OSError, match=r"file.*(exists and is no run folder|Not a directory)"):  # noqa: PT012
        run.check(toy_recipe())
        run.begin(toy_recipe(), 10)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path, toy_recipe):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match=r"cannot write to the run folder .*run: Permission denied"):
        RunFolder(tmp_path / "run").begin(toy_recipe(), 10)


def test_a_read_only_disk_is_named(tmp_path, toy_recipe, monkeypatch):
    def read_only(*about):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(
        OSError, match=r"cannot write to the run folder .*run: Read-only file system"
    ):
        RunFolder(tmp_path / "run").begin(toy_recipe(), 10)


def test_a_folder_of_other_things_is_not_touched(tmp_path, toy_recipe):
    (tmp_path / ".git").mkdir()
    with pytest.raises(FileExistsError, match="is no run folder: nothing in it was touched"):
        RunFolder(tmp_path).check(toy_recipe())
    assert [path.name for path in tmp_path.iterdir()] == [".git"]


def test_an_empty_folder_may_become_a_run(tmp_path, toy_recipe):
    run = RunFolder(tmp_path)
    run.check(toy_recipe())
    run.begin(toy_recipe(), 10)
    assert run.holds_run
    run.close()


def test_another_recipe_is_an_error_that_names_the_settings(run, toy_recipe):
    other = toy_recipe(model={"vocab_size": 30, "n_layer": 3}, train={"lr": 0.5, "log_every": 7})
    message = r"model\.n_layer: 2, 3; train\.lr: 0\.01, 0\.5\. Give another --out"
    with pytest.raises(ValueError, match=message):
        run.check(other)


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"log_every": 1, "save_every": 1, "keep_checkpoints": 9}},
        {"eval": {"mem_lens": (0, 5)}, "generate": {"length": 3}},
        {"data": {"path": "moved/text.txt", "cache_dir": "elsewhere"}},
    ],
)
def test_settings_on_which_no_weight_depends_may_change(run, toy_recipe, change):
    run.check(toy_recipe(**{"model": {"vocab_size": 30}, **change}))


@pytest.mark.parametrize(
    "change",
    [{"data": {"vocab": "bytes"}}, {"data": {"valid_fraction": 0.2}}, {"train": {"seed": 5}}],
)
def test_settings_on_which_the_weights_depend_may_not_change(run, toy_recipe, change):
    with pytest.raises(ValueError, match="run of another recipe"):
        run.check(toy_recipe(**{"model": {"vocab_size": 30}, **change}))


def test_the_size_of_the_vocabulary_may_be_left_to_the_corpus(run, toy_recipe):
    run.check(toy_recipe())
    with pytest.raises(ValueError, match=r"model\.vocab_size: 30, 31"):
        run.check(toy_recipe(model={"vocab_size": 31}))


def test_the_folder_says_what_was_run_and_where(run, toy_recipe):
    assert load_recipe(run.path / "recipe.toml") == toy_recipe(model={"vocab_size": 30})
    about = json.loads((run.path / "environment.json").read_text())
    assert about["format_version"] == FORMAT_VERSION
    assert about["packages"]["torch"] == str(torch.__version__)


def test_a_folder_that_was_killed_while_it_was_made_is_completed(tmp_path, toy_recipe):
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".recipe.toml.123.tmp").write_text("[mod")
    run = RunFolder(tmp_path)
    run.check(toy_recipe())
    run.begin(toy_recipe(), 10)
    run.close()
    (tmp_path / "environment.json").unlink()
    run.begin(toy_recipe(), 10)
    assert (tmp_path / "environment.json").exists()
    run.close()


def test_a_model_folder_loads(run, model, vocab):
    run.save_model("best", model, vocab)
    folder = run.path / "model" / "best"
    assert torch.equal(TransformerXL.from_pretrained(folder).content_bias, model.content_bias)
    assert load_vocab(folder).hash == vocab.hash
    assert "1 layers, d_model 4" in (folder / "README.md").read_text()


def test_a_vocabulary_that_was_half_written_is_written_again(run, model, vocab):
    folder = run.path / "model" / "last"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text('{"half')
    run.save_model("last", model, vocab)
    assert load_vocab(folder).hash == vocab.hash


def test_the_lock_ends_with_the_run(run, toy_recipe):
    config = toy_recipe(model={"vocab_size": 30})
    other = RunFolder(run.path)
    with pytest.raises(RuntimeError, match=r"another program is training in .*run: wait for it"):
        other.begin(config, 10)
    run.close()
    other.begin(config, 10)
    other.close()


def test_where_there_are_no_locks_one_trains_without(run, toy_recipe, monkeypatch):
    def flock(*about):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(checkpoint.fcntl, "flock", flock)
    RunFolder(run.path).begin(toy_recipe(model={"vocab_size": 30}), 10)
