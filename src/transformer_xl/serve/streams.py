"""Streams in one batch that come and go, each at the cost of its own memory."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.nn import KeptMemory, LanguageModel, Memory
from transformer_xl.nn.lengths import Lengths
from transformer_xl.nn.memory import join
from transformer_xl.nn.reading import read


@runtime_checkable
class Streams(Protocol):
    """Memories of streams that read a token each, side by side."""

    def __len__(self) -> int:
        """Return the number of streams."""
        ...

    def add(self, memory: Memory | KeptMemory) -> int:
        """Let a stream come, with a copy of a memory that sees all; return its place."""
        ...

    def copy(self, place: int) -> Memory | KeptMemory:
        """Return the memory of a stream, apart from the others."""
        ...

    def drop(self, place: int) -> None:
        """Let a stream go."""
        ...

    def settle(self) -> dict[int, int]:
        """Give up room that few streams use; return the new places of those that moved."""
        ...

    def read(self, tokens: dict[int, int]) -> Float[Tensor, "B D"]:
        """Read a token of each stream, by its place; return the hidden states in that order."""
        ...


def make_streams(model: LanguageModel, mem_len: int, most: int) -> Streams:
    """Return a batch, yet empty, for streams of a model."""
    empty = model.keep(model.start_memory(1, 0))
    kind = KeptStreams if isinstance(empty, KeptMemory) else HiddenStreams
    return kind(model, mem_len, most)


class KeptStreams:
    """Streams with kept keys and values, in one block of memory with a row for each.

    A row that a stream has left is computed on, without a past, until another takes it: to move
    the rows together for each that leaves would copy the memories of all. Only when most rows are
    free the block becomes smaller, and larger when none is. All rows end at the same place; a
    shorter past begins later, and what lies before it is hidden. Room behind the newest place is
    for a number of tokens, after which all is moved to the front.

    Args:
        model: The model, in evaluation mode.
        mem_len: Remembered positions.
        most: Streams that there can be.
    """

    def __init__(self, model: LanguageModel, mem_len: int, most: int) -> None:
        self._model, self._mem_len, self._most = model, mem_len, most
        self._step = Lengths.of(model.config, segment_len=1, mem_len=mem_len, ext_len=0)
        self._room = mem_len + max(16, mem_len // 4)
        self._stop = mem_len
        self._tensors: list[list[Tensor]] = []
        # How much each row remembers; None: it is free.
        self._lengths: list[int | None] = []
        # Functions of the weights alone, so shared by all memories that there will be.
        self._positions: dict[tuple[int | None, bool], list[Tensor]] = {}

    def __len__(self) -> int:
        return sum(length is not None for length in self._lengths)

    def add(self, memory: Memory | KeptMemory) -> int:
        """Let a stream come, with a memory that is copied; return its place."""
        assert isinstance(memory, KeptMemory)
        memory = memory.last(self._mem_len)
        if None not in self._lengths:
            self._resize(min(max(1, 2 * len(self._lengths)), self._most), memory)
        place, M = self._lengths.index(None), len(memory)
        for rows, given in zip(self._tensors, (memory.keys, memory.values), strict=True):
            for row, x in zip(rows, given, strict=True):
                row[:, place, self._stop - M : self._stop] = x[:, 0, memory.start : memory.stop]
        self._lengths[place], self._positions = M, memory.positions
        return place

    def copy(self, place: int) -> KeptMemory:
        """Return the memory of a stream, apart from the others."""
        M = self._lengths[place]
        assert M is not None
        keys, values = (
            [x[:, place : place + 1, self._stop - M : self._stop].clone() for x in rows]
            for rows in self._tensors
        )
        memory = KeptMemory(keys, values, 0, M)
        memory.positions = self._positions
        return memory

    def drop(self, place: int) -> None:
        """Let a stream go."""
        self._lengths[place] = None

    def settle(self) -> dict[int, int]:
        """Give up rows where most are free; return the new places of those that moved."""
        n, size = len(self), len(self._lengths)
        # Not at one half already: a stream that comes and goes would move all each time.
        few = n * 2 <= size if size <= 4 else n * 8 < size * 3
        if not few or not n:
            return {}
        places = [place for place, length in enumerate(self._lengths) if length is not None]
        new = max(n, size // 2)
        index = torch.tensor(places + [places[0]] * (new - n), device=self._model.device)
        self._tensors = [[x[:, index] for x in rows] for rows in self._tensors]
        self._lengths = [self._lengths[place] for place in places] + [None] * (new - n)
        return {old: place for place, old in enumerate(places)}

    def read(self, tokens: dict[int, int]) -> Float[Tensor, "B D"]:
        """Read a token of each stream, by its place; return the hidden states in that order."""
        if self._stop == self._room:
            self._move_to_front()
        longest = max(length for length in self._lengths if length is not None)
        # A free row sees the token that it reads, and nothing else.
        hidden = [longest - (length or 0) for length in self._lengths]
        device = self._model.device
        keys, values = self._tensors
        memory = KeptMemory(
            keys,
            values,
            self._stop - longest,
            self._stop,
            torch.tensor(hidden, device=device) if any(hidden) else None,
        )
        memory.positions = self._positions
        given = torch.tensor([[tokens.get(place, 0)] for place in range(len(self._lengths))])
        ((_, states, _, after),) = read(self._model, given, self._step, memory)
        self._stop += 1
        if self._model.config.reset_at is not None and after.forgotten is not None:
            # Where a document has begun, less is seen than before.
            seen = (len(after) - after.forgotten).tolist()
        else:
            seen = [min((length or 0) + 1, self._mem_len) for length in self._lengths]
        self._lengths = [
            None if length is None else n for length, n in zip(self._lengths, seen, strict=True)
        ]
        return states[:, -1][list(tokens)]

    def _move_to_front(self) -> None:
        M = self._mem_len
        for x in (x for rows in self._tensors for x in rows):
            x[:, :, :M] = x[:, :, self._stop - M : self._stop].clone()
        self._stop = M

    def _resize(self, size: int, like: KeptMemory) -> None:
        made: list[list[Tensor]] = []
        given = self._tensors or [[], []]
        for rows, memories in zip(given, (like.keys, like.values), strict=True):
            made.append([])
            for n, x in enumerate(memories):
                # Zeros: what is hidden is multiplied by zero, which not every number survives.
                larger = x.new_zeros(x.shape[0], size, self._room, x.shape[3])
                if rows:
                    larger[:, : len(self._lengths)] = rows[n]
                made[-1].append(larger)
        self._tensors = made
        self._lengths += [None] * (size - len(self._lengths))


class HiddenStreams:
    """Streams of a model that keeps no keys: absolute positions, or an LSTM."""

    def __init__(self, model: LanguageModel, mem_len: int, most: int) -> None:
        self._model = model
        self._step = Lengths.of(model.config, segment_len=1, mem_len=mem_len, ext_len=0)
        self._mems: Memory | None = None
        self._places: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, memory: Memory | KeptMemory) -> int:
        """Let a stream come, with a memory that is copied; return its place."""
        joined = memory if self._mems is None else join([self._mems, memory])
        assert isinstance(joined, Memory)
        self._mems, self._next = joined, self._next + 1
        self._places.append(self._next)
        return self._next

    def copy(self, place: int) -> Memory:
        """Return the memory of a stream, apart from the others."""
        assert self._mems is not None
        memory = self._mems.select([self._places.index(place)])
        if memory.forgotten is None:
            return memory
        return Memory(memory.last(len(memory) - int(memory.forgotten[0])).states)

    def drop(self, place: int) -> None:
        """Let a stream go."""
        assert self._mems is not None
        stays = [row for row, each in enumerate(self._places) if each != place]
        self._mems = self._mems.select(stays) if stays else None
        self._places.remove(place)

    def settle(self) -> dict[int, int]:
        """Do nothing: no row is ever free."""
        return {}

    def read(self, tokens: dict[int, int]) -> Float[Tensor, "B D"]:
        """Read a token of each stream, by its place; return the hidden states in that order."""
        given = torch.tensor([[tokens[place]] for place in self._places])
        ((_, states, _, mems),) = read(self._model, given, self._step, self._mems)
        assert isinstance(mems, Memory)
        self._mems = mems
        rows = {place: row for row, place in enumerate(self._places)}
        return states[:, -1][[rows[place] for place in tokens]]
