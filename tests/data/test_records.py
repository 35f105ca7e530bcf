"""Records that `datasets` reads: JSON lines, Parquet, and data sets of Hugging Face."""

import json
import os
import sys
import types

import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data.finding import find_hub_text
from transformer_xl.data.preparing import prepare

RECORDS = [{"text": "first\n", "id": 1}, {"text": "zweite é"}, {"text": "\tthird\r\nfourth"}]
TEXT = "first\nzweite é\n\tthird\nfourth\n"


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture(autouse=True)
def _cache_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def text_of(tmp_path):
    """Prepares a text as a whole, and returns it."""

    def run(*files, **settings):
        path = os.pathsep.join(str(tmp_path / x) for x in files)
        share = {"valid_fraction": 0, "test_fraction": 0}
        config = DataConfig(path=path, cache_dir=str(tmp_path / "cache"), **share, **settings)
        corpus = prepare(config)
        return corpus.vocab.decode(corpus.split("train"))

    return run


def test_records_give_their_field_one_text_after_another(tmp_path, text_of):
    import gzip

    import pyarrow.parquet

    (tmp_path / "a.jsonl").write_text(lines(*RECORDS) + "\n\n")
    (tmp_path / "b.ndjson.gz").write_bytes(gzip.compress(lines({"text": "fifth"}).encode()))
    assert text_of("a.jsonl", "b.ndjson.gz") == TEXT + "fifth\n"
    (tmp_path / "c[1].jsonl").write_text(lines({"body": "other", "text": 7}))
    assert text_of("c[1].jsonl", json_field="body") == "other\n"
    (tmp_path / "texts").mkdir()
    table = pyarrow.Table.from_pylist([{"text": x["text"]} for x in RECORDS])
    pyarrow.parquet.write_table(table, tmp_path / "texts" / "d.parquet")
    assert text_of("texts") == TEXT


def test_what_is_not_read_of_json_lines_may_be_anything(tmp_path, text_of):
    others = [{"meta": None}, {"meta": "x"}, {"meta": 1}, {"meta": {"a": 1}}, {"late": [1]}, {}]
    dates = [{"text": f"2020-01-0{n}"} | other for n, other in enumerate(others, 1)]
    (tmp_path / "a.jsonl").write_text(lines(*dates))
    (tmp_path / "empty.jsonl").write_text("")
    expected = "".join(f"{x['text']}\n" for x in dates)
    assert text_of("a.jsonl", "empty.jsonl") == expected


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{', r"a\.jsonl: line 2 is not JSON: "),
        (
            "a.jsonl",
            '{"body": "x"}',
            r"line 1 has no text in .* 'text' \(its fields are body\); name",
        ),
        ("a.jsonl", '{"text": 1}', r"a\.jsonl: line 1 has no text in the field 'text'"),
        ("a.parquet", "PAR1", r"a\.parquet cannot be read by datasets: "),
    ],
)
def test_records_that_do_not_fit_are_named(tmp_path, text_of, name, data, message):
    (tmp_path / name).write_text(data)
    with pytest.raises(ValueError, match=message):
        text_of(name)


@pytest.mark.parametrize("error", [OSError(5, "failed"), MemoryError(), ImportError("x")])
def test_trouble_of_the_machine_is_none_of_the_records(tmp_path, text_of, monkeypatch, error):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(type(error)):
        text_of("a.parquet")
    # What was written is used by the next call.
    assert [*(tmp_path / "cache").glob(".building-*")]


def test_without_the_package_the_error_says_what_to_install(tmp_path, text_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet, read with datasets, needs.*pip install"):
        text_of("a.parquet")
    with pytest.raises(ValueError, match=r"'hf:org/name', read with datasets, needs"):
        prepare(DataConfig(name="hf:org/name", cache_dir=str(tmp_path)))


def test_the_splits_of_a_data_set_are_ours(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, texts in (("train", ["a", "b\n"] * 5), ("validation", ["held\nout\n"])):
        (folder / f"{name}.jsonl").write_text(lines(*({"text": x} for x in texts)))
    config = DataConfig(
        name=f"hf:{folder}", vocab="chars", cache_dir=str(tmp_path), test_fraction=0
    )
    corpus = prepare(config)
    parts = [corpus.vocab.decode(corpus.split(x)) for x in ("train", "valid")]
    assert parts[0] == "a\nb\n" * 5
    assert parts[1].count("\n") == 2
    # What was read is read once, and again where its files or its fields differ.
    assert prepare(config).folder == corpus.folder
    folders = {find_hub_text(config, tmp_path / "downloads", print)[0]}
    (folder / "train.jsonl").write_text(lines({"text": "other"}))
    folders.add(find_hub_text(config, tmp_path / "downloads", print)[0])
    assert len(folders) == 2
    with pytest.raises(ValueError, match=r"data\.name='hf:' has no data set: write hf:ORG/NAME"):
        prepare(DataConfig(name="hf:"))
