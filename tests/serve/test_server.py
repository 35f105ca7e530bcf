"""The process: limits, the key, restarts, signals, the command line."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")

from transformer_xl.apps.serve import server as serving  # noqa: E402  (they need these)
from transformer_xl.apps.serve.serve_settings import ServeSettings  # noqa: E402
from transformer_xl.apps.serve.service import Service  # noqa: E402
from transformer_xl.cli import main, models  # noqa: E402
from transformer_xl.inference.generate import State  # noqa: E402

COMPLETIONS = "/v1/completions"


def post(server, **body):
    return httpx.post(server.address + COMPLETIONS, json={"prompt": "abc"} | body, timeout=60)


@pytest.mark.parametrize("error", [OSError("the disk is full"), RuntimeError("a fault")])
def test_who_waits_for_a_session_that_cannot_be_saved_is_told(
    made, run_server, tmp_path, monkeypatch, error
):
    def fails(*words):
        raise error

    with run_server(made, sessions=tmp_path) as server:
        first = post(server, session="tale", max_tokens=3, seed=3).json()["choices"][0]["text"]
        monkeypatch.setattr(State, "save", fails)
        answer = post(server, session="tale", max_tokens=3)
        assert answer.status_code == (507 if isinstance(error, OSError) else 500)
        monkeypatch.undo()
        # It goes on from where it had been.
        more = post(server, prompt="", session="tale", max_tokens=4).json()["choices"][0]["text"]
        assert first + more == made.alone("abc", 7, seed=3)


def test_what_is_too_much_is_refused(made, run_server):
    with run_server(made, max_prompt=20, max_tokens=10, max_queue=3, max_body=500) as server:
        for body, status in [
            ({"prompt": "a" * 21}, 400),
            ({"max_tokens": 11}, 400),
            ({"n": 4}, 400),
            ({"prompt": ["a"] * 4}, 400),
            ({"prompt": "a" * 600}, 413),
            ({"prompt": "a" * 20, "n": 3}, 200),
        ]:
            answer = post(server, **body)
            assert answer.status_code == status, answer.text
        assert answer.json()["settings"]["max_tokens"] == 10
        # Without a length that could be believed.
        pieces = (b" " * 100 for _ in range(10_000))
        url, headers = server.address + COMPLETIONS, {"Content-Type": "application/json"}
        assert httpx.post(url, content=pieces, headers=headers).status_code == 413


def test_a_full_queue_is_said_with_when_to_come_again(made, run_server, until):
    with run_server(made, max_batch=1, max_queue=1, max_tokens=10**6) as server:
        long = {"max_tokens": 10**6, "stream": True, "prompt": "abc"}
        with httpx.stream("POST", server.address + COMPLETIONS, json=long, timeout=60) as answer:
            # Kept: without its reader the answer is closed.
            lines = answer.iter_lines()
            next(lines)
            waits = threading.Thread(target=post, args=[server], daemon=True)
            waits.start()
            until(lambda: server.service.engine.n_waiting == 1)
            refused = post(server)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "queue_full"
        waits.join(60)


def test_a_key_is_asked_for_and_never_shown(made, run_server, caplog):
    with run_server(made, api_key="sesame-open\n\n other-key \n") as server:
        for headers, status in [
            ({}, 401),
            ({"Authorization": "Bearer sesame"}, 401),
            ({"Authorization": "Basic sesame-open"}, 401),
            ({"Authorization": "Bearer sesame-open other-key"}, 401),
            ({"Authorization": b"Bearer k\xfcey"}, 401),
            ({"Authorization": "Bearer sesame-open"}, 200),
            ({"Authorization": "Bearer other-key"}, 200),
        ]:
            for path in ("/v1/models", "/v1/sessions", "/metrics"):
                answer = httpx.get(server.address + path, headers=headers)
                assert answer.status_code == status
                assert "sesame-open" not in answer.text
        assert httpx.get(server.address + "/health").status_code == 200
        assert httpx.get(server.address + "/?key=secret").status_code == 200
    lines = [r.getMessage() for r in caplog.records if r.name == "transformer_xl.serve"]
    assert any(line.startswith("GET /v1/models 401 ") for line in lines)
    assert not any("sesame" in line or "secret" in line for line in lines)


@pytest.fixture
def start(made, tmp_path):
    """Starts `txl serve` as a process, and ends it."""
    processes = []

    def begin(*words):
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "transformer_xl", "serve", str(made.folder)),
                *("--port", "0", "--sessions", str(tmp_path / "sessions"), *words),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        processes.append(process)
        for line in process.stderr:
            if found := re.search(r"listening on (http://\S+)/", line):
                return process, found[1]
        raise AssertionError("it did not begin to listen")

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_runs_and_saves_it(start, made, tmp_path, number):
    process, address = start("--shutdown_seconds", "0.1")
    body = {"prompt": "abc", "max_tokens": 4096, "seed": 3, "session": "tale", "stream": True}
    with httpx.stream("POST", address + COMPLETIONS, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        choices = [json.loads(next(lines)[6:])["choices"][0]]
        process.send_signal(number)
        events = [line[6:] for line in lines if line.startswith("data: {")]
    choices += [json.loads(event)["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] == "length"
    assert process.wait(60) == 0
    assert process.stderr.read().splitlines()[-1].endswith("stopped")
    text = "".join(choice["text"] for choice in choices)
    _, address = start()
    body = {"max_tokens": 9, "session": "tale"}
    more = httpx.post(address + COMPLETIONS, json=body, timeout=60).json()["choices"][0]["text"]
    assert text + more == made.alone("abc", len(text) + 9, seed=3)


@pytest.mark.slow
def test_a_kill_loses_nothing_that_was_said(start, made):
    process, address = start()
    body = {"prompt": "abc", "max_tokens": 9, "seed": 3, "session": "tale"}
    first = httpx.post(address + COMPLETIONS, json=body, timeout=60).json()["choices"][0]["text"]
    process.kill()
    process.wait()
    _, address = start()
    body = {"max_tokens": 11, "session": "tale"}
    second = httpx.post(address + COMPLETIONS, json=body, timeout=60).json()["choices"][0]["text"]
    assert first + second == made.alone("abc", 20, seed=3)


def test_what_is_missing_is_named_with_the_command(made, monkeypatch, capsys):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    assert main(["serve", str(made.folder)]) == 1
    assert "pip install 'transformer-xl[serve]'" in capsys.readouterr().err


def test_a_wrong_setting_is_named(made, capsys):
    for words, message in [
        (["--sessions", ""], "sessions='' is no folder"),
        (["--api_key", "secret k\u00e9y"], "must be printable ASCII and not empty"),
        (["--api_key", " "], "must be printable ASCII and not empty"),
        (["--session_lease", "2"], "by the header X-Session"),
        (["--sessions", "rediss://user:secret@127.0.0.1"], "sessions in Redis are gone: give each"),
        (["--port", "70000"], "port=70000 must be at most 65535"),
        (["--max_batch", "0"], "max_batch"),
        (["--names", "[::1"], "names='[::1' must be a host name without a port"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000"),
    ]:
        assert main(["serve", str(made.folder), *words]) in (1, 2), words
        # The parser draws a frame around it.
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert message in said, words
        assert "secret" not in said


@pytest.mark.parametrize(
    ("variable", "option", "message"),
    [
        ("TXL_API_KEY", "--api_key", "is set and empty: give it a value, or unset it"),
        ("TXL_SESSIONS", "--sessions", "is not read any more: give its value as --sessions"),
    ],
)
def test_what_a_variable_of_the_environment_leaves_open_starts_no_server(
    made, monkeypatch, capsys, variable, option, message
):
    from transformer_xl.apps import serve

    given = []
    monkeypatch.setattr(serve, "serve", lambda *words: given.append(words))
    monkeypatch.setenv(variable, "")
    assert main(["serve", str(made.folder)]) == 2
    assert f"{variable} {message}" in capsys.readouterr().err
    assert not given
    # What the command line says is used in its place.
    monkeypatch.chdir(made.folder)
    assert main(["serve", str(made.folder), "--port", "0", option, "given"]) == 0
    monkeypatch.setenv("TXL_SESSIONS", "x")
    monkeypatch.setenv("TXL_API_KEY", "from-outside")
    command = ["serve", str(made.folder), "--port", "0", "--sessions", "given", "--name", "mine"]
    assert main(command) == 0
    assert [words[3].api_key for words in given][1:] == ["from-outside"]
    assert [words[4] for words in given] == [made.folder.name, "mine"]


def test_two_servers_do_not_share_the_folder_of_their_sessions(tmp_path):
    with serving.alone_in(tmp_path / "new"):
        said = pytest.raises(RuntimeError, match="another server keeps its sessions in")
        with said, serving.alone_in(tmp_path / "new"):
            pass
    (tmp_path / "file").touch()
    said = pytest.raises(OSError, match="is no folder that can be written to")
    with said, serving.alone_in(tmp_path / "file"):
        pass


def service_of(made, settings, generation=None):
    return Service(made.model, made.vocab, made.weights, settings, "it", generation)


def test_more_texts_than_there_is_room_for_are_refused(make_model):
    message = r"max_batch=1\d+, .*would take.*: lower --max_batch"
    with pytest.raises(ValueError, match=f"(?s){message}"):
        service_of(make_model(), ServeSettings(max_batch=10**15))


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
    with serving.listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(tmp_path), "--port", port, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert remedy in line
