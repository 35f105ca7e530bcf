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
from transformer_xl.data.corpus import VERIFIED, write_corpus
from transformer_xl.data.imported import ImportedVocab
from transformer_xl.data.locking import LOCK
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.preparing import prepare
from transformer_xl.data.text import SPLITS, Span, parts_of

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


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_threads_change_no_byte(tmp_path, kind):
    path = text_for(kind, tmp_path, 15)
    one, three = (
        files_of(prepare(config_for(kind, path, tmp_path / str(n), workers=n)).folder)
        for n in (1, 3)
    )
    assert one == three


@settings(max_examples=30, deadline=None)
@given(text=TEXTS, size=st.integers(1, 40))
def test_a_text_cut_where_lines_begin_gives_the_units_of_the_whole(tmp_path_factory, text, size):
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    path.write_bytes(data := text.encode())
    vocab = train_vocab("bpe", [text, LINES], 300)
    parts = [data[x.start : x.stop] for p in parts_of([Span(path, 0, len(data))], size) for x in p]
    assert b"".join(parts) == data
    assert [x for part in parts for x in vocab.encode(part.decode())] == vocab.encode(text)


KILLED = """
import os, signal, sys
from transformer_xl.config import DataConfig
from transformer_xl.data import preparing, text

text.BLOCK_BYTES = 400
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
from pathlib import Path
Path.replace = count_down(Path.replace)
preparing.shutil.rmtree = count_down(preparing.shutil.rmtree)
settings = dict(path=sys.argv[1], cache_dir=sys.argv[2], vocab=sys.argv[4], vocab_size=300)
if sys.argv[4] != "bpe":
    del settings["vocab_size"]
preparing.prepare(DataConfig(**settings))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path, kind):
    path = text_for(kind, tmp_path, 30)
    whole = files_of(prepare(config_for(kind, path, tmp_path / "whole")).folder)
    cache, codes = tmp_path / "killed", []
    # Each time it gets a little further than the last.
    while 0 not in codes:
        words = [str(path), str(cache), "4", kind]
        ended = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
        codes.append(ended.returncode)
        assert len(codes) < 40
        (folder,) = (x for x in cache.iterdir() if x.name not in ("downloads", ".locks"))
        if not folder.name.startswith(".building-"):
            # It gets its name when it is whole.
            assert whole.items() <= files_of(folder).items()
        else:
            assert codes[-1] != 0
    assert codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1)
    assert len(codes) > 3
    assert files_of(folder) == whole


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
    chosen = preparing._learned(spans)
    assert {span.path.name for span in chosen} == {"a.txt", "b.txt"}
    assert 2000 < sum(map(len, chosen)) < 4000
    vocab = prepare(config_for("bpe", tmp_path, tmp_path)).vocab
    assert {a, c} <= {vocab.decode([token]) for token in range(len(vocab))}


@pytest.mark.parametrize("kind", ["bytes", "words", "bpe"])
def test_tokens_from_elsewhere_are_the_same_corpus(tmp_path, kind):
    corpus = prepare(config_for(kind, text_for(kind, tmp_path), tmp_path / "cache"))
    pieces = {name: np.array_split(corpus.split(name), 3) for name in SPLITS}
    written = write_corpus(tmp_path / "new", corpus.vocab, pieces, "a text")
    assert written.checksums == corpus.checksums
    # Words do not tell how many blanks were between them.
    if kind != "words":
        assert [written.n_bytes(x) for x in SPLITS] == [corpus.n_bytes(x) for x in SPLITS]
    for splits in ({"train": []}, {"dev": []}):
        with pytest.raises(ValueError, match=r"must be of train, valid, test, and .* a new folder"):
            write_corpus(tmp_path / "new", corpus.vocab, splits, "a text")
    with pytest.raises(ValueError, match=r"valid: a piece .* must be tokens"):
        write_corpus(tmp_path / "bad", corpus.vocab, {"valid": [np.array([len(corpus.vocab)])]}, "")


def test_the_authors_bytes_keep_their_numbers_and_their_name():
    vocab = ImportedVocab.of_bytes([98, 97])
    assert (vocab.encode("a\nb"), vocab.decode([0, 1])) == ([1, 0], "ba")
    # What was prepared before is still found, and fits converted checkpoints.
    assert vocab.hash == "74cba45c2c644afd6261aca47207253e9cb1137a67c6811bfc227513e68922bc"
