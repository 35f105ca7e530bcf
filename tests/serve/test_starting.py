"""A server that says that it listens can write: what cannot be is refused before."""

import pytest
import torch

from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.service import Service
from transformer_xl.cli import main
from transformer_xl.config import GenerateConfig


def service(made, **settings):
    return Service(made.model, made.vocab, made.weights, ServeSettings(**settings), "it")


def test_more_texts_than_there_is_room_for_are_refused_with_how_many_there_are(make_model):
    with pytest.raises(ValueError, match=r"max_batch=1000000000000000, mem_len=12: .*would take"):
        service(make_model(), max_batch=10**15)
    with pytest.raises(ValueError, match=r"lower --max_batch, to at most [\d,]+"):
        service(make_model(), max_batch=10**15)


def test_a_memory_that_fits_nowhere_ends_the_command_before_it_listens(make_model, capsys):
    made = make_model(mem_len=10**12)
    assert main(["serve", str(made.folder), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "mem_len=1000000000000" in said
    assert "use a smaller model" in said
    assert "listening" not in said


def test_a_folder_that_asks_for_beam_search_is_not_served(make_model, refused):
    made = make_model()
    settings = ServeSettings(), "it", GenerateConfig(beam_size=4)
    with refused("beam_size=4: the server samples, and streams what it has sampled"):
        Service(made.model, made.vocab, made.weights, *settings)


def test_a_model_that_cannot_read_a_token_is_not_served(make_model, monkeypatch):
    made = make_model()

    def fail(*given, **named):
        raise RuntimeError("no kernel for it")

    monkeypatch.setattr(type(made.model), "forward", fail)
    with pytest.raises(RuntimeError, match=r"the model cannot run: .* no kernel for it"):
        service(made)


def test_a_model_that_predicts_no_numbers_is_not_served(make_model):
    made = make_model(n_layer=3)
    with torch.no_grad():
        made.model.embedding.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="its predictions are NaN"):
        service(made)
