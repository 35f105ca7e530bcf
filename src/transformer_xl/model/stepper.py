"""The stepper: advances a batch of streams by one token, or real vector, each.

All generation uses it: of functions and sessions, the server and transformers.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.model.arguments import Rows, step_inputs, stream_numbers
from transformer_xl.model.calling import first_wrapped
from transformer_xl.model.capture import captured
from transformer_xl.model.embedding import AdaptiveEmbedding, embedded
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import KeysAndValues, Memory, join
from transformer_xl.model.positions import Positions
from transformer_xl.model.reading import read
from transformer_xl.model.ring import RingView, attend
from transformer_xl.model.segment import View
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.variants.residuals import factors
from transformer_xl.ops import choose_backend, native, triton

_LEAST_CAPACITY = 64
Inputs = Int[Tensor, " B"] | Float[Tensor, "B F"]
"""A token, or real vector, of each stream."""


class Stepper(ABC):
    """Advances a batch of streams by one token each; :meth:`of` chooses the implementation.

    Attributes:
        state: The state of the streams. :meth:`read` returns the next state without setting it, so
            that an interrupted step can be repeated; calling the stepper sets it.
        is_fast: Whether a step is a single launch or call, instead of one for each operation.
    """

    state: Any
    is_fast: ClassVar[bool] = False
    _model: Any

    @staticmethod
    def of(model: LanguageModel, lengths: Lengths, memory: Memory) -> "Stepper":
        """Create the fastest stepper for a model.

        Args:
            model: The model, in evaluation mode and with fixed weights.
            lengths: The lengths; ``segment_len`` and ``ext_len`` are not used.
            memory: The memory of the streams. It is copied.

        Raises:
            ValueError: The memory does not fit the model.
        """
        model.require_memory(memory)
        memory = model.keep(memory)
        kind, _ = choose_stepper(model)
        if kind == NativeStepper and memory.tensors[0].dtype != model.dtype:
            kind = RingStepper
        return cast(Any, kind)(model, lengths, memory)

    def __call__(self, tokens: Inputs) -> Float[Tensor, "B D"]:
        """Read a token of each stream and set the next state; return the output of the layers.

        Raises:
            ValueError: A token is outside the vocabulary (on a GPU, a device-side assertion); the
                number of tokens is not the batch size; or adapters were changed.
        """
        hidden, self.state = self.read(tokens)
        return hidden

    @abstractmethod
    def read(self, tokens: Inputs) -> tuple[Float[Tensor, "B D"], Any]:
        """Read a token of each stream; return the output of the layers and the next state."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Number of streams."""

    @abstractmethod
    def memory(self, rows: Rows | None = None) -> Memory:
        """Return a copy of the memory of some streams. None: all."""

    @abstractmethod
    def select(self, rows: Rows) -> "Stepper":
        """Return a new stepper of the streams ``rows``, in that order; repetition is allowed."""

    def take(self, rows: Rows) -> "Stepper":
        """As :meth:`select`, but may reuse the buffers of this stepper, which becomes invalid."""
        return self.select(rows)

    @abstractmethod
    def put(self, row: int, memory: Memory) -> None:
        """Replace the memory of a row by a copy of another one, of a single stream."""

    @abstractmethod
    def reset(self, rows: Rows) -> None:
        """Clear the memory of some streams."""

    def _taken(self, tokens: Tensor) -> Tensor:
        return step_inputs(tokens, self.batch_size, self._model.config)


class CallingStepper(Stepper):
    """Calls the model for each token: for models without a KV cache, or with wrapped modules."""

    state: Memory

    def __init__(self, model: LanguageModel, lengths: Lengths, memory: Memory) -> None:
        self._model = model
        self._lengths = lengths._replace(segment_len=1, ext_len=0)
        self.state = memory

    @torch.no_grad()
    def read(self, tokens: Inputs) -> tuple[Float[Tensor, "B D"], Memory]:
        """See :meth:`Stepper.read`."""
        given = self._taken(tokens)[:, None]
        (piece,) = read(self._model, given, self._lengths, self.state)
        return piece.hidden[:, -1], piece.mems

    @property
    def batch_size(self) -> int:
        """See :meth:`Stepper.batch_size`."""
        return self.state.batch_size

    def memory(self, rows: Rows | None = None) -> Memory:
        """See :meth:`Stepper.memory`; the memory of all streams is returned without a copy."""
        return self.state if rows is None else self.state.select(rows)

    def select(self, rows: Rows) -> "CallingStepper":
        """See :meth:`Stepper.select`."""
        return CallingStepper(self._model, self._lengths, self.state.select(rows))

    def put(self, row: int, memory: Memory) -> None:
        """See :meth:`Stepper.put`."""
        order = [self.batch_size if n == row else n for n in range(self.batch_size)]
        self.state = join([self.state, self._model.keep(memory)]).select(order)

    def reset(self, rows: Rows) -> None:
        """See :meth:`Stepper.reset`."""
        self.state = self.state.reset(rows)


def choose_stepper(model: LanguageModel) -> tuple[type[Any], str]:
    """Choose the stepper of a model; return it with the reason, for display."""
    if not isinstance(model, TransformerXL) or model.positions.is_absolute:
        return CallingStepper, "the model has no keys and values that could be kept"
    if model.config.layer_attn_lens:
        return CallingStepper, "the layers have attention lengths of their own"
    if (wrapped := first_wrapped(model)) is not None:
        return CallingStepper, f"{wrapped} was wrapped, replaced or hooked, and has to be called"
    if torch.is_autocast_enabled(model.device.type):
        return CallingStepper, "autocast chooses the precision of each operation"
    if model.device.type == "cuda":
        return FixedStepper, "the step is captured as a CUDA graph"
    against = reason_against_native(model, model.dtype)
    if against is None:
        return NativeStepper, f"compiled step, {native.level()}"
    return RingStepper, f"operations of torch: {against}"


def reason_against_native(model: TransformerXL, dtype: torch.dtype) -> str | None:
    """Return why the compiled step cannot be used, for display; None: it can."""
    config = model.config
    weights = [linear.weight for layer in model.layers for linear in layer.matrices]
    for is_set, what in (
        (model.positions.is_absolute, f"attn_type={config.attn_type}"),
        (bool(config.layer_attn_lens), "layer_attn_lens"),
        (config.gate != "none", f"gate={config.gate!r}"),
        (config.enhanced_recurrence, "enhanced_recurrence=True"),
        ("raw_queries" in config.quirks, "the quirk raw_queries"),
    ):
        if is_set:
            return f"the compiled step does not support {what}"
    if reason := native.reason_against(model.device, dtype):
        return reason
    for weight in weights:
        if not native.can_read(weight, dtype):
            return f"the compiled step cannot read a {type(weight).__name__} in {weight.dtype}"
    return None


def _maps(model: TransformerXL) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the linear maps of the layers, with their owners and names there."""
    parts = [part for layer in model.layers for part in layer.modules()]
    return [(x, *c) for x in parts for c in x.named_children() if isinstance(c[1], nn.Linear)]


class RingStepper(Stepper):
    """Keeps keys and values in a ring buffer, in which the newest position replaces the oldest.

    The softmax does not depend on the order of the keys; the position scores, computed for all
    distances, are gathered into the order of the slots. The capacity is ``mem_len + 1``, or less
    while all streams are shorter: the buffer then grows, and its slots are in order.
    """

    state: int
    """Index of the next position, common to all streams of the batch."""

    def __init__(self, model: TransformerXL, lengths: Lengths, memory: Memory) -> None:
        self._model, self._reset_at = model, model.config.reset_at
        self._maps = _maps(model)
        self._mem_len, self._size = lengths.mem_len, lengths.mem_len + 1
        self._limit = lengths.windowed().attn_len or self._size
        self._clamp_len = lengths.clamp_len
        memory = memory.last(self._mem_len)
        assert isinstance(memory, KeysAndValues)
        model.require_own(memory)
        # Index of the first position that each stream sees.
        self._first = torch.zeros(memory.batch_size, dtype=torch.int64, device=model.device)
        if memory.forgotten is not None:
            self._first += memory.forgotten
        self.state = len(memory)
        self._lay_out(memory.by_name(), slice(None), self.state, self._capacity_for(self.state + 1))

    @property
    def batch_size(self) -> int:
        """See :meth:`Stepper.batch_size`."""
        return len(self._first)

    @torch.no_grad()
    def read(self, tokens: Inputs) -> tuple[Float[Tensor, "B D"], int]:
        """See :meth:`Stepper.read`."""
        self._require_plain()
        # Before anything is modified, as an invalid token raises here.
        x = self._embedded(self._taken(tokens).to(self._first.device)[:, None])
        if self._reset_at is not None:
            self._first[tokens == self._reset_at] = self.state
        return self._advanced(x)[:, 0], self.state + 1

    @torch.no_grad()
    def memory(self, rows: Rows | None = None) -> Memory:
        """See :meth:`Stepper.memory`."""
        if rows is not None:
            return self.select(rows).memory()
        M = self._longest()
        place = self._places(self.state - M, self.state)
        cached = ([x.index_select(2, place) for x in rings] for rings in self._rings)
        forgotten = (self._first - (self.state - M)).clamp(min=0)
        # Each step checks that the model has no adapters.
        mask = forgotten if forgotten.any() else None
        return KeysAndValues(*cached, forgotten=mask, adapters=())

    @torch.no_grad()
    def select(self, rows: Rows) -> "RingStepper":
        """See :meth:`Stepper.select`."""
        index = self._numbers(rows)
        other = copy.copy(self)
        other._rings = tuple([x.index_select(1, index) for x in rings] for rings in self._rings)
        other._first = self._first[index]
        other._renew()
        return other

    @torch.no_grad()
    def put(self, row: int, memory: Memory) -> None:
        """See :meth:`Stepper.put`."""
        memory = self._model.keep(memory).last(self._mem_len).seen()
        M, before = len(memory), self.state
        if before < M:
            # Shifted by a multiple of the capacity, all positions keep their slots.
            shift = -(-(M - before) // self._capacity) * self._capacity
            self.state = before + shift
            self._first += shift
        self._first[row] = self.state
        span = max(M, self._longest()) + 1
        if self._has_to_move(span):
            self._move(span)
        place = self._places(self.state - M, self.state)
        for rings, given in zip(self._rings, memory.by_name(), strict=True):
            for x, new in zip(rings, given, strict=True):
                x[:, row : row + 1, place] = new.to(x.dtype)
        self._first[row] = self.state - M

    def reset(self, rows: Rows) -> None:
        """See :meth:`Stepper.reset`."""
        self._first[self._numbers(rows)] = self.state

    def _numbers(self, rows: Rows) -> Int[Tensor, " rows"]:
        return stream_numbers(rows, self.batch_size, self._first.device)

    def _require_plain(self) -> None:
        if [x for owner, name, x in self._maps if getattr(owner, name) is not x]:
            raise ValueError(
                "the model was given adapters since these streams were begun, whose keys and "
                "values belong to the weights of that time: begin anew with mems=None "
                "(past_key_values=None, another Session) and read the text again"
            )

    def _embedded(self, tokens: Tensor) -> Float[Tensor, "B 1 D"]:
        return embedded(self._model.embedding, tokens)

    @property
    def _position(self) -> int | Int[Tensor, ""]:
        return self.state

    def _longest(self) -> int:
        """Return the length of the longest stream, at most ``mem_len``."""
        first = int(self._first.min()) if len(self._first) else self.state
        return min(self.state - first, self._mem_len)

    def _capacity_for(self, span: int) -> int:
        """Return the capacity to allocate for ``span`` positions, the next one included."""
        return min(self._size, max(_LEAST_CAPACITY, 2 * span))

    def _places(self, start: int, stop: int) -> Int[Tensor, " n"]:
        """Return the slots of the positions from ``start`` to ``stop``."""
        position = torch.arange(start, stop, device=self._first.device)
        return (position - self._origin) % self._capacity

    def _lay_out(
        self,
        cached: Sequence[Sequence[Tensor]],
        place: Any,
        M: int,
        capacity: int,
    ) -> None:
        """Copy the newest ``M`` positions, which are at ``place``, in order into new rings."""

        def laid(x: Float[Tensor, "H B places K"]) -> Float[Tensor, "H B capacity K"]:
            # Zeros, as masked positions are multiplied by zero and must be finite.
            ring = x.new_zeros(*x.shape[:2], capacity, x.shape[3])
            ring[:, :, :M] = x[:, :, place]
            return ring

        view = View(clamp_len=self._clamp_len, is_fixed=True)
        positions = self._model.positions.encode(self._model, capacity, 1, view)
        # In one assignment, so that an interrupt leaves a consistent state.
        self._rings, self._positions, self._capacity, self._origin = (
            tuple([laid(x) for x in layers] for layers in cached),
            [each for each in positions if isinstance(each, Positions)],
            capacity,
            self.state - M,
        )
        self._renew()

    def _has_to_move(self, span: int, reach: int = 1) -> bool:
        """Whether the ring is too small for ``span`` positions, or larger than needed.

        Unless it has its full capacity, the newest ``reach`` positions have to be in order, too.
        """
        newest = (self.state - self._origin) % self._capacity
        return (
            span > self._capacity
            or (newest == 0 and self._capacity_for(span) < self._capacity)
            or (reach > newest + 1 and self._capacity < self._size)
        )

    def _move(self, span: int) -> None:
        """Copy the positions in order into a ring for ``span`` positions."""
        M = self._longest()
        place = self._places(self.state - M, self.state)
        self._lay_out(self._rings, place, M, self._capacity_for(span))

    def _renew(self) -> None:
        """Drop what depends on the addresses of the buffers."""

    def _advanced(self, x: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B 1 D"]:
        """Compute the layers for embedded tokens at the next position."""
        return self._through(x, self._view())

    def _view(self) -> RingView:
        n, span = self.state, self._longest() + 1
        reach = min(span, self._limit)
        if self._has_to_move(span, reach):
            self._move(span)
        newest = (n - self._origin) % self._capacity
        is_in_order = reach <= newest + 1
        places = slice(newest + 1 - reach, newest + 1) if is_in_order else slice(0, self._capacity)
        # Distance of each slot from the token.
        place = torch.arange(places.start, places.stop, device=self._first.device)
        distance = (newest - place) % self._capacity
        order = None if is_in_order else self._capacity - 1 - distance
        seen = (n + 1 - self._first).clamp(max=self._limit)
        hidden = None
        if len(place) > int(seen.min()):
            hidden = distance >= seen[:, None]
        return RingView(newest, places, order, hidden, seen)

    def _through(self, x: Float[Tensor, "B 1 D"], view: RingView) -> Float[Tensor, "B 1 D"]:
        """Compute the layers for embedded tokens; write their keys and values into the ring."""
        model = self._model
        x, first, nothing = self._recurrent(x, view.newest), model.residuals(model), x[:, :0]
        for n, layer in enumerate(model.layers):
            x = first.inputs(n, x)
            q, k, v = layer.project(x, nothing)
            attended = self._attended(n, view, q, k, first.values(n, v))
            x = layer.finish(x, layer.attention.merged(attended))
            if model.config.enhanced_recurrence:
                self._write(n, view.newest, layer.keys_and_values(x))
        return model.final_norm(x)

    def _write(self, n: int, newest: Any, present: Sequence[Tensor]) -> None:
        """Write the keys and values of a token into the ring of a layer."""
        for rings, new in zip(self._rings[:2], present, strict=True):
            self._set(rings[n], newest, new.permute(2, 0, 1, 3))

    def _set(self, ring: Tensor, newest: Any, new: Float[Tensor, "H B 1 K"]) -> None:
        ring[:, :, newest] = new[:, :, 0].to(ring.dtype)

    def _recurrent(self, x: Float[Tensor, "B 1 D"], newest: Any) -> Float[Tensor, "B 1 D"]:
        """Continue the recurrence of the inputs, if there is one; write the input into its ring."""
        decay = self._model.input_decay
        if decay is None:
            return x
        (ring,) = self._rings[2]
        own = x.to(ring.dtype)
        if self._mem_len:
            last = ring[0][:, (newest - 1) % self._capacity].reshape(x.shape)
            is_first = (self._first >= self._position)[:, None, None]
            own = own + (last * decay.to(ring.dtype).tanh()).masked_fill(is_first, 0)
        self._set(ring, newest, own[None])
        return own.to(x.dtype)

    def _attended(self, n: int, view: RingView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the keys and values, (B, 1, H, K), into the ring of layer ``n``; attend to it."""
        self._write(n, view.newest, (k, v))
        keys, values = (rings[n] for rings in self._rings[:2])
        return attend(q, keys, values, self._positions[n], view)


class NativeStepper(RingStepper):
    """A ring whose step is one call of a compiled library, on a CPU (:mod:`transformer_xl.ops`).

    A stream reads the keys that it sees, in at most two runs of slots: nothing is masked or
    gathered. Results do not depend on the number of threads.
    """

    is_fast = True

    _decoder: native.Decoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what has addresses; it is made again."""
        return self.__dict__ | {"_decoder": None}

    def _move(self, span: int) -> None:
        # First, so that an interrupt leaves none that has the addresses of an old ring.
        self._renew()
        super()._move(span)

    def _renew(self) -> None:
        self._decoder = None

    def _advanced(self, x: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B 1 D"]:
        n, span = self.state, self._longest() + 1
        if self._has_to_move(span):
            self._move(span)
        if self._decoder is None:
            self._decoder = self._described()
        seen = (n + 1 - self._first).clamp_(max=self._limit)
        newest = (n - self._origin) % self._capacity
        if self._model.input_decay is not None:
            x = self._recurrent(x, newest)
        return self._decoder(x[:, 0], seen, newest)[:, None]

    def _described(self) -> native.Decoder:
        model, config, final = self._model, self._model.config, self._model.final_norm
        N = config.n_layer
        tensors = []
        mixes = (
            factors(model.value_own, model.value_first, N),
            factors(model.embedding_own, model.embedding_first, N),
        )
        made = model.layers, self._positions, *self._rings[:2], *mixes
        for layer, at, keys, values, of_values, of_embedding in zip(*made, strict=True):
            qkv, o, inner, outer = layer.matrices
            norms = layer.attention_norm, layer.feed_forward_norm
            q_norm, k_norm = layer.attention.q_norm, layer.attention.k_norm
            described = native.LayerTensors(
                qkv=qkv.weight,
                o=o.weight,
                inner=inner.weight,
                outer=outer.weight,
                inner_bias=inner.bias,
                outer_bias=outer.bias,
                attention_norm=norms[0].weight,
                attention_norm_bias=getattr(norms[0], "bias", None),
                feed_forward_norm=norms[1].weight,
                feed_forward_norm_bias=getattr(norms[1], "bias", None),
                q_norm=None if q_norm is None else q_norm.weight,
                k_norm=None if k_norm is None else k_norm.weight,
                content_bias=at.content_bias,
                position_bias=at.position_bias,
                r=at.r,
                distance_bias=at.distance_bias,
                keys=keys,
                values=values,
                value_factors=of_values,
                embedding_factors=of_embedding,
            )
            tensors.append(described)
        return native.Decoder(
            tensors,
            (final.weight, getattr(final, "bias", None)) if config.final_norm else None,
            activation=config.activation,
            norm_first=config.norm_first,
            is_rms=config.norm == "rms",
            eps=config.norm_eps,
        )


class FixedStepper(RingStepper):
    """A ring whose step has fixed shapes and addresses, so that a CUDA graph can replay it.

    The ring has its full capacity from the start, and the index of the newest position is a tensor
    on the device. On a GPU the step is captured once and then replayed with one launch.
    """

    is_fast = True

    def _renew(self) -> None:
        B, device = len(self._first), self._first.device
        self._all_places = torch.arange(self._size, device=device)
        # Inputs and output of a step, at fixed addresses.
        self._number = torch.zeros((), dtype=torch.int64, device=device)
        self._tokens = torch.zeros(B, dtype=torch.int64, device=device)
        if F := self._model.config.n_features:
            self._tokens = torch.zeros(B, F, dtype=self._model.dtype, device=device)
        self._hidden = self._rings[0][0].new_zeros(B, self._model.config.d_model)
        self._replay: Callable[[], None] | None = None

    @torch.no_grad()
    def read(self, tokens: Inputs) -> tuple[Float[Tensor, "B D"], int]:
        """See :meth:`Stepper.read`."""
        self._require_plain()
        self._tokens.copy_(self._taken(tokens))
        self._number.fill_(self.state)
        if self._replay is None:
            self._replay = captured(self._step, self._first)
        self._replay()
        return self._hidden.clone(), self.state + 1

    @torch.no_grad()
    def take(self, rows: Rows) -> "Stepper":
        """See :meth:`Stepper.take`; with as many rows, the buffers are reused."""
        index = self._numbers(rows)
        if len(index) != self.batch_size:
            return self.select(index)
        for x in chain(*self._rings):
            x.copy_(x.index_select(1, index))
        self._first.copy_(self._first[index])
        return self

    def _step(self) -> None:
        x = self._embedded(self._tokens[:, None])
        self._hidden.copy_(self._through(x, self._fixed_view())[:, 0])

    def _embedded(self, tokens: Tensor) -> Float[Tensor, "B 1 D"]:
        embed = self._model.embedding
        if isinstance(embed, AdaptiveEmbedding):
            return embedded(embed, tokens, embed.in_fixed_shapes)
        return super()._embedded(tokens)

    def _capacity_for(self, span: int) -> int:
        return self._size

    def _fixed_view(self) -> RingView:
        place = (self._number - self._origin) % self._size
        distance = (place - self._all_places) % self._size
        if self._reset_at is not None:
            is_reset = self._tokens == self._reset_at
            self._first.copy_(torch.where(is_reset, self._number, self._first))
        seen = (self._number + 1 - self._first).clamp(max=self._limit)
        if self._has_kernel:
            return RingView(place[None], slice(None), None, None, seen)
        hidden = distance >= seen[:, None]
        return RingView(place[None], slice(None), self._size - 1 - distance, hidden, seen)

    @property
    def _position(self) -> Int[Tensor, ""]:
        return self._number

    @property
    def _has_kernel(self) -> bool:
        keys = self._rings[0][0]
        return choose_backend(keys.device, keys.dtype, keys.shape[3]).backend == "triton"

    def _attended(self, n: int, view: RingView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self._has_kernel:
            return super()._attended(n, view, q, k, v)
        assert isinstance(view.newest, Tensor)
        keys, values, at = self._rings[0][n], self._rings[1][n], self._positions[n]
        r = at.r.to(keys.dtype)
        q, k, v = (x.to(keys.dtype) for x in (q, k, v))
        return triton.attend_step(
            *(q, k, v, keys, values, r, at.content_bias, at.position_bias),
            distance_bias=at.distance_bias,
            newest=view.newest,
            n_seen=view.n_seen,
        )

    def _set(self, ring: Tensor, newest: Any, new: Float[Tensor, "H B 1 K"]) -> None:
        ring.index_copy_(2, newest, new.to(ring.dtype))
