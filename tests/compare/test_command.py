"""The command txl compare."""

import json

import pytest

from transformer_xl.cli import main
from transformer_xl.studies import baselines, compare
from transformer_xl.train import Diverged


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"line {n} of a text\n" for n in range(400)))
    return path


def call(text, out, *words):
    return main(["compare", str(text), "--out", str(out), "--minutes", "4", *words])


@pytest.fixture(autouse=True)
def _others_losses(monkeypatch, made, found):
    """A loss of each contestant of the package."""

    def measured(config, folder, *, n_tokens=None):
        made.append((folder.parent.name, config, n_tokens))
        return found({"txl": 2.0, "gpt": 2.5, "lstm": 3.0}[folder.parent.name] + config.train.lr)

    monkeypatch.setattr(compare, "measured", measured)


def test_a_text_of_ones_own_is_read_by_bytes(tmp_path, text, made, capsys):
    out = tmp_path / "out"
    assert call(text, out, "--models", "txl,gpt", "lstm", "--no_baselines", "--json") == 0
    assert {(x.data.path, x.data.vocab) for _, x, _ in made} == {(str(text), "bytes")}
    assert {model for model, *_ in made} == {"txl", "gpt", "lstm"}
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["model"] for row in result["models"]][:2] == ["txl", "gpt"]
    assert json.loads((out / "comparison.json").read_text()) == result
    assert "| txl |" in (out / "comparison.md").read_text()
    assert (out / "comparison.svg").exists()


def test_settings_of_the_command_line_are_those_of_all_contestants(tmp_path, text, made):
    words = ("--models", "txl", "lstm", "--rates", "1", "--no_baselines")
    call(text, tmp_path / "out", *words, "--model.dropout", "0.3", "--train.batch_size", "4")
    own = (*words[:2], *words[3:], "--model.d_inner", "32", "--model.qk_norm", "False")
    assert call(text, tmp_path / "own", *own) == 0
    assert (made[-1][1].model.d_inner, made.pop()[1].model.qk_norm) == (32, False)
    assert [(x.model.kind, x.model.dropout, x.train.batch_size) for _, x, _ in made] == [
        ("transformer_xl", 0.3, 4),
        ("lstm", 0.3, 4),
    ]


@pytest.mark.filterwarnings("ignore:PPMd is left out")
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
        (("--train.steps", "9"), "--train.steps 9 has no effect here"),
        (("--model.dropout", "2"), "model.dropout=2.0"),
        (("--tokens", "-5"), "tokens=-5 must be at least 2"),
    ):
        assert main(["compare", str(text), "--out", str(tmp_path / "out"), *words]) == 2, words
        assert message in capsys.readouterr().err, words
        assert not made, words


def test_without_any_model_that_could_be_trained_it_fails(tmp_path, text, monkeypatch, capsys):
    def failing(*_, **__):
        raise Diverged("the loss is not finite")

    monkeypatch.setattr(compare, "measured", failing)
    words = ("--models", "lstm", "--rates", "1", "--no_baselines")
    assert call(text, tmp_path / "out", *words) == 1
    assert "no contestant could be trained" in capsys.readouterr().err
