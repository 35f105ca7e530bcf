"""Every setting of the text changes what is prepared, or how: `DATA` has a row for each."""

from dataclasses import fields, replace

from transformer_xl.config import DataConfig
from transformer_xl.data import corpus, prepare, tokenizing
from transformer_xl.train.beginning import fit_to_corpus

DATA = {
    "name": ({}, "tiny-shakespeare", "manifest"),
    "path": ({}, "other.txt", "tokens"),
    "valid_path": ({}, "other.txt", "tokens"),
    "test_path": ({}, "other.txt", "tokens"),
    "json_field": ({"path": "rows.jsonl"}, "title", "tokens"),
    "raw": ({"path": "windows.txt"}, True, "tokens"),
    "split_by": (
        {"path": "several", "vocab": "bytes", "valid_fraction": 0.2, "test_fraction": 0.2},
        "file",
        "tokens",
    ),
    "valid_fraction": ({}, 0.2, "tokens"),
    "test_fraction": ({}, 0.2, "tokens"),
    "vocab": ({}, "words", "tokens"),
    "vocab_size": ({"vocab": "words"}, 6, "tokens"),
    "vocab_from": ({"vocab": "chars"}, "all", "vocab"),
    "tokenizer": ({}, "vocabulary", "vocab"),
    "reset_at": ({}, "\n", "training"),
    "completion_at": ({"reset_at": "\n"}, "w", "training"),
    "workers": ({}, 2, "threads"),
    "cache_dir": ({}, "elsewhere", "place"),
    "corpus": ({}, "prepared", "place"),
    "verify": ({}, "always", "comparisons"),
}


def test_every_setting_has_a_row():
    assert [*DATA] == [field.name for field in fields(DataConfig)]
    for name, (base, value, *_) in DATA.items():
        assert DataConfig(**base | {name: value}) != DataConfig(**base), name


def test_the_command_line_hands_every_setting_on(handed_on):
    assert handed_on("data", DataConfig, DATA) == {n: x for n, (_, x, *_) in DATA.items()}


def tokens_of(monkeypatch, config):
    found = prepare(config.data)
    return [found.split(name).tolist() for name in ("train", "valid", "test")]


def vocab_of(monkeypatch, config):
    return prepare(config.data).vocab.symbols


def manifest_of(monkeypatch, config):
    return prepare(config.data).manifest.source["name"]


def training_of(monkeypatch, config):
    model = fit_to_corpus(config, prepare(config.data)).model
    return model.reset_at, model.completion_at


def place_of(monkeypatch, config):
    return prepare(config.data).folder.resolve()


def threads_of(monkeypatch, config):
    seen = []
    encode_blocks = tokenizing._encode_blocks
    monkeypatch.setattr(
        tokenizing, "_encode_blocks", lambda *x: seen.append(x[-1]) or encode_blocks(*x)
    )
    prepare(replace(config.data, cache_dir=f"{config.data.cache_dir}{config.data.workers}"))
    return seen


def comparisons_of(monkeypatch, config):
    """How often checksums are compared where they were compared before."""
    prepare(config.data)
    seen, verify = [], corpus.Corpus.verify
    monkeypatch.setattr(corpus.Corpus, "verify", lambda self: seen.append(1) or verify(self))
    prepare(config.data)
    return seen


OF_TEXT = {
    "tokens": tokens_of,
    "vocab": vocab_of,
    "manifest": manifest_of,
    "training": training_of,
    "place": place_of,
    "threads": threads_of,
    "comparisons": comparisons_of,
}


def test_a_setting_of_the_text_counts(monkeypatch, recipe):
    for name, (base, value, where) in DATA.items():
        found = []
        for settings in (base, base | {name: value}):
            with monkeypatch.context() as patch:
                found.append(OF_TEXT[where](patch, recipe(data=settings)))
        assert found[0] != found[1], name
