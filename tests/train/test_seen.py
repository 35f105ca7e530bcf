"""What the report shows of the memory is what the evaluations say of it."""

import json

import numpy as np
import pytest
import torch

from transformer_xl.config import EvalConfig, ModelConfig
from transformer_xl.data import train_vocab
from transformer_xl.model import build_model
from transformer_xl.train import report, seen
from transformer_xl.train.checkpoint import RunFolder
from transformer_xl.train.report import write_report
from transformer_xl.train.seen import loss_from_start, loss_in_segment

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TEXT = "the cat saw a dog.\nthe dog ran to sea.\n" * 8
KINDS = {
    "the paper": {},
    "no memory": {"mem_len": 0},
    "sinusoids": {"attn_type": 2},
    "LSTM": {"kind": "lstm", "n_head": 8, "d_inner": 2048, "mem_len": 0},
}


@pytest.fixture(params=["chars", "words", "bytes"])
def vocab(request):
    return train_vocab(request.param, [TEXT])


@pytest.fixture
def chars():
    return train_vocab("chars", [TEXT])


def model_of(vocab, **settings):
    widths = {"n_layer": 2, "n_head": 2, "d_model": 8, "d_inner": 8, "mem_len": 6}
    return build_model(ModelConfig(vocab_size=len(vocab), init_std=0.3, **{**widths, **settings}))


def look(model, vocab, settings=None, segment_len=8):
    ids = np.array(vocab.encode(TEXT))
    return ids, seen.see_memory(model, ids, settings or EvalConfig(), segment_len)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_can_be_looked_at(tmp_path, chars, kind):
    _, found = look(model_of(chars, **KINDS[kind]), chars)
    RunFolder(tmp_path).write_json("memory.json", {"split": "test", **found})
    read = report._parse_seen(tmp_path / "memory.json")
    assert read.mem_len == KINDS[kind].get("mem_len", 6)
    assert "What the memory does" in write_report(tmp_path).read_text("utf-8")


def test_the_spans_are_means_of_the_losses_by_place(chars):
    model = model_of(chars)
    ids, found = look(model, chars, EvalConfig(mem_len=9, attn_len=5, batch_size=2))
    lengths = {"segment_len": 8, "attn_len": 5, "batch_size": 2}
    for row, mem_len in zip(found["in_segment"], (0, 9), strict=True):
        losses = loss_in_segment(model, ids, mem_len=mem_len, **lengths)
        assert row["mem_len"] == mem_len
        for span in row["spans"]:
            expected = losses[span["first"] - 1 : span["last"]].mean()
            assert span["nll"] == pytest.approx(expected)
    row = found["from_start"]
    length = row["spans"][-1]["last"]
    assert row["pieces"] == (len(ids) - 1) // length
    losses = loss_from_start(model, ids, length=length, mem_len=9, **lengths)
    for span in row["spans"]:
        assert span["nll"] == pytest.approx(losses[span["first"] - 1 : span["last"]].mean())


def test_only_the_beginning_of_a_long_text_is_read(chars, monkeypatch):
    monkeypatch.setattr(seen, "TOKENS", 50)
    model = model_of(chars)
    ids, found = look(model, chars)
    assert found["tokens"] == 50
    assert found == seen.see_memory(model, ids[:51], EvalConfig(), 8)


def test_a_text_that_begins_with_a_long_prompt_is_read_where_its_completions_are(
    tmp_path, chars, monkeypatch
):
    monkeypatch.setattr(seen, "TOKENS", 50)
    ends = dict(zip(("reset_at", "completion_at"), chars.encode("\n."), strict=True))
    model = model_of(chars, **ends)

    def look(text):
        return seen.see_memory(model, np.array(chars.encode(text)), EvalConfig(), 8)

    # The second document is the first with a completion.
    rest = "\n" + "a cat.ran\n" * 9
    found = look("the dog " * 20 + rest)
    assert found == look(rest)
    assert found["tokens"] == 50
    # Nothing is left out before a completion among the first tokens.
    assert look("the dog " * 5 + rest) != found
    # A prompt longer than what is read; the completion is in the rest that is shorter than a piece.
    found = look("a dog " * 20 + ".ran")
    assert (found["tokens"], found["from_start"]["spans"]) == (28, [])
    RunFolder(tmp_path).write_json("memory.json", {"split": "test", **found})
    assert "What the memory does" in write_report(tmp_path).read_text("utf-8")


def test_looking_changes_nothing(chars):
    model = model_of(chars, dropout=0.3).train()
    before = [x.clone() for x in model.parameters()]
    figures = look(model, chars)[1]
    assert look(model, chars)[1] == figures == json.loads(json.dumps(figures, allow_nan=False))
    assert model.training
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), before, strict=True))
