"""What each layer remembers of the segments before the present one.

:class:`Memory` holds hidden states, as the paper does; :class:`KeptMemory` holds the keys and
values made from them, for weights that do not change. Both are values: no operation changes one
that was handed out before.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.nn.checks import Rows, require_state, stream_numbers, whole


class Memory:
    """The last hidden states that each layer has read, detached from the graph.

    Attributes:
        states: For each layer its inputs, (B, M, D), oldest first.
        forgotten: For each stream, how many of its oldest positions it does not see; None: sees
            all. Streams that were reset have a shorter past than their neighbours.

    Raises:
        ValueError: By its methods, for a stream that there is not (on a GPU, an error of the
            device), a negative length, or a state whose shapes do not fit each other.
    """

    def __init__(
        self,
        states: Sequence[Float[Tensor, "B M D"]],
        forgotten: Int[Tensor, " B"] | None = None,
    ) -> None:
        self.states = tuple(states)
        self.forgotten = forgotten

    def __len__(self) -> int:
        return self.states[0].shape[1]

    @property
    def batch_size(self) -> int:
        """Number of streams."""
        return self.states[0].shape[0]

    def extend(self, states: Sequence[Float[Tensor, "B T D"]], mem_len: int) -> "Memory":
        """Return the memory after another segment: its newest ``mem_len`` positions."""
        T = states[0].shape[1]
        cut = max(len(self) + T - mem_len, 0)
        if cut >= len(self):
            # Whole, it is what the backward pass needs, too, and is held once.
            last = [new.detach()[:, cut - len(self) :] for new in states]
            kept = tuple(last if cut == len(self) else [x.clone() for x in last])
        else:
            kept = tuple(
                torch.cat([old[:, cut:].to(new.dtype), new.detach()], 1)
                for old, new in zip(self.states, states, strict=True)
            )
        return type(self)(kept, _shift(self.forgotten, cut))

    def last(self, mem_len: int) -> "Memory":
        """Return the newest ``mem_len`` positions."""
        cut = max(len(self) - whole("mem_len", mem_len), 0)
        return type(self)([x[:, cut:] for x in self.states], _shift(self.forgotten, cut))

    def reset(self, rows: Rows) -> "Memory":
        """Return a memory in which the streams ``rows`` see no past, nor any zeros."""
        return self.forgetting(_forget(self, rows))

    def forgetting(self, n: Int[Tensor, " B"]) -> "Memory":
        """Return a memory of which each stream does not see its ``n`` oldest positions."""
        return type(self)(self.states, n.clamp(min=0))

    def realigned(self, short: Int[Tensor, " B"], mem_len: int) -> "Memory":
        """Return the newest ``mem_len`` positions of streams that were padded on the right.

        The last ``short`` positions of each stream, which are padding, are dropped; what is before
        them moves to the end, and the gap in front counts as forgotten. All that is kept is copied.
        """
        stream, place, forgotten = _realignment(self, short, mem_len)
        return type(self)([x[stream, place] for x in self.states], forgotten)

    def select(self, rows: Rows) -> "Memory":
        """Return the memory of the streams ``rows``, in that order; repetition is allowed."""
        index = stream_numbers(rows, self.batch_size, self.states[0].device)
        forgotten = None if self.forgotten is None else self.forgotten[index]
        return type(self)([x[index] for x in self.states], forgotten)

    def detach(self) -> "Memory":
        """Return the memory cut from the graph; what a model returns is detached already.

        With gradients enabled, what was made in torch's inference mode is copied, because a graph
        cannot hold it.
        """
        states, forgotten = [x.detach() for x in self.states], self.forgotten
        if torch.is_grad_enabled():
            states = [x.clone() if _is_sealed(x) else x for x in states]
            if forgotten is not None and _is_sealed(forgotten):
                forgotten = forgotten.clone()
        return type(self)(states, forgotten)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Memory":
        """Return the memory on another device or in another precision."""
        forgotten = None if self.forgotten is None else self.forgotten.to(device)
        return type(self)([x.to(device=device, dtype=dtype) for x in self.states], forgotten)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain tensors: ``states`` (N, B, M, D) and ``forgotten`` (B,)."""
        return {"states": torch.stack(self.states), "forgotten": self.forgotten}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Memory":
        """Rebuild a memory from what :meth:`state_dict` returned."""
        states, forgotten = state["states"], state["forgotten"]
        require_state({"states": states}, 4, forgotten)
        return cls(states.unbind(), forgotten)


class KeptMemory:
    """Keys and values of the last positions, kept because the weights do not change.

    Room is taken in blocks: most steps write their keys behind the last ones and move nothing;
    when a block is full, a new one is begun with the newest ``mem_len`` positions. An older value
    stays valid, because nothing that it sees is ever written again. Methods that :class:`Memory`
    has, too, refuse what they refuse there.

    Attributes:
        keys: For each layer, (H, B, room, K).
        values: For each layer, (H, B, room, K).
        start: The oldest place in that room which is remembered.
        stop: The place behind the newest one.
        forgotten: As in :class:`Memory`.
        positions: Projected position encodings, farthest first, for each layer, by ``clamp_len``
            and by whether autocast is on: they depend on the weights alone and are shared by all
            memories that follow.
        adapters: What :func:`~transformer_xl.nn.wrapping.adapters` said of the model that made
            them. None: not known, as in what was a file; the first model that reads on says it.
    """

    def __init__(
        self,
        keys: Sequence[Float[Tensor, "H B room K"]],
        values: Sequence[Float[Tensor, "H B room K"]],
        start: int,
        stop: int,
        forgotten: Int[Tensor, " B"] | None = None,
    ) -> None:
        self.keys, self.values = list(keys), list(values)
        self.start, self.stop = start, stop
        self.forgotten = forgotten
        self.positions: dict[tuple[int | None, bool], list[Tensor]] = {}
        self.adapters: tuple[Any, ...] | None = None
        # Shared by all memories in the same room: where its free part begins. Who takes this out
        # may write there. A lock would do, too, but torch.compile cannot trace one.
        self._free = {stop: True}

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def batch_size(self) -> int:
        """Number of streams."""
        return self.keys[0].shape[1]

    def require(self, adapters: tuple[Any, ...]) -> None:
        """Check that a model's adapters are those with which the keys and values were made.

        Raises:
            ValueError: They are not.
        """
        if self.adapters is None:
            self.adapters = adapters
        if self.adapters != adapters:
            raise ValueError(
                "adapters were added, switched, trained, merged or removed since these keys and "
                "values were made, which belong to the weights of that time: begin anew with "
                "mems=None (past_key_values=None, another Session) and read the text again"
            )

    def with_room(self, T: int, mem_len: int) -> "KeptMemory":
        """Return the same memory with free places behind it for ``T`` more positions.

        They are its own: whoever goes on from this memory, in another thread too, gets others.
        """
        has_room = self.stop + T <= self.keys[0].shape[2]
        is_sealed = any(_is_sealed(x) for x in (*self.keys, *self.values))
        # No other thread comes in between when a key is taken out.
        if has_room and not is_sealed and self._free.pop(self.stop, False):
            self._free[self.stop + T] = True
            # A value of its own, because writing in another precision replaces its tensors.
            return self._in_same_room(self.start, self.stop, self.forgotten)
        # Twice the memory: its positions are moved once in every mem_len tokens.
        roomy = self._moved(room=len(self) + T + max(len(self), mem_len))
        return roomy.with_room(T, mem_len)

    def write(
        self, layer: int, k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H K"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Write a segment's keys and values behind the memory; return them all, memory first."""
        stop = self.stop + k.shape[1]
        for kept, new in ((self.keys, k), (self.values, v)):
            if kept[layer].dtype != new.dtype:
                kept[layer] = kept[layer].to(new.dtype)
            kept[layer][:, :, self.stop : stop] = new.permute(2, 0, 1, 3)
        k, v = (
            kept[layer][:, :, self.start : stop].permute(1, 2, 0, 3)
            for kept in (self.keys, self.values)
        )
        return k, v

    def advance(self, T: int, mem_len: int) -> "KeptMemory":
        """Return the memory after a segment was written: its newest ``mem_len`` positions."""
        stop = self.stop + T
        start = max(self.start, stop - mem_len)
        forgotten = _shift(self.forgotten, start - self.start)
        return self._in_same_room(start, stop, forgotten)

    def last(self, mem_len: int) -> "KeptMemory":
        """Return the newest ``mem_len`` positions."""
        return self.advance(0, whole("mem_len", mem_len))

    def reset(self, rows: Rows) -> "KeptMemory":
        """Return a memory in which the streams ``rows`` see no past, nor any zeros."""
        return self.forgetting(_forget(self, rows))

    def forgetting(self, n: Int[Tensor, " B"]) -> "KeptMemory":
        """Return a memory of which each stream does not see its ``n`` oldest positions."""
        return self._in_same_room(self.start, self.stop, n.clamp(min=0))

    def realigned(self, short: Int[Tensor, " B"], mem_len: int) -> "KeptMemory":
        """Return the newest ``mem_len`` positions of streams that were padded on the right.

        As :meth:`Memory.realigned` does. They are copied, and once more when the next are written.
        """
        stream, place, forgotten = _realignment(self, short, mem_len)
        keys, values = ([x[:, stream, place] for x in tensors] for tensors in self._remembered())
        return self._like_this(keys, values, 0, place.shape[1], forgotten)

    def select(self, rows: Rows) -> "KeptMemory":
        """Return the memory of the streams ``rows``, in that order; repetition is allowed."""
        index = stream_numbers(rows, self.batch_size, self.keys[0].device)
        forgotten = None if self.forgotten is None else self.forgotten[index]
        keys, values = ([x[:, index] for x in tensors] for tensors in self._remembered())
        return self._like_this(keys, values, 0, len(self), forgotten)

    def detach(self) -> "KeptMemory":
        """Return the memory itself: it is made without a graph."""
        return self

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "KeptMemory":
        """Return the memory on another device or in another precision."""
        forgotten = None if self.forgotten is None else self.forgotten.to(device)
        keys, values = (
            [x.to(device=device, dtype=dtype) for x in tensors] for tensors in self._remembered()
        )
        memory = type(self)(keys, values, 0, len(self), forgotten)
        memory.adapters = self.adapters
        return memory

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain tensors, ``keys`` and ``values`` (N, H, B, M, K)."""
        keys, values = (torch.stack(x) for x in self._remembered())
        return {"keys": keys, "values": values, "forgotten": self.forgotten}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "KeptMemory":
        """Rebuild a memory from what :meth:`state_dict` returned."""
        keys, values, forgotten = state["keys"], state["values"], state["forgotten"]
        require_state({"keys": keys, "values": values}, 5, forgotten)
        return cls(keys.unbind(), values.unbind(), 0, keys.shape[3], forgotten)

    def _remembered(self) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = (
            [x[:, :, self.start : self.stop] for x in tensors]
            for tensors in (self.keys, self.values)
        )
        return keys, values

    def _moved(self, room: int) -> "KeptMemory":
        tensors: tuple[list[Tensor], list[Tensor]] = ([], [])
        for new, remembered in zip(tensors, self._remembered(), strict=True):
            for x in remembered:
                new.append(x.new_empty(*x.shape[:2], room, x.shape[3]))
                new[-1][:, :, : len(self)] = x
        return self._like_this(*tensors, 0, len(self), self.forgotten)

    def _like_this(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        start: int,
        stop: int,
        forgotten: Tensor | None,
    ) -> "KeptMemory":
        memory = type(self)(keys, values, start, stop, forgotten)
        memory.positions, memory.adapters = self.positions, self.adapters
        return memory

    def _in_same_room(self, start: int, stop: int, forgotten: Tensor | None) -> "KeptMemory":
        memory = self._like_this(self.keys, self.values, start, stop, forgotten)
        memory._free = self._free
        return memory


def join(memories: Sequence[Memory | KeptMemory]) -> Memory | KeptMemory:
    """Put the streams of several memories of one kind side by side; shorter pasts stay shorter.

    What the shorter ones lack is filled up in front and marked as forgotten.

    Raises:
        ValueError: There is none, or they are not of one model.
    """
    if len({_sizes(memory) for memory in memories}) != 1:
        raise ValueError(
            f"{len(memories)} memories cannot be joined: there must be one at least, and all of "
            "one kind, as deep and as wide"
        )
    M = max(len(memory) for memory in memories)
    hidden = torch.cat([_forgotten(memory) + M - len(memory) for memory in memories])
    hidden = hidden if hidden.any() else None

    def side_by_side(tensors: Iterable[Sequence[Tensor]], streams: int) -> list[Tensor]:
        # Positions are the last dimension but one.
        return [
            torch.cat([F.pad(x, (0, 0, M - x.shape[-2], 0)) for x in layer], streams)
            for layer in zip(*tensors, strict=True)
        ]

    states = [m.states for m in memories if isinstance(m, Memory)]
    if states:
        return Memory(side_by_side(states, 0), hidden)
    kept = [m._remembered() for m in memories if isinstance(m, KeptMemory)]
    keys, values = zip(*kept, strict=True)
    memory = KeptMemory(side_by_side(keys, 1), side_by_side(values, 1), 0, M, hidden)
    first = next(m for m in memories if isinstance(m, KeptMemory))
    memory.positions, memory.adapters = first.positions, first.adapters
    for other in memories:
        if isinstance(other, KeptMemory) and memory.adapters is not None:
            other.require(memory.adapters)
    return memory


def _is_sealed(x: Tensor) -> bool:
    """Whether a tensor of torch's inference mode is used outside of it, where it stays as it is."""
    # What is traced has no such tensors.
    return (
        not torch.compiler.is_compiling()
        and x.is_inference()
        and not torch.is_inference_mode_enabled()
    )


def _shift(forgotten: Tensor | None, cut: int) -> Tensor | None:
    return forgotten if forgotten is None or cut == 0 else (forgotten - cut).clamp(min=0)


def _forgotten(memory: Memory | KeptMemory) -> Tensor:
    if memory.forgotten is not None:
        return memory.forgotten
    return torch.zeros(memory.batch_size, dtype=torch.int64, device=_device(memory))


def _forget(memory: Memory | KeptMemory, rows: Rows) -> Tensor:
    return _forgotten(memory).index_fill(
        0, stream_numbers(rows, memory.batch_size, _device(memory)), len(memory)
    )


def _realignment(
    memory: Memory | KeptMemory, short: Tensor, mem_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which streams and places the new positions come from, and how many see nothing."""
    cut = max(len(memory) - mem_len, 0)
    place = torch.arange(cut, len(memory), device=short.device) - short[:, None]
    stream = torch.arange(memory.batch_size, device=short.device)[:, None]
    # In the gap stands what is a number, too: it is multiplied by zero.
    return stream, place.clamp(min=0), (_forgotten(memory) + short - cut).clamp(min=0)


def _device(memory: Memory | KeptMemory) -> torch.device:
    return memory.states[0].device if isinstance(memory, Memory) else memory.keys[0].device


def _sizes(memory: Memory | KeptMemory) -> tuple[Any, ...]:
    """Return what memories of one model have in common."""
    if isinstance(memory, Memory):
        return Memory, *(x.shape[2] for x in memory.states)
    return KeptMemory, *((x.shape[0], x.shape[3]) for x in (*memory.keys, *memory.values))
