"""The memory: hidden states of previous segments; every operation returns a new one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.errors import InputError
from transformer_xl.model.arguments import Rows, shown, stream_numbers, whole

Join = Callable[
    [int, Float[Tensor, "B T H K"], Float[Tensor, "B T H K"]],
    tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]],
]
"""Appends keys and values of a segment to the cached ones of a layer, and returns all of them."""

OTHER_ADAPTERS = (
    "adapters were added, switched, trained, merged or removed since these keys and values were "
    "made, which belong to the weights of that time: begin anew with mems=None "
    "(past_key_values=None, another Session) and read the text again"
)
_Tensor = TypeVar("_Tensor", Tensor, Tensor | None)


class Memory:
    """The last hidden states that each layer has read (section 3.2 of the paper), detached.

    Methods raise InputError for a stream index out of range (on a GPU, a device-side assertion), a
    negative length, or a state with inconsistent shapes.

    Attributes:
        forgotten: For each stream, how many of its oldest positions are masked; None: none.
            Streams that were reset have a shorter past than the others of their batch.
        has_keys: Whether it is a memory of :class:`KeysAndValues`, for fixed weights.
        names: The names of what is remembered.
        states: The hidden states of each layer; :class:`KeysAndValues` have none.
        adapters: With which its keys and values were projected, if that is known.

    Args:
        states: For each layer its inputs, (B, M, D), oldest first.
        forgotten: As the attribute.

    Example:
        >>> memory = Memory([torch.zeros(2, 6, 8)])  # one layer, two streams, six positions
        >>> len(memory), len(memory.last(4)), memory.select([1, 1, 0]).batch_size
        (6, 4, 3)
    """

    has_keys = False
    names: tuple[str, ...] = ("states",)
    join: Join | None = None
    """How layers append to the keys and values of the memory; None: it holds none."""
    adapters: tuple[object, ...] | None = None

    def __init__(
        self,
        states: Sequence[Float[Tensor, "B M D"]],
        forgotten: Int[Tensor, " B"] | None = None,
    ) -> None:
        self.states = tuple(states)
        self.forgotten = forgotten

    # Overridden by KeysAndValues.

    def by_name(self) -> tuple[Sequence[Tensor], ...]:
        """Return, for each name, one tensor per layer; its last dimensions are B, M and width."""
        return (self.states,)

    @property
    def length(self) -> int:
        """What ``len()`` returns, or a symbol for it in a traced program."""
        return self.states[0].shape[1]

    @property
    def batch_size(self) -> int:
        """Number of streams."""
        return self.states[0].shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self.states[0].device

    def masking(self, forgotten: Int[Tensor, " B"] | None) -> "Memory":
        """Return the memory with as many positions of each stream masked; None: none."""
        return Memory(self.states, forgotten)

    def between(self, start: int, stop: int) -> "Memory":
        """Return the positions from ``start`` to ``stop``, none of them masked."""
        return self.changed(lambda x: x[:, start:stop])

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Memory":
        """Return the memory with a function applied to each tensor, and nothing masked."""
        return Memory([change(x) for x in self.states])

    def with_capacity(self, T: int, mem_len: int) -> "Memory":
        """Return the memory detached (SG, section 3.2), copied if autograd could not save it.

        ``T`` and ``mem_len`` matter to :class:`KeysAndValues` alone, which reserves room for a
        segment.
        """
        return self.changed(lambda x: savable(x.detach())).masking(savable(self.forgotten))

    def pasts(self, x: Float[Tensor, "B T D"]) -> Sequence[Float[Tensor, "B M D"]]:
        """Return what each layer has to project of the memory: all of it.

        Of keys and values it is nothing, (B, 0, D) like ``x``.
        """
        return self.states

    def last_input(self) -> Float[Tensor, "B 1 D"]:
        """Return the last input of the first layer, of a memory that is not empty."""
        return self.states[0][:, -1:]

    def append_input(self, x: Float[Tensor, "B T D"]) -> None:
        """Append the inputs of the first layer, if they are remembered apart from it."""

    def detach(self) -> "Memory":
        """Return the memory detached from the graph; a model's ``mems`` already are.

        With gradients enabled, tensors made in inference mode are copied, because autograd cannot
        save them.
        """
        return self.with_capacity(0, 0)

    # Shared with KeysAndValues.

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Views of all remembered tensors."""
        return tuple(x for layers in self.by_name() for x in layers)

    def __len__(self) -> int:
        return self.length

    def extend(self, states: Sequence[Tensor], mem_len: int, n_kept: int | None = None) -> "Memory":
        """Return the memory after another segment: its newest ``mem_len`` positions.

        Args:
            states: What is remembered of each layer; keys and values have been joined already.
            mem_len: Maximum number of positions to keep.
            n_kept: How many positions of the segment are appended; None: all.
        """
        # The stop-gradient SG of section 3.2.
        M, new = self.length, [x.detach()[:, :n_kept] for x in states]
        # Of memory and segment, so many of the oldest positions are dropped.
        cut = max(M + new[0].shape[1] - mem_len, 0)
        if cut > M:
            new = [x[:, cut - M :] for x in new]
        # Exactly the segment is shared, not copied, as the backward pass needs it anyway; of a
        # part of it a copy is kept, so that the rest can be freed.
        if cut != M:
            joined = zip(self.states, new, strict=True)
            new = [torch.cat([old[:, cut:].to(x.dtype), x], 1) for old, x in joined]
        return Memory(new, shifted(self.forgotten, cut))

    def last(self, mem_len: int) -> "Memory":
        """Return the newest ``mem_len`` positions."""
        cut = max(self.length - whole("mem_len", mem_len), 0)
        return self.between(cut, self.length).masking(shifted(self.forgotten, cut))

    def without_last(self, n: int) -> "Memory":
        """Return all positions but the newest ``n``."""
        return self.between(0, self.length - n).masking(self.forgotten)

    def reset(self, rows: Rows) -> "Memory":
        """Return a memory in which all positions are masked for the streams ``rows``."""
        index = stream_numbers(rows, self.batch_size, self.device)
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
        index = stream_numbers(rows, self.batch_size, self.device)
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

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return the memory as plain tensors.

        They are ``states`` (N, B, M, D), or ``keys`` and ``values`` (N, H, B, M, K), with
        ``input_recurrence`` also ``inputs`` (1, 1, B, M, D); and ``forgotten`` (B,) or None.
        """
        tensors = zip(self.names, self.by_name(), strict=True)
        stacked = {name: torch.stack([*layers]) for name, layers in tensors}
        return stacked | {"forgotten": self.forgotten}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor | None]) -> "Memory":
        """Rebuild a memory, of hidden states or of keys and values, from :meth:`state_dict`.

        Raises:
            InputError: A shape, dtype or count is wrong.
        """
        from transformer_xl.model import KeysAndValues

        kind, names, ndim = KeysAndValues, ("keys", "values", "inputs"), 5
        if "states" in state:
            kind, names, ndim = Memory, Memory.names, 4
        if missing := {*names[:2]} - state.keys():
            raise InputError(f"the state of a memory lacks {min(missing)}: it is not complete")
        tensors = {name: x for name in names if (x := state.get(name)) is not None}
        shapes = {name: tuple(x.shape) for name, x in tensors.items()}
        shape = shapes[names[0]]
        expected = dict.fromkeys(shapes, shape)
        if "inputs" in shapes:
            # Of one layer, for the streams and positions of the keys.
            expected["inputs"] = 1, 1, *shape[2:4], *shapes["inputs"][4:]
        are_real = all(x.is_floating_point() for x in tensors.values())
        if not (are_real and shapes == expected and len(shape) == ndim and shape[0]):
            raise InputError(f"{shapes} are no memory: numbers of {ndim} dimensions, of one shape")
        forgotten, (B, M) = state["forgotten"], shape[-3:-1]
        if forgotten is not None and not (
            forgotten.shape == (B,)
            and forgotten.dtype == torch.int64
            and bool(((forgotten >= 0) & (forgotten <= M)).all())
        ):
            raise InputError(
                f"forgotten={shown(forgotten)} must be an integer for each of the {B} streams, "
                f"from 0 to {M}"
            )
        return kind(*(x.unbind() for x in tensors.values()), forgotten=forgotten)

    @staticmethod
    def cat(memories: Sequence["Memory"]) -> "Memory":
        """Concatenate memories along the batch dimension.

        Shorter ones are padded in front, and the padding is masked.

        Raises:
            InputError: The list is empty, or the memories differ in kind, depth, width or adapters.
        """
        shared = {
            (type(memory), *((*x.shape[:-3], x.shape[-1]) for x in memory.tensors))
            for memory in memories
        }
        if len(shared) != 1:
            raise InputError(
                f"{len(memories)} memories cannot be joined: there must be one at least, and all "
                "of one kind, as deep and as wide"
            )
        adapters = {memory.adapters for memory in memories} - {None}
        if len(adapters) > 1:
            raise InputError(OTHER_ADAPTERS)
        M = max(memory.length for memory in memories)
        forgotten = torch.cat([memory._mask() + M - memory.length for memory in memories])
        joined: Any = [
            [
                torch.cat([F.pad(x, (0, 0, M - x.shape[-2], 0)) for x in layer], -3)
                for layer in zip(*tensors, strict=True)
            ]
            for tensors in zip(*(memory.by_name() for memory in memories), strict=True)
        ]
        memory = type(memories[0])(*joined, forgotten=forgotten if forgotten.any() else None)
        memory.adapters = next(iter(adapters), None)
        return memory

    def _mask(self) -> Int[Tensor, " B"]:
        if self.forgotten is not None:
            return self.forgotten
        return torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)


def is_sealed(x: Tensor) -> bool:
    """Whether a tensor made in inference mode is used outside of it, where it is read-only."""
    # Traced code has no such tensors.
    return (
        not torch.compiler.is_compiling()
        and x.is_inference()
        and not torch.is_inference_mode_enabled()
    )


def savable(x: _Tensor) -> _Tensor:
    """Return a tensor that autograd, if it is recording, can save; None passes."""
    return x.clone() if x is not None and torch.is_grad_enabled() and is_sealed(x) else x


def shifted(forgotten: Tensor | None, cut: int) -> Tensor | None:
    """Return how many positions are masked after the ``cut`` oldest ones were dropped."""
    return forgotten if forgotten is None or cut == 0 else (forgotten - cut).clamp(min=0)
