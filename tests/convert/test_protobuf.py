"""Messages of Protocol Buffers: what was written is read, and what was cut is refused."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.interop.convert.tf_files import fields, varint

NUMBERS = st.integers(1, 2**29 - 1)
INTEGERS = st.integers(0, 2**64 - 1)
VALUES = INTEGERS | st.binary(max_size=300) | st.floats(allow_nan=False)


def written(n):
    return bytes([n]) if n < 0x80 else bytes([n & 0x7F | 0x80]) + written(n >> 7)


def field(number, value):
    if isinstance(value, int):
        return written(number << 3) + written(value)
    if isinstance(value, float):
        return written(number << 3 | 1) + struct.pack("<d", value)
    return written(number << 3 | 2) + written(len(value)) + value


@settings(max_examples=50)
@given(st.lists(st.tuples(NUMBERS, VALUES), max_size=5))
def test_what_was_written_is_read(listed):
    found = list(fields(b"".join(field(*x) for x in listed)))
    expected = [(n, struct.pack("<d", x) if isinstance(x, float) else x) for n, x in listed]
    assert found == expected


@settings(max_examples=50)
@given(NUMBERS, VALUES, st.data())
def test_a_message_that_was_cut_is_refused(number, value, data):
    message = field(number, value)
    cut = message[: data.draw(st.integers(1, len(message) - 1))]
    with pytest.raises((ValueError, IndexError)):
        list(fields(cut))


@settings(max_examples=50)
@given(INTEGERS, st.binary(max_size=3), st.binary(max_size=3))
def test_an_integer_is_read_where_it_stands(n, before, behind):
    data = before + written(n) + behind
    assert varint(data, len(before)) == (n, len(data) - len(behind))


def test_what_is_no_message_is_refused():
    with pytest.raises(ValueError, match="no message"):
        list(fields(b"\x0b\x00"))
    with pytest.raises(ValueError, match="a number in the message has no end"):
        list(fields(b"\x08" + b"\xff" * 11))
