"""What the comparison of long documents asks can be answered, and not by the end alone."""

from importlib import import_module
from pathlib import Path

import pytest

from transformer_xl.inference.classify import Fit


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module("long_documents")


def test_only_the_first_segment_tells_the_class(program):
    task = program.marks(30, segment_len=8)
    for text, label in zip(task.train.texts, task.train.labels.tolist(), strict=True):
        assert text[:8][text[:8] < task.n_classes].tolist() == [label]
        assert len(text) >= 4 * 8
    for text in task.train.last(8).texts:
        assert len(text) == 8
        assert (text >= task.n_classes).all()


def test_scales_have_their_mode_in_every_key(program):
    major, minor = [0, 2, 4, 5, 7, 9, 11, 12, 7, 4, 0], [0, 2, 3, 5, 7, 8, 11, 12, 7, 3, 0]
    for tonic in range(50, 62):
        assert not program.is_minor([[tonic + note] for note in major])
        assert program.is_minor([[tonic + note, -1] for note in minor])


@pytest.mark.usefixtures("one_thread")
def test_every_way_is_trained_and_measured(program):
    task = program.marks(4, segment_len=4)
    task = program.replace(task, test=task.train)
    for way in program.WAYS:
        row = program.learned(task, way, Fit(epochs=1, batch_size=4), seed=0)
        assert 0 <= row["accuracy"] <= 1
        assert row["train_loss"] > 0


@pytest.mark.slow
def test_the_chorales_are_read(program, shared):
    task = program.chorales(shared / "data" / "jsb-chorales" / "Jsb16thSeparated.json", 2)
    assert len(task.train.texts) == 2 * 229
    assert len(task.test.texts) == 76 + 77
    assert 0.3 < task.test.labels.float().mean() < 0.7
    # A transposition changes no class.
    assert task.train.labels[::2].equal(task.train.labels[1::2])
