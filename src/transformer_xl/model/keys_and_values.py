"""Keys and values projected from the hidden states of a memory, for fixed weights."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.errors import InputError
from transformer_xl.model.memory import OTHER_ADAPTERS, Memory, is_sealed, savable, shifted


class KeysAndValues(Memory):
    """Keys and values of the last positions (a KV cache); valid while the weights are fixed.

    Buffers have spare capacity: most steps write behind the last keys and copy nothing, and a full
    buffer is replaced by a larger one. No position is overwritten, so all memories that share
    buffers stay valid. :meth:`with_capacity` returns the memory that a forward pass appends to;
    nobody else has it, and :meth:`extend` returns the memory after that.

    Attributes:
        keys: For each layer, (H, B, capacity, K).
        values: For each layer, (H, B, capacity, K).
        inputs: With ``input_recurrence``, the inputs of the first layer alone, (1, B, capacity, D),
            in float32 at least.
        adapters: What :func:`~transformer_xl.model.calling.adapters` returned for the model that
            projected them. None: unknown, as after loading; set by the first model that uses them.
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
        adapters: tuple[object, ...] | None = None,
    ) -> None:
        self.forgotten = forgotten
        self.keys, self.values, self.inputs = list(keys), list(values), list(inputs)
        self.names = ("keys", "values", "inputs") if inputs else ("keys", "values")
        self.adapters = adapters
        self.start, self.stop = 0, self.keys[0].shape[2]
        # Where the free part begins, shared by all memories of these buffers. Whoever pops it may
        # write there. torch.compile cannot trace a lock. A symbol in a traced program is no key.
        self._free = {self.stop: True} if isinstance(self.stop, int) else {}

    @property
    def length(self) -> int:
        """What ``len()`` returns, or a symbol for it in a traced program."""
        return self.stop - self.start

    @property
    def batch_size(self) -> int:
        """Number of streams."""
        return self.keys[0].shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self.keys[0].device

    @property
    def _buffers(self) -> tuple[list[Tensor], ...]:
        return (self.keys, self.values, self.inputs)[: len(self.names)]

    def by_name(self) -> tuple[Sequence[Tensor], ...]:
        """Return, for each name, one tensor per layer, (H, B, M, K); of inputs, only the first."""
        cached = slice(self.start, self.stop)
        return tuple([x[:, :, cached] for x in layers] for layers in self._buffers)

    def bind_adapters(self, adapters: tuple[object, ...]) -> None:
        """Store the adapters of the model if they are unknown; otherwise require the same ones.

        Args:
            adapters: What :func:`~transformer_xl.model.calling.adapters` returned for the model.

        Raises:
            InputError: The keys and values were projected with other adapters.
        """
        if self.adapters is None:
            self.adapters = adapters
        if self.adapters != adapters:
            raise InputError(OTHER_ADAPTERS)

    def with_capacity(self, T: int, mem_len: int) -> "KeysAndValues":
        """Return the same memory with free capacity for ``T`` more positions.

        The capacity is exclusive: another continuation of this memory, also in another thread, is
        given different buffers.
        """
        has_capacity = self.stop + T <= self.keys[0].shape[2]
        is_read_only = any(is_sealed(x) for layers in self._buffers for x in layers)
        # dict.pop is atomic.
        if has_capacity and not is_read_only and self._free.pop(self.stop, False):
            self._free[self.stop + T] = True
            # A new object, because writing in another precision replaces its tensors.
            return self._in_same_buffers(self.start, self.stop, savable(self.forgotten))
        # Twice the memory: positions are copied once every mem_len tokens.
        M = self.length
        capacity = M + T + max(M, mem_len)

        def moved(x: Tensor) -> Tensor:
            larger = x.new_empty(*x.shape[:2], capacity, x.shape[3])
            larger[:, :, :M] = x
            return larger

        grown = self.changed(moved)
        grown.stop, grown._free, grown.forgotten = M, {M + T: True}, savable(self.forgotten)
        return grown

    def masking(self, forgotten: Int[Tensor, " B"] | None) -> "KeysAndValues":
        """Return the memory with as many positions of each stream masked; None: none."""
        return self._in_same_buffers(self.start, self.stop, forgotten)

    def pasts(self, x: Float[Tensor, "B T D"]) -> Sequence[Float[Tensor, "B none D"]]:
        """Return the hidden states of each layer, which are cached as keys and values: none."""
        return [x[:, :0]] * len(self.keys)

    def detach(self) -> "KeysAndValues":
        """Return the memory: it is detached."""
        return self

    def join(  # pyright: ignore[reportIncompatibleVariableOverride]
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
        to[layer][:, :, self.stop : self.stop + new.shape[2]] = new

    def extend(
        self, states: Sequence[Tensor], mem_len: int, n_kept: int | None = None
    ) -> "KeysAndValues":
        """See :meth:`Memory.extend`; keys and values have been joined already."""
        n_kept = int(states[0].shape[1]) if n_kept is None else n_kept
        cut = max(self.length + n_kept - mem_len, 0)
        after = self._in_same_buffers(self.start + cut, self.stop + n_kept)
        return after.masking(shifted(self.forgotten, cut))

    def between(self, start: int, stop: int) -> "KeysAndValues":
        """Return the positions from ``start`` to ``stop``, none of them masked."""
        return self._in_same_buffers(self.start + start, self.start + stop)

    def changed(self, change: Callable[[Tensor], Tensor]) -> "KeysAndValues":
        """Return the memory with a function applied to each tensor, and nothing masked."""
        changed = ([change(x) for x in layers] for layers in self.by_name())
        return KeysAndValues(*changed, adapters=self.adapters)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Memory":
        """Return the memory on another device or in another precision.

        The inputs of a recurrence are in float32 at least.
        """
        memory = super().to(device, dtype)
        if isinstance(memory, KeysAndValues) and dtype is not None:
            exact = torch.promote_types(dtype, torch.float32)
            cached = self.by_name()[2:]
            memory.inputs = [x.to(device=device, dtype=exact) for layers in cached for x in layers]
        return memory

    def _in_same_buffers(
        self, start: int, stop: int, forgotten: Tensor | None = None
    ) -> "KeysAndValues":
        memory = KeysAndValues(*self._buffers, forgotten=forgotten, adapters=self.adapters)
        memory.start, memory.stop, memory._free = start, stop, self._free
        return memory
