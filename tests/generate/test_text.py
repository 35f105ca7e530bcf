import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.inference.generate import TextWriter

BYTES = train_vocab("bytes", [])
TEXT = "naïve — 漢字 🙂 end"


def test_pieces_are_whole_characters_as_soon_as_they_are_known():
    read = []

    def tokens():
        for token in TEXT.encode():
            read.append(token)
            yield token

    written = ""
    for piece in TextWriter(BYTES).pieces(tokens()):
        written += piece
        assert TEXT.startswith(written)
        assert written.encode() == bytes(read)
    assert written == TEXT


def test_an_unfinished_character_ends_as_a_replacement():
    assert "".join(TextWriter(BYTES).pieces(iter("é".encode()[:1]))) == "\N{REPLACEMENT CHARACTER}"


def test_an_empty_stop_string_is_refused_before_anything_is_drawn():
    with pytest.raises(ValueError, match="a stop string is empty"):
        TextWriter(BYTES, ["x", ""])


def test_a_stop_string_may_begin_and_end_inside_of_tokens():
    vocab = train_vocab("bpe", ["hello wonderful world. " * 50], 300)
    ids = vocab.encode("hello wonderful world. hello")
    assert len(ids) < 12
    assert "".join(TextWriter(vocab, ["ful wor"]).pieces(iter(ids))) == "hello wonder"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_written_is_what_stands_before_the_first_stop(text, stop):
    expected = text
    for end in range(len(text) + 1):
        if places := [text[:end].index(s) for s in stop if s in text[:end]]:
            expected = text[: min(places)]
            break
    written, read = "", 0

    def tokens():
        nonlocal read
        for read, token in enumerate(text.encode(), 1):
            # What is not written yet could be the beginning of a stop string.
            held = text[len(written) : read - 1]
            assert not held or any(s.startswith(held) for s in stop)
            yield token

    for piece in TextWriter(BYTES, stop).pieces(tokens()):
        written += piece
        assert expected.startswith(written)
    assert written == expected


def test_the_prompt_decides_what_stands_before_the_first_word():
    vocab = train_vocab("words", ["one two three\n"])
    two_three = vocab.encode("two three")
    for prompt, expected in (("", "two three"), ("one", " two three"), ("one\n", "two three")):
        pieces = TextWriter(vocab, prompt=vocab.encode(prompt)).pieces(iter(two_three))
        assert "".join(pieces) == expected


def test_one_stop_string_is_not_its_letters():
    assert "".join(TextWriter(BYTES, " th").pieces(iter(b"one two three"))) == "one two"
