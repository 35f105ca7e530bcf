"""Transforms: a text becomes more ordinary, and every byte comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.apps.compress import Settings, compress, decompress
from transformer_xl.apps.compress.header import unpack
from transformer_xl.apps.compress.transforms import applied, undone

BOM = b"\xef\xbb\xbf"
CASES = {
    "carriage returns": (b"a\r\nb\r\n", b"a\nb\n"),
    "a lone carriage return": (b"a\rb\r\n", b"a\rb\n"),
    "a line feed among carriage returns": (b"a\r\nb\r\nc\nd", b"a\nb\nc\r\nd"),
    "a byte order mark": (BOM + b"a\n", b"a\n"),
    "tabs": (b"if x:\n\treturn\n\t\tno\n", b"if x:\n    return\n        no\n"),
    "a tab behind code": (b"\tx = 1\t# one\n", b"    x = 1\t# one\n"),
    "a line with spaces": (b"\ta\n\t\tb\n        c\n", b"    a\n        b\n\t\tc\n"),
    "a table": (b"\ta\tb\n\tc\td\n", b"    a\tb\n    c\td\n"),
    "capitals": (b"THE CAT SAT, he", b"the cat sat, HE"),
    "few letters": (b"0010 MOVE 1 TO N.", b"0010 move 1 to n."),
    "all": (BOM + b"WHILE NOT:\r\n\tRETURN\r\n", b"while not:\n    return\n"),
}
UNCHANGED = {
    "line feeds alone": b"a\nb\n",
    "as many of both line ends": b"a\r\nb\n",
    "two carriage returns": b"a\r\r\nb\r\n",
    "as many tabs as spaces": b"\ta\n    b\n",
    "spaces behind tabs": b"\t  a\n",
    "small letters": b"The cat\n",
    "hardly any letters": b"A 123, 456, 789\n",
}


@pytest.mark.parametrize(("text", "changed"), CASES.values(), ids=CASES)
def test_what_is_changed(text, changed):
    result, used = applied(text)
    assert (result, undone(result, used)) == (changed, text)


@pytest.mark.parametrize("text", UNCHANGED.values(), ids=UNCHANGED)
def test_what_cannot_be_undone_is_left(text):
    assert applied(text) == (text, 0)


@given(st.lists(st.sampled_from([BOM, b"\r\n", b"\n", b"\r", b"\t", b"    ", b" ", b"A", b"b"])))
def test_every_byte_comes_back(parts):
    text = b"".join(parts)
    assert undone(*applied(text)) == text


@pytest.mark.parametrize(("case", "n_applied"), [("carriage returns", 1), ("tabs", 0), ("all", 3)])
def test_an_archive_says_what_was_applied(model, vocab, case, n_applied):
    # To a model of bytes, four spaces are more symbols than a tab.
    data = CASES[case][0] * 40
    content = compress(data, model, vocab, Settings(streams=2)).content
    coding = unpack(content)[0].model_coding
    assert coding is not None
    assert coding.transforms.bit_count() == n_applied
    assert decompress(content, model, vocab) == data
