"""`txl prepare` with the name of a corpus, and what is no text, from preparing to scoring."""

import json

import pytest

from transformer_xl.data.catalogue import KNOWN_CORPORA


def test_a_corpus_is_prepared_by_name_with_its_common_settings(txl, tmp_path):
    song = {"train": [[60, 62, 64, 60]] * 40, "valid": [[60, 62, 64]] * 4, "test": [[64, 62]] * 4}
    (tmp_path / "Jsb16thSeparated.json").write_text(json.dumps(song))
    ended = txl("prepare", "jsb-chorales", "--data.path", tmp_path, "--json")
    assert ended.code == 0
    assert (ended.json["vocab"], ended.json["train"], ended.json["test"]) == (4, 200, 12)
    assert "differs from the published" in ended.err


def test_a_name_that_is_neither_recipe_nor_corpus_is_misuse(txl):
    ended = txl("prepare", "war-and-peace")
    assert ended.code == 2
    assert "war-and-peace" in ended.err


def test_the_help_names_every_corpus(txl):
    out = " ".join(txl("prepare", "--help").out.split())
    assert all(name in out for name in KNOWN_CORPORA)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_integers_are_trained_on_generated_and_scored(txl, tmp_path, toy_recipe):
    from transformer_xl.config.recipes import dump_recipe

    (tmp_path / "notes.txt").write_text("".join(f"60 {60 + n % 5} -1 72\n" for n in range(400)))
    data = {"path": str(tmp_path / "notes.txt"), "vocab": "integers"}
    recipe = toy_recipe(data=data, generate={"prompt": "60 61"})
    (tmp_path / "notes.toml").write_text(dump_recipe(recipe))
    run = tmp_path / "run"
    assert txl("train", tmp_path / "notes.toml", "--out", run, "--quiet").code == 0
    ended = txl("generate", run, "--prompt", "60 61 -1", "--length", "12")
    assert ended.code == 0
    written = ended.out.split()
    assert all(symbol.removeprefix("-").isdigit() for symbol in written)
    (tmp_path / "song.txt").write_text("60 62 -1 72\n")
    scores = txl("score", run, tmp_path / "song.txt", "--json").json
    assert len(scores["ids"]) == 5
    refused = txl("generate", run, "--prompt", "60 99")
    assert refused.code == 2
    assert "not in the vocabulary" in refused.err
