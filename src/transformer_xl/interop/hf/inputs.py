"""Inputs and caches of transformers, read by our model.

In transformers, rows of different lengths are padded on either side, with a mask of real tokens;
our model takes rows that begin at the first position, and their lengths. An input of any length is
read segment by segment; the memory is passed as ``past_key_values``.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from transformer_xl.model import LanguageModel, Memory, Stepper
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.reading import read as read_segments
from transformer_xl.model.segment import Segment

# Enough tokens to distinguish the whole text from its continuation.
_TAIL = 16


class TransformerXLCache(Cache):
    """The memory of a batch of texts, as a cache of transformers.

    A call of the model returns a new one and does not change its input, so that several
    continuations can start from the same memory. Within ``generate``, which does not share its
    cache, single tokens are read by a stepper that is passed from cache to cache.

    Attributes:
        seen: Number of columns of tokens that were read, including padding.
        tail: The last tokens that were read; None for vectors.
        is_stepped: Whether the next call may advance the stepper, which invalidates this cache.
    """

    is_croppable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_initialized = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, mems: Memory | Stepper, seen: int = 0, tail: Tensor | None = None) -> None:
        super().__init__(layers=[])
        self._at, self.seen, self.tail = mems, seen, tail
        self.is_stepped = False

    @property
    def mems(self) -> Memory:
        """The memory, as in calls of :class:`~transformer_xl.TransformerXL`."""
        return self._at if isinstance(self._at, Memory) else self._at.memory()

    def stepper(self, model: LanguageModel) -> Stepper:
        """Return the stepper that continues from this memory."""
        if isinstance(self._at, Stepper):
            return self._at
        return Stepper.of(model, Lengths.of(model.config, ext_len=0), self._at)

    def after(self, mems: Memory | Stepper, segment: Segment) -> "TransformerXLCache":
        """Return the cache after a segment was read."""
        tail, tokens = None, segment.tokens
        if tokens is not None and (self.tail is not None or not self.seen):
            before = [] if self.tail is None else [self.tail]
            tail = torch.cat([*before, tokens[:, -_TAIL:]], 1)[:, -_TAIL:]
        return TransformerXLCache(mems, self.seen + segment.shape[1], tail)

    def is_beginning_of(self, tokens: Tensor) -> bool:
        """Whether these tokens are the whole text, including those that were read already."""
        if tokens.shape[1] < self.seen:
            return False
        if self.tail is None:
            return tokens.shape[1] > self.seen
        own = tokens[:, self.seen - self.tail.shape[1] : self.seen].to(self.tail.device)
        times = len(self.tail) // max(len(own), 1)
        return torch.equal(own.repeat_interleave(times, 0), self.tail)

    def __len__(self) -> int:
        return len(self.mems.store.tensors()[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.batch_size} texts, {self.seen} tokens read)"

    @property
    def batch_size(self) -> int:
        """Number of texts."""
        return self._at.batch_size

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of tokens that were read, including padding."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the length of texts is not limited."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of columns of a mask and its offset, 0."""
        return self.seen + query_length, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select texts by index; repetition is allowed."""
        at = self._at
        self._at = at.take(indices) if isinstance(at, Stepper) else at.select(indices)
        if self.tail is not None:
            self.tail = self.tail[indices.to(self.tail.device)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the texts for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each text."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def repeated(self, repeats: int) -> "TransformerXLCache":
        """Return another cache with each text repeated."""
        cache = TransformerXLCache(self.mems, self.seen, self.tail)
        cache.batch_repeat_interleave(repeats)
        return cache

    def reset(self) -> None:
        """Forget everything."""
        self._at = self.mems.reset(torch.arange(self.batch_size))
        self.seen, self.tail = 0, None

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: positions that have left the memory are lost."""
        raise NotImplementedError(
            "a memory cannot be rolled back to an earlier token: keep the cache of that time"
        )


def own_cache(cache: Any) -> TransformerXLCache | None:
    """Return ``past_key_values`` if it is our cache.

    Raises:
        TypeError: It is a cache of another kind.
    """
    if cache is None or isinstance(cache, TransformerXLCache):
        return cache
    raise TypeError(
        f"past_key_values is a {type(cache).__name__}, a Transformer-XL takes what its last call "
        "returned as past_key_values (a TransformerXLCache), or None to begin"
    )


# The label of ignored positions.
IGNORED = -100


class Inputs(NamedTuple):
    """The validated inputs of a call, of any length and padded on either side."""

    segment: Segment
    is_real: Bool[Tensor, "B T"] | None = None
    """The mask of real tokens. None: all."""

    @classmethod
    def of(
        cls,
        tokens: Tensor | None,
        vectors: Tensor | None,
        mask: Tensor | None,
        position_ids: Tensor | None,
    ) -> "Inputs":
        """Validate the inputs of a call; of a mask that also covers the past, take the last part.

        Raises:
            ValueError: There are both tokens and vectors or neither, or shapes do not match.
        """
        given = tokens if vectors is None else vectors
        if given is None or (tokens is not None and vectors is not None):
            raise ValueError("give either input_ids or inputs_embeds")
        B, T = given.shape[:2]
        if not T:
            raise ValueError(
                "the input is empty: give at least one token that the memory has not read"
            )
        is_real = starts = None
        if mask is not None:
            if mask.ndim != 2 or len(mask) != B or mask.shape[1] < T:
                raise ValueError(
                    f"attention_mask of shape {tuple(mask.shape)} must be ({B}, {T}), or wider by "
                    "what the memory has read: one row for each text, 1 for real tokens"
                )
            real = mask[:, -T:].to(given.device).bool()
            is_real = None if bool(real.all()) else real
        if position_ids is not None:
            # Positions are relative: of these indices only a 0, the start of a document, matters.
            starts = (position_ids[..., -T:] == 0).to(given.device).expand(B, T)
            starts = starts if is_real is None else starts & is_real
            starts = starts if bool(starts.any()) else None
        return cls(Segment(tokens, vectors, starts=starts), is_real)

    @property
    def is_token(self) -> bool:
        """Whether it is one token of each text, without mask or document starts."""
        tokens, _, _, starts = self.segment
        is_one = tokens is not None and tokens.shape[1] == 1
        return is_one and starts is None and self.is_real is None

    def has_padding_before(self) -> bool:
        """Whether a row is padded on the left, so that its first token is not predicted."""
        real = self.is_real
        return real is not None and bool((real[:, 1:] & ~real[:, :-1]).any())

    def columns(self, order: Int[Tensor, "B n"]) -> "Inputs":
        """Return the given columns of each row."""
        tokens, vectors, _, starts = self.segment
        segment = Segment(
            _gathered(tokens, order), _gathered(vectors, order), starts=_gathered(starts, order)
        )
        return Inputs(segment, _gathered(self.is_real, order))

    def between(self, start: int, stop: int) -> "Inputs":
        """Return the columns from ``start`` to before ``stop``."""
        columns = torch.arange(start, stop, device=self.segment.device)
        return self.columns(columns.expand(self.segment.shape[0], -1))

    def targets(
        self, labels: Tensor | None, shift_labels: Tensor | None
    ) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]] | None:
        """Return the target of each position, and which are predicted from a context.

        Raises:
            ValueError: The labels do not have the shape of the input.
        """
        targets = labels if shift_labels is None else shift_labels
        if targets is None:
            return None
        if targets.shape != self.segment.shape:
            name = "labels" if shift_labels is None else "shift_labels"
            raise ValueError(
                f"{name} of shape {tuple(targets.shape)} must be {tuple(self.segment.shape)}, the "
                f"shape of the input, with {IGNORED} where nothing is to be predicted"
            )
        targets = targets.to(self.segment.device)
        is_real, starts = self.is_real, self.segment.starts
        if is_real is None:
            is_real = torch.ones_like(targets, dtype=torch.bool)
        has_context = is_real
        if shift_labels is None:
            targets = pad(targets[:, 1:], (0, 1), value=IGNORED)
            # The last token of a document does not predict the first of the next one.
            follows = is_real if starts is None else is_real & ~starts
            has_context = has_context & pad(follows[:, 1:], (0, 1))
        return targets, has_context & (targets != IGNORED)


def read(
    model: LanguageModel, inputs: Inputs, mems: Memory, segment_len: int, last: int | None = None
) -> tuple[Float[Tensor, "B n D"], Memory]:
    """Read inputs; return the hidden states of the last columns and the memory.

    Args:
        model: The model.
        inputs: What it reads.
        mems: The memory before them.
        segment_len: Segment length, beyond which there is no gradient.
        last: Number of last columns to return. None: all.
    """
    T = inputs.segment.shape[1]
    n = T if last is None else min(last, T)
    segment_len = _segment_len(model, segment_len, T)
    place = sizes = None
    first = T - n
    if inputs.is_real is not None:
        # Real tokens first, in their order.
        order = (~inputs.is_real).long().argsort(dim=1, stable=True)
        place, sizes = order.argsort(1)[:, T - n :], inputs.is_real.sum(1)
        first = int(place.min()) if segment_len < T else 0
        inputs = inputs.columns(order)
    tokens, vectors, _, starts = inputs.segment
    # Everything read enters the memory, so no extended context is read again.
    lengths = Lengths.of(model.config, segment_len=segment_len, ext_len=0)
    kept = []
    for piece in read_segments(
        model, tokens, lengths, mems, sizes=sizes, starts=starts, inputs_embeds=vectors
    ):
        mems = piece.mems
        if piece.start + piece.hidden.shape[1] > first:
            kept.append(piece.hidden)
    hidden = kept[0] if len(kept) == 1 else torch.cat(kept, 1)
    if place is None:
        return hidden[:, hidden.shape[1] - n :], mems
    return _gathered(hidden, place - (T - hidden.shape[1])), mems


def read_to_the_end(
    model: LanguageModel, inputs: Inputs, mems: Memory, segment_len: int
) -> tuple[Float[Tensor, "B D"], Memory]:
    """Read inputs; return the hidden states of each row's last token, and the memory.

    Segments are counted from the end, so that the last one, which has the gradient, is complete in
    all rows; those before it are read without a gradient.

    Raises:
        ValueError: A row has no token.
    """
    T = inputs.segment.shape[1]
    if inputs.is_real is not None:
        lengths = inputs.is_real.sum(1)
        if not bool(lengths.all()):
            row = int(lengths.argmin())
            raise ValueError(f"row {row} has no token: a text must have at least one")
        # Padding first, truncated to the longest row.
        order = inputs.is_real.long().argsort(dim=1, stable=True)
        T = int(lengths.max())
        inputs = inputs.columns(order[:, -T:])
    segment_len = _segment_len(model, segment_len, T)
    borders = (0, *range(T % segment_len or segment_len, T, segment_len), T)
    *earlier, (start, stop) = pairwise(borders)
    with torch.no_grad():
        for begin, end in earlier:
            _, mems = read(model, inputs.between(begin, end), mems, segment_len, last=1)
    hidden, mems = read(model, inputs.between(start, stop), mems, segment_len, last=1)
    return hidden[:, 0], mems


def _segment_len(model: LanguageModel, segment_len: int, T: int) -> int:
    """Return the segment length: T without a memory, as there is no context between segments."""
    has_memory = not model.remembers_positions or model.config.mem_len > 0
    return segment_len if has_memory else T


def _gathered(x: Any, place: Int[Tensor, "B n"]) -> Any:
    """Return the given columns of each row; None of None."""
    if x is None:
        return None
    return x.take_along_dim(place[..., None] if x.ndim == 3 else place, 1)
