"""Documents that Ray's workers score and continue have the bytes of those of one process."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transformer_xl.config import GenerateConfig, ModelConfig
from transformer_xl.data import load_vocab, train_vocab
from transformer_xl.inference import documents
from transformer_xl.inference.answers import losses
from transformer_xl.inference.documents import Work, here, process
from transformer_xl.inference.generate import from_pretrained, generate
from transformer_xl.model import build_model
from transformer_xl.model.segment import Lengths

PROGRAM = Path(__file__).parents[2] / "examples" / "documents_with_ray.py"
LETTERS = "abcdefgh "


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


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*"))}


def rows(paths):
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_each_document_has_the_score_that_it_has_alone(model, source, tmp_path):
    work = Work(model=str(model), batch_size=4, per_task=7)
    found = rows(process(work, source, tmp_path / "out"))
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


@pytest.mark.parametrize("kind", ["score", "generate"])
def test_as_many_documents_are_read_together_as_was_asked(model, tmp_path, monkeypatch, kind):
    source, sizes = tmp_path / "documents.jsonl", []
    source.write_text('{"text": "abcdefgh"}\n{"text": "bcdefgha"}\n' * 20)
    original = documents.from_pretrained

    def spied(*given):
        net, vocab = original(*given)
        net.register_forward_pre_hook(lambda module, words: sizes.append(len(words[0])))
        return net, vocab

    monkeypatch.setattr(documents, "from_pretrained", spied)
    drawing = GenerateConfig(length=1) if kind == "generate" else GenerateConfig()
    for batch_size in (3, 30):
        work = Work(model=str(model), kind=kind, batch_size=batch_size, generation=drawing)
        process(work, source, tmp_path / f"out-{batch_size}")
        # Of generated texts, only different ones are read.
        assert max(sizes) == (batch_size if kind == "score" else 2)
        sizes.clear()


@pytest.mark.parametrize("kind", ["score", "generate"])
def test_the_memory_is_as_long_as_was_asked(model, source, tmp_path, kind):
    net, vocab = from_pretrained(model)
    build_model(replace(net.config, mem_len=0)).save_pretrained(tmp_path / "plain", vocab)
    source.write_text(json.dumps({"text": LETTERS * 20}))
    drawing = GenerateConfig(length=9) if kind == "generate" else GenerateConfig()
    work = Work(model=str(tmp_path / "plain"), kind=kind, mem_len=5, generation=drawing)
    (found,) = rows(process(work, source, tmp_path / "out"))
    plain, ids = from_pretrained(work.model)[0], vocab.encode(LETTERS * 20)
    if kind == "generate":
        written = generate(plain, ids, length=9, seed=1, mem_len=5)
        assert found["text"] == vocab.decode(list(written))
    else:
        alone = losses(plain, [ids], Lengths.of(plain.config, mem_len=5))[0].sum()
        assert found["nll_sum"] == pytest.approx(alone, rel=1e-5)
        with pytest.raises(ValueError, match=r"mem_len=0: .* give a mem_len"):
            process(Work(model=work.model), source, tmp_path / "none")


def test_the_program_passes_the_memory_length(model, source, tmp_path, monkeypatch):
    source.write_text(json.dumps({"text": LETTERS * 20}))
    command = [str(PROGRAM), "score", str(model), str(source), str(tmp_path / "a")]
    monkeypatch.setattr(sys, "argv", [*command, "--workers", "0", "--mem-len", "5"])
    runpy.run_path(str(PROGRAM), run_name="__main__")
    process(Work(model=str(model), mem_len=5), source, tmp_path / "b")
    process(Work(model=str(model)), source, tmp_path / "c")
    assert contents(tmp_path / "a") == contents(tmp_path / "b") != contents(tmp_path / "c")


def test_a_call_that_failed_before_any_result_does_not_keep_others_out(model, source, tmp_path):
    def fails(given, tasks, n):
        raise MemoryError

    with pytest.raises(MemoryError):
        process(Work(model=str(model), batch_size=9999), source, tmp_path / "out", executor=fails)
    work = Work(model=str(model), per_task=30)
    assert len(process(work, source, tmp_path / "out")) == 2
    with pytest.raises(ValueError, match="results of another model, source or settings"):
        process(Work(model=str(model), per_task=31), source, tmp_path / "out")


def test_another_call_is_refused_while_the_first_has_no_result_yet(model, source, tmp_path):
    other = Work(model=str(model), per_task=7)

    def beside(given, tasks, n):
        with pytest.raises(ValueError, match="results of another model, source or settings"):
            process(other, source, tmp_path / "out")
        yield from here(given, tasks, n)

    work = Work(model=str(model), per_task=30)
    assert len(process(work, source, tmp_path / "out", executor=beside)) == 2


def test_a_folder_of_an_earlier_version_goes_on(model, source, tmp_path):
    work, out = Work(model=str(model), per_task=30), tmp_path / "out"
    process(work, source, out)
    # A setting that it did not have.
    assert "mem_len" not in json.loads((out / "about.json").read_text())["work"]


@pytest.mark.slow
def test_each_document_is_continued_as_alone(model, source, tmp_path):
    drawing = GenerateConfig(length=9, seed=5)
    work = Work(model=str(model), kind="generate", per_task=7, batch_size=3, generation=drawing)
    found = rows(process(work, source, tmp_path / "out"))
    net, vocab = from_pretrained(model)
    for n, (each, line) in enumerate(zip(found, source.read_text().splitlines(), strict=True)):
        text = json.loads(line)["text"]
        if not text or "z" in text:
            assert "error" in each
            continue
        written = generate(net, vocab.encode(text), length=9, seed=5 + n)
        assert (each["text"], each["seed"]) == (vocab.decode(list(written)), 5 + n)


def test_what_is_done_is_not_repeated_and_what_differs_is_refused(
    model, source, tmp_path, monkeypatch
):
    out, work = tmp_path / "out", Work(model=str(model), per_task=7)

    def dies(given, tasks, n):
        perform = documents.Performer(given)
        perform(tasks[0])
        perform(tasks[3])
        yield tasks[0]

    with pytest.raises(RuntimeError, match=r"4 of 6 parts are missing, first part-000001"):
        process(work, source, out, executor=dies)
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert len(times) == 2
    process(work, source, out)
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times
    process(work, source, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")
    with pytest.raises(ValueError, match="results of another model, source or settings"):
        process(Work(model=str(model), per_task=8), source, out)
    # A text of the same size, and a vocabulary with other numbers.
    whole = source.read_bytes()
    source.write_bytes(whole.replace(b"abc", b"abe", 1))
    with pytest.raises(ValueError, match="results of another model, source or settings"):
        process(work, source, out)
    source.write_bytes(whole)
    vocab = load_vocab(model)
    train_vocab("chars", [LETTERS.replace("h", "i")]).save(model)
    with pytest.raises(ValueError, match="results of another model, source or settings"):
        process(work, source, out)
    vocab.save(model)
    assert process(work, source, out)
    monkeypatch.setattr(documents, "_LONGEST_LINE", 20)
    with pytest.raises(ValueError, match="a line of more than 20 bytes"):
        process(work, source, tmp_path / "long")
    monkeypatch.undo()
    source.write_text("")
    with pytest.raises(ValueError, match="has no document"):
        process(work, source, tmp_path / "empty")


@pytest.mark.parametrize("kind", ["score", "generate"])
def test_a_line_that_is_no_document_is_an_error_of_its_own(model, source, tmp_path, kind):
    good = source.read_bytes().splitlines()[:3]
    bad = [
        b"[]",
        b'{"text": 5}',
        b"{",
        b"",
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b'{"id": 1}',
    ]
    bad += [b'{"text": "a", "id": 1.5}', b'{"x":' + b"[" * 10_000]
    source.write_bytes(b"\n".join([good[0], *bad, *good[1:]]))
    work = Work(model=str(model), kind=kind, per_task=7)
    found = rows(process(work, source, tmp_path / "out"))
    assert [each["id"] for each in found] == ["d0", *range(1, 10), "d1", "d2"]
    for number, each in enumerate(found):
        if 1 <= number <= 9:
            assert each["error"].startswith(f"line {number + 1} is no document"), each
    # The others are read as ever.
    if kind == "score":
        source.write_bytes(b"\n".join(good))
        alone = rows(process(work, source, tmp_path / "alone"))
        assert [each["nll"] for each in alone] == [found[n]["nll"] for n in (0, 10, 11)]


def test_the_threads_of_the_caller_stay_as_they_were(model, source, tmp_path):
    before = torch.get_num_threads()
    process(Work(model=str(model), threads=before + 1), source, tmp_path / "out")
    assert torch.get_num_threads() == before


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="have no effect on scores"):
        Work(model="m", generation=GenerateConfig(length=3))
    with pytest.raises(ValueError, match="beam_size=2"):
        Work(model="m", kind="generate", generation=GenerateConfig(beam_size=2))
    with pytest.raises(ValueError, match="prompt='Once' has no effect: documents are"):
        Work(model="m", kind="generate", generation=GenerateConfig(prompt="Once"))
    with pytest.raises(ValueError, match="batch_size=0"):
        Work(model="m", batch_size=0)


def test_a_value_that_is_none_of_the_choices_is_refused_by_name():
    wrong = {"kind": "scores", "weights": "int4", "threads": 1.5, "generation": {"length": 3}}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name}="):
            Work(model="m", **{name: value})


def test_texts_without_end_are_refused():
    with pytest.raises(ValueError, match="length=0 leaves nothing to generate: documents need a"):
        Work(model="m", kind="generate", generation=GenerateConfig(length=0))


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
def test_two_workers_one_killed_write_what_one_process_writes(model, source, tmp_path):
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
    drawing = GenerateConfig(length=400, seed=5)
    work = Work(model=str(model), kind="generate", per_task=2, generation=drawing)
    process(work, source, tmp_path / "alone")
    assert contents(out) == contents(tmp_path / "alone")
    assert len(contents(out)) == 20
