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

    def found(name):
        if not (tmp_path / "hub" / name).is_dir():
            raise errors.LocalEntryNotFoundError("not in the cache")
        return tmp_path / "hub" / name

    def get_hf_file_metadata(url, timeout):
        assert timeout <= 5
        asked.append("?")
        owner, name = url.split("/")[3:5]
        if not (tmp_path / "hub" / owner / name).is_dir():
            raise ConnectionError("no network")

    def hf_hub_download(name, file, local_files_only):
        asked.append(file)
        if not (found(name) / file).is_file():
            raise errors.EntryNotFoundError(file)
        return str(found(name) / file)

    def snapshot_download(name, allow_patterns, local_files_only):
        copy = tmp_path / "cache" / name / "0123456789abcdef"
        for path in found(name).iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                asked.append(path.name)
                copy.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
        return str(copy)

    monkeypatch.setattr(library, "get_hf_file_metadata", get_hf_file_metadata)
    monkeypatch.setattr(library, "hf_hub_download", hf_hub_download)
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
        "the Hugging Face hub (shipped models: notes, toy; did you mean toy?)"
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
    for path in ("../x", "./x", "/x/y", "a/b/c", "a", "-a/b", "a/.b", "a/" + 97 * "b"):
        assert not may_be_on_hub(path)
    # What the hub would refuse, with a message about names and not about the path.
    for path in ("a..b/c", "a/b..c", "a/b--c", "a-/b", "a/b.", "a/b-", "a/ß"):
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
    with pytest.raises(RuntimeError, match="a model of type 'gpt2', not 'transformer-xl'"):
        locate("me/other")
    with pytest.raises(RuntimeError, match="a model of type None"):
        locate("me/broken")
    with pytest.raises(RuntimeError, match=r"it has no config\.json"):
        locate("me/none")
    assert "model.safetensors" not in asked
    with pytest.raises(RuntimeError, match=r"no model\.safetensors; other files"):
        locate("me/pickled")


def test_the_hub_is_asked_once_and_what_is_cached_is_used_without_it(hub, shipped, monkeypatch):
    library = pytest.importorskip("huggingface_hub")
    from huggingface_hub import errors

    root, asked = hub
    with pytest.raises(OSError, match=r"can the hub be reached \(ConnectionError\): connect"):
        locate("me/toy")
    assert asked.count("?") == 1
    for error in (ConnectionError("no network"), errors.EntryNotFoundError("config.json")):

        def refuse(url, timeout, error=error):
            raise error

        monkeypatch.setattr(library, "get_hf_file_metadata", refuse)
        locating._download.cache_clear()
        shutil.copytree(shipped / "toy-1", root / "me" / "toy")
        assert locate("me/toy").path.name == "0123456789abcdef"
        locating._download.cache_clear()
        shutil.rmtree(root / "me")
    with pytest.raises(RuntimeError, match=r"it has no config\.json"):
        locate("me/toy")


def test_the_nearest_folder_is_named(shipped):
    Path("runs/demo").mkdir(parents=True)
    for name in ("runs/dmeo", "rusn/demo", "rnus/dem", "./runs/demi"):
        with pytest.raises(OSError, match=r"did you mean the folder runs/demo\?\)$"):
            locate(name)


def test_without_a_network_the_hub_is_an_error_that_says_so(shipped):
    # The real library, which is told to stay offline.
    pytest.importorskip("huggingface_hub")
    with pytest.raises(OSError, match="me/nothing is no folder, and neither in the cache"):
        locate("me/nothing")


def test_without_the_library_the_extra_is_named(shipped, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RuntimeError, match=r"pip install 'transformer-xl\[hf\]'"):
        locate("me/nothing")


def test_nothing_is_written_into_a_shipped_model(shipped, toy_recipe):
    from transformer_xl.train.checkpoint import RunFolder
    from transformer_xl.train.report import write_report

    folder = shipped / "toy-1"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model, vocab = txl.from_pretrained("toy")
    session = txl.Session.open("toy")
    session.write("the cat")
    for write in (
        lambda: model.save_pretrained(folder, vocab),
        lambda: RunFolder(folder).begin(toy_recipe(), 1),
        lambda: write_report(folder),
        lambda: txl.convert("toy", shipped / "new"),
        lambda: session.save(folder / "state.safetensors"),
    ):
        with pytest.raises(PermissionError, match="come with the package, which are not changed"):
            write()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert json.loads(before["config.json"])["model_type"] == "transformer-xl"
