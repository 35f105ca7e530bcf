"""What each layer remembers of the segments before the present one.

:class:`Memory` is the one class that the rest of the code knows. What it holds is one of two
stores: :class:`HiddenStates`, as in the paper, or :class:`KeysAndValues`, made from them for
weights that do not change. A memory is a value: no operation changes one that was handed out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.model.arguments import Rows, require_state, stream_numbers, whole

Join = Callable[
    [Float[Tensor, "B T H K"], Float[Tensor, "B T H K"]],
    tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]],
]
"""Takes a segment's keys and values; returns them behind those that are remembered."""

Past = Float[Tensor, "B M D"] | Join
"""What a layer remembers: hidden states, or what joins its keys and values to a segment's."""

Present = Float[Tensor, "B T D"] | tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H K"]] | None
"""What a layer returns to be remembered. None: the keys and values that it has joined."""


class Store(ABC):
    """What a memory holds, without what each stream sees of it.

    Attributes:
        names: What its tensors are called.
        stream_dim: Which dimension of each is the streams; the last but one is the positions.
    """

    names: ClassVar[tuple[str, ...]]
    stream_dim: ClassVar[int]

    @abstractmethod
    def tensors(self) -> tuple[Sequence[Tensor], ...]:
        """Return, for each name, what is remembered: a tensor for each layer, oldest first."""

    @abstractmethod
    def with_room(self, T: int, mem_len: int) -> "Store":
        """Return the store as a segment of ``T`` positions can be read with."""

    @abstractmethod
    def past(self, layer: int) -> Past:
        """Return what a layer remembers, as the layer reads it."""

    @abstractmethod
    def extended(self, present: Sequence[Any], kept: int, cut: int) -> "Store":
        """Return the store after a segment.

        Args:
            present: What each layer returned to be remembered.
            kept: How many of the first positions of the segment are remembered.
            cut: How many of the oldest positions are not remembered any more.
        """

    @abstractmethod
    def between(self, start: int, stop: int) -> "Store":
        """Return the positions from ``start`` to ``stop``."""

    def stacked(self) -> dict[str, Float[Tensor, "N *shape"]]:
        """Return what is remembered by name, all layers in one tensor."""
        tensors = zip(self.names, self.tensors(), strict=True)
        return {name: torch.stack([*layers]) for name, layers in tensors}

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Store":
        """Return a store of other tensors."""
        tensors: Any = ([change(x) for x in layers] for layers in self.tensors())
        return type(self)(*tensors)


class HiddenStates(Store):
    """The last hidden states that each layer has read, detached from the graph.

    Attributes:
        states: For each layer, (B, M, D), oldest first.
    """

    names, stream_dim = ("states",), 0

    def __init__(self, states: Sequence[Float[Tensor, "B M D"]]) -> None:
        self.states = tuple(states)

    def tensors(self) -> tuple[Sequence[Tensor], ...]:
        """See :meth:`Store.tensors`."""
        return (self.states,)

    def with_room(self, T: int, mem_len: int) -> "HiddenStates":
        """See :meth:`Store.with_room`."""
        return HiddenStates(
            [x.detach().clone() if _is_sealed_now(x) else x.detach() for x in self.states]
        )

    def past(self, layer: int) -> Float[Tensor, "B M D"]:
        """See :meth:`Store.past`."""
        return self.states[layer]

    def extended(self, present: Sequence[Any], kept: int, cut: int) -> "HiddenStates":
        """See :meth:`Store.extended`."""
        M = self.states[0].shape[1]
        new = [x.detach()[:, :kept] for x in present]
        if cut < M:
            joined = zip(self.states, new, strict=True)
            return HiddenStates([torch.cat([old[:, cut:].to(x.dtype), x], 1) for old, x in joined])
        if cut == M:
            # Whole, it is what the backward pass needs, too, and is held once.
            return HiddenStates(new)
        return HiddenStates([x[:, cut - M :].clone() for x in new])

    def between(self, start: int, stop: int) -> "HiddenStates":
        """See :meth:`Store.between`."""
        return HiddenStates([x[:, start:stop] for x in self.states])


class KeysAndValues(Store):
    """Keys and values of the last positions, kept because the weights do not change.

    Room is taken in blocks: most steps write their keys behind the last ones and move nothing;
    when a block is full, a new one is begun with the positions that are remembered. An older value
    stays valid, because nothing that it sees is ever written again.

    Attributes:
        keys: For each layer, (H, B, room, K).
        values: For each layer, (H, B, room, K).
        start: The oldest place in that room which is remembered.
        stop: The place behind the newest one.
        adapters: What :func:`~transformer_xl.model.wrapping.adapters` said of the model that made
            them. None: not known, as in what was a file; the first model that reads on says it.
    """

    names, stream_dim = ("keys", "values"), 1

    def __init__(
        self,
        keys: Sequence[Float[Tensor, "H B room K"]],
        values: Sequence[Float[Tensor, "H B room K"]],
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self.keys, self.values = list(keys), list(values)
        self.start, self.stop = start, self.keys[0].shape[2] if stop is None else stop
        self.adapters: tuple[Any, ...] | None = None
        # Shared by all stores in the same room: where its free part begins. Who takes this out may
        # write there. A lock would do, too, but torch.compile cannot trace one.
        self._free = {self.stop: True}

    def tensors(self) -> tuple[Sequence[Tensor], ...]:
        """See :meth:`Store.tensors`."""
        keys, values = (
            [x[:, :, self.start : self.stop] for x in tensors]
            for tensors in (self.keys, self.values)
        )
        return keys, values

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

    def with_room(self, T: int, mem_len: int) -> "KeysAndValues":
        """Return the same store with free places behind it for ``T`` more positions.

        They are its own: whoever goes on from this store, in another thread too, gets others.
        """
        has_room = self.stop + T <= self.keys[0].shape[2]
        is_sealed = any(_is_sealed(x) for x in (*self.keys, *self.values))
        # No other thread comes in between when a key is taken out.
        if has_room and not is_sealed and self._free.pop(self.stop, False):
            self._free[self.stop + T] = True
            # A value of its own, because writing in another precision replaces its tensors.
            return self._in_same_room(self.start, self.stop)
        # Twice the memory: its positions are moved once in every mem_len tokens.
        M = self.stop - self.start
        room = M + T + max(M, mem_len)

        def moved(x: Tensor) -> Tensor:
            larger = x.new_empty(*x.shape[:2], room, x.shape[3])
            larger[:, :, :M] = x
            return larger

        roomy = self.changed(moved)
        roomy.stop, roomy._free = M, {M: True}
        return roomy.with_room(T, mem_len)

    def past(self, layer: int) -> Join:
        """See :meth:`Store.past`."""
        return partial(self.join, layer)

    def join(
        self, layer: int, k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H K"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Put a segment's keys and values behind those of a layer; return them all."""
        stop = self.stop + k.shape[1]
        for remembered, new in ((self.keys, k), (self.values, v)):
            if remembered[layer].dtype != new.dtype:
                remembered[layer] = remembered[layer].to(new.dtype)
            remembered[layer][:, :, self.stop : stop] = new.permute(2, 0, 1, 3)
        k, v = (
            remembered[layer][:, :, self.start : stop].permute(1, 2, 0, 3)
            for remembered in (self.keys, self.values)
        )
        return k, v

    def extended(self, present: Sequence[Any], kept: int, cut: int) -> "KeysAndValues":
        """See :meth:`Store.extended`."""
        for layer, new in enumerate(present):
            if new is not None:
                # In the place of those that the segment itself has attended to.
                self.join(layer, *new)
        return self._in_same_room(self.start + cut, self.stop + kept)

    def between(self, start: int, stop: int) -> "KeysAndValues":
        """See :meth:`Store.between`."""
        return self._in_same_room(self.start + start, self.start + stop)

    def changed(self, change: Callable[[Tensor], Tensor]) -> "KeysAndValues":
        """See :meth:`Store.changed`."""
        keys, values = ([change(x) for x in layers] for layers in self.tensors())
        store = KeysAndValues(keys, values)
        store.adapters = self.adapters
        return store

    def _in_same_room(self, start: int, stop: int) -> "KeysAndValues":
        store = KeysAndValues(self.keys, self.values, start, stop)
        store.adapters, store._free = self.adapters, self._free
        return store


class Memory:
    """What a model remembers of several streams.

    Attributes:
        store: What is remembered, of all streams as many positions.
        forgotten: For each stream, how many of its oldest positions it does not see; None: sees
            all. Streams that were reset have a shorter past than their neighbours.

    Args:
        store: A store, or hidden states: for each layer its inputs, (B, M, D), oldest first.
        forgotten: As the attribute.

    Raises:
        ValueError: By its methods, for a stream that there is not (on a GPU, an error of the
            device), a negative length, or a state whose shapes do not fit each other.
    """

    def __init__(
        self,
        store: Store | Sequence[Float[Tensor, "B M D"]],
        forgotten: Int[Tensor, " B"] | None = None,
    ) -> None:
        self.store = store if isinstance(store, Store) else HiddenStates(store)
        self.forgotten = forgotten

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is remembered, as views."""
        return tuple(x for layers in self.store.tensors() for x in layers)

    @property
    def states(self) -> tuple[Float[Tensor, "B M D"], ...]:
        """The hidden states of each layer.

        Raises:
            ValueError: The memory holds keys and values.
        """
        if not isinstance(self.store, HiddenStates):
            raise ValueError("the memory holds keys and values and no hidden states")
        return self.store.states

    @property
    def has_keys(self) -> bool:
        """Whether keys and values are held, and no hidden states."""
        return isinstance(self.store, KeysAndValues)

    def __len__(self) -> int:
        store = self.store
        if isinstance(store, KeysAndValues):
            return store.stop - store.start
        return cast(HiddenStates, store).states[0].shape[1]

    @property
    def batch_size(self) -> int:
        """Number of streams."""
        return self._first.shape[self.store.stream_dim]

    @property
    def _first(self) -> Tensor:
        store = self.store
        return store.keys[0] if isinstance(store, KeysAndValues) else self.states[0]

    def with_room(self, T: int, mem_len: int) -> "Memory":
        """Return the memory as a segment of ``T`` tokens can be read with, cut from the graph."""
        return Memory(self.store.with_room(T, mem_len), _unsealed(self.forgotten))

    def extend(self, present: Sequence[Present], mem_len: int, kept: int | None = None) -> "Memory":
        """Return the memory after another segment: its newest ``mem_len`` positions.

        Args:
            present: What each layer returned to be remembered of the segment.
            mem_len: How many positions are remembered at most.
            kept: How many of the first tokens of the segment are. None: all.
        """
        if kept is None:
            first = present[0]
            assert first is not None
            kept = (first if isinstance(first, Tensor) else first[0]).shape[1]
        cut = max(len(self) + kept - mem_len, 0)
        return Memory(self.store.extended(present, kept, cut), _shift(self.forgotten, cut))

    def last(self, mem_len: int) -> "Memory":
        """Return the newest ``mem_len`` positions."""
        cut = max(len(self) - whole("mem_len", mem_len), 0)
        return Memory(self.store.between(cut, len(self)), _shift(self.forgotten, cut))

    def crop(self, n: int) -> "Memory":
        """Return the memory without its ``n`` newest positions, as it was before they were read.

        What had left the memory by then does not come back: who wants to go back ``n`` positions
        from a full memory lets it remember ``n`` more, and hides them by ``attn_len``.

        Raises:
            ValueError: There are fewer positions, or it is one state that holds all of the past.
        """
        stop = len(self) - whole("n", n)
        if stop < 0:
            raise ValueError(f"n={n} newest positions of {len(self)} cannot be dropped")
        forgotten = None if self.forgotten is None else self.forgotten.clamp(max=stop)
        return Memory(self.store.between(0, stop), forgotten)

    def reset(self, rows: Rows) -> "Memory":
        """Return a memory in which the streams ``rows`` see no past, nor any zeros."""
        index = stream_numbers(rows, self.batch_size, self._first.device)
        return self.forgetting(self._forgotten().index_fill(0, index, len(self)))

    def forgetting(self, n: Int[Tensor, " B"]) -> "Memory":
        """Return a memory of which each stream does not see its ``n`` oldest positions."""
        return Memory(self.store, n.clamp(min=0))

    def seen(self) -> "Memory":
        """Return the memory of one stream without the positions that the stream does not see."""
        if self.forgotten is None:
            return self
        return Memory(self.last(len(self) - int(self.forgotten[0])).store)

    def realigned(self, short: Int[Tensor, " B"], mem_len: int) -> "Memory":
        """Return the newest ``mem_len`` positions of streams that were padded on the right.

        The last ``short`` positions of each stream, which are padding, are dropped; what is before
        them moves to the end, and the gap in front counts as forgotten. All that is kept is copied.
        """
        cut = max(len(self) - mem_len, 0)
        place = torch.arange(cut, len(self), device=short.device) - short[:, None]
        stream = torch.arange(self.batch_size, device=short.device)[:, None]
        # The gap holds finite values; they are multiplied by zero.
        index = (*[slice(None)] * self.store.stream_dim, stream, place.clamp(min=0))
        forgotten = (self._forgotten() + short - cut).clamp(min=0)
        return Memory(self.store.changed(lambda x: x[index]), forgotten)

    def select(self, rows: Rows) -> "Memory":
        """Return the memory of the streams ``rows``, in that order; repetition is allowed."""
        index = stream_numbers(rows, self.batch_size, self._first.device)
        forgotten = None if self.forgotten is None else self.forgotten[index]
        take = (*[slice(None)] * self.store.stream_dim, index)
        return Memory(self.store.changed(lambda x: x[take]), forgotten)

    def detach(self) -> "Memory":
        """Return the memory cut from the graph; what a model returns is detached already.

        With gradients enabled, what was made in torch's inference mode is copied, because a graph
        cannot hold it.
        """
        return self if self.has_keys else self.with_room(0, 0)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Memory":
        """Return the memory on another device or in another precision."""
        forgotten = None if self.forgotten is None else self.forgotten.to(device)
        return Memory(self.store.changed(lambda x: x.to(device=device, dtype=dtype)), forgotten)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain tensors.

        They are ``states`` (N, B, M, D), or ``keys`` and ``values`` (N, H, B, M, K), and
        ``forgotten`` (B,) or None.
        """
        return self.store.stacked() | {"forgotten": self.forgotten}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Memory":
        """Rebuild a memory from what :meth:`state_dict` returned."""
        kind = HiddenStates if "states" in state else KeysAndValues
        tensors, forgotten = {name: state[name] for name in kind.names}, state["forgotten"]
        require_state(tensors, 4 + kind.stream_dim, forgotten)
        return cls(kind(*(x.unbind() for x in tensors.values())), forgotten)

    def _forgotten(self) -> Int[Tensor, " B"]:
        if self.forgotten is not None:
            return self.forgotten
        return torch.zeros(self.batch_size, dtype=torch.int64, device=self._first.device)


def join(memories: Sequence[Memory]) -> Memory:
    """Batch the streams of several memories of one kind; shorter pasts stay shorter.

    What the shorter ones lack is filled up in front and marked as forgotten.

    Raises:
        ValueError: There is none, or they are not of one model.
    """
    if len({_sizes(memory) for memory in memories}) != 1:
        raise ValueError(
            f"{len(memories)} memories cannot be joined: there must be one at least, and all of "
            "one kind, as deep and as wide"
        )
    stores = [memory.store for memory in memories]
    M = max(len(memory) for memory in memories)
    hidden = torch.cat([memory._forgotten() + M - len(memory) for memory in memories])
    batched = (
        [
            torch.cat([F.pad(x, (0, 0, M - x.shape[-2], 0)) for x in layer], stores[0].stream_dim)
            for layer in zip(*tensors, strict=True)
        ]
        for tensors in zip(*(store.tensors() for store in stores), strict=True)
    )
    store = type(stores[0])(*batched)
    for other in stores:
        if isinstance(store, KeysAndValues) and isinstance(other, KeysAndValues):
            store.adapters = other.adapters if store.adapters is None else store.adapters
            if store.adapters is not None:
                other.require(store.adapters)
    return Memory(store, hidden if hidden.any() else None)


def _sizes(memory: Memory) -> tuple[Any, ...]:
    """Return what memories of one model have in common."""
    dim = memory.store.stream_dim
    return type(memory.store), *((*x.shape[:dim], x.shape[-1]) for x in memory.tensors)


def _is_sealed(x: Tensor) -> bool:
    """Whether a tensor of torch's inference mode is used outside of it, where it stays as it is."""
    # What is traced has no such tensors.
    return (
        not torch.compiler.is_compiling()
        and x.is_inference()
        and not torch.is_inference_mode_enabled()
    )


def _is_sealed_now(x: Tensor) -> bool:
    """Whether a graph, which is being made, cannot hold a tensor."""
    return torch.is_grad_enabled() and _is_sealed(x)


def _unsealed(x: Tensor | None) -> Tensor | None:
    return x.clone() if x is not None and _is_sealed_now(x) else x


def _shift(forgotten: Tensor | None, cut: int) -> Tensor | None:
    return forgotten if forgotten is None or cut == 0 else (forgotten - cut).clamp(min=0)
