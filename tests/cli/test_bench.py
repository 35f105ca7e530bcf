"""bench, as a user types it."""

import json

import pytest

from transformer_xl.apps.bench import speed as measuring
from transformer_xl.cli import benching
from transformer_xl.ops import timing

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("CEILING_WIDTH", "READING_WIDTH"):
        monkeypatch.setattr(timing, name, {"cpu": 64})
    monkeypatch.setattr(measuring, "TOKENS", 3)


def test_bench_shows_a_table_to_people_and_an_object_to_programs(txl, toy_toml):
    ended = txl("bench", toy_toml, "--steps", 1, "--json")
    assert ended.code == 0
    assert {"training", "evaluation", "generation", "ceiling"} <= {*ended.json}
    for word in ("training", "evaluation", "generation", "tokens/s", "measured peak", "MB"):
        assert word in ended.err
    # How many characters there are is for the text to say.
    assert "vocab_size=100 is assumed" in ended.err
    assert txl("bench", toy_toml, "--steps", 1).out == ""


def test_bench_takes_the_settings_of_the_command_line(txl, toy_toml):
    words = ["--model.vocab_size", 50, "--model.mem_len", 3, "--train.segment_len", 5]
    ended = txl("bench", toy_toml, "--steps", 1, "--json", *words, "--eval.mem_len", 7)
    assert ended.json["vocab_size"] == 50
    assert "is taken for" not in ended.err
    row = ended.json["training"]
    assert (row["segment_len"], row["mem_len"]) == (5, 3)
    assert (ended.json["evaluation"]["mem_len"], ended.json["generation"]["mem_len"]) == (7, 3)


@pytest.mark.slow
def test_bench_profiles_and_writes_what_it_found(txl, toy_toml, tmp_path):
    file = tmp_path / "new" / "profile.json"
    ended = txl("bench", toy_toml, "--steps", 1, "--profile", file, "--json")
    assert ended.code == 0
    assert json.loads(file.read_text()) == ended.json
    assert [*tmp_path.rglob("*.*")] == [file]
    for row in ended.json["parts"]:
        assert row["part"] in ended.err
    assert ended.json["operators"][0]["operator"] in ended.err


@pytest.mark.parametrize(
    "words", [["{toy}", "--steps", 1, "--profile"], ["evaluation-speed", "--out"]], ids=str
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    txl, toy_toml, tmp_path, monkeypatch, words
):
    for name in ("_measure", "_measure_windows"):
        monkeypatch.setattr(benching.Bench, name, None)
    words = [toy_toml if word == "{toy}" else word for word in words]
    ended = txl("bench", *words, tmp_path, "--json")
    assert (ended.code, ended.out) == (1, "")
    assert f"{tmp_path} is a folder: give a file in it" in ended.err


@pytest.mark.slow
def test_bench_profiles_without_a_file(txl, toy_toml):
    ended = txl("bench", toy_toml, "--steps", 1, "--profile")
    assert (ended.code, ended.out) == (0, "")
    assert "softmax and loss" in ended.err


def test_bench_explains_what_it_cannot_do(txl, toy_toml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for words, code, message in [
        (["--steps", 0], 2, "steps=0 must be at least 1"),
        (["--profile", "a.json", "b.json"], 2, "--profile takes one file, not 2"),
        (["--profile", "--train.compile", "True"], 2, "profile with --train.compile False"),
        (["--profile", "file/profile.json", "--steps", 1], 1, "cannot write file/profile.json"),
    ]:
        ended = txl("bench", toy_toml, *words)
        assert (ended.code, ended.out) == (code, ""), words
        assert message in ended.err, words


TINY = ["--model.n_layer", 2, "--model.d_model", 16, "--model.n_head", 2, "--model.d_inner", 16]


def test_evaluation_speed_is_a_part_of_bench(txl, tmp_path):
    file = tmp_path / "new" / "table-9.json"
    words = ["--attn_lens", 5, 800, "--segment_len", 8, "--windows", 2, "--rounds", 1]
    ended = txl("bench", "evaluation-speed", *TINY, *words, "--out", file, "--json")
    assert ended.code == 0
    assert json.loads(file.read_text()) == ended.json
    assert [row["attn_len"] for row in ended.json["rows"]] == [5, 800]
    assert [row["paper"] for row in ended.json["rows"]] == [None, 363]
    assert (ended.json["n_layer"], ended.json["dtype"]) == (2, "float32")
    for word in ("window, ms/token", "paper", "363"):
        assert word in ended.err


def test_an_option_of_the_other_measurement_is_refused(txl):
    for recipe, words, message in [
        (
            "demo",
            ["--attn_lens", 3],
            "--attn_lens (3,) has no effect here: it is an option of txl bench",
        ),
        ("evaluation-speed", ["--steps", 3], "--steps 3 has no effect here"),
        ("evaluation-speed", ["--train.steps", 3], "--train.steps 3 has no effect here"),
        ("evaluation-speed", ["--model.mem_len", 3], "--model.mem_len 3 has no effect here"),
        ("evaluation-speed", ["--model.attn_len", 3], "--model.attn_len 3 has no effect here"),
        ("evaluation-speed", ["--model.attn_type", 1], "--model.attn_type 1 has no effect here"),
        ("evaluation-speed", ["--model.n_positions", 9], "--model.n_positions 9 has no effect"),
    ]:
        ended = txl("bench", recipe, *words)
        assert (ended.code, ended.out) == (2, ""), words
        assert message in ended.err, words


def test_the_help_says_what_evaluation_speed_is(txl):
    ended = txl("bench", "evaluation-speed", "--help")
    assert ended.code == 0
    assert "--attn_lens" in ended.out
    assert "measures the paper's Table 9" in " ".join(txl("bench", "--help").out.split())


def test_evaluation_speed_explains_what_it_cannot_do(txl):
    ended = txl("bench", "evaluation-speed", *TINY, "--attn_lens", 0)
    assert (ended.code, ended.out) == (2, "")
    assert "attn_lens=(0,) must be a list with each item an integer above 0" in ended.err
