"""The door: help, versions, exit codes, and errors instead of tracebacks."""

import errno
import inspect
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import transformer_xl
from transformer_xl import cli
from transformer_xl.cli import main, parse
from transformer_xl.cli.printing import show

VERBS = [*cli.commands()]


def test_help_lists_every_command_and_the_exit_codes(txl):
    ended = txl("--help")
    assert ended.code == 0
    rows = [line.removeprefix("│").split() for line in ended.out.splitlines()]
    assert [row[1] for row in rows if row[:1] == ["•"]] == VERBS
    assert "exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted by Ctrl-C" in ended.out
    assert txl("-h") == ended


def test_no_command_at_all_is_a_misuse_that_is_helped(txl):
    ended = txl()
    assert ended.code == 2
    assert ended.out.startswith("usage: txl")


def test_the_version_is_that_of_the_package(txl):
    assert txl("--version") == (0, transformer_xl.__version__ + "\n", "")


def examples(kind):
    """The command lines at the end of the help of a command."""
    _, _, lines = (inspect.getdoc(kind) or "").partition("\nExamples:\n")
    return [line.strip() for line in lines.splitlines()]


def test_the_help_of_a_command_says_what_it_does_and_shows_examples(txl):
    for verb in VERBS:
        ended = txl(verb, "--help")
        assert ended.code == 0, verb
        kind = cli.commands()[verb]
        text = " ".join(ended.out.split())
        assert " ".join((inspect.getdoc(kind) or "").split()) in text, verb
        assert examples(kind), verb
        for example in examples(kind):
            assert f"  {example}"[:70] in ended.out, verb
        assert ended.err == "", verb


def test_the_examples_in_the_help_parse(toy_toml, trained):
    for verb in VERBS:
        kind = cli.commands()[verb]
        for example in examples(kind):
            # Of a pipeline the part that is ours, without what the shell does around it.
            command = next(part for part in example.split("|") if "txl " in part)
            words = shlex.split(command.split(">")[0])
            words = words[words.index("txl") + 1 :]
            words = [str(toy_toml) if word.endswith(".toml") else word for word in words]
            known = {"shakespeare-char-cpu", "demo"} - {
                *transformer_xl.config.recipes.recipe_names()
            }
            words = [str(toy_toml) if word in known else word for word in words]
            if verb == "train" and "/" in words[1]:
                words[1] = str(trained)
            assert type(parse(words)) is kind, verb


def test_the_help_shows_what_a_setting_does_and_what_it_is_by_default(txl, toy_toml):
    out = txl("train", toy_toml, "--help").out
    assert "--model.d-inner" not in out
    text = " ".join(word for word in out.split() if word != "│")
    row = text[text.index("--model.d_inner INT") :][:160]
    assert "Width of the feed-forward layer" in row
    assert "(from the recipe; default: 2048)" in row


def test_a_wrong_command_line_is_a_misuse_that_is_explained(txl):
    for words, message in [
        (["recipes", "--from-authors", "--n_layer 3"], "txl recipes --from_authors is gone: "),
        (["bench", "demo", "--steps", "1"], "txl bench is gone: txl doctor says how fast"),
        (["convert", "a", "b", "--to=authors"], "txl convert --to is gone: old formats are"),
        (["estimate", "demo", "--gpus", "2"], "txl estimate is gone: docs/scale.md has"),
        (["eval", "a", "--preset=wt103-large"], "txl eval --preset is gone: txl convert writes"),
        (["report", "runs/demo"], "txl report is gone: a report is written when a training"),
        (["trian"], "there is no command or option trian: did you mean train?"),
        (["xyzzy"], "the commands are recipes, prepare, train"),
        (["--json"], "--json"),
        (["train"], "RECIPE"),
        (["train", "demo", "--out", "x", "--train.setps", "3"], "--train.steps"),
        (["train", "demo", "--out", "x", "--train.steps", "three"], "three"),
        (["generate", "english", "--top_p", "2"], "top_p=2.0 must be at most 1"),
        (["compress", "text", "--verfy"], "--verify"),
    ]:
        ended = txl(*words)
        assert ended.code == 2, words
        assert message in ended.err, words
        assert "Traceback" not in ended.err, words
        assert ended.out == "", words


def test_a_wrong_recipe_is_named_with_what_is_wrong(txl, tmp_path):
    path = tmp_path / "mine.toml"
    for content, code, message in [
        (b"[model\n", 2, "is not valid TOML"),
        (b"\x80\x04\x95", 2, "is not a recipe: it is not text"),
        (None, 1, "does not exist"),
    ]:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        ended = txl("train", path, "--out", tmp_path / "run")
        assert (ended.code, ended.out) == (code, ""), content
        assert ended.err.startswith("txl: "), content
        assert str(path) in ended.err, content
        assert message in ended.err, content
        assert not (tmp_path / "run").exists(), content


def failing(monkeypatch, error):
    def run():
        raise error

    monkeypatch.setattr(cli, "parse", lambda argv: SimpleNamespace(run=run))


class Stopped(Exception):  # noqa: N818  (as the one of the training loop)
    def __init__(self, number):
        super().__init__("stopped at step 3 and saved")
        self.signal_number = number


def test_how_it_ended_is_the_exit_code(monkeypatch, capsys):
    for error, code, message in [
        (ValueError("n=1 is wrong"), 2, "txl: n=1 is wrong"),
        (FileNotFoundError("no a.txt"), 1, "txl: no a.txt"),
        (RuntimeError("the loss is nan"), 1, "txl: the loss is nan"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Stopped(signal.SIGINT), 130, "stopped at step 3 and saved"),
        (Stopped(signal.SIGTERM), 0, "stopped at step 3 and saved"),
        (OSError(errno.ENOSPC, "No space left"), 1, "txl: the disk is full: [Errno 28]"),
        (OSError("the disk is full: a was not"), 1, "txl: the disk is full: a was not"),
    ]:
        failing(monkeypatch, error)
        assert main([]) == code, error
        out, err = capsys.readouterr()
        assert out == "", error
        assert err.strip().startswith(message), error
        assert "Traceback" not in err, error


def test_a_bug_is_not_hidden_nor_a_traceback_that_is_wanted(monkeypatch):
    failing(monkeypatch, TypeError("ours"))
    with pytest.raises(TypeError, match="ours"):
        main([])
    failing(monkeypatch, ValueError("n=1 is wrong"))
    monkeypatch.setenv("TXL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="n=1"):
        main([])


@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", b"\xff \xce\xa9"), ("ascii", b"\\udcff \\u03a9")]
)
def test_a_terminal_gets_any_text(monkeypatch, tmp_path, encoding, shown):
    with (tmp_path / "out").open("w", encoding=encoding) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        cli._write_anything()
        stream.write(os.fsdecode(b"\xff") + " Ω")
    assert (tmp_path / "out").read_bytes() == shown


def test_a_result_is_a_table_or_json_without_infinities(capsys):
    values = {"ppl": float("inf"), "nll": 0.123456, "n": 3, "of": {"a": 1, "b": float("nan")}}
    show(values, as_json=False)
    table = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in table] == [
        ["ppl", "inf"],
        ["nll", "0.1235"],
        ["n", "3"],
        ["of", "a 1, b nan"],
    ]
    show(values, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"ppl": None, "nll": 0.123456, "n": 3, "of": {"a": 1, "b": None}}


def test_no_two_files_of_commands_import_each_other():
    shared = {"fitting", "flow", "given", "loading", "out_files", "printing", "tables"}
    for path in Path(cli.__file__).parent.glob("*.py"):
        if path.name == "__init__.py":
            continue
        imported = set(re.findall(r"from transformer_xl\.cli\.(\w+) import", path.read_text()))
        assert imported <= shared, path.name
