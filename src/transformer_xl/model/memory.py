"""The memory: hidden states of previous segments, or keys and values projected from them.

Both are values: every operation returns a new one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.model.arguments import Rows, require_state, stream_numbers, whole


class Memory:
    """The last hidden states that each layer has read (section 3.2 of the paper), detached.

    Methods raise ValueError for a stream index out of range (on a GPU, a device-side assertion), a
    negative length, or a state with inconsistent shapes.

    Attributes:
        forgotten: For each stream, how many of its oldest positions are masked; None: none.
            Streams that were reset have a shorter past than the others of their batch.
        has_keys: Whether it is a memory of :class:`KeysAndValues`, for fixed weights.

    Args:
        states: For each layer its inputs, (B, M, D), oldest first.
        forgotten: As the attribute.

    Example:
        >>> memory = Memory([torch.zeros(2, 6, 8)])  # one layer, two streams, six positions
        >>> len(memory), len(memory.last(4)), memory.select([1, 1, 0]).batch_size
        (6, 4, 3)
    """

    has_keys = False
    _states: tuple[Float[Tensor, "B M D"], ...]

    def __init__(
        self,
        states: Sequence[Float[Tensor, "B M D"]],
        forgotten: Int[Tensor, " B"] | None = None,
    ) -> None:
        self._states = tuple(states)
        self.forgotten = forgotten

    # What :class:`KeysAndValues` does in another way.

    @property
    def states(self) -> tuple[Float[Tensor, "B M D"], ...]:
        """The hidden states, (B, M, D) for each layer.

        Raises:
            ValueError: The memory holds keys and values.
        """
        return self._states

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what is remembered."""
        return ("states",)

    def by_name(self) -> tuple[Sequence[Tensor], ...]:
        """Return, for each name, one tensor per layer; its last dimensions are B, M and width."""
        return (self._states,)

    @property
    def length(self) -> int:
        """What ``len()`` returns, or a symbol for it in a traced program."""
        return self._states[0].shape[1]

    @property
    def _first(self) -> Tensor:
        return self._states[0]

    @property
    def _width(self) -> int:
        return self._states[0].shape[2]

    def masking(self, forgotten: Int[Tensor, " B"] | None) -> "Memory":
        """Return the memory with as many positions of each stream masked; None: none."""
        return self if forgotten is self.forgotten else Memory(self._states, forgotten)

    def between(self, start: int, stop: int) -> "Memory":
        """Return the positions from ``start`` to ``stop``, none of them masked."""
        return self.changed(lambda x: x[:, start:stop])

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Memory":
        """Return the memory with a function applied to each tensor, and nothing masked."""
        return Memory([change(x) for x in self._states])

    def with_capacity(self, T: int, mem_len: int) -> "Memory":
        """Return a memory, detached, to which a segment of ``T`` tokens can be appended."""
        return self.changed(lambda x: savable(x.detach())).masking(self._savable_mask())

    def pasts(self, x: Float[Tensor, "B T D"]) -> Sequence[Float[Tensor, "B M D"]]:
        """Return the hidden states of each layer, as many as are not cached as keys and values."""
        return self._states

    def last_input(self) -> Float[Tensor, "B 1 D"]:
        """Return the last input of the first layer, of a memory that is not empty."""
        return self._states[0][:, -1:]

    def append_input(self, x: Float[Tensor, "B T D"]) -> None:
        """Append the inputs of the first layer, if they are remembered apart from it."""

    def _extended(self, states: Sequence[Tensor], kept: int, cut: int) -> "Memory":
        """Append the first ``kept`` positions of a segment; drop the ``cut`` oldest ones."""
        M, new = self.length, [x.detach()[:, :kept] for x in states]
        if cut == M:
            # The backward pass needs the same tensors, so they are shared and not copied.
            return Memory(new)
        if cut > M:
            new = [x[:, cut - M :] for x in new]
        joined = zip(self._states, new, strict=True)
        return Memory([torch.cat([old[:, cut:].to(x.dtype), x], 1) for old, x in joined])

    def detach(self) -> "Memory":
        """Return the memory detached from the graph; a model's ``mems`` already are.

        With gradients enabled, tensors made in inference mode are copied, because autograd cannot
        save them.
        """
        return self.with_capacity(0, 0)

    # What both do alike.

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Views of all remembered tensors."""
        return tuple(x for layers in self.by_name() for x in layers)

    def __len__(self) -> int:
        return self.length

    @property
    def batch_size(self) -> int:
        """Number of streams."""
        return self._first.shape[-3]

    @property
    def nbytes(self) -> int:
        """Size of the positions it holds, without the free capacity of their buffers."""
        return sum(x.nbytes for x in self.tensors)

    def __repr__(self) -> str:
        """Show sizes only: reading values would synchronize the device."""
        x = self._first
        return (
            f"{type(self).__name__}(n_layer={len(self.by_name()[0])}, batch_size="
            f"{self.batch_size}, length={self.length}, width={self._width}, dtype={x.dtype}, "
            f"device={str(x.device)!r}, nbytes={self.nbytes:_})"
        )

    def extend(self, states: Sequence[Any], mem_len: int, kept: int | None = None) -> "Memory":
        """Return the memory after another segment: its newest ``mem_len`` positions.

        Args:
            states: What is remembered of each layer; keys and values have been joined already.
            mem_len: Maximum number of positions to keep.
            kept: How many positions of the segment are appended; None: all.
        """
        if kept is None:
            kept = int(states[0].shape[1])
        cut = max(self.length + kept - mem_len, 0)
        return self._extended(states, kept, cut).masking(_shift(self.forgotten, cut))

    def last(self, mem_len: int) -> "Memory":
        """Return the newest ``mem_len`` positions."""
        cut = max(self.length - whole("mem_len", mem_len), 0)
        return self.between(cut, self.length).masking(_shift(self.forgotten, cut))

    def crop(self, n: int) -> "Memory":
        """Return the memory without its ``n`` newest positions.

        Positions that were dropped at the other end do not come back: to be able to go back ``n``
        positions, keep ``n`` more than needed and mask them with ``attn_len``.

        Raises:
            ValueError: The memory has fewer positions.
        """
        stop = self.length - whole("n", n)
        if stop < 0:
            raise ValueError(f"n={n} newest positions of {self.length} cannot be dropped")
        forgotten = None if self.forgotten is None else self.forgotten.clamp(max=stop)
        return self.between(0, stop).masking(forgotten)

    def reset(self, rows: Rows) -> "Memory":
        """Return a memory in which all positions are masked for the streams ``rows``."""
        index = stream_numbers(rows, self.batch_size, self._first.device)
        return self.forgetting(self._mask().index_fill(0, index, self.length))

    def forgetting(self, n: Int[Tensor, " B"]) -> "Memory":
        """Return the memory with the ``n`` oldest positions of each stream masked."""
        return self.masking(n.clamp(min=0))

    def seen(self) -> "Memory":
        """Return the memory of a single stream without its masked positions."""
        if self.forgotten is None:
            return self
        return self.last(self.length - int(self.forgotten[0])).masking(None)

    def realigned(self, short: Int[Tensor, " B"], mem_len: int) -> "Memory":
        """Return the newest ``mem_len`` positions of streams that were padded on the right.

        The last ``short`` positions of each stream, which are padding, are dropped; the others are
        copied to the end, and the gap in front is masked.
        """
        cut = max(self.length - mem_len, 0)
        place = torch.arange(cut, self.length, device=short.device) - short[:, None]
        stream = torch.arange(self.batch_size, device=short.device)[:, None]
        # The gap holds finite values; they are multiplied by zero.
        place = place.clamp(min=0)
        forgotten = (self._mask() + short - cut).clamp(min=0)
        return self.changed(lambda x: x[..., stream, place, :]).masking(forgotten)

    def select(self, rows: Rows) -> "Memory":
        """Return the memory of the streams ``rows``, in that order; repetition is allowed."""
        index = stream_numbers(rows, self.batch_size, self._first.device)
        forgotten = None if self.forgotten is None else self.forgotten[index]
        return self.changed(lambda x: x[..., index, :, :]).masking(forgotten)

    def clone(self) -> "Memory":
        """Return a copy."""
        forgotten = None if self.forgotten is None else self.forgotten.clone()
        return self.changed(torch.clone).masking(forgotten)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Memory":
        """Return the memory on another device or in another precision."""
        forgotten = None if self.forgotten is None else self.forgotten.to(device)
        return self.changed(lambda x: x.to(device=device, dtype=dtype)).masking(forgotten)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain tensors.

        They are ``states`` (N, B, M, D), or ``keys`` and ``values`` (N, H, B, M, K), with
        ``input_recurrence`` also ``inputs`` (1, 1, B, M, D); and ``forgotten`` (B,) or None.
        """
        tensors = zip(self.names, self.by_name(), strict=True)
        stacked = {name: torch.stack([*layers]) for name, layers in tensors}
        return stacked | {"forgotten": self.forgotten}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Memory":
        """Rebuild a memory, of hidden states or of keys and values, from :meth:`state_dict`."""
        forgotten = state["forgotten"]
        if "states" in state:
            require_state({"states": state["states"]}, 4, forgotten)
            return Memory(state["states"].unbind(), forgotten)
        tensors = {name: state[name] for name in ("keys", "values")}
        require_state(tensors, 5, forgotten)
        if (inputs := state.get("inputs")) is not None:
            require_state({"inputs": inputs}, 5, forgotten)
            expected = 1, 1, *tensors["keys"].shape[2:4]
            if inputs.shape[:4] != expected:
                raise ValueError(
                    f"inputs of shape {tuple(inputs.shape)} must be (*{expected}, D): those of one "
                    "layer, for the streams and positions of the keys"
                )
            tensors["inputs"] = inputs
        return KeysAndValues(*(x.unbind() for x in tensors.values()), forgotten=forgotten)

    def _mask(self) -> Int[Tensor, " B"]:
        if self.forgotten is not None:
            return self.forgotten
        return torch.zeros(self.batch_size, dtype=torch.int64, device=self._first.device)

    def _savable_mask(self) -> Tensor | None:
        return None if self.forgotten is None else savable(self.forgotten)


class KeysAndValues(Memory):
    """Keys and values of the last positions (a KV cache); valid while the weights are fixed.

    Buffers have spare capacity: most steps write
    behind the last keys and copy nothing; a full buffer is replaced by a larger one. Those that
    share a buffer stay valid, because no position is overwritten.

    Attributes:
        keys: For each layer, (H, B, capacity, K).
        values: For each layer, (H, B, capacity, K).
        inputs: With ``input_recurrence``, the inputs of the first layer alone, (1, B, capacity, D),
            in float32 at least.
        adapters: What :func:`~transformer_xl.model.calling.adapters` returned for the model that
            projected them. None: unknown, as after loading; set by the first model that uses them.
        is_prefix: Whether they are parameters themselves (prefix tuning), to which gradients flow;
            those that are appended are detached.
        start: Index of the oldest cached position in the buffers.
        stop: Index behind the newest one.
    """

    has_keys = True

    def __init__(
        self,
        keys: Sequence[Float[Tensor, "H B capacity K"]],
        values: Sequence[Float[Tensor, "H B capacity K"]],
        inputs: Sequence[Float[Tensor, "1 B capacity D"]] = (),
        *,
        forgotten: Int[Tensor, " B"] | None = None,
        adapters: tuple[Any, ...] | None = None,
    ) -> None:
        self.forgotten = forgotten
        self.keys, self.values, self.inputs = list(keys), list(values), list(inputs)
        self.adapters = adapters
        self.start, self.stop = 0, self.keys[0].shape[2]
        # Where the free part begins, shared by all memories of these buffers. Whoever pops it may
        # write there. torch.compile cannot trace a lock. A symbol in a traced program is no key.
        self._free = {self.stop: True} if isinstance(self.stop, int) else {}
        self._is_joined = self.is_prefix = False

    @property
    def states(self) -> tuple[Float[Tensor, "B M D"], ...]:
        """There are none.

        Raises:
            ValueError: Always.
        """
        raise ValueError("the memory holds keys and values and no hidden states")

    @property
    def length(self) -> int:
        """What ``len()`` returns, or a symbol for it in a traced program."""
        return self.stop - self.start

    @property
    def _first(self) -> Tensor:
        return self.keys[0]

    @property
    def _width(self) -> int:
        return self.keys[0].shape[0] * self.keys[0].shape[3]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what is cached."""
        return ("keys", "values", "inputs") if self.inputs else ("keys", "values")

    @property
    def _buffers(self) -> tuple[list[Tensor], ...]:
        return tuple(getattr(self, name) for name in self.names)

    def by_name(self) -> tuple[Sequence[Tensor], ...]:
        """Return, for each name, one tensor per layer, (H, B, M, K); of inputs, only the first."""
        cached = slice(self.start, self.stop)
        return tuple([x[:, :, cached] for x in layers] for layers in self._buffers)

    def require(self, adapters: tuple[Any, ...]) -> None:
        """Require the adapters with which the keys and values were projected.

        Raises:
            ValueError: The adapters differ.
        """
        if self.adapters is None:
            self.adapters = adapters
        if self.adapters != adapters:
            raise ValueError(
                "adapters were added, switched, trained, merged or removed since these keys and "
                "values were made, which belong to the weights of that time: begin anew with "
                "mems=None (past_key_values=None, another Session) and read the text again"
            )

    def with_capacity(self, T: int, mem_len: int) -> "KeysAndValues":
        """Return the same memory with free capacity for ``T`` more positions.

        The capacity is exclusive: another continuation of this memory, also in another thread, is
        given different buffers.
        """
        is_learned = self.is_prefix and torch.is_grad_enabled()
        if is_learned or not isinstance(self.stop + T, int):
            # Autograd does not save what is written to later, and a symbol is no capacity.
            joined = self._in_same_buffers(self.start, self.stop, self._savable_mask())
            joined._is_joined = True
            return joined
        has_capacity = self.stop + T <= self.keys[0].shape[2]
        is_sealed = any(_is_sealed(x) for layers in self._buffers for x in layers)
        # dict.pop is atomic.
        if has_capacity and not is_sealed and self._free.pop(self.stop, False):
            self._free[self.stop + T] = True
            # A new object, because writing in another precision replaces its tensors.
            return self._in_same_buffers(self.start, self.stop, self._savable_mask())
        # Twice the memory: positions are copied once every mem_len tokens.
        M = self.length
        capacity = M + T + max(M, mem_len)

        def moved(x: Tensor) -> Tensor:
            larger = x.new_empty(*x.shape[:2], capacity, x.shape[3])
            larger[:, :, :M] = x
            return larger

        grown = self.changed(moved)
        grown.stop, grown._free, grown.forgotten = M, {M + T: True}, self._savable_mask()
        return grown

    def masking(self, forgotten: Int[Tensor, " B"] | None) -> "KeysAndValues":
        """Return the memory with as many positions of each stream masked; None: none."""
        if forgotten is self.forgotten:
            return self
        return self._in_same_buffers(self.start, self.stop, forgotten)

    def pasts(self, x: Float[Tensor, "B T D"]) -> Sequence[Float[Tensor, "B none D"]]:
        """Return the hidden states of each layer, which are cached as keys and values: none."""
        return [x[:, :0]] * len(self.keys)

    def detach(self) -> "KeysAndValues":
        """Return the memory: it is detached."""
        return self

    def join(
        self, layer: int, k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H K"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Append a segment's keys and values to those of a layer; return all of them."""
        stop = self.stop + k.shape[1]
        for remembered, new in ((self.keys, k), (self.values, v)):
            self._append(remembered, layer, new.permute(2, 0, 1, 3))
        k, v = (
            remembered[layer][:, :, self.start : stop].permute(1, 2, 0, 3)
            for remembered in (self.keys, self.values)
        )
        return k, v

    def last_input(self) -> Float[Tensor, "B 1 D"]:
        """Return the last input of the first layer, of a memory that is not empty."""
        return self.inputs[0][0, :, self.stop - 1 : self.stop]

    def append_input(self, x: Float[Tensor, "B T D"]) -> None:
        """Append the inputs of the first layer, if they are cached."""
        if self.inputs:
            self._append(self.inputs, 0, x[None])

    def _append(self, to: list[Tensor], layer: int, new: Float[Tensor, "H B T K"]) -> None:
        if to[layer].dtype != new.dtype:
            to[layer] = to[layer].to(new.dtype)
        if self._is_joined:
            to[layer] = torch.cat([to[layer][:, :, : self.stop], new], 2)
        else:
            to[layer][:, :, self.stop : self.stop + new.shape[2]] = new

    def _extended(self, states: Sequence[Any], kept: int, cut: int) -> "KeysAndValues":
        after = self._in_same_buffers(self.start + cut, self.stop + kept)
        if self._is_joined:
            after = after.changed(lambda x: x.detach())
        return after

    def between(self, start: int, stop: int) -> "KeysAndValues":
        """Return the positions from ``start`` to ``stop``, none of them masked."""
        return self._in_same_buffers(self.start + start, self.start + stop)

    def changed(self, change: Callable[[Tensor], Tensor]) -> "KeysAndValues":
        """Return the memory with a function applied to each tensor, and nothing masked."""
        changed = ([change(x) for x in layers] for layers in self.by_name())
        memory = KeysAndValues(*changed, adapters=self.adapters)
        memory.is_prefix = self.is_prefix
        return memory

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Memory":
        """Return the memory on another device or in another precision.

        The inputs of a recurrence are in float32 at least.
        """
        memory: Any = super().to(device, dtype)
        if dtype is not None:
            exact = torch.promote_types(dtype, torch.float32)
            cached = self.by_name()[2:]
            memory.inputs = [x.to(device=device, dtype=exact) for layers in cached for x in layers]
        return memory

    def _in_same_buffers(
        self, start: int, stop: int, forgotten: Tensor | None = None
    ) -> "KeysAndValues":
        memory = KeysAndValues(*self._buffers, forgotten=forgotten, adapters=self.adapters)
        memory.start, memory.stop, memory._free = start, stop, self._free
        memory.is_prefix = self.is_prefix
        return memory


def join(memories: Sequence[Memory]) -> Memory:
    """Concatenate memories along the batch dimension.

    Shorter ones are padded in front, and the padding is masked.

    Raises:
        ValueError: The list is empty, or the memories differ in kind, depth or width.
    """
    if len({_sizes(memory) for memory in memories}) != 1:
        raise ValueError(
            f"{len(memories)} memories cannot be joined: there must be one at least, and all of "
            "one kind, as deep and as wide"
        )
    M = max(memory.length for memory in memories)
    forgotten = torch.cat([memory._mask() + M - memory.length for memory in memories])
    joined: Any = [
        [
            torch.cat([F.pad(x, (0, 0, M - x.shape[-2], 0)) for x in layer], -3)
            for layer in zip(*tensors, strict=True)
        ]
        for tensors in zip(*(memory.by_name() for memory in memories), strict=True)
    ]
    memory = type(memories[0])(*joined)
    if isinstance(memory, KeysAndValues):
        for other in memories:
            if isinstance(other, KeysAndValues) and other.adapters is not None:
                memory.require(other.adapters)
    return memory.masking(forgotten if forgotten.any() else None)


def _sizes(memory: Memory) -> tuple[Any, ...]:
    """Return the sizes that memories of the same model share."""
    return type(memory), *((*x.shape[:-3], x.shape[-1]) for x in memory.tensors)


def _is_sealed(x: Tensor) -> bool:
    """Whether a tensor made in inference mode is used outside of it, where it is read-only."""
    # Traced code has no such tensors.
    return (
        not torch.compiler.is_compiling()
        and x.is_inference()
        and not torch.is_inference_mode_enabled()
    )


def savable(x: Tensor) -> Tensor:
    """Return a tensor that autograd, if it is recording, can save."""
    return x.clone() if torch.is_grad_enabled() and _is_sealed(x) else x


def _shift(forgotten: Tensor | None, cut: int) -> Tensor | None:
    return forgotten if forgotten is None or cut == 0 else (forgotten - cut).clamp(min=0)
