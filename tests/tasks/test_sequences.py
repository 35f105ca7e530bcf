"""Sequences as tasks: chorales and logs, from their data to figures."""

import json
import math

import numpy as np
import pytest
import torch

from transformer_xl.cli import main
from transformer_xl.config import Config, DataConfig, ModelConfig
from transformer_xl.data import Vocab, prepare, train_vocab
from transformer_xl.data.catalogue import KNOWN_CORPORA
from transformer_xl.inference.answers import losses
from transformer_xl.model import build_model
from transformer_xl.model.segment import Lengths
from transformer_xl.tasks import load_task
from transformer_xl.tasks.logs import task as logs_anomalies
from transformer_xl.tasks.music.task import ROUNDS
from transformer_xl.tasks.music.writing import MARKS
from transformer_xl.tasks.task import Trained

SIZES = {"n_layer": 2, "n_head": 2, "d_model": 16, "d_inner": 16, "mem_len": 200}


def model_for(vocab: Vocab, kind="transformer_xl"):
    torch.manual_seed(2)
    sizes = SIZES if kind == "transformer_xl" else {"n_layer": 2, "d_model": 16, "mem_len": 0}
    return build_model(ModelConfig(vocab_size=len(vocab), kind=kind, init_std=0.4, **sizes)).eval()


def trained(vocab: Vocab, kind="transformer_xl") -> Trained:
    model = model_for(vocab, kind)
    return Trained(
        model,
        vocab,
        Config(model=model.config, data=DataConfig(name="x")),
        Lengths.of(model.config, segment_len=7),
    )


@pytest.mark.parametrize("kind", ["transformer_xl", "lstm"])
def test_the_losses_of_texts_are_those_of_each_alone(kind):
    vocab = train_vocab("chars", ["abcd\n"])
    model = model_for(vocab, kind)
    draw = np.random.default_rng(1)
    texts = [draw.integers(0, 5, size=n).tolist() for n in (7, 2, 12, 5, 12)]
    found = losses(model, texts, Lengths.of(model.config, segment_len=4), batch_size=2)
    for own, text in zip(found, texts, strict=True):
        tokens = torch.tensor([text])
        nll = model(tokens[:, :-1], None, tokens[:, 1:]).nll.detach()
        np.testing.assert_allclose(own, nll[0].double().numpy(), rtol=1e-4, atol=1e-5)


CHORALES = {
    "train": [[[70, 60, 52, 40]] * 8, [[72, 62, 53, 43], [74, 64, -1, 45]] * 4],
    "valid": [[[71, 61, 52, 41]] * 4],
    "test": [[[71, 61, 52, 41]] * 6, [[70, 62, 52, 41], [72, -1, 53, 41]] * 4],
}


@pytest.fixture
def music(tmp_path):
    path = tmp_path / "Jsb16thSeparated.json"
    path.write_text(json.dumps(CHORALES))
    folder = tmp_path / "data"
    folder.mkdir()
    load_task("music").prepare(tmp_path, folder)
    return folder


@pytest.mark.slow
def test_chorales_are_marked_and_those_to_train_on_are_in_several_keys(music):
    corpus = prepare(DataConfig(path=str(music / "music.json"), vocab="integers"))
    valid = corpus.vocab.decode(corpus.split("valid"))
    assert valid == "1000" + " 71 61 52 41" * 4 + "\n"
    pieces = json.loads((music / "music.json").read_text())["train"]
    assert len(pieces) == 2 * ROUNDS
    assert len({tuple(piece) for piece in pieces}) > 2
    assert all(piece[0] == 1000 and (len(piece) != 34 or piece[17] == 1001) for piece in pieces)


def test_the_loss_of_a_chorale_is_that_of_the_whole_piece(music):
    task = load_task("music")
    vocab = train_vocab("integers", [" ".join(map(str, (-1, *range(40, 75), *MARKS)))])
    given = trained(vocab)
    found = task.measure(given, music, "test")
    n_notes = np.array([24, 32])
    texts = json.loads((music / "music.json").read_text())["test"]
    nll = []
    for text in texts:
        ids = torch.tensor([[vocab.eos_id, *vocab.encode(" ".join(map(str, text))), vocab.eos_id]])
        nll.append(given.model(ids[:, :-1], None, ids[:, 1:]).nll.sum().item())
    assert found.metrics["note"] == pytest.approx(sum(nll) / 56, rel=1e-4)
    assert found.metrics["frame"] == pytest.approx(4 * found.metrics["note"])
    np.testing.assert_allclose(found.scores, -np.array(nll) / n_notes, rtol=1e-4)
    names = dict(task.baselines(music, "test"))
    assert [len(row.scores) for row in names.values()] == [2, 2]
    # Add-one counts, each note twice or four times by two pieces in 16 keys.
    assert 1 < names["unigram"].metrics["note"] < math.log(len(vocab)) * 1.3


@pytest.mark.slow
def test_a_line_of_a_log_is_scored_by_the_sum_of_its_tokens(tmp_path, monkeypatch):
    logs = {"train": (1, 3_000, 0.0), "test": (3, 300, 0.3)}
    monkeypatch.setattr(logs_anomalies, "LOGS", logs)
    task = load_task("logs")
    task.prepare(tmp_path, tmp_path)
    text = (tmp_path / "test.txt").read_text()
    vocab = train_vocab("words", [(tmp_path / "train.txt").read_text()])
    given = trained(vocab)
    found = task.measure(given, tmp_path, "test")
    ids = vocab.encode(text)
    nll = losses(given.model, [ids], given.lengths)[0]
    ends = np.flatnonzero(np.array(ids) == vocab.eos_id)[:-1] + 1
    surprise = np.array([x.sum() for x in np.split(np.concatenate([[0.0], nll]), ends)])
    kinds = json.loads((tmp_path / "test.json").read_text())
    wrong = np.array([kind is not None for kind in kinds])
    pairs = surprise[wrong][:, None] - surprise[~wrong]
    auc = ((pairs > 0) + 0.5 * (pairs == 0)).mean(1)
    np.testing.assert_allclose(found.scores, auc, atol=2e-3)
    assert found.metrics["auc"] == pytest.approx(found.scores.mean())
    for _, row in task.baselines(tmp_path, "test"):
        assert len(row.scores) == wrong.sum()


def test_a_task_that_makes_its_data_is_given_none(tmp_path, capsys):
    assert main(["task", "logs", str(tmp_path)]) == 2
    assert "task logs makes its data: leave them out: txl task logs" in capsys.readouterr().err


def test_the_download_of_the_chorales_is_what_the_task_reads():
    (file,) = KNOWN_CORPORA["jsb-chorales"].files.values()
    assert (file.name,) == load_task("music").reads
