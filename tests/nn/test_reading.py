"""How a text is cut changes nothing."""

from dataclasses import replace

import pytest
import torch

from transformer_xl.inference.evaluate import score
from transformer_xl.model import TransformerXL
from transformer_xl.model.reading import Reader, ReaderState, read_all
from transformer_xl.model.reading import read as read_segments
from transformer_xl.model.segment import Lengths

TEXT = torch.randint(31, (47,), generator=torch.Generator().manual_seed(3)).tolist()
CUTS = [[47], [1] * 47, [1, 6, 1, 13, 2, 24], [20, 27]]


def made(config, **options):
    torch.manual_seed(0)
    return TransformerXL(replace(config, init_std=0.3, **options)).double().eval()


def reader_of(model, state=None, **lengths):
    return Reader(model, Lengths.of(model.config, **lengths), state)


def read(reader, sizes):
    found, rest = [], TEXT
    for size in sizes:
        found += reader.read(rest[:size])
        rest = rest[size:]
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"attn_type": 1, "n_positions": 12}, {"start_memory": "zeros"}, {"mem_len": 0}],
    ids=str,
)
def test_a_text_in_pieces_is_the_text_at_once(tiny_config, options):
    model = made(tiny_config, **options)
    expected = list(score(model, TEXT, segment_len=7))
    whole = reader_of(model, segment_len=7)
    whole.read(TEXT, scored=False)
    assert whole.state.last_token == TEXT[-1]
    after = whole.read([4, 5])
    for sizes in CUTS:
        reader = reader_of(model, segment_len=7)
        found = read(reader, sizes)
        assert found[0] is expected[0] is None
        assert found[1:] == pytest.approx(expected[1:], abs=1e-11), sizes
        # And so is what comes next.
        assert reader.state.last_token == TEXT[-1]
        assert reader.read([4, 5]) == pytest.approx(after, abs=1e-11), sizes


def test_with_a_window_segments_do_not_matter(tiny_config):
    model = made(tiny_config)
    found = [
        read(reader_of(model, segment_len=T, attn_len=6), [47])[1:] for T in (1, 2, 5, 46, 200)
    ]
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-11)
    assert read(reader_of(model, segment_len=46), [47])[1:] != pytest.approx(found[0], abs=1e-3)


@pytest.mark.parametrize("attn_len", [None, 6, 3])
def test_the_memory_has_a_bound_and_a_state_goes_on(tiny_config, attn_len):
    model = made(tiny_config)
    reader = reader_of(model, segment_len=7, attn_len=attn_len)
    most = {None: 5 + 6, 6: 5, 3: 5}[attn_len]
    assert reader.most_positions == most
    lengths = []
    for n, token in enumerate(TEXT):
        assert reader.remaining == (8 if n == 0 else 7 - (n - 1) % 7)
        reader.read([token])
        lengths.append(len(reader.state.mems))
    assert max(lengths) == most
    again = reader_of(model, segment_len=7, attn_len=attn_len, state=reader.state)
    assert again.read([1, 2, 3]) == reader.read([1, 2, 3])
    # In segments of another length a new one begins.
    assert (
        reader_of(model, segment_len=2, state=ReaderState(*reader.state[:2], 5)).state.offset == 0
    )


@pytest.mark.parametrize(
    ("options", "bound"),
    [({}, False), ({"attn_type": 2}, True), ({"enhanced_recurrence": True}, True)],
    ids=str,
)
def test_a_model_says_whether_it_depends_on_how_much_is_read_at_once(tiny_config, options, bound):
    reader = reader_of(made(tiny_config, **options), segment_len=7)
    assert reader.model.depends_on_segments is bound
    one_by_one = read(reader_of(reader.model, segment_len=7), [1] * 47)[1:]
    differs = one_by_one != pytest.approx(read(reader, [47])[1:], abs=1e-6)
    assert differs is bound
    # In whole segments it does not.
    assert read(reader_of(reader.model, segment_len=7), [8, 14, 7, 18])[1:] == pytest.approx(
        list(score(reader.model, TEXT, segment_len=7))[1:], abs=1e-11
    )


def test_an_interrupt_leaves_a_state_that_can_be_gone_on_from(tiny_config, monkeypatch):
    model = made(tiny_config)
    reader, expected = reader_of(model, segment_len=7), list(score(model, TEXT, segment_len=7))
    n_calls = 0
    forward = TransformerXL.forward

    def interrupted(*given, **settings):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            raise KeyboardInterrupt
        return forward(*given, **settings)

    monkeypatch.setattr(TransformerXL, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reader.read(TEXT)
    # The first token and two segments.
    assert reader.state.last_token == TEXT[14]
    assert reader.read(TEXT[15:]) == pytest.approx(expected[15:], abs=1e-11)


@pytest.fixture
def rows():
    return torch.tensor(TEXT[:40]).view(2, 20)


@torch.no_grad()
@pytest.mark.parametrize("ext_len", [0, 3])
def test_what_is_read_again_is_predicted_once(tiny_config, rows, ext_len):
    model = made(tiny_config, ext_len=ext_len)
    lengths = Lengths.of(model.config, segment_len=6)
    pieces = [*read_segments(model, rows[:, :-1], lengths, targets=rows[:, 1:])]
    assert [piece.start for piece in pieces] == [0, 6, 12, 18]
    assert [piece.nll.shape[1] for piece in pieces] == [6, 6, 6, 1]
    mems, expected = None, []
    for start in range(0, 19, 6):
        stop, first = min(start + 6, 19), start - min(ext_len, start)
        targets = rows[:, start + 1 : stop + 1]
        out = model(rows[:, first:stop], mems, targets, context=start - first)
        mems = out.mems
        expected.append(out.nll)
    assert torch.equal(torch.cat([piece.nll for piece in pieces], 1), torch.cat(expected, 1))
    for mine, theirs in zip(pieces[-1].mems.states, mems.states, strict=True):
        assert torch.equal(mine, theirs)


@torch.no_grad()
def test_rows_of_a_text_are_its_columns(tiny_config, rows):
    model = made(tiny_config)
    lengths = Lengths.of(model.config, segment_len=7)
    one, other = (
        [piece.nll for piece in read_segments(model, given[0], lengths, targets=given[1])]
        for given in ((rows[:, :-1], rows[:, 1:]), ([x[:-1] for x in rows], [x[1:] for x in rows]))
    )
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 4, 7, 8, 15])
def test_the_last_tokens_may_be_all_that_is_predicted(tiny_config, rows, n):
    model = made(tiny_config)
    lengths = Lengths.of(model.config, segment_len=7)
    whole = [x.nll for x in read_segments(model, rows[:, :-1], lengths, targets=rows[:, 1:])]
    last = [x.nll for x in read_segments(model, rows[:, :-1], lengths, targets=rows[:, -n:])]
    found = torch.cat([x for x in last if x is not None], 1)
    torch.testing.assert_close(found, torch.cat(whole, 1)[:, -n:], rtol=0, atol=1e-13)
    # Of the others nothing is computed.
    assert [x is None for x in last] == [stop <= 19 - n for stop in (7, 14, 19)]


@torch.no_grad()
def test_nothing_is_read_of_a_text_without_tokens(tiny_config):
    model = made(tiny_config)
    mems = model.start_memory(1)
    nothing = torch.empty(1, 0, dtype=torch.int64)
    assert [*read_segments(model, nothing, Lengths.of(model.config), mems)] == []
    assert read_all(model, nothing, Lengths.of(model.config), mems) is mems
