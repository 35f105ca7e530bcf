"""The name of a model is a folder, a shipped model or one of the hub, in this order."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import transformer_xl as txl
from transformer_xl.config import locating
from transformer_xl.config.locating import Located, locate, may_be_on_hub
from transformer_xl.model.pretrained import find_model_folder, model_weights


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub in a folder, and the names of the files that were asked for."""
    library = pytest.importorskip("huggingface_hub")
    from huggingface_hub import errors

    asked = []

    def snapshot_download(name, allow_patterns):
        if not (tmp_path / "hub" / name).is_dir():
            raise errors.LocalEntryNotFoundError("not in the cache\nConnect to the network")
        copy = tmp_path / "cache" / name / "0123456789abcdef"
        copy.mkdir(parents=True, exist_ok=True)
        for path in (tmp_path / "hub" / name).iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                asked.append(path.name)
                shutil.copy(path, copy)
        return str(copy)

    monkeypatch.setattr(library, "snapshot_download", snapshot_download)
    locating._download.cache_clear()
    (tmp_path / "hub").mkdir()
    yield tmp_path / "hub", asked
    locating._download.cache_clear()


def test_a_shipped_model_is_found_by_its_name(shipped):
    for name, version in (("notes", 2), ("notes-1", 1), ("toy", 1)):
        path, remark, is_path = locate(name)
        own = name.partition("-")[0]
        assert path == find_model_folder(Path(name)) == shipped / f"{own}-{version}"
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
        "toz does not exist: give a model folder, a run folder, a shipped model, or OWNER/NAME of "
        "the hub (shipped models: notes, toy; did you mean toy?)"
    )


def test_an_empty_name_is_not_the_folder_one_is_in(shipped, monkeypatch):
    monkeypatch.chdir(shipped / "toy-1")
    assert locate(".") == Located(Path())
    for name in ("", None, 3):
        with pytest.raises(ValueError, match=r"is no name of a model: give a model folder"):
            txl.from_pretrained(name)  # pyright: ignore[reportArgumentType]


def test_everything_that_loads_takes_a_name(shipped):
    folder = shipped / "toy-1"
    expected = model_weights(txl.TransformerXL.from_pretrained(folder))
    model, vocab = txl.from_pretrained("toy")
    for loaded in (model, txl.TransformerXL.from_pretrained("toy"), txl.Session.open("toy").model):
        found = model_weights(loaded)
        assert all(found[name].equal(x) for name, x in expected.items())
    assert vocab.hash == txl.load_vocab("toy").hash == txl.load_vocab(folder).hash
    with pytest.raises(FileNotFoundError, match="toz does not exist"):
        txl.from_pretrained("toz")


def test_the_path_of_a_missing_run_is_not_looked_up_on_the_hub(shipped):
    assert may_be_on_hub("me/demo")
    Path("me").mkdir()
    for path in ("me/demo", "runs/demo", "models/wt103"):
        assert not may_be_on_hub(path)
    with pytest.raises(FileNotFoundError, match=r"^runs/demo does not exist: give"):
        locate("runs/demo")
    for path in ("./x/y", "x/y/", "x//y"):
        assert not may_be_on_hub(path)
    for path in ("../x", "./x", "/x/y", "a/b/c", "a", "-a/b", "a/.b", "a/ß", "a/" + 97 * "b"):
        assert not may_be_on_hub(path)


def test_a_model_of_the_hub_is_read_without_pickles_and_code(hub, shipped):
    root, asked = hub
    shutil.copytree(shipped / "toy-1", root / "me" / "toy")
    for name in ("pytorch_model.bin", "modeling.py", "training_args.pt"):
        (root / "me" / "toy" / name).write_text("")
    path, remark, is_path = locate("me/toy")
    assert remark == "using me/toy from the Hugging Face hub (revision 0123456789ab)"
    assert not is_path
    assert {"config.json", "model.safetensors", "vocab.json", "tokenizer.json"} <= {*asked}
    assert not {"pytorch_model.bin", "modeling.py", "training_args.pt"} & {*asked}
    model, vocab = txl.from_pretrained("me/toy")
    assert len(vocab) == model.config.vocab_size
    assert vocab.hash == txl.load_vocab("toy").hash
    # A folder of the same name comes first.
    shutil.copytree(shipped / "notes-1", "me/toy")
    assert locate("me/toy") == Located(Path("me/toy"))
    assert path.is_dir()


def test_only_our_models_are_downloaded(hub, shipped):
    root, asked = hub
    for name, files in {
        "other": {"config.json": '{"model_type": "gpt2"}', "model.safetensors": ""},
        "broken": {"config.json": "[", "model.safetensors": ""},
        "none": {"model.safetensors": ""},
        "pickled": {"config.json": '{"model_type": "transformer-xl"}', "pytorch_model.bin": ""},
    }.items():
        (root / "me" / name).mkdir(parents=True)
        for file, content in files.items():
            (root / "me" / name / file).write_text(content)
    for name, kind in (("other", "'gpt2'"), ("broken", "None"), ("none", "None")):
        with pytest.raises(RuntimeError, match=f"is of type {kind}, not 'transformer-xl'"):
            locate(f"me/{name}")
    assert "model.safetensors" not in asked
    with pytest.raises(RuntimeError, match=r"or has no model\.safetensors"):
        locate("me/pickled")


def test_without_a_network_the_hub_is_an_error_that_says_so(shipped):
    # The real library, which is told to stay offline.
    pytest.importorskip("huggingface_hub")
    with pytest.raises(OSError, match="me/nothing is no folder, and cannot be downloaded"):
        locate("me/nothing")


def test_without_the_library_the_extra_is_named(shipped, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RuntimeError, match=r"pip install 'transformer-xl\[hf\]'"):
        locate("me/nothing")


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
