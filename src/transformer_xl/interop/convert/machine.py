"""A pickle machine that executes nothing.

A pickle is a program for a machine with a stack and a memo. This one knows all instructions of the
protocols 0 to 5, but a name in the file is only looked up in the table of
:mod:`~transformer_xl.interop.convert.constructors`: nothing is imported, and no class is made. It
never calls itself, and checks each length before it takes anything.
"""

import mmap
import struct
from collections.abc import Callable

import numpy as np
from torch import Tensor

from transformer_xl.interop.convert.arrays import set_array_state
from transformer_xl.interop.convert.constructors import (
    call,
    check_keys,
    elements_of,
    merged,
    resolve,
    set_items,
)
from transformer_xl.interop.convert.inert import Instance, UnreadableFile, check_depth
from transformer_xl.interop.convert.literals import parse_int, unquote
from transformer_xl.interop.convert.memory_limit import ENTRY, SIZES, allowed_memory

_MAX_INT_BYTES = 512
_MAX_LINE = 4096
# A Python 2 text of this size is the content of an array.
_LONG_TEXT = 1 << 20


class Machine:
    """The machine while it reads one pickle."""

    def __init__(
        self,
        data: bytes | mmap.mmap,
        persistent_load: Callable[[object], object] | None,
        start: int,
        end: int,
    ) -> None:
        self.position = start
        self._data = data
        self._end = end
        self._persistent_load = persistent_load
        self._stack: list = []
        # The stacks below the marks.
        self._below: list[list] = []
        self._memo: dict[int, object] = {}
        self._names: dict[tuple[str, str], object] = {}
        # Copies cannot amount to more than a file of this size has a use for.
        self._budget = 2 * (end - start) + 1000
        self._start = start
        self._memory = 0
        self._allowed = 0

    def run(self) -> object:
        """Read up to the end of the pickle and return its value."""
        data, instructions, sizes = self._data, _INSTRUCTIONS, SIZES
        end = self._end
        while self.position < end:
            code = data[self.position]
            self.position += 1
            self._memory += sizes[code]
            if self._memory > self._allowed:
                self._allowed = allowed_memory(self._memory, self.position - self._start)
            if code == _STOP:
                (value,) = self._stack
                check_depth(value)
                return value
            instruction = instructions.get(code)
            if instruction is None:
                raise UnreadableFile(
                    f"the pickle has an unknown instruction ({code}) at byte {self.position - 1:,}"
                )
            instruction(self)
        raise UnreadableFile("the pickle is truncated: the file was not copied completely")

    def _spend(self, n: int) -> None:
        self._budget -= n
        if self._budget < 0:
            raise UnreadableFile("refused: a small part of the file is copied over and over")

    # What instructions are followed by.

    def _take(self, n: int) -> bytes:
        start = self.position
        if n > self._end - start:
            raise UnreadableFile(
                f"the pickle is truncated: {n:,} bytes are announced at byte {start:,} and "
                f"{self._end - start:,} are left"
            )
        self.position = start + n
        return self._data[start : start + n]

    def _number(self, n_bytes: int) -> int:
        return int.from_bytes(self._take(n_bytes), "little")

    def _line(self, limit: int = _MAX_LINE) -> bytes:
        stop = self._data.find(b"\n", self.position, min(self._end, self.position + limit))
        if stop < 0:
            raise UnreadableFile(f"the pickle has no end of a line at byte {self.position:,}")
        return self._take(stop + 1 - self.position)[:-1]

    def _pop_mark(self) -> list:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def _pop_entries(self, width: int) -> list:
        items = self._pop_mark()
        self._memory += ENTRY * (len(items) // width)
        if self._memory > self._allowed:
            self._allowed = allowed_memory(self._memory, self.position - self._start)
        return items

    # Plain values.

    def _proto(self) -> None:
        if self._number(1) > 5:
            raise UnreadableFile("the pickle has a protocol above 5")

    def _frame(self) -> None:
        if self._number(8) > self._end - self.position:
            raise UnreadableFile("the pickle is truncated: a frame does not fit in")

    def _int_line(self) -> None:
        line = self._line()
        self._stack.append(line == b"01" if line in (b"00", b"01") else parse_int(line))

    def _long_line(self) -> None:
        self._stack.append(parse_int(self._line().removesuffix(b"L")))

    def _float_line(self) -> None:
        self._stack.append(float(self._line(limit=400)))

    def _binint(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def _long(self, width: int) -> None:
        if (n := self._number(width)) > _MAX_INT_BYTES:
            raise UnreadableFile(f"the pickle has a number of {n:,} bytes")
        self._stack.append(int.from_bytes(self._take(n), "little", signed=True))

    def _binfloat(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _string_line(self) -> None:
        self._stack.append(unquote(self._line(limit=self._end)))

    def _string(self, width: int) -> None:
        text = self._take(self._number(width))
        self._stack.append(text if len(text) >= _LONG_TEXT else text.decode("latin-1"))

    def _unicode_line(self) -> None:
        self._stack.append(self._line(limit=self._end).decode("raw-unicode-escape"))

    def _unicode(self, width: int) -> None:
        self._stack.append(self._take(self._number(width)).decode("utf-8", "surrogatepass"))

    def _bytes(self, width: int) -> None:
        self._stack.append(self._take(self._number(width)))

    def _bytearray(self) -> None:
        self._stack.append(bytearray(self._take(self._number(8))))

    # The two most frequent instructions of a vocabulary, without calls.

    def _short_unicode(self) -> None:
        start = self.position + 1
        self.position = stop = start + self._data[start - 1]
        if stop > self._end:
            raise UnreadableFile("the pickle is truncated: the file was not copied completely")
        self._stack.append(str(self._data[start:stop], "utf-8", "surrogatepass"))

    def _memoize(self) -> None:
        memo = self._memo
        memo[len(memo)] = self._stack[-1]

    # Containers.

    def _tuple(self, n: int) -> None:
        items = self._stack[-n:]
        if len(items) < n:
            raise UnreadableFile("the pickle takes more from the stack than there is")
        self._stack[-n:] = [tuple(items)]

    def _mark_tuple(self) -> None:
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _mark_list(self) -> None:
        items = self._pop_mark()
        self._stack.append(items)

    def _mark_dict(self) -> None:
        items = self._pop_entries(2)
        made: dict = {}
        set_items(made, items)
        self._stack.append(made)

    def _mark_frozenset(self) -> None:
        items = self._pop_entries(1)
        check_keys(items)
        self._stack.append(frozenset(items))

    def _append(self) -> None:
        value = self._stack.pop()
        elements_of(self._stack[-1]).append(value)

    def _appends(self) -> None:
        items = self._pop_mark()
        elements_of(self._stack[-1]).extend(items)

    def _setitem(self) -> None:
        key, value = self._stack[-2:]
        del self._stack[-2:]
        set_items(self._stack[-1], [key, value])

    def _setitems(self) -> None:
        items = self._pop_entries(2)
        set_items(self._stack[-1], items)

    def _additems(self) -> None:
        items = self._pop_entries(1)
        target = self._stack[-1]
        if isinstance(target, Instance):
            target.elements.extend(items)
            return
        if type(target) is not set:
            raise UnreadableFile("the pickle adds members to something that is no set")
        check_keys(items)
        target.update(items)

    # The stack and the memo.

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _drop_mark(self) -> None:
        self._pop_mark()

    def _get(self, width: int) -> None:
        self._stack.append(self._memo[self._number(width)])

    def _binget(self) -> None:
        self._stack.append(self._memo[self._data[self.position]])
        self.position += 1

    def _put(self, width: int) -> None:
        self._memo[self._number(width)] = self._stack[-1]

    def _get_line(self) -> None:
        self._stack.append(self._memo[parse_int(self._line(limit=30))])

    def _put_line(self) -> None:
        self._memo[parse_int(self._line(limit=30))] = self._stack[-1]

    # Names and objects.

    def _name(self, module: object, name: object) -> object:
        if type(module) is not str or type(name) is not str:
            raise UnreadableFile("the pickle has a name that is no text")
        if (module, name) not in self._names:
            self._names[module, name] = resolve(module, name)
        return self._names[module, name]

    def _global_line(self) -> None:
        module, name = self._line().decode(), self._line().decode()
        self._stack.append(self._name(module, name))

    def _stack_global(self) -> None:
        name = self._stack.pop()
        self._stack.append(self._name(self._stack.pop(), name))

    def _inst(self) -> None:
        function = self._name(self._line().decode(), self._line().decode())
        args = tuple(self._pop_mark())
        self._stack.append(call(function, args, self._spend))

    def _obj(self) -> None:
        function, *args = self._pop_mark()
        self._stack.append(call(function, tuple(args), self._spend))

    def _reduce(self) -> None:
        args = self._stack.pop()
        self._stack[-1] = call(self._stack[-1], args, self._spend)

    def _newobj_ex(self) -> None:
        if self._stack.pop():
            raise UnreadableFile("the pickle makes an object with named arguments")
        self._reduce()

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Instance):
            target.state = merged(state, self._spend)
        elif isinstance(target, np.ndarray):
            set_array_state(target, state, self._spend)
        elif type(target) not in (dict, set) and not isinstance(target, Tensor):
            # Attributes of dictionaries and tensors are of no use.
            raise UnreadableFile("refused: the file changes something that is no object of its own")

    def _persistent(self) -> None:
        if self._persistent_load is None:
            self._unsupported()
        else:
            self._stack[-1] = self._persistent_load(self._stack[-1])

    def _unsupported(self) -> None:
        raise UnreadableFile("the pickle refers to something outside of itself")


def _wide(method: Callable[[Machine, int], None], width: int) -> Callable[[Machine], None]:
    return lambda machine: method(machine, width)


_STOP = ord(".")
_M = Machine
_INSTRUCTIONS: dict[int, Callable[[Machine], None]] = {
    code[0]: instruction
    for code, instruction in {
        b"\x80": _M._proto,
        b"\x95": _M._frame,
        b"I": _M._int_line,
        b"L": _M._long_line,
        b"F": _M._float_line,
        b"J": _M._binint,
        b"K": lambda machine: machine._stack.append(machine._number(1)),
        b"M": lambda machine: machine._stack.append(machine._number(2)),
        b"\x8a": _wide(_M._long, 1),
        b"\x8b": _wide(_M._long, 4),
        b"G": _M._binfloat,
        b"N": lambda machine: machine._stack.append(None),
        b"\x88": lambda machine: machine._stack.append(True),
        b"\x89": lambda machine: machine._stack.append(False),
        b"S": _M._string_line,
        b"T": _wide(_M._string, 4),
        b"U": _wide(_M._string, 1),
        b"V": _M._unicode_line,
        b"X": _wide(_M._unicode, 4),
        b"\x8c": _M._short_unicode,
        b"\x8d": _wide(_M._unicode, 8),
        b"C": _wide(_M._bytes, 1),
        b"B": _wide(_M._bytes, 4),
        b"\x8e": _wide(_M._bytes, 8),
        b"\x96": _M._bytearray,
        b")": lambda machine: machine._stack.append(()),
        b"\x85": _wide(_M._tuple, 1),
        b"\x86": _wide(_M._tuple, 2),
        b"\x87": _wide(_M._tuple, 3),
        b"t": _M._mark_tuple,
        b"]": lambda machine: machine._stack.append([]),
        b"l": _M._mark_list,
        b"}": lambda machine: machine._stack.append({}),
        b"d": _M._mark_dict,
        b"\x8f": lambda machine: machine._stack.append(set()),
        b"\x91": _M._mark_frozenset,
        b"a": _M._append,
        b"e": _M._appends,
        b"s": _M._setitem,
        b"u": _M._setitems,
        b"\x90": _M._additems,
        # The stack and the memo.
        b"(": _M._mark,
        b"0": _M._pop,
        b"1": _M._drop_mark,
        b"2": lambda machine: machine._stack.append(machine._stack[-1]),
        b"h": _M._binget,
        b"j": _wide(_M._get, 4),
        b"g": _M._get_line,
        b"q": _wide(_M._put, 1),
        b"r": _wide(_M._put, 4),
        b"p": _M._put_line,
        b"\x94": _M._memoize,
        b"c": _M._global_line,
        b"\x93": _M._stack_global,
        b"i": _M._inst,
        b"o": _M._obj,
        b"R": _M._reduce,
        b"\x81": _M._reduce,
        b"\x92": _M._newobj_ex,
        b"b": _M._build,
        b"Q": _M._persistent,
        **dict.fromkeys((b"P", b"\x82", b"\x83", b"\x84", b"\x97", b"\x98"), _M._unsupported),
    }.items()
}
