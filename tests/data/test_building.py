import json
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import DataConfig
from transformer_xl.data import preparing
from transformer_xl.data.corpus import VERIFIED
from transformer_xl.data.locking import LOCK
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.preparing import prepare
from transformer_xl.data.tasks import Task, encode_part, perform, perform_all
from transformer_xl.data.text import SPLITS, Span

KINDS = ("bytes", "authors-bytes", "chars", "words", "bpe", "integers")
LINES = "def add(self, name):\n    return self.name + naïve\n\n\nclass Wörter:\n    pass\n"
TEXTS = st.text(alphabet=st.sampled_from("  \t\n\n\rab_1é漢.,()=-"), min_size=8, max_size=64)


def files_of(folder):
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        # It tells when. A killed process leaves its lock file and a temporary folder.
        if path.name not in (VERIFIED, LOCK) and path.is_file()
    }


def text_for(kind, folder, n=60):
    path = folder / "text.txt"
    numbers = "".join(f"{x} {x * 7 % 11} {-x}\n" for x in range(4 * n))
    path.write_text(numbers if kind == "integers" else LINES * n, encoding="utf-8")
    return path


def config_for(kind, path, cache, **settings):
    size = 300 if kind == "bpe" else None
    return DataConfig(path=str(path), vocab=kind, vocab_size=size, cache_dir=str(cache), **settings)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(preparing, "PART_BYTES", 500)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *((kind, 1) for kind in KINDS),
        ("bpe", 2),
        *(pytest.param(kind, 3, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_parts_and_processes_change_no_byte(tmp_path, monkeypatch, kind, workers):
    path = text_for(kind, tmp_path, 15)
    whole = files_of(prepare(config_for(kind, path, tmp_path / "whole")).folder)
    monkeypatch.setattr(preparing, "PART_BYTES", 200)
    config = config_for(kind, path, tmp_path / "parts", workers=workers)
    assert files_of(prepare(config).folder) == whole


def test_a_text_cut_anywhere_gives_what_the_whole_gives(tmp_path_factory, is_nightly):
    @settings(max_examples=60 if is_nightly else 6, deadline=None)
    @given(text=TEXTS, size=st.integers(1, 40))
    def check(text, size):
        check_cuts(tmp_path_factory.mktemp("cut"), text, size)

    check()


def check_cuts(folder, text, size):
    data = text.encode()
    (folder / "text").write_bytes(data)
    span = Span(folder / "text", 0, len(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "PART_BYTES", size)
        for kind in ("bytes", "chars", "words", "bpe"):
            parts = list(preparing._parts(DataConfig(vocab=kind), [span]))
            assert [x for part in parts for s in part for x in range(s.start, s.stop)] == [
                *range(len(data))
            ]
            (folder / kind).mkdir()
            train_vocab(kind, [text, LINES], 300 if kind == "bpe" else None).save(folder / kind)
            tokens = []
            for name, pieces in (("whole", [[span]]), ("parts", parts)):
                tasks = [
                    Task(
                        encode_part,
                        (folder / kind, piece, False),
                        folder / f"{kind}-{name}-{n}.json",
                        0,
                    )
                    for n, piece in enumerate(pieces)
                ]
                done = [task.target.with_suffix("") for task in perform_all(tasks, 1)]
                tokens.append(b"".join(path.read_bytes() for path in done))
            assert tokens[0] == tokens[1]


KILLED = """
import os, signal, sys
from transformer_xl.config import DataConfig
from transformer_xl.data import preparing, tasks
from transformer_xl.data.corpus import VERIFIED
from transformer_xl.data.preparing import prepare

preparing.PART_BYTES = 500
n_left = int(sys.argv[3])

def count_down(function):
    def counted(*arguments, **named):
        global n_left
        n_left -= 1
        if n_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return counted

# At the moment at which a file is whole, or just before.
tasks.perform = count_down(tasks.perform)
from pathlib import Path
Path.replace = count_down(Path.replace)
preparing.shutil.rmtree = count_down(preparing.shutil.rmtree)
settings = dict(path=sys.argv[1], cache_dir=sys.argv[2], vocab=sys.argv[4], vocab_size=300)
if sys.argv[4] != "bpe":
    del settings["vocab_size"]
prepare(DataConfig(**settings, workers=1))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path, kind):
    path = text_for(kind, tmp_path, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "PART_BYTES", 500)
        whole = files_of(prepare(config_for(kind, path, tmp_path / "whole")).folder)
    cache, codes = tmp_path / "killed", []
    # Each time it gets a little further than the last.
    while 0 not in codes:
        words = [str(path), str(cache), "6", kind]
        ended = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
        codes.append(ended.returncode)
        assert len(codes) < 40
        (folder,) = (x for x in cache.iterdir() if x.name != "downloads")
        if not folder.name.startswith(".building-"):
            # It gets its name when it is whole.
            assert whole.items() <= files_of(folder).items()
        else:
            assert codes[-1] != 0
    assert codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1)
    assert len(codes) > 3
    assert files_of(folder) == whole


@pytest.mark.usefixtures("small_parts")
def test_any_executor_makes_the_same_corpus(tmp_path):
    path, numbers = text_for("words", tmp_path), []

    def backwards(tasks, n_workers):
        numbers.append(n_workers)
        for task in reversed(tasks):
            perform(task)
            yield task

    config = config_for("words", path, tmp_path / "executor", workers=7)
    made = files_of(prepare(config, executor=backwards).folder)
    assert set(numbers) == {7}
    assert made == files_of(prepare(config_for("words", path, tmp_path / "none")).folder)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_an_executor_that_fails_keeps_what_is_done(tmp_path, error):
    path = text_for("words", tmp_path)

    def failing(tasks, n_workers):
        perform(tasks[0])
        raise error("a worker was lost")

    def tasks_for(folder):
        performed = []
        config = config_for("words", path, folder)
        prepare(config, executor=lambda tasks, n: performed.extend(tasks) or perform_all(tasks, n))
        return len(performed)

    with pytest.raises(error, match="a worker was lost"):
        prepare(config_for("words", path, tmp_path / "failed"), executor=failing)
    assert tasks_for(tmp_path / "failed") == tasks_for(tmp_path / "whole") - 1


@pytest.mark.usefixtures("small_parts")
def test_an_executor_that_leaves_no_file_is_an_error(tmp_path):
    config = config_for("words", text_for("words", tmp_path), tmp_path / "cache")
    with pytest.raises(RuntimeError, match=r"(\d+) of \1 tasks left no file, the first is "):
        prepare(config, executor=lambda tasks, n_workers: tasks)


@pytest.mark.usefixtures("small_parts")
def test_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    path = text_for("words", tmp_path)
    config = config_for("words", path, tmp_path / "cache")

    def stop(line):
        if line.startswith("writing valid"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config, stop)
    done = []
    monkeypatch.setattr(
        preparing, "perform_all", lambda tasks, n: done.extend(tasks) or perform_all(tasks, n)
    )
    prepare(config)
    assert done
    assert all(x.target.parent.name in ("valid", "test") for x in done)


@pytest.mark.usefixtures("small_parts")
def test_a_part_that_changed_on_the_disk_is_found_and_made_again(tmp_path):
    path = text_for("words", tmp_path)
    config = config_for("words", path, tmp_path / "cache")
    damaged = []

    def damage(tasks, n_workers):
        yield from perform_all(tasks, n_workers)
        if tasks and tasks[0].do is encode_part and not damaged:
            part = tasks[1].target.with_suffix("")
            part.write_bytes(bytes(part.stat().st_size))
            damaged.append(part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "perform_all", damage)
        with pytest.raises(RuntimeError, match=r"000001\.bin does not match its checksum.*again"):
            prepare(config)
    whole = prepare(config_for("words", path, tmp_path / "other"))
    assert files_of(prepare(config).folder) == files_of(whole.folder)


def test_an_error_in_another_process_is_the_same_error(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "PART_BYTES", 10)
    (tmp_path / "latin.txt").write_bytes(b"abc def ghi\n" * 9 + b"abc\xe9\n")
    config = DataConfig(
        path=str(tmp_path / "latin.txt"), vocab="words", cache_dir=str(tmp_path / "c"), workers=2
    )
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: byte 111 is 0xe9"):
        prepare(config)
    assert list((tmp_path / "c").glob("*-*")) == []


def test_a_process_that_dies_is_reported_and_what_is_done_is_kept(tmp_path, monkeypatch):
    path = text_for("words", tmp_path)
    monkeypatch.setattr(preparing, "PART_BYTES", 500)
    config = config_for("words", path, tmp_path / "cache", workers=2)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(RuntimeError, match=r"ended with code .*fewer --data\.workers"):
            prepare(config)
    assert len(list((tmp_path / "cache").glob(".building-*"))) == 1
    prepare(config_for("words", path, tmp_path / "cache")).verify()


def test_two_who_prepare_the_same_do_it_once(tmp_path):
    path = text_for("words", tmp_path)
    config = config_for("words", path, tmp_path / "cache")
    inside, may_go_on = threading.Event(), threading.Event()
    said = []

    def first(line):
        inside.set()
        may_go_on.wait(60)

    def second(line):
        said.append(line)
        may_go_on.set()

    results = []
    thread = threading.Thread(target=lambda: results.append(prepare(config, first).folder))
    thread.start()
    assert inside.wait(60)
    results.append(prepare(config, second).folder)
    thread.join()
    assert said == ["another process is preparing this corpus; waiting for it"]
    assert results[0] == results[1]
    assert (tmp_path / "cache").exists()
    assert not (results[0] / "lock").exists()


def test_a_corpus_of_an_earlier_version_is_still_found(tmp_path):
    # The settings as they were before there were others, which change nothing here.
    path = text_for("chars", tmp_path)
    config = config_for("chars", path, tmp_path)
    assert preparing._settings(config) == {
        "name": "",
        "path": str(path),
        "valid_path": None,
        "test_path": None,
        "split_by": "fraction",
        "valid_fraction": 0.05,
        "test_fraction": 0.05,
        "vocab": "chars",
        "vocab_size": None,
    }
    others = [{"json_field": "x"}, {"vocab_from": "all"}]
    keys = {
        json.dumps(preparing._settings(config_for("chars", path, tmp_path, **x))) for x in others
    }
    assert len(keys) == 2


@pytest.mark.parametrize("words", ["alpha beta gamma delta", "альфа бета гамма дельта"])
def test_byte_pair_units_are_learned_from_all_over_a_long_text(tmp_path, monkeypatch, words):
    a, b, c, d = words.split()
    monkeypatch.setattr(preparing, "PART_BYTES", 1000)
    monkeypatch.setattr(preparing, "LEARNED_BYTES", 3000)
    (tmp_path / "a.txt").write_text(f"{a} {b}\n" * 500, encoding="utf-8")
    (tmp_path / "b.txt").write_text(f"{c} {d}\n" * 500, encoding="utf-8")
    spans = [Span(tmp_path / x, 0, (tmp_path / x).stat().st_size) for x in ("a.txt", "b.txt")]
    parts = list(preparing._parts(DataConfig(vocab="bpe"), spans))
    assert max(sum(map(len, part)) for part in parts) < 1100
    chosen = preparing._learned(parts)
    assert {span.path.name for span in chosen} == {"a.txt", "b.txt"}
    assert 2000 < sum(map(len, chosen)) < 4000
    vocab = prepare(config_for("bpe", tmp_path, tmp_path)).vocab
    assert {a, c} <= {vocab.decode([token]) for token in range(len(vocab))}


def test_many_files_may_share_a_part_and_one_may_fill_several(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "PART_BYTES", 100)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"line {number}\n" * (50 if number == 7 else 2))
    share = {"valid_fraction": 0, "test_fraction": 0}
    config = config_for("words", folder, tmp_path / "cache", **share)
    found = prepare(config)
    text = "".join(path.read_text() for path in sorted(folder.iterdir()))
    assert found.vocab.decode(found.split("train")) == text
    assert len(found.manifest["splits"]["train"]["text_files"]) == 30
    assert all(found.n_tokens(name) == len(np.atleast_1d(found.split(name)))
               for name in SPLITS if found.n_tokens(name))  # fmt: skip
    assert list((tmp_path / "cache").iterdir()) == [found.folder]
