"""Data sets of Hugging Face: with the package where it is installed, else with one like it."""

import json
import sys
import types

import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data.finding import find_hub_text
from transformer_xl.data.preparing import prepare

ROWS = {
    "train": [{"text": f"row {n}"} for n in range(10)],
    "validation": [{"text": "held\nout\n"}],
    "unsupervised": [{"text": "never"}],
}


@pytest.fixture
def datasets(monkeypatch):
    module = types.ModuleType("datasets")
    module.asked = []

    def load_dataset(path, name):
        module.asked.append((path, name))
        return ROWS

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def config(tmp_path, name="hf:org/name", **settings):
    return DataConfig(name=name, vocab="words", cache_dir=str(tmp_path), **settings)


def texts(corpus):
    splits = ("train", "valid", "test")
    return [corpus.vocab.decode(corpus.split(x)) for x in splits if corpus.n_tokens(x)]


def test_its_splits_are_ours_and_rows_end_with_a_line(datasets, tmp_path):
    corpus = prepare(config(tmp_path, test_fraction=0))
    assert texts(corpus) == ["".join(f"row {n}\n" for n in range(10)), "held\nout\n"
                             .replace("held", "<unk>").replace("out", "<unk>")]  # fmt: skip
    assert datasets.asked == [("org/name", None)]
    # Once imported, it needs no network.
    assert prepare(config(tmp_path, test_fraction=0)).folder == corpus.folder
    assert len(datasets.asked) == 1
    prepare(config(tmp_path, "hf:org/name:part", test_fraction=0))
    assert datasets.asked[1:] == [("org/name", "part")]


def test_a_folder_is_read_again_where_its_files_or_its_place_differ(
    datasets, tmp_path, monkeypatch
):
    found = []
    for place in ("one", "other"):
        folder = tmp_path / place / "texts"
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text("{}")
        monkeypatch.chdir(tmp_path / place)
        for name in ("hf:texts", "hf:texts", f"hf:{folder}"):
            # What is hidden is none of the texts.
            (folder / ".git").mkdir(exist_ok=True)
            (folder / ".git" / "index").write_text(name)
            found.append(find_hub_text(config(tmp_path, name), tmp_path / "cache", print)[0])
    (folder / "train.jsonl").write_text("{ }")
    found.append(find_hub_text(config(tmp_path, "hf:texts"), tmp_path / "cache", print)[0])
    assert found[0] == found[1] == found[2]
    assert found[3] == found[4] == found[5]
    assert len({*found}) == len(datasets.asked) == 3


def test_a_name_without_a_data_set_is_refused(datasets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"data\.name='hf:' has no data set: write hf:ORG/NAME"):
        find_hub_text(config(tmp_path, "hf:"), tmp_path / "cache", print)


def test_a_wrong_column_names_the_others(datasets, tmp_path):
    with pytest.raises(ValueError, match=r"no text in the column 'body' \(its columns are text\)"):
        prepare(config(tmp_path, json_field="body"))


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"'hf:org/name' needs.*pip install datasets"):
        prepare(config(tmp_path))


def test_trouble_of_the_package_is_an_error_of_ours(datasets, tmp_path):
    class DatasetNotFoundError(Exception):
        pass

    def load_dataset(*arguments, **settings):
        raise DatasetNotFoundError("no such data set")

    datasets.load_dataset = load_dataset
    with pytest.raises(OSError, match="datasets cannot read org/name: DatasetNotFoundError: no"):
        prepare(config(tmp_path))


def test_the_real_package_reads_a_folder_of_files(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, part in (("train", "train"), ("validation", "validation")):
        lines = "".join(json.dumps(row) + "\n" for row in ROWS[part])
        (folder / f"{name}.jsonl").write_text(lines)
    corpus = prepare(config(tmp_path / "cache", f"hf:{folder}", test_fraction=0))
    assert texts(corpus)[0] == "".join(f"row {n}\n" for n in range(10))
