"""A text that arrives in any way has the scores of the text."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import product, takewhile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.cli import flow
from transformer_xl.cli.flow import Sums, pieces_of, scores
from transformer_xl.data.imported import Rules
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.inference.evaluate import score
from transformer_xl.interop.convert.cutting import imported_vocab
from transformer_xl.model import TransformerXL
from transformer_xl.model.reading import Reader
from transformer_xl.model.segment import Lengths

TEXT = (
    "def f(self, name):\n    return name or 'naïve — 漢字 🙂'\n\n\n    # 12 words (of it):\n"
    "class Node:\n\tx = 3 \n   \nend and no line end"
)
PLAIN = "the cat saw a dog\nit ran\n\nto sea and saw a cat\nthe dog"
WORDS = imported_vocab(
    [*dict.fromkeys(PLAIN.split()), "<eos>"],
    Rules(join="words", line_ends="after", eos="<eos>"),
    lower_case=False,
)
VOCABS = {
    "bytes": (train_vocab("bytes", []), TEXT),
    "chars": (train_vocab("chars", [TEXT]), TEXT),
    "few chars": (train_vocab("chars", [PLAIN], held_out=[TEXT]), TEXT),
    "bpe": (train_vocab("bpe", [TEXT * 20], 330), TEXT),
    "words": (train_vocab("words", [TEXT]), TEXT),
    "imported": (WORDS, PLAIN),
}


def arrivals(data, seed):
    """The data in blocks, some of them empty: nothing more had come."""
    draw, blocks = random.Random(seed), []
    while data:
        size = draw.choice((0, 1, 1, 2, 3, 7, 30, 100))
        blocks.append(data[:size])
        data = data[size:]
    return blocks


def pieces(vocab, by, blocks):
    return [piece for piece in pieces_of(vocab, blocks, by) if piece is not None]


def scored(reader, vocab, by, blocks):
    """Return the tokens and their log-probabilities."""
    found = scores(reader, pieces_of(vocab, blocks, by))
    return [pair for piece, x in found for pair in zip(piece.ids, x, strict=True)]


def tokens(found):
    return [token for piece in found for token in piece.ids]


@pytest.mark.parametrize("kind", VOCABS)
def test_the_tokens_are_those_of_the_whole_text(kind):
    vocab, text = VOCABS[kind]
    for seed in range(12):
        found = pieces(vocab, "token", arrivals(text.encode(), seed))
        assert tokens(found) == vocab.encode_lines(text), seed


@pytest.mark.parametrize("kind", VOCABS)
def test_lines_are_cut_by_themselves(kind):
    vocab, text = VOCABS[kind]
    lines = text.splitlines(keepends=True)
    expected = [(line, vocab.encode_lines(line), n) for n, line in enumerate(lines, 1)]
    for seed in range(4):
        found = pieces(vocab, "line", arrivals(text.encode(), seed))
        assert [(piece.text, piece.ids, piece.line) for piece in found] == expected, seed


@given(st.binary(max_size=60), st.integers(0, 9))
def test_bytes_that_are_no_text_are_read_as_they_are(data, seed):
    for by in ("token", "line"):
        found = pieces(VOCABS["bytes"][0], by, arrivals(data, seed))
        assert bytes(tokens(found)) == data


@settings(deadline=None)
@given(st.text("aé漢\n ", max_size=80), st.integers(0, 3))
def test_what_has_no_end_is_cut_where_it_is_cut_in_any_arrival(text, seed):
    vocab = train_vocab("chars", ["aé漢\n "])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "LONGEST", 8)
        for by in ("token", "line"):
            whole = pieces(vocab, by, [text.encode()])
            found = pieces(vocab, by, arrivals(text.encode(), seed))
            assert tokens(found) == vocab.encode(text)
            if by == "line":
                assert found == whole
                assert all(len(piece.text) <= 8 for piece in found)


def test_nothing_waits_that_is_certain():
    vocab = VOCABS["bpe"][0]
    for by, text, certain in (
        ("line", "one\ntwo", "one\n"),
        ("token", "one\ntwo", "one\n"),
        ("token", "one two", "one"),
        ("token", "if x:\n  ", "if"),
    ):
        known = takewhile(lambda x: x is not None, pieces_of(vocab, [text.encode(), b""], by))
        assert "".join(piece.text for piece in known) == certain


def test_what_has_no_symbol_is_left_out_and_told_with_its_line():
    vocab = train_vocab("chars", ["a\nb"])
    data = "a\nbb\nbΩab\n".encode() + b"a\xffa\nb"
    for by, seed in product(("token", "line"), range(3)):
        found = pieces(vocab, by, arrivals(data, seed))
        assert vocab.decode(tokens(found)) == "a\nbb\nbab\naa\nb"
        assert sum((piece.unknown for piece in found), Counter()) == {"Ω": 1, "\udcff": 1}
        first = next(piece for piece in found if piece.unknown)
        assert first.line + vocab.first_unknown_line(first.text) - 1 == 3


@pytest.fixture
def of_bytes(tiny_config):
    return TransformerXL(replace(tiny_config, vocab_size=256, init_std=0.3)).double().eval()


def test_the_scores_are_those_of_the_whole_text(of_bytes):
    vocab, data = VOCABS["bytes"][0], TEXT.encode()
    expected = list(score(of_bytes, list(data), segment_len=16))
    for seed in range(6):
        reader = Reader(of_bytes, Lengths.of(of_bytes.config, segment_len=16))
        found = scored(reader, vocab, "token", arrivals(data, seed))
        assert bytes(token for token, _ in found) == data
        assert [x for _, x in found][1:] == pytest.approx(expected[1:], abs=1e-11), seed


def test_segments_are_filled_where_more_has_come(of_bytes, monkeypatch):
    sizes = []
    read = Reader.read
    monkeypatch.setattr(Reader, "read", lambda self, ids: sizes.append(len(ids)) or read(self, ids))

    def sizes_read(reader, blocks):
        sizes.clear()
        scored(reader, VOCABS["bytes"][0], "token", blocks)
        return list(sizes)

    blocks = [b"0123456789", b"abcdefghij", b"", b"x", b"", b"yz"]
    # The first token is only read with the next one.
    assert sizes_read(Reader(of_bytes, Lengths.of(of_bytes.config, segment_len=8)), blocks) == [
        9,
        8,
        3,
        1,
        2,
    ]
    # Where it matters how much is read at once, segments are whole.
    config = replace(of_bytes.config, enhanced_recurrence=True)
    bound = TransformerXL(config).eval()
    assert sizes_read(Reader(bound, Lengths.of(bound.config, segment_len=8)), blocks) == [9, 8, 6]


@pytest.mark.parametrize("kind", VOCABS)
def test_the_sums_of_lines_are_those_of_their_tokens(tiny_config, kind):
    vocab, text = VOCABS[kind]
    torch.manual_seed(0)
    config = replace(tiny_config, vocab_size=len(vocab), init_std=0.3)
    model = TransformerXL(config).double().eval()
    reader = Reader(model, Lengths.of(model.config, segment_len=8))
    found = [*scores(reader, pieces_of(vocab, arrivals(text.encode(), 2), "line"))]
    cut = [(line, vocab.encode_lines(line)) for line in text.splitlines(keepends=True)]
    log_probs = list(score(model, [t for _, ids in cut for t in ids], segment_len=8))
    assert [piece.text for piece, _ in found] == [line for line, _ in cut]
    total = Sums()
    for number, (line, (written, ids)) in enumerate(zip(found, cut, strict=True)):
        sums = Sums.of(vocab, *line)
        total += sums
        of_line, log_probs = log_probs[: len(ids)], log_probs[len(ids) :]
        known = [x for x in of_line if x is not None]
        nll, figures = -sum(known), sums.figures()
        assert (figures["tokens"], figures["nll_sum"]) == (len(known), pytest.approx(nll))
        assert figures["nll"] == pytest.approx(nll / len(known))
        assert figures["bits_per_token"] == pytest.approx(nll / math.log(2) / len(known))
        if vocab.token_bytes is None:
            assert figures["bits_per_byte"] is None
        else:
            # The first token of all, a letter that every vocabulary here has, is not predicted.
            n_bytes = len(written.encode()) - (vocab.token_bytes[ids[0]] if number == 0 else 0)
            assert figures["bits_per_byte"] == pytest.approx(nll / math.log(2) / n_bytes)
    assert total.nll_sum == pytest.approx(sum(Sums.of(vocab, *line).nll_sum for line in found))


def test_a_line_without_tokens_comes_in_its_place(of_bytes):
    vocab = imported_vocab(["a"], Rules(join="words"), lower_case=False)
    reader = Reader(of_bytes, Lengths.of(of_bytes.config))
    found = [*scores(reader, pieces_of(vocab, [b"\na\n\n\n"], "line"))]
    assert [(piece.line, len(x)) for piece, x in found] == [(1, 0), (2, 1), (3, 0), (4, 0)]
    assert Sums.of(vocab, *found[0]).figures()["bits_per_token"] is None
