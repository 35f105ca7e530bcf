"""The segment of a forward pass, the lengths with which it is read, and what its queries see."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError, SettingsError
from transformer_xl.model.arguments import require_tensor, whole
from transformer_xl.model.memory import Join, Memory

SEGMENT_LEN = 128
"""Default segment length."""

_LEAST = {"segment_len": 1, "attn_len": 1}


class Lengths(NamedTuple):
    """The lengths with which a model reads a text.

    Everything that reads a text takes them, and :meth:`of` resolves and validates them, so that
    all code paths treat a length alike.
    """

    segment_len: int
    """Tokens read at once, at most."""
    mem_len: int
    """Positions remembered, at most."""
    attn_len: int | None
    """Keys a query sees at most, counting its own; None: all."""
    clamp_len: int | None
    """Largest distance told apart; None: any."""
    ext_len: int
    """Last tokens of a segment that are read again with the next one, and not remembered."""

    @classmethod
    def of(cls, config: ModelConfig, *, requires_effect: bool = True, **lengths: Any) -> "Lengths":
        """Resolve lengths, given by name, against the settings of a model; None: as configured.

        Args:
            config: The settings of the model.
            requires_effect: Whether to refuse a length that has no effect in such a model.
            lengths: Any of the attributes.

        Raises:
            InputError: A length is no integer, or out of range.
            SettingsError: It has no effect.
        """
        if unknown := lengths.keys() - {*cls._fields}:
            raise TypeError(f"{min(unknown)}: no such length; there are {', '.join(cls._fields)}")
        lengths = {name: x for name, x in lengths.items() if x is not None}
        # Lengths were validated in an eager call before tracing.
        if not torch.compiler.is_compiling():
            lengths = {name: whole(name, x, _LEAST.get(name, 0)) for name, x in lengths.items()}
            for name, beside, _ in config.unused() if requires_effect else ():
                if name in lengths and lengths[name] != getattr(config, name):
                    raise SettingsError(
                        f"{name}={lengths[name]} has no effect with {beside}; leave it out"
                    )
        configured = config.mem_len, config.attn_len, config.clamp_len, config.ext_len
        return cls(SEGMENT_LEN, *configured)._replace(**lengths)

    @property
    def arguments(self) -> dict[str, int | None]:
        """The lengths as keyword arguments of a forward pass: all but ``segment_len``."""
        arguments = self._asdict()
        del arguments["segment_len"]
        return arguments

    def window(self, config: ModelConfig) -> int:
        """Return how many keys, its own included, every query has, whatever the segmentation.

        With ``key_offset`` the oldest position of the memory is but a part of the next key.
        """
        return max(self.mem_len + 1 - config.key_offset, 1)

    def is_windowed(self, config: ModelConfig) -> bool:
        """Whether every token sees the same number of positions, whatever the segmentation."""
        return self.attn_len is not None and self.attn_len <= self.window(config)

    def n_spare(self, config: ModelConfig) -> int:
        """Return how many more positions are kept than a token sees."""
        return max(self.window(config) - (self.attn_len or self.mem_len + 1), 0)

    def windowed(self, config: ModelConfig) -> "Lengths":
        """Return lengths that are windowed, with the longest window that they allow."""
        is_windowed = self.is_windowed(config)
        return self if is_windowed else self._replace(attn_len=self.window(config))


class Segment(NamedTuple):
    """The inputs of one forward pass: tokens, real-valued features, or vectors in their place.

    Rows may be padded, and documents may begin within them.
    """

    tokens: Int[Tensor, "B T"] | Float[Tensor, "B T F"] | None
    """Tokens, or with ``n_features`` real vectors; both are embedded."""
    vectors: Float[Tensor, "B T D"] | None
    short: Int[Tensor, " B"] | None = None
    """How many positions at the end of each row are padding. None: no padding."""
    starts: Bool[Tensor, "B T"] | None = None
    """Where documents begin. None: nowhere."""

    @classmethod
    def of(
        cls,
        tokens: Tensor | None,
        vectors: Tensor | None,
        lengths: Tensor | None,
        starts: Tensor | None,
        config: ModelConfig,
    ) -> "Segment":
        """Validate and combine the arguments of a forward pass.

        Raises:
            InputError: An argument is missing, or of a wrong type or shape.
        """
        if (tokens is None) == (vectors is None):
            number = "both" if vectors is not None else "neither"
            raise InputError(f"a segment is tokens or inputs_embeds: {number} of them is given")
        if tokens is None:
            _require_real("inputs_embeds", vectors, "d_model", config.d_model)
        elif config.n_features:
            _require_real("inputs", tokens, "n_features", config.n_features)
        else:
            tokens = require_tensor("tokens", tokens, kind="integers")
            if tokens.ndim != 2 or not tokens.numel():
                shape = tuple(tokens.shape)
                raise InputError(f"tokens of shape {shape} must be (streams, length) and not empty")
        segment = cls(tokens, vectors)
        if starts is not None:
            starts = require_tensor("starts", starts).to(segment.device)
            if starts.shape != segment.shape or starts.dtype != torch.bool:
                raise InputError(
                    f"starts of shape {tuple(starts.shape)} and {starts.dtype} must say true or "
                    f"false for each place of a segment of shape {segment.shape}"
                )
        segment = segment.with_starts(starts, config.reset_at)
        return segment if lengths is None else segment.padded(lengths)

    @property
    def inputs(self) -> Tensor:
        """The tokens or vectors."""
        return cast(Tensor, self.tokens if self.vectors is None else self.vectors)

    @property
    def shape(self) -> tuple[int, int]:
        """Batch size and length (B, T)."""
        return self.inputs.shape[0], self.inputs.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the tokens or vectors."""
        return self.inputs.device

    def with_starts(self, starts: Tensor | None, reset_at: int | None) -> "Segment":
        """Return the segment in which documents begin at ``starts`` and at tokens ``reset_at``."""
        if reset_at is not None and self.tokens is not None:
            resets = self.tokens == reset_at
            starts = resets if starts is None else resets | starts
        return self._replace(starts=starts)

    def padded(self, lengths: Tensor) -> "Segment":
        """Return the segment with rows of these lengths.

        Padding is overwritten, so it may hold anything: an index outside the vocabulary, or NaN.

        Raises:
            InputError: A length is out of range.
        """
        (B, T), is_traced = self.shape, torch.compiler.is_compiling()
        lengths = require_tensor("lengths", lengths, kind="integers").to(self.device)
        # Values are not known while tracing: a program pads whatever it is given.
        if lengths.shape != (B,) or not (is_traced or ((lengths >= 0) & (lengths <= T)).all()):
            raise InputError(
                f"lengths={lengths.tolist()} must be one for each of the {B} rows, from 0 to {T}"
            )
        short = T - lengths
        if not is_traced and not short.any():
            return self
        padding = ~self._replace(short=short).is_real(T)

        def filled(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            return x.masked_fill(padding if x.ndim == 2 else padding[..., None], 0)

        return Segment(filled(self.tokens), filled(self.vectors), short, filled(self.starts))

    def is_real(self, n: int) -> Bool[Tensor, "B n"]:
        """Mark the positions, of the last ``n``, that are no padding."""
        B, T = self.shape
        if self.short is None:
            return torch.ones(B, n, dtype=torch.bool, device=self.device)
        return torch.arange(T - n, T, device=self.device) < T - self.short[:, None]


class View(NamedTuple):
    """What the queries of a segment may see, and what the memory keeps of the segment."""

    first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None
    """Index of the first key that each stream, or each query, sees, among the keys of memory and
    segment. None: 0."""
    attn_len: int | None = None
    """How many keys a query sees at most, counting its own. None: all."""
    clamp_len: int | None = None
    """Distances above it count as it. None: no limit."""
    mem_len: int = 0
    """How many positions the memory keeps at most."""
    ext_len: int = 0
    """How many positions at the end of the segment are read again with the next one; the memory
    leaves them out."""
    padding: Int[Tensor, " B"] | None = None
    """How many positions at the end of each row are padding. None: no padding."""
    starts: Bool[Tensor, "B T"] | None = None
    """Where documents begin. None: nowhere."""
    join: Join | None = None
    """Appends to the keys and values of the memory, if it holds these. No object that has a method
    ``to``: offloading by accelerate would move it, and layers would append to a copy."""
    is_fixed: bool = False
    """Whether the weights are fixed, so that what depends on them alone may be cached."""

    @classmethod
    def of(cls, segment: Segment, memory: Memory, lengths: Lengths) -> "View":
        """Return the view of a segment that is read after a memory, with capacity for it."""
        first_key, M = memory.forgotten, memory.length
        if segment.starts is not None:
            # A key is masked if its index is below that of the first one that is seen: of the
            # newest start up to each query.
            place = torch.arange(M, M + segment.starts.shape[1], device=segment.device)
            before = 0 if first_key is None else first_key[:, None]
            first_key = torch.where(segment.starts, place, before).cummax(1).values
        join = memory.join
        return cls(
            first_key,
            lengths.attn_len,
            lengths.clamp_len,
            lengths.mem_len,
            lengths.ext_len,
            segment.short,
            segment.starts,
            join,
            is_fixed=join is not None,
        )

    def joined(
        self, layer: int, k: Float[Tensor, "B S H K"], v: Float[Tensor, "B S H K"]
    ) -> tuple[Float[Tensor, "B all H K"], Float[Tensor, "B all H K"]]:
        """Return all keys and values of a layer, given those projected in this call."""
        return (k, v) if self.join is None else self.join(layer, k, v)

    def remember(self, memory: Memory, states: Sequence[Float[Tensor, "B T D"]]) -> Memory:
        """Return the memory after the segment, detached.

        Args:
            memory: The memory before it.
            states: What each layer keeps of the segment.
        """
        M, T = memory.length, states[0].shape[1]
        n_kept = max(T - self.ext_len, 0)
        # `realigned` truncates padded rows, after moving the padding to the front.
        most = self.mem_len if self.padding is None else M + n_kept
        memory = memory.extend(states, most, n_kept)
        if self.starts is not None and n_kept:
            # The next segment continues the document of the last position.
            assert self.first_key is not None
            memory = memory.forgetting(self.first_key[:, n_kept - 1] - (M + n_kept - memory.length))
        return memory if self.padding is None else memory.realigned(self.padding, self.mem_len)


NO_LIMITS = View()
"""All queries see all keys before them; nothing is remembered."""


def _require_real(name: str, x: Any, setting: str, width: int) -> None:
    """Require real vectors of a width."""
    shape = tuple(require_tensor(name, x).shape)
    if not (x.is_floating_point() and x.ndim == 3 and x.numel() and shape[2] == width):
        raise InputError(
            f"{name} of shape {shape} and {x.dtype} must be real vectors, (streams, length, "
            f"{setting}={width}), and not empty"
        )
