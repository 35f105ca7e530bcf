"""What an earlier version has written opens, goes on and is restored, bit for bit.

``make.py`` says what is there. Stored numbers are compared by their bits on every machine, computed
ones to more digits than any change of what is computed would leave alone.
"""

import json
import re
import shutil
import sys
from dataclasses import asdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from transformer_xl import Session, State, convert, generate, load_vocab
from transformer_xl.apps.compress import decompress, needs_model
from transformer_xl.config import ModelConfig
from transformer_xl.config.checks import create_from_stored
from transformer_xl.config.distributed import World
from transformer_xl.data import Corpus
from transformer_xl.inference.generate import Sampling
from transformer_xl.model import load_model
from transformer_xl.train.checkpoint.checkpoints import Checkpoints, read_about, read_whole

HERE = Path(__file__).parent
SETS = sorted(path.parent for path in HERE.glob("*/expected.json"))
CORPORA = ("bytes", "chars", "words", "bpe")
ARCHIVES = ("model", "model-learn", "learn", "stored")
FLOAT64 = {"rel": 1e-9, "abs": 1e-9}
# Thirty steps of training in float32: single roundings of 1e-7, enlarged by Adam's division.
FLOAT32 = {"rel": 1e-3, "abs": 1e-4}

pytestmark = pytest.mark.usefixtures("one_thread")


def _load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"artifacts_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


describing = _load("describing")


@pytest.fixture(params=SETS, ids=lambda path: path.name)
def artifacts(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy: what opens a file must not need to write beside it, and some of it goes on."""
    return shutil.copytree(request.param, tmp_path / "artifacts")


@pytest.fixture
def expected(artifacts: Path) -> dict[str, Any]:
    return json.loads((artifacts / "expected.json").read_text(encoding="utf-8"))


def test_the_artifacts_are_small_and_name_no_place_of_a_machine() -> None:
    assert SETS
    paths = [path for folder in SETS for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in paths) < 3e6
    for path in paths:
        content = path.read_bytes()
        assert len(content) < 1e6
        # An absolute path where a word or a string begins.
        assert not re.search(rb"""(?:^|[\s"'=(])/\w+/\w""", content), path


@pytest.mark.parametrize("kind", CORPORA)
def test_a_prepared_corpus_of_an_earlier_version_opens(artifacts, expected, kind):
    folder = artifacts / "corpora" / kind
    Corpus(folder).verify()
    assert describing.describe_corpus(folder) == expected["corpora"][kind]


@pytest.mark.parametrize(
    "name",
    ["chars", "transformers", "adaptive", "options", "lstm", "bfloat16", "float16"],
)
def test_a_model_folder_of_an_earlier_version_opens(artifacts, expected, name):
    folder, known = artifacts / "models" / name, expected["models"][name]
    assert describing.raw_digests(folder / "model.safetensors") == known.pop("file")
    _require_model(describing.describe_model(load_model(folder)), known)


def test_a_model_folder_of_an_earlier_version_opens_in_transformers(artifacts, expected):
    pytest.importorskip("transformer_xl.hf", reason="needs pip install 'transformer-xl[hf]'")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for name in ("chars", "transformers"):
        folder, known = artifacts / "models" / name, expected["models"][name]
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert describing.digests(model.transformer.named_parameters()) == known["weights"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = expected["corpora"]["chars"]["ids"]
        assert tokenizer(describing.SAMPLE)["input_ids"] == ids


def _require_model(found: dict[str, Any], known: dict[str, Any]) -> None:
    """Compare a model; settings that came later, or that change nothing, do not count."""
    for name in ("nll", "log_probs"):
        assert found.pop(name) == pytest.approx(known.pop(name), **FLOAT64)
    settings = found.pop("settings")
    written = known.pop("settings")
    expected = json.loads(json.dumps(asdict(create_from_stored(ModelConfig, written))))
    assert settings == expected
    assert found == known


def test_a_stopped_run_of_an_earlier_version_is_read_bit_for_bit(artifacts, expected):
    known = expected["run"]["stopped"]
    with Checkpoints(artifacts / "run" / "checkpoints", World()) as checkpoints:
        newest = checkpoints.newest(pytest.fail)
    assert newest is not None
    assert describing.digests(read_whole(newest, "").items()) == known["tensors"]
    assert read_about(newest) == known["about"]


def test_a_stopped_run_of_an_earlier_version_goes_on_to_the_same_end(artifacts, expected, tmp_path):
    runs = [shutil.copytree(artifacts / "run", tmp_path / name) for name in ("one", "other")]
    found, again = (describing.finish_run(run, artifacts / "corpora" / "chars") for run in runs)
    ends = [describing.digests(end["weights"].items()) for end in (found, again)]
    assert ends[0] == ends[1]
    del again["weights"]
    assert again == {name: x for name, x in found.items() if name != "weights"}
    known, weights = expected["run"]["end"], found.pop("weights")
    # What it reads last, by what is left of the text, and in which order, is no matter of rounding.
    assert found.pop("segments") == known.pop("segments")
    assert found.pop("best") == pytest.approx(known.pop("best"), **FLOAT32)
    lines = zip(found.pop("metrics"), known.pop("metrics"), strict=True)
    for line, known_line in lines:
        kind, known_kind = line.pop("kind"), known_line.pop("kind")
        assert kind == known_kind
        assert line == pytest.approx(known_line, **FLOAT32)
    assert found == known
    end = load_file(artifacts / "run-end.safetensors")
    assert weights.keys() == end.keys()
    for name, x in end.items():
        if name.startswith(("model.", "average.", "mems.")):
            torch.testing.assert_close(weights[name], x, rtol=1e-3, atol=1e-4)


def test_a_session_of_an_earlier_version_goes_on(artifacts, expected):
    known, path = expected["sessions"]["session"], artifacts / "session.safetensors"
    assert describing.raw_digests(path) == known["tensors"]
    session = Session.load(artifacts / "models" / "chars", path)
    text = "".join(session.generate(describing.N_GREEDY, sampling=Sampling(temperature=0)))
    assert text == known["greedy"]


def test_a_saved_memory_of_an_earlier_version_goes_on(artifacts, expected):
    known, folder = expected["sessions"]["state"], artifacts / "models" / "chars"
    path, model = artifacts / "state.safetensors", load_model(folder)
    state = State.load(path, folder / "model.safetensors", model)
    read = {**state.mems.state_dict(), "random": state.random}
    tensors = ((name, x) for name, x in read.items() if x is not None)
    assert describing.digests(tensors) == known["tensors"]
    assert state.last_token == known["last_token"]
    assert describing.greedy(model, [state.last_token], state.mems) == known["greedy"]
    seeded = generate(model, state=state, length=5)
    assert list(seeded) == known["seeded"]


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_of_an_earlier_version_is_restored(artifacts, expected, name):
    pytest.importorskip("constriction", reason="needs pip install 'transformer-xl[compress]'")
    known = expected["archives"][name]
    content = (artifacts / "archives" / f"{name}.txl").read_bytes()
    assert needs_model(content) == bool(known["model"])
    model = vocab = None
    if known["model"]:
        folder = artifacts / "models" / known["model"]
        model, vocab = load_model(folder), load_vocab(folder)
    try:
        found = decompress(content, model, vocab)
    except RuntimeError as error:
        # What learned while it coded is read where sums come out the same, and says so elsewhere.
        refused = str(error)
    else:
        assert found == (artifacts / "archives" / known["holds"]).read_bytes()
        return
    assert known["learns"], refused
    assert expected["machine"] != describing.machine(), refused
    assert re.search("cannot be decompressed here|starts from other weights", refused)


def test_an_old_checkpoint_converts_to_the_same_model(artifacts, expected, tmp_path):
    known = expected["converted"]
    converted = convert(artifacts / "authors", tmp_path / "converted")
    for folder in (converted, artifacts / "converted"):
        settings = json.loads((folder / "config.json").read_text())
        assert settings["origin"]["format"] == "authors"
        _require_model(describing.describe_model(load_model(folder)), dict(known))
        vocab = load_vocab(folder)
        assert vocab.encode("word3 word7") == load_vocab(artifacts / "converted").encode(
            "word3 word7"
        )
    weights = "model.safetensors"
    assert describing.raw_digests(converted / weights) == describing.raw_digests(
        artifacts / "converted" / weights
    )


def test_the_program_that_writes_them_writes_what_opens(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])
    monkeypatch.chdir(tmp_path)
    module = _load("authors")
    torch.save(module.authors_model(), tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "model")
    assert load_model(tmp_path / "model").config.cutoffs == (12,)
