"""The program that writes the text of the model of chorales."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

PROGRAM = Path(__file__).parents[2] / "scripts" / "pretrained" / "chorales.py"


@pytest.fixture(autouse=True)
def _beside(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))


@pytest.fixture
def program() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(PROGRAM)))


def test_a_transposition_keeps_intervals_and_rests(program):
    piece = [(60, 55, 52, -1), (62, -1, 53, 43)]
    assert program.transposed(piece, 3) == [(63, 58, 55, -1), (65, -1, 56, 46)]
    assert program.transposed(program.transposed(piece, 3), -3) == piece


def test_no_voice_leaves_its_range_and_every_key_within_it_is_one(program):
    pieces = [[(70, 60, 50, 40)], [(75, 66, 54, 45)], [(72, -1, 52, 42), (73, 62, 52, 42)]]
    ranges = program.ranges_of(pieces)
    assert ranges == [(70, 75), (60, 66), (50, 54), (40, 45)]
    assert [program.keys_of(piece, ranges) for piece in pieces] == [
        [0, 1, 2, 3, 4],
        [-4, -3, -2, -1, 0],
        [-2, -1, 0, 1, 2],
    ]


def test_a_round_has_every_piece_once_and_keys_come_again_after_all_others(program):
    pieces = [[(70, 60, 50, 40)], [(72, 61, 51, 42)] * 2, [(75, 66, 54, 45)] * 3]
    keys = [program.keys_of(piece, program.ranges_of(pieces)) for piece in pieces]
    found = program.rounds_of(pieces, 10, seed=1)
    rounds = [found[n : n + 3] for n in range(0, 30, 3)]
    for each in rounds:
        assert sorted(map(len, each)) == [1, 2, 3]
    for piece, own in zip(pieces, keys, strict=True):
        sung = [x for each in rounds for x in each if len(x) == len(piece)][: len(own)]
        assert sorted(sung) == sorted(program.transposed(piece, key) for key in own)
    assert found == program.rounds_of(pieces, 10, seed=1) != program.rounds_of(pieces, 10, seed=2)


def test_the_text_is_read_as_a_corpus_and_what_is_held_out_is_as_it_was(
    program, tmp_path, monkeypatch, capsys
):
    from transformer_xl import DataConfig, prepare

    song = [[72, 67, 64, 48], [74, 67, -1, 47]]
    parts = {"train": [song * 2, song * 3], "valid": [song], "test": [song * 4]}
    (tmp_path / "Jsb16thSeparated.json").write_text(json.dumps(parts))
    out = tmp_path / "chorales.json"
    words = ["chorales.py", str(out), "--path", str(tmp_path), "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(PROGRAM), run_name="__main__")
    written = json.loads(out.read_text())
    assert (written["valid"], written["test"]) == (parts["valid"], parts["test"])
    assert sorted(written["train"]) == sorted(parts["train"] * 2)
    corpus = prepare(DataConfig(path=str(out), vocab="integers"))
    assert corpus.n_tokens("train") == 2 * (4 * 4 + 1 + 4 * 6 + 1)
    before = out.read_bytes()
    monkeypatch.setattr(sys, "argv", [*words, "--seed", "5"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert "chorales.json exists; --force overwrites it" in capsys.readouterr().err
    assert out.read_bytes() == before
    monkeypatch.setattr(sys, "argv", [*words, "--seed", "5", "--force"])
    runpy.run_path(str(PROGRAM), run_name="__main__")
    assert out.read_bytes() != before
