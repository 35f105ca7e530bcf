import json
import shutil

import numpy as np
import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data.corpus import VERIFIED, raw_split
from transformer_xl.data.preparing import prepare
from transformer_xl.data.store import StoredTokens
from transformer_xl.errors import DataError

TEXT = "What light through yonder window breaks?\n" * 400
SPLITS = ("train", "valid", "test")


@pytest.fixture
def made(web, tmp_path):
    """A prepared corpus, and a copy of it in a store."""
    (tmp_path / "text.txt").write_text(TEXT)
    corpus = prepare(DataConfig(path=str(tmp_path / "text.txt"), vocab="chars"))
    shutil.copytree(corpus.folder, web.folder / "corpus")
    return corpus


@pytest.fixture
def opened(web, tmp_path, made):
    """Opens the copy, with other settings if need be."""

    def run(**settings):
        settings = {"vocab": "chars", "corpus": f"{web.url}/corpus/", **settings}
        return prepare(DataConfig(cache_dir=str(tmp_path / "cache"), **settings))

    return run


def damage(path):
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def test_a_copy_in_a_store_is_the_corpus(made, opened):
    corpus = opened()
    assert corpus.manifest == made.manifest
    assert corpus.vocab.hash == made.vocab.hash
    for name in SPLITS:
        assert np.array_equal(np.asarray(corpus.tokens(name)), made.split(name))
    for name in SPLITS:
        assert isinstance(corpus.split(name), np.memmap)
        assert np.array_equal(corpus.split(name), made.split(name))
    assert raw_split(corpus, "valid") == raw_split(made, "valid")


def test_opening_it_and_holding_out_fetches_nothing_of_the_training_text(web, opened):
    web.sent.clear()
    corpus = opened()
    assert not [name for name in web.sent if name.endswith(".bin")]
    corpus.split("valid")
    tokens = corpus.tokens("train")
    assert isinstance(tokens, StoredTokens)
    assert web.sent["corpus/valid.bin"] == corpus.n_tokens("valid") * 2
    # Whether there are ranges.
    assert web.sent["corpus/train.bin"] <= 1
    web.sent.clear()
    again = opened()
    again.split("valid")
    assert {name for name, n in web.sent.items() if n} <= {"corpus/manifest.json"}


def test_what_was_fetched_as_a_whole_is_read_here(opened):
    corpus = opened()
    corpus.split("train")
    assert isinstance(corpus.tokens("train"), np.memmap)


@pytest.mark.parametrize("name", ["valid", "train"])
def test_a_fetched_split_must_have_its_checksum(web, opened, name):
    corpus = opened()
    damage(web.folder / "corpus" / f"{name}.bin")
    with pytest.raises(DataError, match=rf"{name}\.bin is damaged: it does not have the checksum"):
        corpus.split(name)
    assert not (corpus.folder / f"{name}.bin").exists()


def test_the_training_split_is_compared_with_its_checksum_on_request(web, opened):
    damage(web.folder / "corpus" / "train.bin")
    opened()
    with pytest.raises(DataError, match=r"corpus/train\.bin is damaged: .*checksum"):
        opened(verify="always")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train.bin", lambda data: data[:-2], r"train\.bin is damaged: .* bytes instead of"),
        ("test.bin", None, r"test\.bin is damaged: it is missing"),
        ("manifest.json", lambda data: b"{", r"manifest\.json is damaged"),
        (
            "manifest.json",
            lambda data: data.replace(b"train.bin", b"../x.bin"),
            "no name of a file",
        ),
        ("manifest.json", lambda data: data.replace(b"uint16", b"object"), "dtype 'object'"),
        ("vocab.json", lambda data: b"{}", "is damaged"),
    ],
)
def test_a_damaged_copy_is_named(web, opened, file, change, message):
    path = web.folder / "corpus" / file
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(DataError, match=message):
        opened()


def test_where_there_is_no_corpus_the_missing_file_is_named(web, opened):
    with pytest.raises(FileNotFoundError, match=r"nothing at http.*/nowhere/manifest\.json"):
        opened(corpus=f"{web.url}/nowhere")


def test_another_corpus_at_the_same_place_is_another_corpus(web, opened):
    first = opened()
    manifest = json.loads((web.folder / "corpus" / "manifest.json").read_text())
    (web.folder / "corpus" / "manifest.json").write_text(json.dumps(manifest | {"made": "later"}))
    assert opened().folder != first.folder


def test_settings_that_the_corpus_does_not_have_are_refused(opened):
    with pytest.raises(ValueError, match=r"data\.vocab=bytes, but data\.corpus=.* has chars: set"):
        opened(vocab="bytes")
    with pytest.raises(ValueError, match=r"data\.name='enwik8', but .* was made with '':"):
        opened(name="enwik8")


def test_a_folder_on_a_shared_disk_is_named_in_the_same_way(made, tmp_path):
    shared = tmp_path / "shared"
    shutil.copytree(made.folder, shared)
    for place in (str(shared), f"file://{shared}"):
        corpus = prepare(DataConfig(corpus=place, vocab="chars"))
        assert corpus.folder == shared
        assert np.array_equal(corpus.tokens("train"), made.split("train"))
    assert json.loads((shared / VERIFIED).read_text())
    damage(shared / "train.bin")
    with pytest.raises(DataError, match="checksum"):
        prepare(DataConfig(corpus=str(shared), vocab="chars"))


def test_a_copy_can_be_in_a_store_that_is_no_web_server(made, bucket, put, tmp_path):
    for file in made.folder.iterdir():
        put(f"copy/{file.name}", file.read_bytes())
    corpus = prepare(
        DataConfig(corpus=f"{bucket}/copy", vocab="chars", cache_dir=str(tmp_path / "cache"))
    )
    tokens = corpus.tokens("train")
    assert isinstance(tokens, StoredTokens)
    places = np.array([[0, 5], [100, 4000]])
    assert np.array_equal(tokens[places], made.split("train")[places])
