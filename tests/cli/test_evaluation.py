"""eval by other ways than a plain reading, as a user types them."""

import re
import shutil
from dataclasses import replace

import pytest
from tests.cli.conftest import TEXT

from transformer_xl.cli.loading import say_if_unmeasured
from transformer_xl.config import ModelConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.data import load_vocab, prepare
from transformer_xl.inference.evaluate import (
    Dynamic,
    SlidingWindow,
    WithMemory,
    evaluate,
    gradient_squares,
)
from transformer_xl.model import TransformerXL

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = TEXT[:100]


@pytest.fixture
def short(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text(SHORT)
    return path


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_eval_learns_as_it_goes_and_leaves_the_run_as_it_is(txl, trained, text):
    before = files_of(trained)
    words = ["--file", text, "--eval.segment_len", 16, "--eval.dynamic", "rms"]
    words += ["--eval.dynamic_lr", 1e-3, "--eval.dynamic_decay", 0.01, "--eval.dynamic_eps", 0.2]
    found = txl("eval", trained, *words, "--eval.dynamic_tokens", 300, "--json").json
    assert files_of(trained) == before
    model, vocab = TransformerXL.from_pretrained(trained), load_vocab(trained / "model" / "best")
    training_text = prepare(load_recipe(trained / "recipe.toml").data).split("train")
    squares = gradient_squares(model, training_text[:300], segment_len=16)
    settings = Dynamic(lr=1e-3, decay=0.01, eps=0.2, squares=squares)
    ids = vocab.encode(TEXT)
    expected = evaluate(model, ids, replace(settings, segment_len=16))
    assert found["nll"] == pytest.approx(expected.nll)
    assert found["nll"] < evaluate(model, ids, WithMemory(segment_len=16)).nll
    assert (found["dynamic"], found["batch_size"]) == ("rms", 1)


def test_eval_takes_the_text_as_its_second_word(txl, trained, short):
    found = [txl("eval", trained, *words, short, "--json").json for words in ((), ("--file",))]
    assert found[0]["nll"] == found[1]["nll"]
    assert found[0]["split"] == str(short)
    code, out, err = txl("eval", trained, short, "--file", "other")
    assert (code, out) == (2, "")
    assert f"{short} and --file other are two texts: leave out one of them" in err


def test_eval_by_windows_has_no_memory(txl, trained, short):
    words = ["--file", short, "--eval.window", 4, "--eval.batch_size", 3]
    found = txl("eval", trained, *words, "--json").json
    ids = load_vocab(trained / "model" / "best").encode(SHORT)
    expected = evaluate(TransformerXL.from_pretrained(trained), ids, SlidingWindow(window=4))
    assert found["nll"] == pytest.approx(expected.nll, rel=1e-5)
    assert (found["window"], found["mem_len"]) == (4, 0)


def test_eval_measures_each_memory_that_is_asked_for(txl, trained, text):
    words = ["eval", trained, "--file", text, "--eval.mem_lens", 0, 3, 20]
    found = txl(*words, "--json").json
    curve = found["memory_curve"]
    # The configured memory is that of the object itself.
    assert [row["mem_len"] for row in curve] == [0, 3, 8, 20]
    for row in curve:
        alone = txl(
            "eval", trained, "--file", text, "--eval.mem_len", row["mem_len"], "--json"
        ).json
        assert row["nll"] == pytest.approx(alone["nll"])
        assert "memory_curve" not in alone
    assert {name: found[name] for name in curve[2]} == curve[2]
    assert len({row["nll"] for row in curve}) == 4
    shown = txl(*words).out.splitlines()[-4:]
    assert [line.split(":")[0].split() for line in shown] == [
        ["memory", str(row["mem_len"])] for row in curve
    ]


def test_eval_explains_what_cannot_be(txl, trained, text):
    for words, message in [
        (["--eval.window", 3, "--eval.dynamic", "sgd"], "are two ways to evaluate"),
        (
            ["--eval.dynamic", "sgd", "--weights", "int8"],
            "--eval.dynamic and --weights exclude each other",
        ),
        (["--data.path", "x"], "--data.path x has no effect here: --file is the text;"),
        (["--eval.dynamic", "sgd", "--data.path", "x"], "--data.path x has no effect here"),
        (["--eval.split", "test"], "--file and --eval.split exclude each other"),
        (["--knn.k", 4], "txl eval --knn.k is gone: revision 47b3a2d of transformer_xl"),
    ]:
        ended = txl("eval", trained, "--file", text, *words)
        assert (ended.code, ended.out) == (2, ""), words
        assert message in " ".join(ended.err.replace("│", " ").split()), words


def test_a_memory_longer_than_was_measured_is_said_to_be(txl, trained, text, tmp_path):
    """The recipe measures its own memory of 8 alone."""
    note = "have memories of up to 8;"
    archive = tmp_path / "text.txl"
    for words in (
        ["eval", trained, text],
        ["eval", trained, text, "--eval.window", 20],
        ["eval", trained, text, "--eval.mem_lens", 4, 9],
        ["compress", text, archive, "--model", trained, "--mem_len", 8],
    ):
        assert note not in txl(*words).err
    archive.unlink()
    for words in (
        ["eval", trained, text, "--eval.mem_len", 9],
        ["compress", text, archive, "--model", trained, "--mem_len", 9],
    ):
        err = txl(*words).err
        assert "memory 9: " in err
        assert note in err


def test_a_memory_that_no_layer_sees_needs_no_warning(trained, capsys):
    small = {"vocab_size": 9, "n_layer": 2, "n_head": 2, "d_model": 8, "d_inner": 8, "mem_len": 8}
    for lengths, is_warned in (
        ({"layer_attn_lens": (4, 8)}, False),
        ({"attn_len": 8}, False),
        ({"attn_len": 9}, True),
        ({}, True),
    ):
        say_if_unmeasured(trained, TransformerXL(ModelConfig(**small, **lengths)), 9)
        assert ("memory 9: " in capsys.readouterr().err) == is_warned


def test_another_text_is_evaluated_without_the_training_text(txl, trained, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    recipe = (run / "recipe.toml").read_text()
    moved = re.sub(r"(?m)^path = .*$", 'path = "moved-away.txt"', recipe)
    assert moved != recipe
    (run / "recipe.toml").write_text(moved.replace("[eval]", '[eval]\nngram_cache = "training"'))
    ended = txl("eval", run, text, "--json")
    assert ended.code == 0
    assert "nll_with_cache" not in ended.json
    ended = txl("eval", run, text, "--eval.ngram_cache", "training")
    assert ended.code != 0
    assert "moved-away.txt" in ended.err
    (run / "recipe.toml").write_text(recipe.replace("[eval]", '[eval]\nngram_cache = "training"'))
    assert "nll_with_cache" in txl("eval", run, "--json").json
    own = ["eval", run, "--eval.split", "train"]
    assert "nll_with_cache" not in txl(*own, "--json").json
    ended = txl(*own, "--eval.ngram_cache", "training")
    assert (ended.code, ended.out) == (2, "")
    assert "the text that is evaluated would be counted" in " ".join(ended.err.split())


def test_eval_with_an_ngram_cache_says_what_both_take(txl, trained, text):
    words = ["eval", trained, text, "--eval.segment_len", 16]
    cached = [*words, "--eval.ngram_cache", "read"]
    alone, mixed = (txl(*each, "--json").json for each in (words, cached))
    assert mixed["nll"] == pytest.approx(alone["nll"])
    assert mixed["nll_with_cache"] < alone["nll"]  # the text repeats a sentence
    ratio = mixed["nll_with_cache"] / mixed["nll"]
    assert mixed["bits_per_byte_with_cache"] == pytest.approx(ratio * mixed["bits_per_byte"])
    counted = txl(
        "eval", trained, text, *words[3:], "--eval.ngram_cache", "training", "--json"
    ).json
    assert counted["nll_with_cache"] < mixed["nll_with_cache"]  # the run was trained on it
    lines = txl(*cached, "--eval.mem_lens", 4).out
    assert lines.count("with an n-gram cache") == 2
