"""The decoder: advances a batch of streams by one token, or real vector, each.

All generation uses it: of functions and sessions, the server and transformers.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError
from transformer_xl.model.arguments import Rows
from transformer_xl.model.calling import first_wrapped
from transformer_xl.model.keys_and_values import KeysAndValues
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import OTHER_ADAPTERS, Memory
from transformer_xl.model.positions import Positions
from transformer_xl.model.reading import read
from transformer_xl.model.segment import Lengths, View
from transformer_xl.model.steps import CapturedStep, CompiledStep, Step
from transformer_xl.model.stream_cache import StreamCache
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.variants.key_offset import own_width
from transformer_xl.ops import choose_backend, native

Inputs = Int[Tensor, " B"] | Float[Tensor, "B F"]
"""A token, or real vector, of each stream."""


class Decoder(ABC):
    """Reads one token of each stream of a batch at a time; :meth:`of` chooses the implementation.

    It is not the stack of :class:`DecoderLayer`, which is :class:`TransformerXL`, but what runs it
    token by token.

    Attributes:
        state: The state of the streams. :meth:`read` returns the next state without setting it, so
            that an interrupted step can be repeated; calling the decoder sets it.
        kind: How a step runs: eager, compiled (C++) or captured (CUDA).
        lengths: The lengths with which it reads.
    """

    state: Any
    kind: str
    lengths: Lengths
    _model: Any

    @staticmethod
    def of(model: LanguageModel, lengths: Lengths, memory: Memory) -> "Decoder":
        """Create the fastest decoder for a model.

        Args:
            model: The model, in evaluation mode and with fixed weights.
            lengths: The lengths; ``segment_len`` and ``ext_len`` are not used. Every token sees the
                longest window that they allow.
            memory: The memory of the streams. It is copied.

        Raises:
            InputError: The memory does not fit the model.
        """
        model.require_memory(memory)
        memory, lengths = model.keep(memory), lengths.windowed(model.config)
        step, _ = choose_step(model, memory.tensors[0].dtype)
        if step is None:
            return EagerDecoder(model, lengths, memory)
        return CachedDecoder(cast(TransformerXL, model), lengths, memory, step)

    def __call__(self, tokens: Inputs) -> Float[Tensor, "B D"]:
        """Read a token of each stream and set the next state; return the output of the layers.

        The caller draws the next token from it, by ``model.head``.

        Raises:
            InputError: A token is outside the vocabulary (on a GPU, a device-side assertion); the
                number of tokens is not the batch size; or adapters were changed.
        """
        hidden, self.state = self.read(tokens)
        return hidden

    def is_for(self, model: LanguageModel, lengths: Lengths) -> bool:
        """Whether it reads with a model and with these lengths."""
        own, other = (x._replace(segment_len=1, ext_len=0) for x in (self.lengths, lengths))
        return self._model is model and own == other

    def _require_shape(self, tokens: Inputs, config: ModelConfig) -> None:
        F, shape = config.n_features, tuple(tokens.shape)
        if shape != ((self.batch_size, F) if F else (self.batch_size,)):
            what = f"a vector of n_features={F}" if F else "one"
            raise InputError(
                f"tokens of shape {shape} must be {what} for each of the {self.batch_size} streams"
            )

    @abstractmethod
    def read(self, tokens: Inputs) -> tuple[Float[Tensor, "B D"], Any]:
        """Read a token of each stream; return the output of the layers and the next state."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Number of streams."""

    @property
    @abstractmethod
    def n_positions(self) -> int:
        """How many positions the longest stream remembers."""

    @abstractmethod
    def fork(self) -> "Decoder":
        """Return a decoder that goes on by itself, which shares what does not change."""

    @abstractmethod
    def rewind(self, n: int) -> None:
        """Forget the last ``n`` positions of each stream, at most ``n_positions``.

        What follows is exact if the rest has all positions that a token sees.
        """

    @abstractmethod
    def memory(self, rows: Rows | None = None) -> Memory:
        """Return the memory of some streams, which later steps do not change. None: all."""

    @abstractmethod
    def select(self, rows: Rows) -> "Decoder":
        """Return a new decoder of the streams ``rows``, in that order; repetition is allowed."""

    @abstractmethod
    def take(self, rows: Rows) -> "Decoder":
        """As :meth:`select`, but may reuse the buffers of this decoder, which becomes invalid."""

    @abstractmethod
    def put(self, row: int, memory: Memory) -> None:
        """Replace the memory of a row by a copy of another one, of a single stream."""

    @abstractmethod
    def reset(self, rows: Rows) -> None:
        """Clear the memory of some streams."""


class EagerDecoder(Decoder):
    """Calls the model for each token: for every model, with whatever is hooked or wrapped."""

    state: Memory
    kind = "eager"

    def __init__(self, model: LanguageModel, lengths: Lengths, memory: Memory) -> None:
        self._model = model
        self.lengths = lengths._replace(segment_len=1, ext_len=0)
        self.state = self._cut(memory)

    @torch.no_grad()
    def read(self, tokens: Inputs) -> tuple[Float[Tensor, "B D"], Memory]:
        """See :meth:`Decoder.read`."""
        self._require_shape(tokens, self._model.config)
        (piece,) = read(self._model, tokens[:, None], self.lengths, self.state)
        return piece.hidden[:, -1], piece.mems

    @property
    def batch_size(self) -> int:
        """See :meth:`Decoder.batch_size`."""
        return self.state.batch_size

    @property
    def n_positions(self) -> int:
        """See :meth:`Decoder.n_positions`."""
        return len(self.state)

    def fork(self) -> "EagerDecoder":
        """See :meth:`Decoder.fork`."""
        return copy.copy(self)

    def rewind(self, n: int) -> None:
        """See :meth:`Decoder.rewind`."""
        self.state = self.state.without_last(n)

    def memory(self, rows: Rows | None = None) -> Memory:
        """See :meth:`Decoder.memory`."""
        return self.state if rows is None else self.state.select(rows)

    def select(self, rows: Rows) -> "EagerDecoder":
        """See :meth:`Decoder.select`."""
        return EagerDecoder(self._model, self.lengths, self.state.select(rows))

    take = select

    def put(self, row: int, memory: Memory) -> None:
        """See :meth:`Decoder.put`."""
        order = [self.batch_size if n == row else n for n in range(self.batch_size)]
        self.state = Memory.cat([self.state, self._cut(self._model.keep(memory))]).select(order)

    def reset(self, rows: Rows) -> None:
        """See :meth:`Decoder.reset`."""
        self.state = self.state.reset(rows)

    def _cut(self, memory: Memory) -> Memory:
        # A recurrent state is no position.
        is_cut = self._model.remembers_positions
        return memory.last(self.lengths.mem_len) if is_cut else memory


class CachedDecoder(StreamCache, Decoder):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Keeps keys and values in a cache, on which a step works: compiled or captured.

    Args:
        model: The model, in evaluation mode and with fixed weights.
        lengths: The lengths.
        memory: The memory of the streams. It is copied.
        step: What reads a token of each stream.
    """

    def __init__(
        self, model: TransformerXL, lengths: Lengths, memory: Memory, step: type[Step]
    ) -> None:
        memory = model.keep(memory)
        assert isinstance(memory, KeysAndValues)
        model.bind_adapters(memory)
        width = model.config.head_width
        n_offset = width - own_width(width) if model.config.key_offset else 0
        super().__init__(memory, lengths.mem_len, n_offset=n_offset, is_fixed=step.is_fixed)
        self._model, self.lengths, self._make_step = model, lengths, step
        limit = min(lengths.attn_len or lengths.mem_len + 1, lengths.mem_len + 1)
        of_layers = model.config.layer_attn_lens or (limit,) * model.config.n_layer
        # How many keys a token sees at most, its own included.
        self._attn_lens = [min(attn_len, limit) for attn_len in of_layers]
        self.kind = step.kind
        self._maps = _linear_maps(model)
        self._positions: list[Positions] = []
        self._step: Step | None = None

    def __getstate__(self) -> dict[str, object]:
        """Leave out the step, which is made again for the buffers of a copy."""
        return self.__dict__ | {"_step": None}

    @property
    def state(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Index of the next position, common to all streams of the batch."""
        return self.position

    @state.setter
    def state(self, position: int) -> None:
        self.position = position

    @torch.no_grad()
    def read(self, tokens: Inputs) -> tuple[Float[Tensor, "B D"], int]:
        """See :meth:`Decoder.read`."""
        if not all(children[name] is x for children, name, x in self._maps):
            raise InputError(OTHER_ADAPTERS)
        self._require_shape(tokens, self._model.config)
        reset_at = self._model.config.reset_at
        if not self.is_fixed and reset_at is not None and bool((tokens == reset_at).any()):
            self.own()
        self.make_room()
        if self._step is None or self._step.tensors is not self.tensors:
            n = min(self.capacity, self.mem_len + 1)
            if not self._positions or len(self._positions[0].r) != n:
                view = View(clamp_len=self.lengths.clamp_len, is_fixed=True)
                encoded: Any = self._model.positions.encode(self._model, n, 1, view)
                self._positions = encoded
            self._step = self._make_step(self._model, self, self._positions, self._attn_lens)
        return self._step(tokens.to(self.device)), self.position + 1

    @torch.no_grad()
    def put(self, row: int, memory: Memory) -> None:
        """See :meth:`Decoder.put`."""
        super().put(row, self._model.keep(memory))


def choose_step(
    model: LanguageModel, dtype: torch.dtype | None = None
) -> tuple[type[Step] | None, str]:
    """Choose the step of a model; return it with the reason, for display.

    Args:
        model: The model.
        dtype: Precision of keys and values. None: that of the model.

    Returns:
        The class of the step. None: the model is called.
    """
    dtype = model.dtype if dtype is None else dtype
    if not isinstance(model, TransformerXL) or model.positions.is_absolute:
        return None, "the model has no keys and values that could be kept"
    if (wrapped := first_wrapped(model)) is not None:
        return None, f"{wrapped} was wrapped, replaced or hooked, and has to be called"
    if torch.is_autocast_enabled(model.device.type):
        return None, "autocast chooses the precision of each operation"
    if model.device.type == "cuda":
        choice = choose_backend(model.device, dtype, model.config.head_width)
        if choice.backend == "triton":
            return CapturedStep, "the step is captured as a CUDA graph"
        return None, f"the model is called: {choice.reason}"
    against = CompiledStep.reason_against(model, dtype)
    if against is None:
        return CompiledStep, f"compiled step, {native.level()}"
    return None, f"the model is called: {against}"


def _linear_maps(model: TransformerXL) -> list[tuple[Mapping[str, Any], str, nn.Module]]:
    """Return the linear maps of the layers, with the children of their owners and names there."""
    owners = [part._modules for layer in model.layers for part in layer.modules()]
    return [(x, name, c) for x in owners for name, c in x.items() if isinstance(c, nn.Linear)]
