import copy
import subprocess
import sys
import threading
import time

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.data.segments import Segments
from transformer_xl.data.tokens import _CONNECTIONS, StoredTokens

BLOCK = 4096
FILE = "train.bin"


def write(web, n, dtype=np.uint16):
    tokens = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, n).astype(dtype)
    (web.folder / FILE).write_bytes(tokens.tobytes())
    return tokens


def read_in_store(web, n, dtype=np.uint16, block_bytes=BLOCK):
    return StoredTokens(f"{web.url}/{FILE}", np.dtype(dtype), n, block_bytes=block_bytes)


def over(segments, tokens):
    """The same streams of the same tokens, which lie elsewhere."""
    moved = copy.copy(segments)
    moved._tokens = tokens
    return moved


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_it_is_indexed_as_an_array_is(data):
    n, per_block = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 20))
    dtype = np.dtype(data.draw(st.sampled_from(["uint16", "uint32"])))
    tokens = np.arange(n, dtype=dtype) * 7
    fsspec.filesystem("memory").pipe("/tokens.bin", tokens.tobytes())
    stored = StoredTokens("memory://tokens.bin", dtype, n, block_bytes=per_block * dtype.itemsize)
    assert (len(stored), stored.dtype, stored.shape) == (n, dtype, (n,))
    assert np.array_equal(np.asarray(stored), tokens)
    for _ in range(3):
        shape = data.draw(st.sampled_from([(), (1,), (7,), (2, 5), (0,)]))
        size = int(np.prod(shape))
        flat = data.draw(st.lists(st.integers(-n, n - 1), min_size=size, max_size=size))
        places = np.array(flat, dtype=np.int64).reshape(shape)
        found = stored[places]
        assert found.dtype == dtype
        assert np.array_equal(found, tokens[places])
        start, stop, step = data.draw(st.slices(n).map(lambda s: (s.start, s.stop, s.step)))
        if n and (step is None or step > 0):
            assert np.array_equal(stored[start:stop:step], tokens[start:stop:step])


@pytest.mark.parametrize("places", [[10], [-11], [[0, 10]], 0.5, [True] * 10])
def test_what_is_no_place_is_refused(web, places):
    write(web, 10)
    with pytest.raises(IndexError, match=r"positions .*(of 10 tokens|be integers)"):
        read_in_store(web, 10)[np.array(places)]


@pytest.mark.parametrize(("dtype", "ext_len"), [(np.uint16, 5), (np.uint32, 0)])
def test_streams_read_in_a_store_what_they_read_on_a_disk(web, dtype, ext_len):
    n = 20_011
    here = Segments(write(web, n, dtype), 5, 700, ext_len)
    there = over(here, read_in_store(web, n, dtype))
    # Once around, and over the end.
    for _ in range(-(-n // 700) + 3):
        for ours, theirs in zip(there.next_segment(), here.next_segment(), strict=True):
            assert np.array_equal(ours, theirs)


def test_a_rank_reads_its_streams_and_one_block_ahead_of_each(web):
    batch_size, segment_len, n_segments, rows = 8, 256, 30, range(2, 4)
    n = batch_size * 50_000
    here = Segments(write(web, n), batch_size, segment_len, rows=rows)
    web.sent.clear()
    tokens = read_in_store(web, n)
    there = over(here, tokens)
    for _ in range(n_segments):
        assert np.array_equal(there.next_segment()[1], here.next_segment()[1])
    for task in tokens._blocks.values():
        task.result()
    needed = len(rows) * (n_segments * segment_len + 1) * 2
    # A stream begins and ends anywhere in a block; one more is read ahead.
    most = len(rows) * (-(-(n_segments * segment_len + 1) * 2 // BLOCK) + 1 + 1) * BLOCK
    asked = 1  # Whether there are ranges.
    assert needed <= tokens.bytes_read <= most
    assert web.sent[FILE] <= tokens.bytes_read + asked
    assert most < 2 * n / 8
    # Where they stand, and what follows.
    assert len(tokens._blocks) <= 2 * 2 * len(rows)


@pytest.mark.slow
def test_no_more_connections_are_open_at_once_however_many_streams_ask(web, monkeypatch):
    n, counting, open_now, most = 160 * BLOCK // 2, threading.Lock(), 0, 0
    expected = write(web, n)
    tokens = read_in_store(web, n)
    read = StoredTokens._read

    def slow(self, start, stop):
        nonlocal open_now, most
        with counting:
            open_now += 1
            most = max(most, open_now)
        time.sleep(0.003)
        try:
            return read(self, start, stop)
        finally:
            with counting:
                open_now -= 1

    monkeypatch.setattr(StoredTokens, "_read", slow)
    for first in range(0, BLOCK, BLOCK // 2):
        # Blocks of which none is next to another, and others each time.
        places = np.arange(first, n, 2 * BLOCK)
        assert np.array_equal(tokens[places], expected[places])
        tokens._expect([*range(1, 160, 3)])
    assert 1 < most <= _CONNECTIONS


def test_all_ranks_together_read_the_corpus_once(web):
    batch_size, segment_len, per_stream = 4, 500, 10_000
    n = batch_size * per_stream
    all_tokens = write(web, n)
    web.sent.clear()
    ranks = [
        over(Segments(all_tokens, batch_size, segment_len, rows=range(r, r + 1)), tokens)
        for r in range(batch_size)
        for tokens in [read_in_store(web, n, block_bytes=2000)]
    ]
    # But for the last segment, whose targets end in the next stream.
    for _ in range(per_stream // segment_len - 1):
        for rank in ranks:
            rank.next_segment()
    for rank in ranks:
        for task in rank._tokens._blocks.values():
            task.result()
    ahead, asked = 2000, 1
    assert web.sent[FILE] <= n * 2 + batch_size * (ahead + asked)


def test_a_store_that_fails_for_a_while_stops_nothing(web):
    tokens = write(web, 10_000)
    stored = read_in_store(web, 10_000)
    places = np.arange(0, 10_000, 500)
    web.statuses = [500, 503]
    assert np.array_equal(stored[places], tokens[places])


def test_a_store_that_fails_is_named_and_asked_again_by_the_next_call(web):
    tokens = write(web, 10_000)
    stored = read_in_store(web, 10_000)
    web.statuses = [503] * 40
    with pytest.raises(OSError, match=r"cannot read http.*train\.bin.*503"):
        stored[5]
    web.statuses.clear()
    assert stored[5] == tokens[5]


HANGS = """
import sys, threading
import numpy as np
from transformer_xl.data import tokens

def read_range(fs, path, start, stop, url):
    return b"12" if start == 0 else threading.Event().wait()

tokens.read_range = read_range
stored = tokens.StoredTokens("file://" + sys.argv[1], np.dtype("uint16"), 2, block_bytes=2)
sys.exit(f"read {stored[0]}")
"""


def test_a_program_ends_while_a_store_keeps_it_waiting_for_what_it_read_ahead(tmp_path):
    (tmp_path / FILE).write_bytes(b"1234")
    command = [sys.executable, "-c", HANGS, str(tmp_path / FILE)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.stderr == f"read {int.from_bytes(b'12', 'little')}\n"


def test_another_size_and_a_server_without_ranges_are_refused(web):
    write(web, 1000)
    with pytest.raises(OSError, match=r"train\.bin has 2000 bytes instead of 2002"):
        read_in_store(web, 1001)
    web.has_ranges = False
    with pytest.raises(OSError, match=r"gives no byte ranges, .* copy the corpus to a disk"):
        read_in_store(web, 1000)
