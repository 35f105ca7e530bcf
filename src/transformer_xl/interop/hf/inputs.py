"""Inputs of transformers, read by our model.

In transformers, rows of different lengths are padded on either side, with a mask of real tokens;
our model takes rows that begin at the first position, and their lengths. An input of any length is
read segment by segment; the memory is passed as ``past_key_values``.
"""

from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from transformer_xl.errors import InputError
from transformer_xl.model import LanguageModel, Lengths, Memory, Segment
from transformer_xl.model import read as read_segments

# The label of ignored positions.
IGNORED = -100


def require_known(
    tokens: Int[Tensor, "B T"], is_real: Bool[Tensor, "B T"] | None, vocab_size: int
) -> None:
    """Require that tokens are in the vocabulary, but those of padding.

    Raises:
        InputError: A token that is no padding is not one of ``vocab_size``.
    """
    beyond = (tokens < 0) | (tokens >= vocab_size)
    beyond = beyond if is_real is None else beyond & is_real
    if bool(beyond.any()):
        raise InputError(
            f"input_ids hold {int(tokens[beyond][0])}, and the model has {vocab_size} tokens, 0 to "
            f"{vocab_size - 1}: if this is padding, give the attention_mask, 0 there, which "
            "tokenizer(texts, padding=True) returns; if tokens were added, call "
            "model.resize_token_embeddings(len(tokenizer))"
        )


class Inputs(NamedTuple):
    """The validated inputs of a call, of any length and padded on either side."""

    segment: Segment
    is_real: Bool[Tensor, "B T"] | None = None
    """The mask of real tokens. None: all."""

    @classmethod
    def of(
        cls, tokens: Tensor | None, vectors: Tensor | None, mask: Tensor | None, vocab_size: int
    ) -> "Inputs":
        """Validate the inputs of a call; of a mask that also covers the past, take the last part.

        Raises:
            InputError: There are both tokens and vectors or neither, shapes do not match, or a
                token that is no padding is not one of ``vocab_size``.
        """
        inputs = tokens if vectors is None else vectors
        if inputs is None or (tokens is not None and vectors is not None):
            raise InputError("give either input_ids or inputs_embeds")
        name, ndim = ("input_ids", 2) if vectors is None else ("inputs_embeds", 3)
        if inputs.ndim != ndim or not inputs.shape[1]:
            raise InputError(
                f"{name} of shape {tuple(inputs.shape)} must be (texts, length"
                f"{', width' * (ndim == 3)}): a row for each text, of at least one token that the "
                "memory has not read"
            )
        B, T = inputs.shape[:2]
        is_real = None
        if mask is not None:
            if mask.ndim != 2 or mask.shape[0] != B or mask.shape[1] < T:
                raise InputError(
                    f"attention_mask of shape {tuple(mask.shape)} must be ({B}, {T}), or wider by "
                    "what the memory has read: one row for each text, 1 for real tokens"
                )
            real = mask[:, -T:].to(inputs.device).bool()
            is_real = None if bool(real.all()) else real
        if tokens is not None:
            require_known(tokens, is_real, vocab_size)
        return cls(Segment(tokens, vectors), is_real)

    def columns(self, order: Int[Tensor, "B n"]) -> "Inputs":
        """Return the given columns of each row."""
        tokens, vectors, *_ = self.segment
        return Inputs(
            Segment(_gathered(tokens, order), _gathered(vectors, order)),
            _gathered(self.is_real, order),
        )

    def targets(self, labels: Tensor) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Return the target of each position, and which are predicted from a context.

        Raises:
            InputError: The labels do not have the shape of the input.
        """
        if labels.shape != self.segment.shape:
            raise InputError(
                f"labels of shape {tuple(labels.shape)} must be {tuple(self.segment.shape)}, the "
                f"shape of the input, with {IGNORED} where nothing is to be predicted"
            )
        targets = pad(labels[:, 1:].to(self.segment.device), (0, 1), value=IGNORED)
        has_context = targets != IGNORED
        if self.is_real is not None:
            has_context &= self.is_real & pad(self.is_real[:, 1:], (0, 1))
        return targets, has_context


class Reading(NamedTuple):
    """What was computed of inputs."""

    hidden: Float[Tensor, "B n D"]
    """The hidden states of the last columns, after all layers."""
    mems: Memory
    """The memory after them."""
    layers: tuple[Float[Tensor, "B T D"], ...] | None = None
    """The input of the first layer, then the output of each layer; the last one is ``hidden``."""
    attentions: tuple[Float[Tensor, "B H T S"], ...] | None = None
    """The attention weights of each layer: positions of the memory, then columns of the input."""


class Wanted(NamedTuple):
    """What else is to be returned of the layers."""

    hidden_states: bool = False
    attentions: bool = False


def read(
    model: LanguageModel,
    inputs: Inputs,
    mems: Memory,
    lengths: Lengths,
    last: int | None = None,
    wanted: Wanted = Wanted(),  # noqa: B008
) -> Reading:
    """Read inputs; return the hidden states of the last columns and the memory.

    Args:
        model: The model.
        inputs: What it reads.
        mems: The memory before them.
        lengths: Lengths; of segments too, beyond which there is no gradient.
        last: Number of last columns to return. None: all.
        wanted: What else to return, of all columns.

    Raises:
        InputError: Attention weights of more than one segment or of padded rows are wanted, or the
            layers have none.
    """
    T = inputs.segment.shape[1]
    n = T if last is None or any(wanted) else min(last, T)
    lengths = lengths._replace(segment_len=_segment_len(model, lengths.segment_len, T))
    if wanted.attentions and (lengths.segment_len < T or inputs.is_real is not None):
        raise InputError(
            f"output_attentions: the attention of padded rows, or of {T} tokens in segments of "
            f"{lengths.segment_len}, is no single matrix; hand in each text alone, without an "
            f"attention_mask, in calls with past_key_values, or load the model with segment_len={T}"
        )
    place = sizes = None
    first = T - n
    if inputs.is_real is not None:
        # Real tokens first, in their order.
        order = (~inputs.is_real).long().argsort(dim=1, stable=True)
        place, sizes = order.argsort(1)[:, T - n :], inputs.is_real.sum(1)
        first = int(place.min())
        inputs = inputs.columns(order)
    tokens, vectors, *_ = inputs.segment
    pieces_read, layers, attentions = [], [], []
    looking = model.observed(attentions=wanted.attentions) if any(wanted) else nullcontext()
    with looking as observation:
        for piece in read_segments(
            model, tokens, lengths, mems, sizes=sizes, inputs_embeds=vectors
        ):
            mems = piece.mems
            if piece.start + piece.hidden.shape[1] > first:
                pieces_read.append(piece.hidden)
            if observation is not None:
                layers.append([*observation.hidden[:-1], piece.hidden])
                attentions = observation.attentions
                observation.hidden, observation.weights = [], []

    def columns(pieces: list[Tensor]) -> Tensor:
        hidden = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        if place is None:
            # Not a view where all columns are returned: gradients flow through the tensor itself.
            return hidden if n == hidden.shape[1] else hidden[:, hidden.shape[1] - n :]
        return _gathered(hidden, place - (T - hidden.shape[1]))

    return Reading(
        columns(pieces_read),
        mems,
        tuple(columns([*x]) for x in zip(*layers, strict=True)) if wanted.hidden_states else None,
        tuple(attentions) if wanted.attentions else None,
    )


def read_to_the_end(
    model: LanguageModel, inputs: Inputs, mems: Memory, lengths: Lengths
) -> tuple[Float[Tensor, "B D"], Memory]:
    """Read inputs; return the hidden states of each row's last token, and the memory.

    Segments are counted from the end, so that the last one, which has the gradient, is complete in
    all rows; those before it are read without a gradient.

    Raises:
        InputError: A row has no token.
    """
    T = inputs.segment.shape[1]
    if inputs.is_real is not None:
        sizes = inputs.is_real.sum(1)
        if not bool(sizes.all()):
            row = int(sizes.argmin())
            raise InputError(f"row {row} has no token: a text must have at least one")
        # Padding first, truncated to the longest row.
        order, T = inputs.is_real.long().argsort(dim=1, stable=True), int(sizes.max())
        inputs = inputs.columns(order[:, -T:])
    segment_len = _segment_len(model, lengths.segment_len, T)
    columns = torch.arange(T, device=inputs.segment.device).expand(inputs.segment.shape[0], -1)
    starts = [0, *range(T % segment_len or segment_len, T, segment_len)]
    for start, stop in pairwise([*starts, T]):
        with nullcontext() if stop == T else torch.no_grad():
            piece = inputs.columns(columns[:, start:stop])
            hidden, mems, *_ = read(model, piece, mems, lengths, last=1)
    return hidden[:, 0], mems  # pyright: ignore[reportPossiblyUnboundVariable]


def _segment_len(model: LanguageModel, segment_len: int, T: int) -> int:
    """Return the segment length: T without a memory, as there is no context between segments."""
    has_memory = not model.remembers_positions or model.config.mem_len > 0
    return segment_len if has_memory else T


def _gathered(x: Any, place: Int[Tensor, "B n"]) -> Any:
    """Return the given columns of each row; None of None."""
    if x is None:
        return None
    return x.take_along_dim(place if x.ndim == 2 else place[..., None], 1)
