"""The shipped recipes of tasks: they train on what the tasks write, and the sizes are fair."""

import io
import json
import tarfile
import wave
from dataclasses import replace
from itertools import islice, permutations

import numpy as np
import pytest
import torch

from transformer_xl.config.recipes import load_recipe
from transformer_xl.data.vocab_files import load_vocab
from transformer_xl.model import build_model
from transformer_xl.tasks import TASKS, load_task, run
from transformer_xl.tasks.digits import task as spoken_digits
from transformer_xl.tasks.logs import task as logs_anomalies
from transformer_xl.tasks.run import run_task
from transformer_xl.tasks.series import task as time_series

MODELS = [(task, model) for task in TASKS for model in load_task(task).models]
SEGMENT_LEN, MEM_LEN = 8, 12


def smaller(name):
    """A shipped recipe with smaller sizes and fewer steps, and all else as it is."""
    config = load_recipe(name)
    model, data, train, evaluation = config.model, config.data, config.train, config.eval
    is_lstm, is_real = model.kind == "lstm", data.vocab == "features"
    sizes = {"n_layer": 2, "d_model": 16, "mem_len": 0 if is_lstm else MEM_LEN}
    if not is_lstm:
        sizes |= {"n_head": 2, "d_inner": 16}
        sizes |= {"attn_len": MEM_LEN + 1} if model.attn_len else {}
        sizes |= {"cutoffs": tuple(range(4, 4 + len(model.cutoffs)))} if model.cutoffs else {}
    units = {"bpe": 300, "words": 12}.get(data.vocab) if data.vocab_size else None
    stages = [(start, SEGMENT_LEN, MEM_LEN) for start, *_ in train.stages]
    steps = {"steps": 4, "batch_size": 2, "segment_len": SEGMENT_LEN, "stages": tuple(stages)}
    steps |= {"warmup_steps": 1, "eval_every": 0, "save_every": 4, "precision": "float32"}
    lengths = {"segment_len": SEGMENT_LEN} if evaluation.segment_len else {}
    lengths |= {"mem_len": 2 * MEM_LEN} if evaluation.mem_len else {}
    lengths |= {"mem_lens": (0, MEM_LEN)} if evaluation.mem_lens else {}
    return replace(
        config,
        model=replace(model, **sizes),
        data=replace(data, vocab_size=units),
        train=replace(train, **steps),
        eval=replace(evaluation, batch_size=1, **lengths),
        generate=config.generate if is_real else replace(config.generate, length=4),
    )


def write_babi(folder):
    names = ("Ann", "Bob", "Eve", "Joe", "Sue", "Tom")
    # No story of the test is among those of the training, and no word is in the training alone.
    for part, size, n_names in (("train", 30, 2), ("test", 12, 3)):
        stories = []
        for n, people in enumerate(islice(permutations(names, n_names), size)):
            place = ("kitchen", "garden", "office")[n % 3]
            stories += [f"1 {' and '.join(people)} and Mary are in the {place}."]
            # Some are too long for the first training.
            stories[-1] += " They sing there with all of the others until evening." * (n % 2)
            stories += [f"2 Where is Mary?\t{place}\t1"]
        (folder / f"qa1_x_{part}.txt").write_text("\n".join(stories) + "\n")


def write_music(folder):
    piece = [[70 + k % 3, 62, 55 - k % 2, 43] for k in range(24)]
    content = {split: [piece, piece[3:]] for split in ("train", "valid", "test")}
    (folder / "Jsb16thSeparated.json").write_text(json.dumps(content))


def write_digits(folder):
    draw = np.random.default_rng(0)
    for part, indices in (("train", (5, 6, 20)), ("test", (0,))):
        with tarfile.open(folder / f"{part}.tar.gz", "w:gz") as archive:
            for name in (f"{d}_{speaker}_{k}" for d in (0, 1) for speaker in "ab" for k in indices):
                content = io.BytesIO()
                with wave.open(content, "wb") as file:
                    file.setnchannels(1)
                    file.setsampwidth(2)
                    file.setframerate(8_000)
                    file.writeframes(draw.integers(-999, 999, 2_000).astype("<i2").tobytes())
                about = tarfile.TarInfo(f"{name}.wav")
                about.size = len(content.getvalue())
                archive.addfile(about, io.BytesIO(content.getvalue()))


WRITE = {
    "babi": write_babi,
    "music": write_music,
    "digits": write_digits,
}


@pytest.fixture
def small_tasks(monkeypatch):
    logs = {"train": (1, 200, 0.0), "usual": (2, 50, 0.0), "test": (3, 200, 0.3)}
    monkeypatch.setattr(logs_anomalies, "LOGS", logs)
    monkeypatch.setattr(time_series, "N_SERIES", {"train": 2, "valid": 1, "test": 1})
    monkeypatch.setattr(time_series, "PATHS", 3)
    monkeypatch.setattr(spoken_digits.SpokenDigits, "copies", 1)
    for name in TASKS:
        # Their own tests measure them.
        monkeypatch.setattr(load_task(name).__class__, "baselines", lambda *given: iter(()))
    monkeypatch.setattr(run, "load_recipe", smaller)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "small_tasks")
@pytest.mark.parametrize(("name", "model"), MODELS)
def test_shipped_recipes_train_on_what_the_task_writes(tmp_path, name, model):
    task, source = load_task(name), tmp_path / "source"
    if not task.makes_data:
        source.mkdir()
        WRITE[name](source)
    given = None if task.makes_data else source
    found = run_task(task, given, tmp_path / "out", models=(model,), splits=("test",))
    (metrics,) = found["models"][model]["test"]["seeds"]
    assert metrics
    runs = sorted(x.parent.name for x in (tmp_path / "out").rglob("model/best"))
    assert len(runs) == len(task.models[model])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "small_tasks")
def test_the_vocabulary_of_babi_has_the_words_of_long_stories(tmp_path):
    (tmp_path / "source").mkdir()
    write_babi(tmp_path / "source")
    run_task(load_task("babi"), tmp_path / "source", tmp_path / "out", splits=("test",))
    data = tmp_path / "out" / "data"
    assert "sing" not in (data / "short_train.txt").read_text()
    assert "sing" in (data / "train.txt").read_text()
    vocab = load_vocab(tmp_path / "out" / "txl-1" / "stage_2" / "model" / "best")
    words = {"sing", "there", "with", "all", "of", "others", "until", "evening"}
    assert words <= {*vocab.symbols}


VOCABULARIES = {"babi": 162, "music": 52, "logs": 136}
"""Symbols of the text of each task."""


def n_parameters(name, n_symbols):
    config = replace(load_recipe(name).model, vocab_size=n_symbols)
    with torch.device("meta"):
        return sum(x.numel() for x in build_model(config).parameters())


def test_the_lstm_beside_a_model_has_as_many_parameters():
    for name in [x for x in TASKS if "lstm" in load_task(x).models]:
        models = load_task(name).models
        own, other = (n_parameters(models[x][-1], VOCABULARIES[name]) for x in ("txl", "lstm"))
        assert abs(own / other - 1) < 0.05, name
