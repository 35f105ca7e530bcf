import copy

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.data import store
from transformer_xl.data.segments import Segments
from transformer_xl.data.store import StoredTokens

BLOCK = 4096
FILE = "train.bin"


def write(web, n, dtype=np.uint16):
    tokens = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, n).astype(dtype)
    (web.folder / FILE).write_bytes(tokens.tobytes())
    return tokens


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(store, "BLOCK_BYTES", BLOCK)


def read_in_store(web, n, dtype=np.uint16):
    return StoredTokens(f"{web.url}/{FILE}", np.dtype(dtype), n)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "BLOCK_BYTES", per_block * dtype.itemsize)
        stored = StoredTokens("memory://tokens.bin", dtype, n)
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


@pytest.mark.parametrize(("dtype", "ext_len"), [(np.uint16, 5), (np.uint32, 0)])
def test_streams_read_in_a_store_what_they_read_on_a_disk(web, dtype, ext_len):
    n = 20_011
    here = Segments(write(web, n, dtype), 5, 700, ext_len)
    there = over(here, read_in_store(web, n, dtype))
    # Once around, and over the end.
    for _ in range(-(-n // 700) + 3):
        for ours, theirs in zip(there.next_segment(), here.next_segment(), strict=True):
            assert np.array_equal(ours, theirs)


def test_a_rank_reads_its_streams_and_no_others(web):
    batch_size, segment_len, n_segments, rows = 8, 256, 30, range(2, 4)
    n = batch_size * 50_000
    here = Segments(write(web, n), batch_size, segment_len, rows=rows)
    tokens = read_in_store(web, n)
    there = over(here, tokens)
    web.sent.clear()
    for _ in range(n_segments):
        assert np.array_equal(there.next_segment()[1], here.next_segment()[1])
        assert len(tokens._blocks) <= 2 * len(rows)
    n_bytes = (n_segments * segment_len + 1) * 2
    # A stream begins and ends anywhere in a block.
    most = len(rows) * (-(-n_bytes // BLOCK) + 1) * BLOCK
    assert len(rows) * n_bytes <= web.sent[FILE] <= most < 2 * n / 8


def test_a_store_that_fails_is_asked_again_and_named(web):
    tokens = write(web, 10_000)
    stored = read_in_store(web, 10_000)
    web.statuses = [500, 503]
    assert np.array_equal(stored[np.arange(0, 10_000, 500)], tokens[::500])
    stored = read_in_store(web, 10_000)
    web.statuses = [503] * 40
    with pytest.raises(OSError, match=r"cannot read http.*train\.bin.*503"):
        stored[5]
    web.statuses.clear()
    assert stored[5] == tokens[5]


def test_another_size_and_a_server_without_ranges_are_refused(web):
    write(web, 1000)
    with pytest.raises(OSError, match=r"train\.bin has 2000 bytes instead of 2002"):
        read_in_store(web, 1001)
    web.has_ranges = False
    with pytest.raises(OSError, match="support range requests"):
        read_in_store(web, 1000)[5]
