"""A server that says that it listens can write: what cannot be is refused before."""

import errno
from pathlib import Path

import pytest

from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.server import listen
from transformer_xl.apps.serve.service import Service
from transformer_xl.cli import main, models
from transformer_xl.config import GenerateConfig


def service(made, **settings):
    return Service(made.model, made.vocab, made.weights, ServeSettings(**settings), "it")


def test_more_texts_than_there_is_room_for_are_refused_with_how_many_there_are(make_model):
    message = r"max_batch=1\d+, mem_len=12: .*would take.* lower --max_batch, to at most [\d,]+"
    with pytest.raises(ValueError, match=f"(?s){message}"):
        service(make_model(), max_batch=10**15)


@pytest.mark.parametrize(
    ("words", "said", "remedy"),
    [
        ((), "Address already in use", "or another --port; 0 is a free one"),
        (("--host", "nowhere.invalid"), "cannot listen on nowhere.invalid", "as --host"),
        (("--host", "192.0.2.1"), "Cannot assign requested address", "as --host"),
        (("--port", "0", "--sessions", "read-only"), "Read-only file system", "leave --sessions"),
    ],
)
def test_what_cannot_be_used_ends_the_command_in_one_line_before_the_model_is_loaded(
    monkeypatch, capsys, tmp_path, words, said, remedy
):
    def mkdir(*given, **how):
        raise OSError(errno.EROFS, "Read-only file system")

    def load(*given):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(tmp_path), "--port", port, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert remedy in line


def test_a_folder_that_asks_for_beam_search_is_not_served(make_model, refused):
    made = make_model()
    settings = ServeSettings(), "it", GenerateConfig(beam_size=4)
    with refused("beam_size=4: the server samples, and streams what it has sampled"):
        Service(made.model, made.vocab, made.weights, *settings)
