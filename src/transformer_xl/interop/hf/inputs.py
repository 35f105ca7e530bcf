"""Inputs and caches as transformers hands them over, read by our model.

There, rows of different lengths are padded on either side and a mask marks what is real; here,
they begin at the first place and end where they end. An input of any length is read in pieces,
with the memory between them, which is carried as ``past_key_values``.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from transformer_xl.model import LanguageModel, Memory, Stepper
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.reading import Piece
from transformer_xl.model.reading import read as read_segments
from transformer_xl.model.segment import Segment

# Enough to tell a text that was read from one that goes on.
_TAIL = 16


class TransformerXLCache(Cache):
    """What a model remembers of the texts of a batch: one of our memories.

    A call of the model returns a new one and leaves the one that it was given as it is, so that
    several continuations can begin with the same memory.

    Within ``generate``, where nobody else has it, single tokens are read by a stepper, which goes
    on from cache to cache.

    Attributes:
        seen: How many columns of tokens it has read, padding included.
        tail: The last tokens that were read; None where vectors were.
        is_stepped: Whether the next call may move the stepper on, so that this cache is of no use
            any more.
    """

    is_compileable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_croppable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_initialized = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, mems: Memory | Stepper, seen: int = 0, tail: Tensor | None = None) -> None:
        super().__init__(layers=[])
        self._at, self.seen, self.tail = mems, seen, tail
        self.is_stepped = False

    @property
    def mems(self) -> Memory:
        """The memory, as :class:`~transformer_xl.TransformerXL` takes and returns it."""
        return self._at if isinstance(self._at, Memory) else self._at.memory()

    def stepper(self, model: LanguageModel) -> Stepper:
        """Return what goes on from here by single tokens."""
        if isinstance(self._at, Stepper):
            return self._at
        return Stepper.of(model, Lengths.of(model.config, ext_len=0), self._at)

    def after(
        self, mems: Memory | Stepper, columns: int, tokens: Tensor | None
    ) -> "TransformerXLCache":
        """Return the cache after more columns were read."""
        tail = None
        if tokens is not None and (self.tail is not None or not self.seen):
            before = [] if self.tail is None else [self.tail]
            tail = torch.cat([*before, tokens[:, -_TAIL:]], 1)[:, -_TAIL:]
        return TransformerXLCache(mems, self.seen + columns, tail)

    def is_beginning_of(self, tokens: Tensor) -> bool:
        """Whether these tokens begin with the ones that were read; not only the ones to come."""
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
        """How many texts it remembers."""
        return self._at.batch_size

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many columns of tokens were read, padding included."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: texts may be of any length."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many columns a mask has to cover, and that it begins with the first."""
        return self.seen + query_length, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the texts with these numbers, in this order; repetition is allowed."""
        at = self._at
        self._at = at.take(indices) if isinstance(at, Stepper) else at.select(indices)
        if self.tail is not None:
            self.tail = self.tail[indices.to(self.tail.device)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the texts into another order, as beams ask for."""
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
        """Refuse: what has left the memory cannot be brought back."""
        raise NotImplementedError(
            "a memory cannot be rolled back to an earlier token: keep the cache of that time"
        )


def own_cache(cache: Any) -> TransformerXLCache | None:
    """Return what came as ``past_key_values``, if it is ours.

    Raises:
        TypeError: It is a cache of another kind.
    """
    if cache is None or isinstance(cache, TransformerXLCache):
        return cache
    raise TypeError(
        f"past_key_values is a {type(cache).__name__}, a Transformer-XL takes what its last call "
        "returned as past_key_values (a TransformerXLCache), or None to begin"
    )


# Labels that are not counted.
IGNORED = -100


class Inputs(NamedTuple):
    """What a call is given."""

    segment: Segment
    """Tokens or vectors, and where documents begin; of any length, and padded on either side."""
    is_real: Bool[Tensor, "B T"] | None = None
    """Which places are no padding. None: all."""

    @classmethod
    def of(
        cls,
        tokens: Tensor | None,
        vectors: Tensor | None,
        mask: Tensor | None,
        position_ids: Tensor | None,
    ) -> "Inputs":
        """Check what a call was given; of a mask that covers the past, too, take the last part.

        Raises:
            ValueError: There are both tokens and vectors or neither, or shapes do not fit.
        """
        given = tokens if vectors is None else vectors
        if given is None or (tokens is not None and vectors is not None):
            raise ValueError("give either input_ids or inputs_embeds")
        B, T = given.shape[:2]
        if not T:
            raise ValueError(
                "the input is empty: hand in at least one token that the memory has not read"
            )
        is_real = starts = None
        if mask is not None:
            if mask.ndim != 2 or len(mask) != B or mask.shape[1] < T:
                raise ValueError(
                    f"attention_mask of shape {tuple(mask.shape)} must be ({B}, {T}), or wider by "
                    "what the memory has read: one row for each text, 1 for what is real"
                )
            real = mask[:, -T:].to(given.device).bool()
            is_real = None if bool(real.all()) else real
        if position_ids is not None:
            # Positions are relative: of these numbers only a new beginning says anything.
            starts = (position_ids[..., -T:] == 0).to(given.device).expand(B, T)
            starts = starts if is_real is None else starts & is_real
            starts = starts if bool(starts.any()) else None
        return cls(Segment(tokens, vectors, starts=starts), is_real)

    @property
    def is_token(self) -> bool:
        """Whether it is one token of each text and nothing besides."""
        tokens, _, _, starts = self.segment
        is_one = tokens is not None and tokens.shape[1] == 1
        return is_one and starts is None and self.is_real is None

    def has_padding_before(self) -> bool:
        """Whether a row has padding before a token, which then is predicted from nothing."""
        real = self.is_real
        return real is not None and bool((real[:, 1:] & ~real[:, :-1]).any())

    def columns(self, order: Int[Tensor, "B n"]) -> "Inputs":
        """Return other columns of each row, all of them real."""
        tokens, vectors, _, starts = self.segment
        return Inputs(
            Segment(
                None if tokens is None else tokens.gather(1, order),
                None if vectors is None else _gathered(vectors, order),
                starts=None if starts is None else starts.gather(1, order),
            )
        )


class Targets(NamedTuple):
    """What each place is to predict."""

    tokens: Int[Tensor, "B T"]
    is_asked: Bool[Tensor, "B T"]
    """Where there is a target. ``num_items_in_batch`` counts these."""
    is_counted: Bool[Tensor, "B T"]
    """Where, besides, something was read that it can be predicted from."""

    @classmethod
    def of(
        cls, labels: Tensor | None, shift_labels: Tensor | None, inputs: Inputs
    ) -> "Targets | None":
        """Shift labels, unless they are shifted.

        Raises:
            ValueError: Their shape is not that of the input.
        """
        given = labels if shift_labels is None else shift_labels
        if given is None:
            return None
        if given.shape != inputs.segment.shape:
            name = "labels" if shift_labels is None else "shift_labels"
            raise ValueError(
                f"{name} of shape {tuple(given.shape)} must be {tuple(inputs.segment.shape)}, the "
                f"shape of the input, with {IGNORED} where nothing is to be predicted"
            )
        given = given.to(inputs.segment.device)
        starts, is_real = inputs.segment.starts, inputs.is_real
        tokens = given
        if shift_labels is None:
            tokens = pad(given[:, 1:], (0, 1), value=IGNORED)
        is_counted = is_asked = tokens != IGNORED
        if shift_labels is None and is_real is not None:
            is_counted = is_counted & pad(is_real[:, 1:], (0, 1))
        if shift_labels is None and starts is not None:
            # The last token of a document does not predict the first of the next one.
            is_counted = is_counted & ~pad(starts[:, 1:], (0, 1))
        if is_real is not None:
            is_counted = is_counted & is_real
        return cls(tokens, is_asked, is_counted)


def read(
    model: LanguageModel,
    inputs: Inputs,
    mems: Memory | None,
    segment_len: int,
    last: int | None = None,
) -> tuple[Float[Tensor, "B n D"], Memory]:
    """Read inputs; return the hidden states of the last columns and the memory.

    Args:
        model: The model.
        inputs: What it reads.
        mems: The memory before them.
        segment_len: How much is read at once. A gradient reaches back to where a piece begins.
        last: How many of the last columns are asked for. None: all.
    """
    B, T = inputs.segment.shape
    n = T if last is None else min(last, T)
    place = torch.arange(T - n, T, device=inputs.segment.device).expand(B, n)
    lengths = None
    if inputs.is_real is not None:
        # What is real comes first, in its order.
        order = (~inputs.is_real).long().argsort(dim=1, stable=True)
        place, lengths = order.argsort(1)[:, T - n :], inputs.is_real.sum(1)
        inputs = inputs.columns(order)
    mems, pieces, first = _begun(model, mems, B), [], None
    # Without a memory nothing would be left of a piece for the next one.
    segment_len = segment_len if _remembers(model) else T
    least = int(place.min()) if segment_len < T and n else 0
    for piece in _pieces(model, inputs.segment, segment_len, mems, lengths):
        mems = piece.mems
        if piece.start + piece.hidden.shape[1] > least:
            first = piece.start if first is None else first
            pieces.append(piece.hidden)
    assert first is not None
    found = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
    if lengths is None:
        return found[:, found.shape[1] - n :], mems
    return _gathered(found, place - first), mems


def read_to_the_end(
    model: LanguageModel,
    inputs: Inputs,
    mems: Memory | None,
    segment_len: int,
) -> tuple[Float[Tensor, "B D"], Memory]:
    """Read inputs; return the hidden states of each row's last token, and the memory.

    Pieces are counted from the end, so that the last one, through which a gradient flows, is whole
    for all rows; those before it are read without a gradient.

    Raises:
        ValueError: A row has no token at all.
    """
    B, T = inputs.segment.shape
    lengths = None
    if inputs.is_real is not None:
        lengths = inputs.is_real.sum(1)
        if not bool(lengths.all()):
            row = int(lengths.argmin())
            raise ValueError(f"row {row} has no token: a text must have at least one")
        # Padding first, and no more of it than the longest row needs.
        order = inputs.is_real.long().argsort(dim=1, stable=True)
        inputs, T = inputs.columns(order[:, T - int(lengths.max()) :]), int(lengths.max())
    mems = _begun(model, mems, B)
    segment_len = segment_len if _remembers(model) else T
    begins = [0, *range(T % segment_len or segment_len, T, segment_len)]
    hidden = own = None
    for start, stop in zip(begins, [*begins[1:], T], strict=True):
        n = stop - start
        column = torch.arange(n, device=inputs.segment.device)[None]
        if lengths is not None:
            own = (lengths - (T - stop)).clamp(0, n)
            column = (column + (n - own)[:, None]) % n
        segment = inputs.columns((column + start).expand(B, n)).segment
        with nullcontext() if stop == T else torch.no_grad():
            ((_, hidden, _, mems),) = _pieces(model, segment, n, mems, own)
    assert hidden is not None
    if own is None:
        return hidden[:, -1], mems
    return _gathered(hidden, (own - 1)[:, None])[:, 0], mems


def _begun(model: LanguageModel, mems: Memory | None, batch_size: int) -> Memory:
    """Return the memory to begin with; of keys and values where the weights stay as they are."""
    mems = model.start_memory(batch_size) if mems is None else mems
    is_fixed = not torch.is_grad_enabled() and not model.training
    return model.keep(mems) if is_fixed else mems


def _remembers(model: LanguageModel) -> bool:
    return not model.remembers_positions or model.config.mem_len > 0


def _pieces(
    model: LanguageModel,
    segment: Segment,
    segment_len: int,
    mems: Memory,
    sizes: Int[Tensor, " B"] | None,
) -> Iterator[Piece]:
    # What is read is remembered; nothing is read again.
    lengths = Lengths.of(model.config, segment_len=segment_len, ext_len=0)
    tokens, vectors, _, starts = segment
    return read_segments(
        model, tokens, lengths, mems, sizes=sizes, starts=starts, inputs_embeds=vectors
    )


def _gathered(x: Float[Tensor, "B T D"], place: Int[Tensor, "B n"]) -> Float[Tensor, "B n D"]:
    return x.gather(1, place[..., None].expand(-1, -1, x.shape[2]))
