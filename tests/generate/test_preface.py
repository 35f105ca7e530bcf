"""The preface of a model: tokens that are read before a text is generated."""

import json
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_xl import evaluate, generate, load_vocab
from transformer_xl.config.shipped import shipped_path
from transformer_xl.data import train_vocab
from transformer_xl.inference.evaluate import WithMemory
from transformer_xl.inference.generate import Sampling, Session, generate_batch
from transformer_xl.model import load_model
from transformer_xl.model.quantizing import compact
from transformer_xl.model.reading import read_all
from transformer_xl.model.segment import Lengths

ROOT = Path(__file__).parents[2]
PREFACE, PROMPT = (3, 1, 4, 1, 5), [2, 6]
SETTINGS = {"length": 12, "seed": 3, "sampling": Sampling(temperature=0.8)}


@pytest.fixture
def after(model):
    """The memory after the preface."""
    lengths = Lengths.of(model.config, segment_len=512)
    with torch.no_grad():
        return read_all(model, torch.tensor([PREFACE]), lengths, model.start_memory(1))


def test_texts_begin_after_the_preface(model, after):
    cold = list(generate(model, PROMPT, **SETTINGS))
    expected = list(generate(model, PROMPT, mems=after, **SETTINGS))
    several = [
        list(generate(model, ids, mems=after, **SETTINGS | {"seed": seed}))
        for ids, seed in (([2], 3), ([7, 7, 7], 4))
    ]
    model.preface = PREFACE
    assert list(generate(model, PROMPT, **SETTINGS)) == expected != cold
    drawn = [*generate_batch(model, [[2], [7, 7, 7]], **SETTINGS)]
    assert [step[0] for step in drawn] == several[0]
    assert [step[1] for step in drawn] == several[1]
    # A text that goes on from a memory has begun.
    assert list(generate(model, PROMPT, mems=after, **SETTINGS)) == expected
    model.preface = ()
    assert list(generate(model, PROMPT, **SETTINGS)) == cold


def test_scores_do_without_the_preface(model):
    ids = np.arange(20) % 7
    expected = evaluate(model, ids, WithMemory(mem_len=8)).nll
    model.preface = PREFACE
    assert evaluate(model, ids, WithMemory(mem_len=8)).nll == expected


def test_a_session_begins_after_the_preface(model):
    vocab = train_vocab("integers", [" ".join(map(str, range(model.config.vocab_size - 1)))])
    model.preface = PREFACE
    one, other = (Session(model, vocab, seed=1, preface=x) for x in (True, False))
    other.write(PREFACE)
    first, *scores = one.write(PROMPT, scored=True)
    assert first is None
    assert scores == pytest.approx(other.write(PROMPT, scored=True)[1:], abs=1e-5)
    copy = one.fork()
    expected = list(other.generate(10, seed=2))
    assert list(one.generate(10, seed=2)) == expected == list(copy.generate(10, seed=2))


def test_a_model_folder_keeps_its_preface(model, tmp_path):
    model.preface = PREFACE
    model.save_pretrained(tmp_path)
    found = load_model(tmp_path)
    assert found.preface == PREFACE == compact(found, "bfloat16").preface
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    for wrong in ([1.5], [True], [-1], [model.config.vocab_size], "text", {"a": 1}, [[1]]):
        path.write_text(json.dumps(settings | {"preface": wrong}))
        with pytest.raises(RuntimeError, match="its preface must be a list of tokens below"):
            load_model(tmp_path)
    del settings["preface"]
    path.write_text(json.dumps(settings))
    assert load_model(tmp_path).preface == ()


@pytest.mark.parametrize("name", ["english", "python-code"])
def test_shipped_prefaces_are_the_texts_in_the_repository(name):
    text = (ROOT / "scripts" / "pretrained" / "prefaces" / f"{name}.txt").read_text()
    vocab = load_vocab(name)
    assert load_model(name).preface == tuple(vocab.encode(text))
    card = (shipped_path(name) / "README.md").read_text(encoding="utf-8")
    assert f"{len(vocab.encode(text))} tokens" in card


@pytest.mark.slow
@pytest.mark.parametrize("name", ["english", "python-code"])
def test_shipped_models_do_not_stutter(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    stutter = import_module("stutter")
    given = Namespace(seeds=2, length=stutter.FIRST, set=[], real=None, python=False)
    found = stutter.measured(name, stutter.PROMPTS[name], given)
    assert found["with"]["stutter"] <= 0.03 < found["without"]["stutter"]
