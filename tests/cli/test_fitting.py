"""Recipes that are made to fit what is given: settings, and a text of one's own."""

from pathlib import Path

import pytest

from transformer_xl.cli import fitting, parse
from transformer_xl.config import recipe_of
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.shipped import ShippedModel
from transformer_xl.train import loop

pytestmark = pytest.mark.usefixtures("one_thread")

LINES = "".join(f"line {n} of a text\n" for n in range(200))


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config_of(*words):
    return parse(["train", *map(str, words)]).config()


FITTED = [
    ("demo", {"train": {"steps": 5}}, {"train.warmup_steps": 0}),
    ("demo", {"model": {"mem_len": 0}}, {"train.reset_memory": 0.0}),
    ("shakespeare", {"train": {"segment_len": 64}},
     {"train.stages": ((0.0, 32, 32), (0.15, 64, 64), (0.3, 64, 128))}),
    ("english", {"train": {"cooldown_fraction": 0.9}}, {"train.stages": ()}),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "given", "expected"), FITTED, ids=str)
def test_settings_of_a_recipe_give_way_to_given_ones(recipe, given, expected):
    said = []
    before, found = load_recipe(recipe), load_recipe(recipe).changed(given, said.append)
    for name, value in expected.items():
        section, _, key = name.partition(".")
        assert getattr(getattr(found, section), key) == value
        was = getattr(getattr(before, section), key)
        is_said = any(line.startswith("note: ") and f"; {name}=" in line for line in said)
        assert is_said == (was != value and key not in given.get(section, {}))
    for section, values in given.items():
        assert {key: getattr(getattr(found, section), key) for key in values} == values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": {"steps": 5, "warmup_steps": 6}}, "warmup_steps=6 is more than steps=5"),
        ({"train": {"accumulate": 3}}, "accumulate=3 must divide batch_size=16"),
        # A time limit that fell away would make the training many times as long.
        ({"train": {"schedule": "cosine"}}, "set minutes to None, and steps"),
        ({"train": {"stages": ((0.0, 32, 32), (0.5, 64, 64))}}, "must end with segment_len=128"),
    ],
    ids=str,
)
def test_given_settings_never_give_way(given, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("demo").changed(given, pytest.fail)


@pytest.mark.parametrize("name", sorted(x.folder.name for x in ShippedModel.all()))
def test_every_shipped_model_is_fine_tuned_by_its_recipe(name):
    tuned, recipe = fitting.fine_tuning_of(name, keeps_text=False), recipe_of(name)
    assert tuned.train.stages == recipe.train.stages
    assert tuned.model.mem_len == recipe.model.mem_len
    assert tuned.train.init_from


def test_a_text_in_place_of_a_recipe_is_trained_on_by_bytes(txl, monkeypatch):
    Path("mine.txt").write_text(LINES)
    words = ("--model.n_layer", 1, "--model.d_model", 16, "--model.d_inner", 16, "--train.steps", 1)
    words += ("--train.batch_size", 2, "--generate.length", 3, "--eval.mem_lens", 8, "--json")
    ended = txl("train", "mine.txt", *words, "--train.stages")
    assert ended.code == 0
    assert ended.err.startswith("from random weights, byte by byte")
    assert "\nnote: warmup_steps=" in ended.err
    assert "txl train english-2 --data.path mine.txt" in ended.err
    config = load_recipe("runs/mine/recipe.toml")
    assert (config.data.path, config.data.vocab, config.model.vocab_size) == (
        "mine.txt", "bytes", 256
    )  # fmt: skip
    # The same command finds its run again, which has nothing to do any more.
    monkeypatch.setattr(loop, "train_step", None)
    again = txl("train", "mine.txt", *words, "--train.stages")
    assert again.json == ended.json
    assert "from random weights" not in again.err


@pytest.mark.parametrize("n_bytes", [300, 30_000_000])
def test_the_recipe_of_a_text_suits_its_size(tmp_path, n_bytes):
    with Path("mine.txt").open("wb") as file:
        file.truncate(n_bytes)
    config = fitting.recipe_of_text("mine.txt")
    train, data = config.train, config.data
    held_out = n_bytes * data.valid_fraction
    assert data.test_fraction == data.valid_fraction
    assert min(200, 0.19 * n_bytes) <= held_out <= 100_500
    n_read = train.steps * train.batch_size * train.segment_len
    assert train.steps == 100 or n_read <= fitting.PASSES * n_bytes
    assert train.warmup_steps < train.steps
    assert train.minutes is not None
    assert train.minutes < 3


def test_what_is_a_text_and_what_a_recipe_or_a_model(trained):
    Path("a.toml").write_text("")
    Path("mine").write_text("# a recipe\n[model]\nn_layer = 1\n[data]\npath = 'x'\n")
    Path("notes.md").write_text("[model] is a word\n")
    Path("x.py").write_text("import os\n")
    Path("texts").mkdir()
    Path("demo").write_text("a recipe comes first")
    texts = {x.name for x in Path().iterdir() if fitting.is_text(x.name)}
    assert texts == {"notes.md", "x.py", "texts"}
    assert not fitting.is_text(str(trained))
    assert not fitting.is_text("english")
    assert not fitting.is_text("nowhere")


def test_a_path_is_that_of_a_text_of_ones_own_unless_a_copy_is_there():
    Path("mine.txt").write_text(LINES)
    Path("input.txt").write_text(LINES)
    Path("lib").mkdir()
    Path("lib/os.py").write_text("import sys\n")
    Path("folder").mkdir()
    for name in "abc":
        Path("folder", name).write_text(LINES)
    demo, verse = load_recipe("demo").data, load_recipe("shakespeare-char-cpu").data
    assert fitting.text_settings(demo, {"path": "mine.txt"}) == {
        "path": "mine.txt", "name": "", "split_by": "fraction"
    }  # fmt: skip
    assert fitting.text_settings(demo, {"path": "folder"}) == {"path": "folder", "name": ""}
    assert fitting.text_settings(demo, {"path": "lib"}) == {"path": "lib"}
    assert fitting.text_settings(verse, {"path": "input.txt"}) == {"path": "input.txt"}
    assert fitting.text_settings(verse, {"path": "mine.txt"}) == {"path": "mine.txt", "name": ""}
    given = {"path": "mine.txt", "name": "tiny-shakespeare"}
    assert fitting.text_settings(verse, given) == given


def test_a_prompt_and_a_batch_of_the_recipe_suit_the_text(toy_recipe):
    Path("mine.txt").write_text(LINES[:600])
    config = toy_recipe(
        data={"path": "mine.txt", "valid_fraction": 0.1, "test_fraction": 0.1},
        generate={"prompt": "Ω"},
        train={"batch_size": 64, "segment_len": 32, "stages": ((0.0, 8, 4), (0.5, 32, 8))},
    )
    said = []
    found = fitting.fitted_to_text(config, {}, said.append)
    assert found.generate.prompt == "\n"
    assert (found.train.batch_size, found.train.segment_len) == (15, 32)
    notes = [line for line in said if line.startswith(("note: the p", "note: the tr"))]
    assert "'Ω', is not in the vocabulary" in notes[0]
    assert "has 480 tokens" in notes[1]
    given = {"generate": {"prompt": "Ω"}, "train": {"batch_size": 64, "segment_len": 32}}
    assert fitting.fitted_to_text(config, given, said.append) == config


def test_a_run_is_trained_on_with_its_own_text_in_another_folder(trained):
    config = config_of(trained, "--out", "more", "--train.steps", 3)
    recipe = load_recipe(trained / "recipe.toml")
    assert config.data.path == recipe.data.path
    assert config.train.init_from == str(trained / "model" / "best")
    with pytest.raises(ValueError, match="give the run folder of the new training with --out"):
        _ = parse(["train", str(trained)]).folder


def test_two_texts_are_one_too_many(txl):
    Path("mine.txt").write_text(LINES)
    code, out, err = txl("train", "mine.txt", "--data.path", "other.txt")
    assert (code, out) == (2, "")
    assert "mine.txt and --data.path other.txt are two texts" in err
