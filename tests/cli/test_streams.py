"""score, as a pipe flows into it."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from transformer_xl.cli import scoring as streams
from transformer_xl.config.recipes import recipe_of

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "the cat saw a dog.\nthe dog ran to sea.\n" * 9


def records(ended):
    assert (ended.code, ended.err) == (0, "")
    return [json.loads(line) for line in ended.out.splitlines()]


def test_the_sums_of_all_lines_are_one_object(txl, trained, stdin):
    stdin(TEXT.encode())
    found = txl("score", trained, "-", "--by", "line", "--json").json
    stdin(TEXT.encode())
    whole = txl("score", trained, "-", "--json").json
    assert (found["lines"], found["tokens"]) == (18, len(TEXT) - 1)
    assert found["nll"] == pytest.approx(whole["nll"])
    assert found["nll"] == pytest.approx(found["nll_sum"] / found["tokens"])
    assert found["nll"] == pytest.approx(found["bits_per_token"] * math.log(2))
    figures = {"tokens", "nll", "nll_sum", "bits_per_token", "bits_per_byte", "unknown"}
    assert set(found) == {"lines", *figures}
    stdin(b"")
    assert txl("score", trained, "-", "--by", "line", "--json").json["nll"] is None


def test_a_text_of_any_platform_has_the_scores_of_the_text(txl, trained, stdin):
    stdin(TEXT.encode())
    plain = txl("score", trained, "-", "--by", "line").out
    for end, encoding in (("\r\n", "utf-8"), ("\r", "utf-8-sig")):
        stdin(TEXT.replace("\n", end).encode(encoding))
        found = txl("score", trained, "-", "--by", "line")
        assert found.out == plain
        n = f"18 {end.replace(chr(13), 'CR').replace(chr(10), ' LF')} to LF"
        assert found.err.startswith(f"normalized the text of the standard input: {n}")
        assert len(found.err.splitlines()) == 1
    stdin(TEXT.replace("\n", "\r\n").encode())
    assert "'\\r' (1 in all" in txl("score", trained, "-", "--by", "line", "--raw").err


def test_the_most_surprising_lines_come_first(txl, trained, stdin):
    odd = "god a was\n"
    stdin((TEXT + odd + TEXT).encode())
    lines = records(txl("score", trained, "-", "--by", "line"))
    stdin((TEXT + odd + TEXT).encode())
    found = records(txl("score", trained, "-", "--by", "line", "--top", 3))
    assert found == sorted(lines, key=lambda x: -x["nll_sum"])[:3]


def test_a_text_that_was_trained_on_is_told(txl, trained, monkeypatch, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    recipe = recipe_of(trained)
    for given, is_told in ((path, True), (tmp_path, True), (tmp_path / "other", False)):
        of_text = replace(recipe, data=replace(recipe.data, name="", path=str(given)))
        monkeypatch.setattr(streams, "recipe_of", lambda folder, found=of_text: found)
        err = txl("score", trained, path, "--by", "line").err
        assert (f"was trained on {path}" in err) == is_told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top", 3], "--top has no effect by token"),
        (["--by", "line", "--top", 0], "top=0 must be at least 1"),
        (["--by", "line", "--top", 2, "--json"], "--json and --top exclude each other"),
        (["--by", "line", "--separate_lines"], "--separate_lines is gone: transformer_xl.inf"),
    ],
    ids=str,
)
def test_options_without_effect_are_refused(txl, trained, tmp_path, words, message):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    ended = txl("score", trained, path, *words)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err


@pytest.mark.parametrize("cut", [1, 130, 200])
def test_a_stream_in_parts_is_the_stream(txl, trained, stdin, tmp_path, cut):
    stdin(TEXT.encode())
    whole = records(txl("score", trained, "-", "--segment_len", 50))
    found, sizes = [], set()
    for part in (TEXT[:cut], TEXT[cut:]):
        stdin(part.encode())
        words = ["--segment_len", 50, "--state", tmp_path / "state"]
        ended = txl("score", trained, "-", *words)
        assert ended.err == (
            f"saved the state to {tmp_path / 'state'}; the same command resumes from it\n"
        )
        found += [json.loads(line) for line in ended.out.splitlines()]
        sizes.add((tmp_path / "state").stat().st_size)
    assert [x["id"] for x in found] == [x["id"] for x in whole]
    assert [x["log_prob"] for x in found][1:] == pytest.approx(
        [x["log_prob"] for x in whole][1:], abs=1e-5
    )
    # 8 + 50 - 1 positions, wherever in a segment the stream was left.
    assert load_file(tmp_path / "state")["keys"].shape[3] == 57
    assert len(sizes) == 1
    # And a text can be written on from there.
    words = ["--state", tmp_path / "state", "--length", 5]
    assert len(txl("generate", trained, *words).out) == 6


def test_nothing_read_leaves_no_state(txl, trained, stdin, tmp_path):
    stdin(b"")
    code, out, err = txl("score", trained, "-", "--state", tmp_path / "state")
    assert (code, out) == (0, "")
    assert err == "no token was scored: the text has 0 tokens\n"
    assert not (tmp_path / "state").exists()


def test_a_text_without_a_known_symbol_is_not_called_empty(txl, trained, stdin):
    stdin("ΩΩΩ".encode())
    code, out, err = txl("score", trained, "-")
    assert (code, out) == (0, "")
    assert "'Ω' (3 in all, the first in line 1); left out" in err
    assert err.endswith("no token was scored: no part of the text is in the vocabulary\n")


class Failing(io.BytesIO):
    """A disk that fails behind what it has."""

    def read1(self, size=-1):
        if block := super().read1(size):
            return block
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("by", ["token", "line"])
def test_the_sums_of_what_was_read_before_a_failure_are_printed(txl, trained, monkeypatch, by):
    data = "the cat\nΩ\n".encode() * 7
    ends = []
    for file in (io.BytesIO(data), Failing(data)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        ends.append(txl("score", trained, "-", "--by", by, "--json"))
    whole, cut = ends
    assert (whole.code, cut.code) == (0, 1)
    assert cut.json == whole.json
    assert cut.json["unknown"] == 7
    failure = "cannot read the standard input to its end: Input/output error"
    assert failure in cut.err
    total = "7 in all not in the vocabulary; left out"
    assert (total in cut.err) == (by == "line")


def test_a_total_is_announced_where_more_follows(txl, trained, stdin):
    for n in (1, 2, 7):
        stdin("Ω a\n".encode() * n)
        first, *total = txl("score", trained, "-", "--by", "line").err.splitlines()
        assert "'Ω' (1 in all, the first in line 1); left out" in first
        assert total == [f"warning: {n} in all not in the vocabulary; left out"] * (n > 1)


def test_an_empty_block_says_that_nothing_more_has_come(monkeypatch):
    monkeypatch.setattr(streams, "_IDLE_SECONDS", 0.05)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as file:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=file))
        blocks = streams._blocks(Path("-"), [], is_raw=True)
        for _ in range(3):
            os.write(writer, b"abc")
            assert next(blocks) == b"abc"
            assert next(blocks) == b""
        os.write(writer, b"end")
        os.close(writer)
        assert list(blocks) == [b"end"]


@pytest.fixture
def process(trained, tmp_path):
    words = ["score", str(trained), "-", "--by", "line", "--state", str(tmp_path / "state")]
    process = subprocess.Popen(
        [sys.executable, "-m", "transformer_xl", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
    )
    yield process
    process.kill()
    process.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_line_is_scored_when_it_is_there_and_a_signal_keeps_the_memory(process, tmp_path, number):
    for n, line in enumerate(("the cat saw a dog.\n", "the dog ran to sea.\n"), 1):
        process.stdin.write(line.encode())
        process.stdin.flush()
        # The pipe stays open; what follows is not waited for.
        found = json.loads(process.stdout.readline())
        assert (found["line"], found["text"] + "\n") == (n, line)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"saved the state to" in err
    assert b"Traceback" not in err
    assert load_file(tmp_path / "state")["keys"].isfinite().all()


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_scoring(process, tmp_path):
    process.stdout.close()
    process.stdin.write(b"the cat\n")
    process.stdin.flush()
    assert process.wait(timeout=60) == 1
    assert b"Traceback" not in process.stderr.read()
    assert (tmp_path / "state").exists()
