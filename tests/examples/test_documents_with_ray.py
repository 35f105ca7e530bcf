"""Documents that Ray's workers score and continue have the bytes of those of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from transformer_xl import from_pretrained, generate
from transformer_xl.config import ModelConfig
from transformer_xl.data import train_vocab
from transformer_xl.inference.answers import losses
from transformer_xl.model import build_model
from transformer_xl.model.segment import Lengths

PROGRAM = Path(__file__).parents[2] / "examples" / "documents_with_ray.py"
LETTERS = "abcdefgh "


@pytest.fixture(scope="module")
def program():
    spec = spec_from_file_location("documents_with_ray", PROGRAM)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    vocab = train_vocab("chars", [LETTERS])
    settings = {"n_layer": 2, "n_head": 2, "d_model": 16, "d_inner": 32, "mem_len": 12}
    config = ModelConfig(vocab_size=len(vocab), dropout=0.0, init_std=0.3, **settings)
    build_model(config).save_pretrained(tmp_path / "model", vocab)
    return tmp_path / "model"


@pytest.fixture
def source(tmp_path):
    texts = [LETTERS[n % 5 :] * (n % 7) + LETTERS[: n % 3] for n in range(40)]
    texts[11] = "no such letter: z"
    lines = [json.dumps({"text": text, "id": f"d{n}", "more": [n]}) for n, text in enumerate(texts)]
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def process(program, model, source, tmp_path, monkeypatch):
    """Run the program in this process; return the files of its folder."""

    def process(*words, kind="score", out="out", folder=model):
        command = [kind, folder, source, tmp_path / out, "--workers", 0, *words]
        monkeypatch.setattr(sys, "argv", ["x", *map(str, command)])
        program.main()
        return contents(tmp_path / out)

    return process


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*"))}


def rows(files):
    return [json.loads(line) for content in files.values() for line in content.splitlines()]


def test_each_document_has_the_score_that_it_has_alone(process, model, source):
    found = rows(process("--batch-size", 4, "--per-task", 7))
    assert [each["id"] for each in found] == [f"d{n}" for n in range(40)]
    net, vocab = from_pretrained(model)
    for each, line in zip(found, source.read_text().splitlines(), strict=True):
        text = json.loads(line)["text"]
        if "z" in text:
            assert "not in the vocabulary" in each["error"]
            continue
        ids = list(vocab.encode(text))
        alone = losses(net, [ids], Lengths.of(net.config))[0].sum() if len(ids) > 1 else 0.0
        assert each["tokens"] == len(ids)
        assert each["nll_sum"] == pytest.approx(alone, rel=1e-5)
        assert each["nll"] == (pytest.approx(alone / (len(ids) - 1)) if len(ids) > 1 else None)


@pytest.mark.slow
def test_each_document_is_continued_as_alone(process, model, source):
    words = ("--per-task", 7, "--batch-size", 3, "--length", 9, "--seed", 5)
    found = rows(process(*words, kind="generate"))
    net, vocab = from_pretrained(model)
    for n, (each, line) in enumerate(zip(found, source.read_text().splitlines(), strict=True)):
        text = json.loads(line)["text"]
        if not text or "z" in text:
            assert "error" in each
            continue
        written = generate(net, vocab.encode(text), length=9, seed=5 + n)
        assert (each["text"], each["seed"]) == (vocab.decode(list(written)), 5 + n)


@pytest.mark.parametrize("kind", ["score", "generate"])
def test_the_memory_is_as_long_as_was_asked(process, model, source, tmp_path, kind):
    net, vocab = from_pretrained(model)
    plain = build_model(replace(net.config, mem_len=0)).eval()
    plain.save_pretrained(tmp_path / "plain", vocab)
    source.write_text(json.dumps({"text": LETTERS * 20}))
    length = ("--length", 9) if kind == "generate" else ()
    (found,) = rows(process("--mem-len", 5, *length, kind=kind, folder=tmp_path / "plain"))
    ids = vocab.encode(LETTERS * 20)
    if kind == "generate":
        written = generate(plain, ids, length=9, seed=1, mem_len=5)
        assert found["text"] == vocab.decode(list(written))
    else:
        alone = losses(plain, [ids], Lengths.of(plain.config, mem_len=5))[0].sum()
        assert found["nll_sum"] == pytest.approx(alone, rel=1e-5)
        with pytest.raises(ValueError, match=r"mem_len=0: .* give a mem_len"):
            process(folder=tmp_path / "plain", out="none")


def test_a_killed_run_goes_on_and_another_one_is_refused(
    program, process, model, source, tmp_path, monkeypatch
):
    whole, refused = process("--per-task", 7, out="whole"), "of another model, source or settings"
    perform, n_calls = program.Worker.perform, []

    def dies(self, *task):
        n_calls.append(task)
        if len(n_calls) == 3:
            raise MemoryError
        perform(self, *task)

    monkeypatch.setattr(program.Worker, "perform", dies)
    with pytest.raises(MemoryError):
        process("--per-task", 7)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    assert len(times) == 2
    assert process("--per-task", 7) == whole
    assert {path: path.stat().st_mtime_ns for path in times} == times
    # A setting that an earlier version did not have is noted where it is set.
    assert "mem_len" not in json.loads((tmp_path / "out" / "about.json").read_text())["work"]
    with pytest.raises(SystemExit, match=refused):
        process("--per-task", 8)
    # A text of the same size, and a vocabulary with other numbers.
    text = source.read_bytes()
    source.write_bytes(text.replace(b"abc", b"abe", 1))
    with pytest.raises(SystemExit, match=refused):
        process("--per-task", 7)
    source.write_bytes(text)
    train_vocab("chars", [LETTERS.replace("h", "i")]).save(model)
    with pytest.raises(SystemExit, match=refused):
        process("--per-task", 7)


def test_a_run_that_failed_before_any_result_does_not_keep_others_out(
    program, process, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(program.Worker, "perform", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            process("--per-task", 3)
    before = torch.get_num_threads()
    assert len(process("--per-task", 30, "--threads", before + 1)) == 2
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("kind", ["score", "generate"])
def test_a_line_that_is_no_document_is_an_error_of_its_own(process, source, kind):
    good = source.read_bytes().splitlines()[:3]
    bad = [b"[]", b'{"text": 5}', b"{", b"", b'{"text": "\\ud800"}', b'{"text": "\xff"}']
    bad += [b'{"id": 1}', b'{"text": "a", "id": 1.5}', b'{"x":' + b"[" * 10_000]
    source.write_bytes(b"\n".join([good[0], *bad, *good[1:]]))
    found = rows(process("--per-task", 7, kind=kind))
    assert [each["id"] for each in found] == ["d0", *range(1, 10), "d1", "d2"]
    for number, each in enumerate(found):
        if 1 <= number <= 9:
            assert each["error"].startswith(f"line {number + 1} is no document"), each
    # The others are read as ever.
    if kind == "score":
        source.write_bytes(b"\n".join(good))
        alone = rows(process("--per-task", 7, out="alone"))
        assert [each["nll"] for each in alone] == [found[n]["nll"] for n in (0, 10, 11)]


def test_what_cannot_be_processed_is_refused(program, process, source, monkeypatch, capsys):
    for words, message in (
        (("--length", 3), "length have no effect on scores"),
        (("--batch-size", 0), "must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            process(*words)
        assert message in capsys.readouterr().err
    monkeypatch.setattr(program, "LONGEST_LINE", 20)
    with pytest.raises(SystemExit, match="a line of more than 20 bytes"):
        process()
    source.write_text("")
    with pytest.raises(SystemExit, match="has no document"):
        process()


def _workers(parent):
    """Return the processes of workers that descend from a process."""
    found, parents = [], {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(status[1])
            if b"MapWorker" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue

    def descends(pid):
        while pid and pid != parent:
            pid = parents.get(pid, 0)
        return pid == parent

    return [pid for pid in found if descends(pid)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_two_workers_one_killed_write_what_one_process_writes(process, model, source, tmp_path):
    pytest.importorskip("ray", reason="needs pip install 'transformer-xl[ray]'")
    words = ["--per-task", "2", "--length", "400", "--seed", "5"]
    command = [sys.executable, str(PROGRAM), "generate", str(model), str(source)]
    # Its folder of sockets has a short path: they have at most 107 bytes.
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    out = tmp_path / "out"
    process_ = subprocess.Popen(
        [*command, str(out), *words, "--workers", "2"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    killed, end = 0, time.monotonic() + 300
    while process_.poll() is None and not killed and time.monotonic() < end:
        if contents(out) if out.exists() else {}:
            for pid in _workers(process_.pid)[:1]:
                os.kill(pid, signal.SIGKILL)
                killed = pid
        time.sleep(0.02)
    said, _ = process_.communicate(timeout=300)
    assert killed, said[-3000:]
    assert process_.returncode == 0, said[-3000:]
    assert contents(out) == process(*words, kind="generate", out="alone")
    assert len(contents(out)) == 20
