"""Sentiment: reviews as prompts, labels as completions, ten folds."""

import gzip
import json

import numpy as np
import pytest

from transformer_xl.config.recipes import load_recipe
from transformer_xl.tasks import load_task
from transformer_xl.tasks.run import run_task
from transformer_xl.tasks.sentiment import words
from transformer_xl.tasks.task import read_examples

RECIPE = """
[data]
path = "train.txt"
valid_path = "valid.txt"
test_path = "test.txt"
vocab = "words"
vocab_size = 12
reset_at = "<eos>"
completion_at = "<sep>"

[model]
n_layer = 1
n_head = 2
d_model = 16
d_inner = 16
mem_len = 8
dropout = 0.0

[train]
steps = 2
batch_size = 2
segment_len = 8
precision = "float32"

[generate]
prompt = "good"
"""


def write(path, rows):
    path.write_bytes(gzip.compress("".join(json.dumps(x) + "\n" for x in rows).encode()))


@pytest.fixture
def source(tmp_path):
    """A folder as the published one, in which one word decides."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "sentiment"
    (folder / "polarity").mkdir(parents=True)

    def reviews(n):
        labels = [k % 2 for k in range(n)]
        rest = [" ".join(draw.choice(["It", "was", "a", "film<br />so"], size=9)) for _ in labels]
        named = zip(rest, labels, strict=True)
        return [{"label": y, "text": f"{x} {('bad', 'good')[y]}!"} for x, y in named]

    for split, n in (("train", 40), ("valid", 20), ("test", 20)):
        write(folder / f"{split}.jsonl.gz", reviews(n))
    folds = [x | {"fold": k // 4 % 10 + 1} for k, x in enumerate(reviews(80))]
    write(folder / "polarity" / "reviews.jsonl.gz", folds)
    return folder


def test_words_are_lowercase_with_marks_that_say_something():
    assert words("It's GOOD!<br /><br />Isn't it? (No.)") == "it's good ! isn't it ? no"


def test_a_line_that_is_no_review_is_named(source, tmp_path):
    for line in (
        '{"label": 2, "text": "good"}',
        '{"label": -1, "text": "good"}',
        '{"label": true, "text": "good"}',
        '{"label": 1.0, "text": "good"}',
        '{"label": 1, "text": null}',
        '{"label": 1}',
        "7",
    ):
        path = source / "valid.jsonl.gz"
        path.write_bytes(gzip.compress(f'{{"label": 1, "text": "good"}}\n\n{line}\n'.encode()))
        with pytest.raises(
            ValueError, match="line 3 is no review with a text and a label, 0 or 1"
        ) as e:
            load_task("sentiment").prepare(source, tmp_path)
        assert str(path) in str(e.value), line


def test_a_review_without_a_fold_is_named(source, tmp_path):
    for fold in ({}, {"fold": 11}, {"fold": 0}, {"fold": "1"}):
        write(source / "polarity" / "reviews.jsonl.gz", [{"label": 1, "text": "good"} | fold])
        with pytest.raises(ValueError, match=r"line 1 is no review with .*, and a fold, 1 to 10"):
            load_task("polarity").prepare(source, tmp_path)


def test_each_fold_has_reviews(source, tmp_path):
    rows = [{"label": 1, "text": "good", "fold": n} for n in range(1, 10)]
    write(source / "polarity" / "reviews.jsonl.gz", rows)
    with pytest.raises(ValueError, match="has no review of fold 10"):
        load_task("polarity").prepare(source, tmp_path)


def test_simple_methods_find_the_word_that_decides(source, tmp_path):
    pytest.importorskip("sklearn")
    task = load_task("sentiment")
    task.prepare(source, tmp_path)
    found = dict(task.baselines(tmp_path, "test"))
    assert len(found) == 3
    assert {x.metrics["accuracy"] for x in found.values()} == {100.0}


def test_no_review_is_in_two_folds(source, tmp_path):
    task = load_task("polarity")
    task.prepare(source, tmp_path)
    tested = []
    for part in task.parts:
        train, valid, test = (read_examples(tmp_path / part, x) for x in ("train", "valid", "test"))
        assert len(train) == 72
        assert len(test) == 8
        assert {x.group for x in test}.isdisjoint({x.group for x in train})
        assert {x.group for x in valid} == {""}
        tested += test
    assert len(tested) == 80


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_folds_begin_with_one_training_and_are_measured_together(source, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    for name in ("first", "second"):
        (tmp_path / f"{name}.toml").write_text(RECIPE)
    task = load_task("polarity")
    recipes = tuple(str(tmp_path / f"{name}.toml") for name in ("first", "second"))
    monkeypatch.setattr(type(task), "models", {"txl": recipes})
    monkeypatch.setattr(type(task), "parts", task.parts[:2])
    out = tmp_path / "out"
    found = run_task(task, source, out)
    runs = sorted(str(x.parent.relative_to(out)) for x in out.rglob("recipe.toml"))
    assert runs == ["txl-1/fold_1/stage_2", "txl-1/fold_2/stage_2", "txl-1/stage_1"]
    (row,) = found["models"]["txl"]["test"]["seeds"]
    assert 0 <= row["accuracy"] <= 100
    assert "valid" not in found["models"]["txl"]
    assert found["models"]["txl"]["test"]["above"].keys() == found["baselines"].keys()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_single_recipe_is_trained_on_each_fold(source, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    (tmp_path / "mine.toml").write_text(RECIPE)
    task = load_task("polarity")
    monkeypatch.setattr(type(task), "parts", task.parts[:2])
    out = tmp_path / "out"
    run_task(task, source, out, models=[str(tmp_path / "mine.toml")])
    runs = sorted(out.rglob("recipe.toml"))
    names = [str(x.parent.relative_to(out)) for x in runs]
    assert names == ["mine-1/fold_1/stage_1", "mine-1/fold_2/stage_1"]
    assert [load_recipe(x).data.path for x in runs] == [
        str(out / "data" / part / "train.txt") for part in ("fold_1", "fold_2")
    ]
