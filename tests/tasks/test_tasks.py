"""Tasks: from published data to a table, and on from where they were stopped."""

import gzip
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from transformer_xl.cli import main
from transformer_xl.config import ModelConfig, load_recipe, recipe_names
from transformer_xl.data import Vocab
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.inference.answers import continuations
from transformer_xl.model import build_model
from transformer_xl.model.segment import Lengths
from transformer_xl.tasks import TASKS, load_task
from transformer_xl.tasks.run import paired_p
from transformer_xl.tasks.task import (
    SEPARATOR,
    Example,
    Measured,
    read_examples,
    write_examples,
)

PLACES = ("kitchen", "garden", "office")
MODEL = """
[data]
path = "train.txt"
valid_path = "valid.txt"
test_path = "test.txt"
vocab = "words"
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
steps = 3
batch_size = 2
segment_len = 8
precision = "float32"

[generate]
prompt = "mary"
"""


@pytest.fixture
def babi(tmp_path):
    """A folder as bAbI's, with stories of one fact."""
    folder = tmp_path / "en"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for n in (1, 2):
        for part, size in (("train", 40), ("test", 10)):
            lines = []
            for place in draw.choice(PLACES, size=size):
                # No story of the test is among those of the training.
                name = f"Mary{len(lines)}{part}"
                lines += [f"1 {name} went to the {place}.", f"2 Where is {name}? \t{place}\t1"]
            (folder / f"qa{n}_where_{part}.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_each_task_names_models_with_recipes():

    for name in TASKS:
        task = load_task(name)
        assert task.name == name
        assert {x for stages in task.models.values() for x in stages} <= {*recipe_names()}


def test_settings_that_the_measure_would_ignore_are_refused(tmp_path, capsys):
    for setting in ("eval.window", "eval.ext_len", "model.ext_len", "eval.dynamic"):
        section, name = setting.split(".")
        lines = MODEL if section == "model" else f"{MODEL}\n[eval]\n"
        value = '"sgd"' if name == "dynamic" else "4"
        lines = (
            lines.replace("[model]", f"[model]\n{name} = {value}") if section == "model" else lines
        )
        path = tmp_path / "own.toml"
        path.write_text(lines if section == "model" else f"{lines}{name} = {value}\n")
        assert main(["task", "babi", str(tmp_path), "--models", str(path)]) == 2, setting
        assert f"{setting}={value.strip(chr(34))} of model" in capsys.readouterr().err, setting


@pytest.mark.parametrize("name", ["poems", "sentiment", "digits-raw", "translation-de-en"])
def test_a_task_that_is_gone_says_where_it_was(name, capsys):
    assert main(["task", name, "data"]) == 2
    assert f"the task {name} is gone: it was in revision 47b3a2d" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"the recipe .* is gone: it was in revision 47b3a2d"):
        load_recipe("sentiment-tuned" if name == "digits-raw" else name)


def test_an_unknown_task_or_model_is_refused(tmp_path, capsys):
    assert main(["task", "nothing", str(tmp_path)]) == 2
    assert "there is no task 'nothing': choose one of" in capsys.readouterr().err
    assert main(["task", "babi", str(tmp_path), "--models", "nothing"]) == 2
    assert "task babi has no model 'nothing': choose among" in capsys.readouterr().err
    assert main(["task", "babi"]) == 2
    assert "txl task babi DATA" in capsys.readouterr().err
    assert main(["task", "babi", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "no file of bAbI" in capsys.readouterr().err
    assert not (tmp_path / "out" / "data").exists()


@pytest.mark.usefixtures("one_thread")
def test_a_task_is_prepared_trained_measured_and_not_done_again(babi, tmp_path, capsys):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(MODEL)
    words = ["task", "babi", str(babi), "--models", str(recipe), "--seeds", "1", "2"]
    words += ["--out", str(tmp_path / "out"), "--json"]
    assert main(words) == 0
    out = capsys.readouterr()
    results = json.loads(out.out)
    assert results == json.loads((tmp_path / "out" / "results.json").read_text())
    (mine,) = results["models"].values()
    assert [row.keys() >= {"mean", "qa1", "qa2"} for row in mine["test"]["seeds"]] == [True, True]
    assert results["baselines"]["most frequent answer"]["test"]["seeds"][0]["mean"] >= 10
    assert 0 < mine["test"]["above"]["most frequent answer"] <= 1
    assert "| most frequent answer |" in (tmp_path / "out" / "results.md").read_text()
    # Nothing is trained again.
    before = {x: x.stat().st_mtime_ns for x in (tmp_path / "out").rglob("*.safetensors")}
    assert main(words) == 0
    assert before == {x: x.stat().st_mtime_ns for x in (tmp_path / "out").rglob("*.safetensors")}
    assert json.loads(capsys.readouterr().out) == results


def test_examples_are_read_as_they_were_written(tmp_path):
    examples = [Example("a b", "c"), Example("", "d e", "group")]
    write_examples(tmp_path, "train", examples)
    assert read_examples(tmp_path, "train") == examples
    assert (tmp_path / "train.txt").read_text() == "a b <sep> c\n <sep> d e\n"
    for wrong in (Example("a <sep> b", "c"), Example("a", "b\nc")):
        with pytest.raises(ValueError, match="has a line end or"):
            write_examples(tmp_path, "train", [wrong])


@pytest.mark.slow
def test_a_paired_test_tells_a_difference_from_chance():
    draw = np.random.default_rng(0)
    chance = draw.random(500)
    better = chance + 0.1 + 0.3 * draw.standard_normal(500)
    same = chance + 0.3 * draw.standard_normal(500)
    own, other, third = (Measured({}, x) for x in (better, chance, same))
    assert paired_p([own], [other]) < 0.001
    assert paired_p([other], [own]) > 0.99
    assert paired_p([third], [other]) > 0.01
    assert paired_p([own], [own]) == 1.0
    assert paired_p([Measured({})], [own]) is None


CONFIG = ModelConfig(
    vocab_size=5, n_layer=2, n_head=2, d_model=16, d_inner=16, mem_len=30, init_std=0.5
)


@pytest.fixture
def model():
    import torch

    torch.manual_seed(2)
    return build_model(CONFIG).double().eval()


@pytest.fixture
def vocab() -> Vocab:
    return train_vocab("chars", ["abcd\n"])


def texts(vocab):
    draw = np.random.default_rng(1)
    return [draw.integers(1, 5, size=n).tolist() for n in (7, 1, 12, 5, 12, 3)]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_continuation_is_the_most_likely_token_each_time(model, vocab, batch_size):
    import torch

    some = texts(vocab)
    lengths = Lengths.of(CONFIG, segment_len=4)
    found = continuations(model, vocab, some, lengths, length=6, stop="\n", batch_size=batch_size)
    for output, text in zip(found, some, strict=True):
        written = list(text)
        for _ in range(6):
            written.append(int(model(torch.tensor([written])).log_probs[0, -1].argmax()))
        assert output == vocab.decode(written[len(text) :]).partition("\n")[0]


def test_empty_texts_are_refused(model, vocab):
    lengths = Lengths.of(CONFIG, segment_len=4)
    with pytest.raises(ValueError, match="texts is empty: give at least one"):
        continuations(model, vocab, [], lengths, length=1, stop="\n")
    with pytest.raises(ValueError, match="each text needs 1 or more tokens: the shortest has 0"):
        continuations(model, vocab, [[1], []], lengths, length=1, stop="\n")


def test_a_document_is_a_story_with_some_of_its_questions(tmp_path):
    for part, size in (("train", 40), ("test", 4)):
        lines = []
        for n in range(size):
            name, place = f"Ann{n}{part}", PLACES[n % 3]
            lines += [f"1 {name} went to the {place}.", f"2 Where is {name}?\t{place}\t1"]
            thing = "milk" if n % 2 else "apple"
            lines += [f"3 {name} took the {thing} there and came back home in no time."]
            lines += [f"4 What has {name}?\t{thing}\t3"]
        (tmp_path / f"qa1_x_{part}.txt").write_text("\n".join(lines) + "\n")
    load_task("babi").prepare(tmp_path, tmp_path)
    examples = {x[:2] for x in read_examples(tmp_path, "train")}
    documents = (tmp_path / "train.txt").read_text().splitlines()
    n_stories = len(documents) // 16
    assert n_stories == 36
    # The first time each story once, as it is.
    assert len({x.split()[0] for x in documents[:n_stories]}) == n_stories
    asked = []
    for document in documents[:n_stories]:
        first, *rest = document.split(SEPARATOR)
        asked.append((" what " in first, len(rest)))
        assert (first, rest[0]) in examples
        if len(rest) > 1:
            assert (f"{first.partition(' where ')[0]} {rest[1]}", rest[2]) in examples
    # The first question alone, the second alone, both.
    assert {*asked} == {(False, 1), (True, 1), (False, 3)}
    short = (tmp_path / "short_train.txt").read_text().splitlines()
    assert len(short) == 16 * n_stories
    assert max(len(x.split(SEPARATOR)[0].split()) for x in short) <= 14


def test_stories_are_renamed(babi, tmp_path):
    load_task("babi").prepare(babi, tmp_path)
    documents = (tmp_path / "train.txt").read_text().splitlines()
    n_stories = len(documents) // 16
    stories = {x.split()[0]: x.split() for x in documents[:n_stories]}
    n_renamed = n_compared = 0
    for document in documents[n_stories:]:
        # It is a story with other places in it, the same one for the same everywhere.
        words = document.split()
        assert words[-1] in words[:-1]
        if len(words) == len(story := stories[words[0]]):
            n_compared += 1
            names = {*zip(story, words, strict=True)}
            assert len(names) == len({*story}) == len({*words})
            changed = [pair for pair in names if pair[0] != pair[1]]
            assert {x for pair in changed for x in pair} <= {*PLACES}
            n_renamed += bool(changed)
    # Of three places in any order a third stay.
    assert n_compared == 15 * n_stories
    assert n_compared // 2 < n_renamed < n_compared


@pytest.mark.slow
def test_a_folder_of_babi_is_read(tmp_path, shared, is_nightly):
    folder = Path(shared) / "data" / "babi" / "en"
    if not is_nightly:
        # All stories of the test, and of those to train on the first ones.
        whole, folder = folder, tmp_path / "en"
        folder.mkdir()
        for path in whole.glob("qa*"):
            if "_test" in path.name:
                (folder / path.name).symlink_to(path)
                continue
            with gzip.open(path, "rt") as file:
                lines = [*islice(file, 300)]
            end = max(n for n, line in enumerate(lines) if line.startswith("1 "))
            (folder / path.name).with_suffix("").write_text("".join(lines[:end]))
    task = load_task("babi")
    task.prepare(folder, tmp_path)
    examples = read_examples(tmp_path, "test")
    assert len(examples) == 20_000
    assert len({x.group for x in examples}) == 20
    assert examples[0].prompt.endswith("where is john ?")
    measured = dict(task.baselines(tmp_path, "test"))["most frequent answer"]
    assert 20 < measured.metrics["mean"] < 40
