"""The name of a model is a folder or a shipped model, in this order."""

import json
import shutil
from pathlib import Path

import pytest

import transformer_xl as txl
from transformer_xl.config.locating import Located, locate
from transformer_xl.model.pretrained import ModelFolder


def test_a_shipped_model_is_found_by_its_name(shipped):
    for name, version in (("notes", 2), ("notes-1", 1), ("toy", 1)):
        path, remark, is_path = locate(name)
        own = name.partition("-")[0]
        assert path == ModelFolder.find(Path(name)).path == shipped / f"{own}-{version}"
        assert remark == f"using the shipped model {own} (version {version})"
        assert not is_path


def test_a_folder_comes_before_a_shipped_model_and_says_so(shipped):
    # A folder without a model is none.
    Path("toy").mkdir()
    assert locate("toy").path == shipped / "toy-1"
    shutil.copytree(shipped / "notes-1", "toy", dirs_exist_ok=True)
    remark = "using the folder toy, not the shipped model toy-1"
    assert locate("toy") == Located(Path("toy"), remark)
    assert locate("toy-1").path == shipped / "toy-1"
    assert locate("./toy") == Located(Path("toy"))
    assert len(txl.load_vocab("toy")) == 256 > len(txl.load_vocab("toy-1"))


def test_a_path_is_never_a_name(shipped):
    with pytest.raises(FileNotFoundError, match=r"^\./toy does not exist: give a model folder"):
        locate("./toy")
    assert locate(shipped / "toy-1") == Located(shipped / "toy-1")


def test_an_unknown_name_is_explained(shipped):
    with pytest.raises(FileNotFoundError) as found:
        locate("toz")
    assert str(found.value) == (
        "toz does not exist: give a model folder, a run folder or a shipped model; hf download "
        "OWNER/NAME --local-dir FOLDER gets one from the Hugging Face hub (shipped models: notes, "
        "toy; did you mean toy?)"
    )


def test_an_empty_name_is_not_the_folder_one_is_in(shipped, monkeypatch):
    monkeypatch.chdir(shipped / "toy-1")
    assert locate(".") == Located(Path())
    for name in ("", None, 3):
        with pytest.raises(ValueError, match=r"is no name of a model: give a model folder"):
            txl.from_pretrained(name)  # pyright: ignore[reportArgumentType]


def test_everything_that_loads_takes_a_name(shipped):
    folder = shipped / "toy-1"
    expected = txl.TransformerXL.from_pretrained(folder).named_weights()
    model, vocab = txl.from_pretrained("toy")
    for loaded in (model, txl.TransformerXL.from_pretrained("toy"), txl.Session.open("toy").model):
        found = loaded.named_weights()
        assert all(found[name].equal(x) for name, x in expected.items())
    assert vocab.hash == txl.load_vocab("toy").hash == txl.load_vocab(folder).hash
    with pytest.raises(FileNotFoundError, match="toz does not exist"):
        txl.from_pretrained("toz")


def test_nothing_is_written_into_a_shipped_model(shipped, toy_recipe):
    from transformer_xl.train import RunFolder

    folder = shipped / "toy-1"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model, vocab = txl.from_pretrained("toy")
    session = txl.Session.open("toy")
    session.write("the cat")
    for write in (
        lambda: model.save_pretrained(folder, vocab),
        lambda: RunFolder(folder).begin(toy_recipe(), 1),
        lambda: session.save(folder / "state.safetensors"),
    ):
        with pytest.raises(PermissionError, match="come with the package, which are not changed"):
            write()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert json.loads(before["config.json"])["model_type"] == "transformer-xl"
