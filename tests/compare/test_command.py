"""The command txl compare."""

import json

import pytest

from transformer_xl.cli import main
from transformer_xl.studies import baselines, compare


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"line {n} of a text\n" for n in range(400)))
    return path


def call(text, out, *words):
    return main(["compare", str(text), "--out", str(out), "--minutes", "4", *words])


@pytest.fixture(autouse=True)
def _others_losses(monkeypatch, made, found):
    """The contestants of the package, by how deep they are."""

    def carry_out(task):
        made.append(task)
        return found(task.config.model.n_layer + task.factor / 10)

    monkeypatch.setattr(compare, "_carry_out", carry_out)


def test_a_text_of_ones_own_is_read_by_bytes(tmp_path, text, made, capsys):
    out = tmp_path / "out"
    assert call(text, out, "--models", "txl,gpt", "lstm", "--no_baselines", "--json") == 0
    data = {(x.config.data.path, x.config.data.vocab) for x in made}
    assert data == {(str(text), "bytes")}
    assert {task.model for task in made} == {"txl", "gpt", "lstm"}
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["model"] for row in result["models"]][:2] == ["txl", "gpt"]
    assert json.loads((out / "comparison.json").read_text()) == result
    assert "| txl |" in (out / "comparison.md").read_text()
    assert (out / "comparison.svg").exists()


def test_baselines_stand_beside_the_models(tmp_path, text):
    pytest.importorskip("pyppmd")
    assert call(text, tmp_path / "out", "--models", "lstm", "--rates", "1") == 0
    table = (tmp_path / "out" / "comparison.md").read_text()
    for name in ("uniform", "xz -9e", "PPMd, given the training text"):
        assert f"| {name} |" in table


def test_an_interrupt_of_the_baselines_leaves_the_tables(tmp_path, text, made, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(baselines, "baselines", interrupted)
    assert call(text, tmp_path / "out", "--models", "lstm", "--rates", "1") == 130
    assert "| lstm |" in (tmp_path / "out" / "comparison.md").read_text()
    result = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["model"] for row in result["models"]] == ["lstm"]


def test_the_same_command_goes_on(tmp_path, text, made):
    words = ("--models", "lstm", "--no_baselines")
    call(text, tmp_path / "out", *words)
    n = len(made)
    assert call(text, tmp_path / "out", *words) == 0
    assert len(made) == n


def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path, text, made, capsys):
    for words, message in (
        (("--models", "gpr"), "contestants are"),
        (("--seeds", "1", "1"), "must be different"),
        (("--minutes", "0"), "minutes=0"),
        (("--search_minutes", "-1"), "search_minutes=-1.0 must be above 0"),
        (("--tokens", "0"), "tokens=0 must be at least 2"),
        (("--tokens", "-5"), "tokens=-5 must be at least 2"),
    ):
        assert main(["compare", str(text), "--out", str(tmp_path / "out"), *words]) == 2, words
        assert message in capsys.readouterr().err, words
        assert not made, words


def test_without_any_model_that_could_be_trained_it_fails(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setattr(compare, "_carry_out", lambda task: {"failed": "RuntimeError: diverged"})
    words = ("--models", "lstm", "--rates", "1", "--no_baselines")
    assert call(text, tmp_path / "out", *words) == 1
    assert "no contestant could be trained" in capsys.readouterr().err


def test_the_runs_are_said_first_and_the_best_last(tmp_path, text, capsys):
    assert call(text, tmp_path / "out", "--models", "txl", "gpt", "--no_baselines") == 0
    out, err = capsys.readouterr()
    assert err.startswith("8 runs of 1 minutes to find rates, and 2 of 4; Ctrl-C stops")
    assert out.splitlines()[-1].startswith("txl is best: ")
    assert max(map(len, out.splitlines())) <= 100


def test_evaluations_are_as_long_as_their_share_of_the_time(tmp_path, text, made, capsys):
    # 16 x 128 tokens in half a second, of which a quarter of 15 s is taken.
    words = ("--models", "txl", "--rates", "1", "--no_baselines", "--search_minutes", "0.25")
    text.write_text("".join(f"line {n} of a text\n" for n in range(40_000)))
    assert call(text, tmp_path / "out", *words) == 0
    assert {task.eval_tokens for task in made} == {15_000}
    assert "evaluating on 15,000 tokens of each split" in capsys.readouterr().err
    # All of it where there is time, as before, and what is given in any case.
    assert call(text, tmp_path / "long", *words[:-2]) == 0
    assert made[-1].eval_tokens is None
    assert call(text, tmp_path / "given", *words, "--tokens", "50") == 0
    assert made[-1].eval_tokens == 50


def test_baselines_take_no_longer_than_a_run(tmp_path, text, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(baselines, "baselines", lambda *_, names: measured.extend(names) or [])
    words = ("--models", "lstm", "--rates", "1", "--minutes")
    # 7.6 kB, of which n-grams take 0.06 s.
    assert call(text, tmp_path / "out", *words, "0.0005") == 0
    assert {"uniform", "gzip -9"} <= {*measured}
    assert "n-gram" not in measured
    assert "n-gram" in capsys.readouterr().err.split("they would take longer")[0].splitlines()[-1]
