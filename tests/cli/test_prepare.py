"""`txl prepare` with the name of a corpus, and what is no text, from preparing to scoring."""

import json

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
