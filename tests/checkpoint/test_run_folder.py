"""The run folder: nothing in it is lost, and nobody else's folder is touched."""

import json
import shlex
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import torch

from transformer_xl.config import FORMAT_VERSION, ModelConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.data import load_vocab, train_vocab
from transformer_xl.model import ModelFolder, TransformerXL
from transformer_xl.train import RunFolder
from transformer_xl.train.checkpoint import run_folder

SMALL = ModelConfig(vocab_size=256, n_layer=1, n_head=1, d_model=4, d_inner=4)


@pytest.fixture
def model():
    return TransformerXL(SMALL)


@pytest.fixture
def vocab():
    return train_vocab("bytes", [])


@pytest.fixture
def run(tmp_path, toy_recipe):
    folder = RunFolder(tmp_path / "run")
    folder.begin(toy_recipe(model={"vocab_size": 30}), 10)
    yield folder
    folder.close()


def test_what_a_killed_program_left_is_removed(run, toy_recipe):
    run.close()
    left = run.path / "checkpoints" / ".unfinished-123"
    left.mkdir(parents=True)
    (left / "state.json").write_bytes(b"half")
    files = ["recipe.toml", "environment.json", "metrics.jsonl", "results.json", "sample.json"]
    files.append("model/best/model.safetensors")
    temporary = [(run.path / file).with_name(f".{Path(file).name}.0a1b.tmp") for file in files]
    # Of a report that another process may be writing.
    report = run.path / ".report.html.0a1b.tmp"
    for folder in (*temporary, report):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"half")
    run.begin(toy_recipe(model={"vocab_size": 30}), 10)
    assert not [path for path in (left, *temporary) if path.exists()]
    assert report.exists()


def test_a_run_that_cannot_fit_is_refused_before_it_begins(tmp_path, toy_recipe):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(OSError, match=r"this run needs .* MB and .* free; make room"):
        run.begin(toy_recipe(), 10**15)
    assert not run.holds_run
    # What is left is no reason to refuse the next try.
    run.check(toy_recipe())


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_file_in_the_way_is_an_error_that_names_it(tmp_path, toy_recipe, place):
    (tmp_path / "file").write_text("mine")
    run = RunFolder(tmp_path / place)
    with pytest.raises(OSError, match=r"file.*(exists and is no run folder|Not a directory)"):  # noqa: PT012
        run.check(toy_recipe())
        run.begin(toy_recipe(), 10)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_of_other_things_is_not_touched(tmp_path, toy_recipe):
    (tmp_path / ".git").mkdir()
    with pytest.raises(FileExistsError, match="is no run folder: nothing in it was touched"):
        RunFolder(tmp_path).check(toy_recipe())
    assert [path.name for path in tmp_path.iterdir()] == [".git"]


def test_another_recipe_is_an_error_that_names_the_settings(run, toy_recipe):
    other = toy_recipe(model={"vocab_size": 30, "n_layer": 3}, train={"lr": 0.5, "log_every": 7})
    message = r"model\.n_layer: 2, 3; train\.lr: 0\.01, 0\.5\. Give another --out"
    with pytest.raises(ValueError, match=message):
        run.check(other)


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"log_every": 1, "save_every": 1, "keep_checkpoints": 9}},
        {"eval": {"mem_lens": (0, 5)}, "generate": {"length": 3}},
        {"data": {"path": "moved/text.txt", "cache_dir": "elsewhere"}},
        {"data": {"corpus": "moved/corpus", "verify": "never"}},
        {"data": {"raw": True}},
        {"train": {"parallel": "fsdp", "accumulate": 2, "recompute": True, "hang_minutes": 1.0}},
    ],
)
def test_settings_on_which_no_weight_depends_may_change(run, toy_recipe, change):
    run.check(toy_recipe(**{"model": {"vocab_size": 30}, **change}))


@pytest.mark.parametrize(
    "change",
    [{"data": {"vocab": "bytes"}}, {"data": {"valid_fraction": 0.2}}, {"train": {"seed": 5}}],
)
def test_settings_on_which_the_weights_depend_may_not_change(run, toy_recipe, change):
    with pytest.raises(ValueError, match="run of another recipe"):
        run.check(toy_recipe(**{"model": {"vocab_size": 30}, **change}))


def test_the_size_of_the_vocabulary_may_be_left_to_the_corpus(run, toy_recipe):
    run.check(toy_recipe())
    # The characters of the text as earlier versions read it may be others.
    with pytest.raises(ValueError, match=r"model\.vocab_size: 30, 31.*--data\.raw True"):
        run.check(toy_recipe(model={"vocab_size": 31}))


def test_the_folder_says_what_was_run_and_where(run, toy_recipe):
    assert load_recipe(run.path / "recipe.toml") == toy_recipe(model={"vocab_size": 30})
    about = json.loads((run.path / "environment.json").read_text())
    assert about["format_version"] == FORMAT_VERSION
    # A build for a certain GPU is not always told as a part of what is installed.
    assert about["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert shlex.split(about["command"]) == sys.argv
    assert date.fromisoformat(about["date"]) <= date.today()
    assert about["revision"] == run_folder._revision()


def test_a_folder_that_was_killed_while_it_was_made_is_completed(tmp_path, toy_recipe):
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".recipe.toml.123.tmp").write_text("[mod")
    run = RunFolder(tmp_path)
    run.check(toy_recipe())
    run.begin(toy_recipe(), 10)
    run.close()
    (tmp_path / "environment.json").unlink()
    run.begin(toy_recipe(), 10)
    assert (tmp_path / "environment.json").exists()
    run.close()


def test_a_model_folder_loads(run, model, vocab, toy_recipe):
    config = replace(toy_recipe(eval={"mem_len": 7}), model=model.config)
    run.save_model("best", config, model.named_weights(), vocab)
    folder = run.path / "model" / "best"
    assert ModelFolder(folder).read_eval_config() == config.eval
    assert torch.equal(TransformerXL.from_pretrained(folder).content_bias, model.content_bias)
    assert load_vocab(folder).hash == vocab.hash
    assert "1 layers, d_model 4" in (folder / "README.md").read_text()


def test_the_card_has_what_was_measured(run, model, vocab):
    (run.path / "model" / "best").mkdir(parents=True)
    run.write_card("best", model.config, vocab, 99)
    card = run.path / "model" / "best" / "README.md"
    assert "Measured" not in card.read_text()
    rows = [{"split": "test", "mem_len": n, "nll": 2.0 - n / 4096} for n in (0, 1024)]
    run.write_card("best", model.config, vocab, 99, rows)
    assert "test text" in card.read_text()
    assert "| 0 | 2.0000 |\n| 1,024 | 1.7500 |\n" in card.read_text()
    run.write_card("best", model.config, vocab, 99, [row | {"bits_per_byte": 1.5} for row in rows])
    assert "| 1,024 | 1.7500 | 1.5000 |\n" in card.read_text()


def test_the_lock_ends_with_the_run(run, toy_recipe):
    config = toy_recipe(model={"vocab_size": 30})
    other = RunFolder(run.path)
    with pytest.raises(RuntimeError, match=r"another program is training in .*run: wait for it"):
        other.begin(config, 10)
    run.close()
    other.begin(config, 10)
    other.close()
