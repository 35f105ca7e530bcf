"""How a text is cut and where its memory is kept changes nothing that the model says."""

import pytest
import torch

from transformer_xl.model.decoder import Decoder
from transformer_xl.model.segment import Lengths

EXACT = {"rtol": 0, "atol": 1e-12}


def some_text(B=2, length=11):
    return torch.randint(23, (B, length))


def read(model, text, segment_lens, mems, **lengths):
    """Read a text in segments; return its hidden states and losses and the memory."""
    hidden, nll, start = [], [], 0
    for T in segment_lens:
        segment = text[:, start : start + T + 1]
        start += T
        out = model(segment[:, :-1], mems, segment[:, 1:], **lengths)
        mems = out.mems
        hidden.append(out.hidden)
        nll.append(out.nll)
    return torch.cat(hidden, 1), torch.cat(nll, 1), mems


def cut(length, T):
    return [T] * (length // T) + ([length % T] if length % T else [])


def assert_same(one, other):
    one, other = one.state_dict(), other.state_dict()
    for name in one.keys() - {"forgotten"}:
        torch.testing.assert_close(one[name], other[name], **EXACT)


@torch.no_grad()
def test_segments_are_invisible(any_model):
    model, text, start, lengths = any_model, some_text(), None, {}
    if model.remembers_positions:
        start, lengths = model.start_memory(2, mem_len=6), {"mem_len": 100}
    hidden, nll, mems = read(model, text, [10], start, **lengths)
    for sizes in ([1] * 10, [4, 4, 2], [5, 5], [1, 9]):
        found = read(model, text, sizes, start, **lengths)
        torch.testing.assert_close(found[0], hidden, **EXACT)
        torch.testing.assert_close(found[1], nll, **EXACT)
        torch.testing.assert_close(found[2].state_dict(), mems.state_dict(), **EXACT)
    assert start is None or len(mems) == 10 + len(start)


@torch.no_grad()
def test_memory_beyond_the_attention_length_is_unused(model):
    text, start = some_text(), model.start_memory(2, mem_len=9)
    # With a key offset, a key has a part of the position before it.
    needed = 3 + model.config.key_offset

    def hidden(mem_len, T):
        found, *_ = read(model, text, cut(10, T), start.last(mem_len), mem_len=mem_len, attn_len=4)
        return found

    for T in (1, 3):
        torch.testing.assert_close(hidden(needed, T), hidden(100, T), **EXACT)
    assert (hidden(2, 3) - hidden(3, 3)).abs().max() > 1e-3


@torch.no_grad()
def test_positions_are_relative(model):
    if model.config.input_recurrence:
        pytest.skip("the recurrence of the inputs has no limit")
    # Two layers that see two tokens back know four, and six with a key offset; what is before them
    # may be anything.
    body = some_text(length=9)
    n = 3 if model.config.key_offset else 5
    texts = [torch.cat([some_text(length=before), body], 1) for before in (0, 5, 11)]
    first, *others = (model(text, attn_len=3).hidden[:, -n:] for text in texts)
    for other in others:
        torch.testing.assert_close(other, first, **EXACT)
    one, other = (model(text).hidden[:, -n:] for text in texts[1:])
    assert (one - other).abs().max() > 1e-3 or model.config.attn_len


@torch.no_grad()
def test_kept_keys_and_values_give_the_numbers_of_the_hidden_states(attending):
    # The lengths may change from one call to the next.
    others = {"clamp_len": 1}, {"attn_len": 2}, {"mem_len": 20}, {"clamp_len": 4}
    model = attending
    for each in ([{}] * 8, [{"mem_len": 0}] * 3, [{}, *others, {}]):
        mems = model.start_memory(3)
        kept = model.keep(mems)
        for step, (T, lengths) in enumerate(zip([3, 1, 5, 2, 9, 1, 1, 4], each, strict=False)):
            segment = some_text(3, T)
            expected, out = model(segment, mems, **lengths), model(segment, kept, **lengths)
            torch.testing.assert_close(out.hidden, expected.hidden, **EXACT)
            torch.testing.assert_close(out.log_probs, expected.log_probs, **EXACT)
            mems, kept = expected.mems, out.mems
            assert len(kept) == len(mems)
            if step % 3 == 2:
                mems, kept = mems.reset([step % 3]), kept.reset([step % 3])
            if step % 4 == 3:
                mems, kept = mems.select([2, 0, 0]), kept.select([2, 0, 0])
        assert_same(kept, model.keep(mems))


@torch.no_grad()
def test_a_decoder_gives_the_numbers_of_a_memory(attending):
    model = attending
    lengths = Lengths.of(model.config).windowed(model.config)
    for prompt in (0, 4, 11):
        mems = model.keep(model.start_memory(2))
        if prompt:
            _, mems = model.read(some_text(2, prompt), mems)
        decoder = Decoder.of(model, lengths, mems)
        for token in some_text(2, 17).T:
            hidden, mems = model.read(token[:, None].contiguous(), mems, **lengths.arguments)
            torch.testing.assert_close(decoder(token), hidden[:, 0], **EXACT)
        assert_same(decoder.memory(), mems)


@torch.no_grad()
def test_a_memory_can_be_continued_as_often_as_one_likes(positioned):
    model = positioned
    begun = model(some_text(2, 5)).mems
    for mems in (begun, model.keep(begun)):
        # A memory of keys and values has room behind it after its first segment.
        mems = model(some_text(2, 2), mems).mems
        one, other = some_text(2, 3), some_text(2, 1)
        before = [model(segment, mems) for segment in (one, other)]
        further = model(other, before[0].mems).hidden
        after = [model(segment, mems) for segment in (one, other)]
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(new.hidden, old.hidden, **EXACT)
        torch.testing.assert_close(model(other, before[0].mems).hidden, further, **EXACT)
        torch.testing.assert_close(model(other, after[0].mems).hidden, further, **EXACT)


@torch.no_grad()
def test_a_stream_that_was_reset_is_like_one_that_begins(positioned):
    model = positioned
    old, text = some_text(3, 6), some_text(3, 5)
    states = model.start_memory(3).last(0), model(old).mems
    for nothing, mems in (states, [model.keep(x) for x in states]):
        expected = {True: model(text, nothing), False: model(text, mems)}
        out = model(text, mems.reset([0, 2]))
        again = model(text, out.mems).hidden
        further = {is_reset: model(text, x.mems).hidden for is_reset, x in expected.items()}
        for row, is_reset in enumerate([True, False, True]):
            torch.testing.assert_close(out.hidden[row], expected[is_reset].hidden[row], **EXACT)
            torch.testing.assert_close(again[row], further[is_reset][row], **EXACT)
