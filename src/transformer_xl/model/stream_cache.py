"""The buffers of a decoder: keys and values, of which the newest replace the oldest."""

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.model.arguments import Rows, stream_numbers
from transformer_xl.model.keys_and_values import KeysAndValues
from transformer_xl.model.memory import Memory

_LEAST_ROOM = 62
_Cache = TypeVar("_Cache", bound="StreamCache")


class StreamCache:
    """Keys and values of the last positions of each stream, and slots for the next ones.

    Position n of all streams is at slot (n - origin) % capacity. The softmax does not depend on the
    order of the keys, so nothing is moved while streams go on. A fixed cache has ``mem_len + 1``
    slots, which are used in turns. Any other one is used from front to back: before it is full,
    what is remembered is copied to the front of a new one. So it lies in the order of the text, on
    which the rounding of sums depends; and a copy by :meth:`fork` shares the buffers until one of
    the two has to write where the other one has written.

    With ``n_offset``, keys are as :func:`~transformer_xl.model.variants.key_offset.offset_keys`
    arranges them: the last features of a position are in the slot of the next one.

    Args:
        memory: Keys and values to start with. They are copied.
        mem_len: How many positions a stream remembers.
        n_offset: How many features of a key are those of the position before.
        is_fixed: Whether the cache has its full capacity from the start, so that its addresses stay
            the same.

    Attributes:
        tensors: Keys and values of each layer, (H, B, capacity, K); with ``input_recurrence`` also
            the inputs of the first layer, (1, B, capacity, D). If it moves, there is a new tuple.
        capacity: Number of slots.
        mem_len: As the argument.
        is_fixed: As the argument.
        position: The index of the next position, common to all streams.
        first: For each stream, the index of the first position that it sees, (B,).
    """

    tensors: tuple[list[Tensor], ...]

    def __init__(
        self, memory: KeysAndValues, mem_len: int, *, n_offset: int = 0, is_fixed: bool = False
    ) -> None:
        last = memory.last(mem_len)
        tensors = last.by_name()
        self.mem_len, self.n_offset, self.is_fixed = mem_len, n_offset, is_fixed
        self.first = torch.zeros(last.batch_size, dtype=torch.int64, device=tensors[0][0].device)
        if last.forgotten is not None:
            self.first += last.forgotten
        self.position = len(last)
        self._free: dict[int, bool] | None = None
        self._lay_out(tensors, self.position)

    @property
    def batch_size(self) -> int:
        """Number of streams."""
        return len(self.first)

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self.first.device

    @property
    def next_slot(self) -> int:
        """The slot into which the next token is written: the newest one of its step."""
        return (self.position - self._origin) % self.capacity

    @property
    def keys(self) -> list[Float[Tensor, "H B capacity K"]]:
        """The keys of each layer."""
        return self.tensors[0]

    @property
    def values(self) -> list[Float[Tensor, "H B capacity K"]]:
        """The values of each layer."""
        return self.tensors[1]

    @property
    def inputs(self) -> Float[Tensor, "B capacity D"]:
        """With ``input_recurrence``, the inputs of the first layer."""
        return self.tensors[2][0][0]

    @property
    def n_positions(self) -> int:
        """How many positions the only stream remembers."""
        return self._longest()

    def rewind(self, n: int) -> None:
        """Forget the last ``n`` positions of each stream, at most ``n_positions``."""
        self.position -= n

    def fork(self: _Cache) -> _Cache:
        """Return a cache that goes on by itself; both share the buffers while they can."""
        if self.is_fixed:
            return self.select(range(self.batch_size))
        if self._free is None:
            self._free = {self.position: True}
        other = copy.copy(self)
        other.first = self.first.clone()
        return other

    def make_room(self, M: int = 0) -> None:
        """Copy the positions into new buffers if there is no room, or too much.

        Args:
            M: Length of a stream that is going to be put in. The next position is counted beside.
        """
        # A fixed one has room from the start, and a GPU is not waited for.
        if not (self.is_fixed or self._can_write(M)):
            self._move(M)

    def own(self) -> None:
        """Copy the positions into new buffers if others have those of this cache, too."""
        if self._free is not None:
            self._move(0)

    def _move(self, M: int) -> None:
        longest = self._longest()
        self._lay_out(self._newest(longest), max(M, longest))

    def _can_write(self, M: int) -> bool:
        """Whether the next position can be written, behind ``M`` of a stream that is put in."""
        slot = self.position - self._origin
        # The slot behind it has a part of the key.
        if slot + 2 > self.capacity or slot < M:
            return False
        if self._free is None or M:
            return self._free is None
        # dict.pop is atomic: of two caches, one may write.
        if not self._free.pop(self.position, False):
            return False
        self._free[self.position + 1] = True
        return True

    @torch.no_grad()
    def memory(self, rows: Rows | None = None) -> KeysAndValues:
        """Return a copy of the keys and values of some streams, oldest first. None: all."""
        if rows is not None:
            return self.select(rows).memory()
        M = self._longest()
        cached = self._newest(M)
        forgotten = (self.first - (self.position - M)).clamp(min=0)
        # Each step requires that the model has no adapters.
        mask = forgotten if forgotten.any() else None
        return KeysAndValues(*cached, forgotten=mask, adapters=())

    @torch.no_grad()
    def select(self: _Cache, rows: Rows) -> _Cache:
        """Return a new cache of the streams ``rows``, in that order; repetition is allowed."""
        index, other = self._numbers(rows), copy.copy(self)
        other.tensors = tuple([x.index_select(1, index) for x in layers] for layers in self.tensors)
        other.first, other._free = self.first[index], None
        return other

    @torch.no_grad()
    def take(self: _Cache, rows: Rows) -> _Cache:
        """Reorder the streams in place if that is possible; else return a new cache."""
        if not self.is_fixed or len(index := self._numbers(rows)) != self.batch_size:
            return self.select(rows)
        for layers in self.tensors:
            for x in layers:
                x.copy_(x.index_select(1, index))
        self.first.copy_(self.first[index])
        return self

    def put(self, row: int, memory: Memory) -> None:
        """Replace the stream of a row by a copy of the only one of a memory."""
        memory = memory.last(self.mem_len).seen()
        M = len(memory)
        self.first[row] = self.position
        self.make_room(M)
        self.first[row] = self.position - M
        slots = self._slots(self.position - M, self.position + 1)
        begins = torch.zeros_like(self.first[row : row + 1])
        self._write(self.tensors, memory.by_name(), slots, slice(row, row + 1), begins)

    def reset(self, rows: Rows) -> None:
        """Have some streams begin with the next position."""
        self.own()
        self.first[self._numbers(rows)] = self.position

    def _numbers(self, rows: Rows) -> Int[Tensor, " rows"]:
        return stream_numbers(rows, self.batch_size, self.first.device)

    def _longest(self) -> int:
        """Return the length of the longest stream, or of what is kept of it."""
        first = int(self.first.min()) if len(self.first) else self.position
        return min(self.position - first, self.mem_len)

    def _capacity_for(self, M: int) -> int:
        """Return the capacity to allocate for ``M`` positions and the next ones."""
        if self.is_fixed:
            return self.mem_len + 1
        # As long as it takes to read it four times, or 512 times if it is short, it is not copied.
        return M + 2 + max(M // 4, min(M, 512), _LEAST_ROOM)

    def _slots(self, start: int, stop: int) -> Int[Tensor, " n"]:
        """Return the slots of the positions from ``start`` to ``stop``."""
        position = torch.arange(start, stop, device=self.first.device)
        return (position - self._origin) % self.capacity

    def _newest(self, M: int) -> tuple[list[Tensor], ...]:
        """Return copies of the newest ``M`` positions, each of its own token, oldest first."""
        slots = self._slots(self.position - M, self.position)
        tensors = tuple([x.index_select(2, slots) for x in layers] for layers in self.tensors)
        if self.n_offset:
            after = self._slots(self.position - M + 1, self.position + 1)
            for x, cache in zip(tensors[0], self.keys, strict=True):
                x[..., -self.n_offset :] = cache.index_select(2, after)[..., -self.n_offset :]
        return tensors

    def _lay_out(self, tensors: Sequence[Sequence[Tensor]], M: int) -> None:
        """Copy the newest positions into new buffers with room for ``M`` in front of the next."""
        n, capacity = tensors[0][0].shape[2], self._capacity_for(M)
        slots = torch.arange(M - n, M + 1, device=self.first.device) % capacity
        # Zeros, as masked positions are multiplied by zero and must be finite.
        new = tuple(
            [x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in layers] for layers in tensors
        )
        self._write(new, tensors, slots, slice(None), self.first - (self.position - n))
        # In one assignment, so that an interrupt leaves a consistent cache.
        layout = new, capacity, self.position - M, None
        self.tensors, self.capacity, self._origin, self._free = layout

    def _write(
        self,
        cache: Sequence[Sequence[Tensor]],
        tensors: Sequence[Sequence[Tensor]],
        slots: Int[Tensor, " positions"],
        rows: slice,
        begins: Int[Tensor, " rows"],
    ) -> None:
        """Write the newest positions of some streams, each of its own token.

        Args:
            cache: The buffers of the cache.
            tensors: The positions, oldest first.
            slots: Their slots, and that of the next one.
            rows: Which streams.
            begins: Which of the positions is the first of each stream.
        """
        for layers, of_layers in zip(cache, tensors, strict=True):
            for x, new in zip(layers, of_layers, strict=True):
                x[:, rows, slots[:-1]] = new.to(x.dtype)
        if not self.n_offset or len(slots) == 1:
            return
        place = torch.arange(1, len(slots), device=slots.device)
        is_first = (place == begins[:, None])[None, :, :, None]
        for x, new in zip(cache[0], tensors[0], strict=True):
            last = x[:, rows, :, -self.n_offset :]
            last[:, :, slots[0]] = 0
            last[:, :, slots[1:]] = new[..., -self.n_offset :].to(x.dtype).masked_fill(is_first, 0)
