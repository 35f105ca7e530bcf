import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.data.segments import Segments

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(0, 40))


def read(segments, n):
    pairs = [segments.next_segment() for _ in range(n)]
    return [torch.cat(part, dim=1).numpy() for part in zip(*pairs, strict=True)]


def corpus_for(batch_size, segment_len, extra):
    return np.arange(max(batch_size * segment_len, 2) + extra, dtype=np.uint16)


@settings(max_examples=50)
@given(SHAPES)
def test_streams_are_unbroken_and_the_corpus_is_a_ring(shape):
    batch_size, segment_len, _ = shape
    corpus = corpus_for(*shape)
    tokens, targets = read(Segments(corpus, batch_size, segment_len), 12)
    for b in range(batch_size):
        start = b * (len(corpus) // batch_size)
        expected = (start + np.arange(12 * segment_len + 1)) % len(corpus)
        assert np.array_equal(tokens[b], expected[:-1])
        assert np.array_equal(targets[b], expected[1:])


@settings(max_examples=50)
@given(SHAPES, st.integers(0, 20))
def test_resuming_changes_nothing(shape, n_read):
    corpus = corpus_for(*shape)
    first = Segments(corpus, *shape[:2])
    read(first, n_read + 1)
    second = Segments(corpus, *shape[:2])
    second.load_state_dict(first.state_dict())
    for ours, theirs in zip(read(first, 3), read(second, 3), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_corpus_shorter_than_one_segment_per_stream_is_refused():
    message = "99 tokens, .* batch_size=10 x segment_len=10 needs 100; lower .*stages"
    with pytest.raises(ValueError, match=message):
        Segments(np.arange(99, dtype=np.uint16), 10, 10)
    Segments(np.arange(100, dtype=np.uint16), 10, 10).next_segment()


@pytest.mark.parametrize("other", [(2, 5, 100), (4, 6, 100), (4, 5, 101)])
def test_a_position_in_other_streams_is_refused(other):
    state = Segments(np.arange(100, dtype=np.uint16), 4, 5).state_dict()
    batch_size, segment_len, length = other
    with pytest.raises(ValueError, match="the saved position belongs to"):
        Segments(np.arange(length, dtype=np.uint16), batch_size, segment_len).load_state_dict(state)


@settings(max_examples=50)
@given(SHAPES, st.integers(0, 9))
def test_the_tokens_before_a_segment_come_with_it_once_more(shape, ext_len):
    batch_size, segment_len, _ = shape
    corpus = corpus_for(*shape)
    plain = Segments(corpus, batch_size, segment_len)
    longer = Segments(corpus, batch_size, segment_len, ext_len)
    for n in range(5):
        (tokens, targets), (more, same) = plain.next_segment(), longer.next_segment()
        assert torch.equal(same, targets)
        assert torch.equal(more[:, ext_len:], tokens)
        for b in range(batch_size):
            start = b * (len(corpus) // batch_size) + n * segment_len
            # The corpus is a ring: its end stands before its beginning.
            before = (start + np.arange(-ext_len, 0)) % len(corpus)
            assert np.array_equal(more[b, :ext_len], before)
    assert more.is_contiguous()
    assert same.is_contiguous()


@settings(max_examples=50)
@given(SHAPES, st.integers(0, 9), st.integers(0, 99))
def test_a_rolled_stream_reads_its_own_part_once_in_each_pass(shape, ext_len, seed):
    batch_size, segment_len, _ = shape
    corpus = corpus_for(*shape)
    stream_len = len(corpus) // batch_size
    n_segments = -(-3 * stream_len // segment_len)
    segments = Segments(corpus, batch_size, segment_len, ext_len, roll_seed=seed)
    pairs = [segments.next_segment() for _ in range(n_segments)]
    tokens = torch.cat([each[:, ext_len:] for each, _ in pairs], dim=1).numpy()
    targets = torch.cat([each for _, each in pairs], dim=1).numpy()
    assert np.array_equal(tokens[:, 1:], targets[:, :-1])
    for n, (each, _) in enumerate(pairs):
        before = tokens[:, max(n * segment_len - ext_len, 0) : n * segment_len]
        context = each[:, :ext_len].numpy()
        assert np.array_equal(context[:, ext_len - before.shape[1] :], before)
    for b in range(batch_size):
        part = np.arange(b * stream_len, (b + 1) * stream_len)
        for n in range(3):
            read_in_pass = tokens[b, n * stream_len : (n + 1) * stream_len]
            assert np.array_equal(np.sort(read_in_pass), part)
            # Turned, and not in another order.
            assert np.array_equal(np.roll(part, -int(read_in_pass[0] - part[0])), read_in_pass)


def test_each_pass_and_each_stream_are_rolled_by_another_length():
    corpus = np.arange(4000, dtype=np.uint16)
    tokens, _ = read(Segments(corpus, 2, 100, roll_seed=1), 60)
    begins = tokens[:, ::2000] - np.array([[0], [2000]])
    assert len(np.unique(begins)) == begins.size
    again, _ = read(Segments(corpus, 2, 100, roll_seed=1), 60)
    assert np.array_equal(tokens, again)
    other, _ = read(Segments(corpus, 2, 100, roll_seed=2), 60)
    assert not np.array_equal(tokens, other)


@settings(max_examples=50)
@given(SHAPES, st.integers(0, 20))
def test_rolled_streams_resume_and_divide_over_processes(shape, n_read):
    batch_size, segment_len, _ = shape
    corpus = corpus_for(*shape)
    whole = Segments(corpus, batch_size, segment_len, roll_seed=3)
    read(whole, n_read + 1)
    parts = [
        Segments(corpus, batch_size, segment_len, rows=range(b, b + 1), roll_seed=3)
        for b in range(batch_size)
    ]
    for part in parts:
        part.load_state_dict(whole.state_dict())
    expected, _ = read(whole, 3)
    assert np.array_equal(np.concatenate([read(part, 3)[0] for part in parts]), expected)
