"""The reader: what moves a memory over a text, segment by segment.

:func:`read` is the loop, for texts that are given whole, several of them batched; :class:`Reader`
goes on with one text that comes in pieces of any length.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_xl.model.arguments import as_tokens
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import Memory
from transformer_xl.model.needs import require_capacity
from transformer_xl.model.segment import Output
from transformer_xl.model.wrapping import evaluating

Texts = Int[Tensor, "B L"] | Sequence[Int[Tensor, " L"]]
"""Texts in tokens, all of one length, on any device."""

Targets = Int[Tensor, "B predicted"] | Sequence[Int[Tensor, " predicted"]]
"""The tokens that the last ones of :data:`Texts` are to predict."""


class Piece(NamedTuple):
    """What was computed of a segment."""

    start: int
    """The first of its columns, apart from those that are read again."""
    hidden: Float[Tensor, "B T D"]
    """Output of the layers; what is read again comes first."""
    nll: Float[Tensor, "B predicted"] | None
    """-log p of each target, in nats; None without targets."""
    mems: Memory
    """The memory after the segment."""


def read(
    model: LanguageModel,
    texts: Texts | None,
    lengths: Lengths,
    mems: Memory | None = None,
    *,
    targets: Targets | None = None,
    sizes: Int[Tensor, " B"] | None = None,
    starts: Bool[Tensor, "B L"] | None = None,
    inputs_embeds: Float[Tensor, "B L D"] | None = None,
) -> Iterator[Piece]:
    """Read texts segment by segment, batched, with the memory carried along.

    The mode of the model and whether there are gradients are the caller's. A segment is computed
    when it is asked for, so between two of them the weights may move.

    Args:
        model: The model.
        texts: The tokens. None: there are ``inputs_embeds``.
        lengths: The lengths. With an ``ext_len``, each segment but the first begins with up to so
            many tokens of the one before it, which are not predicted again.
        mems: The memory to begin with, of a stream for each text. None: as at the start of a text.
        targets: What each token predicts; of fewer columns than the texts: each of the last ones.
        sizes: How many tokens of each text are real; what stands behind them does not matter.
            None: all.
        starts: Where documents begin, as ``TransformerXL.forward`` takes it.
        inputs_embeds: Vectors in place of tokens, as ``TransformerXL.forward`` takes them.

    Raises:
        ValueError: As ``TransformerXL.forward`` raises it.
    """
    segment_len, device = lengths.segment_len, model.device
    n = _width(inputs_embeds if texts is None else texts)
    unasked = n - _width(targets)
    for start in range(0, n, segment_len):
        stop = min(start + segment_len, n)
        read_again = start - min(lengths.ext_len, start)
        # The first of these columns that has a target.
        first = max(start, unasked)
        asked = None
        if targets is not None and first < stop:
            asked = _columns(targets, first - unasked, stop - unasked, device)
        out: Output = model(
            _columns(texts, read_again, stop, device),
            mems,
            asked,
            lengths=None if sizes is None else (sizes - start).clamp(0, stop - start).to(device),
            starts=_columns(starts, read_again, stop, device),
            inputs_embeds=_columns(inputs_embeds, read_again, stop, device),
            context=None if asked is None else first - read_again,
            predicts=asked is not None,
            **lengths.arguments,
        )
        mems = out.mems
        yield Piece(start, out.hidden, out.nll, mems)


def read_all(model: LanguageModel, texts: Texts, lengths: Lengths, mems: Memory) -> Memory:
    """Read texts as :func:`read` does; return the memory behind them."""
    for piece in read(model, texts, lengths, mems):
        mems = piece.mems
    return mems


def _width(rows: Tensor | Sequence[Tensor] | None) -> int:
    if rows is None:
        return 0
    return rows.shape[1] if isinstance(rows, Tensor) else len(rows[0])


def _columns(
    rows: Tensor | Sequence[Tensor] | None, start: int, stop: int, device: torch.device
) -> Tensor | None:
    if rows is None:
        return None
    if isinstance(rows, Tensor):
        return rows[:, start:stop].to(device)
    return torch.stack([row[start:stop] for row in rows]).to(device)


class Place(NamedTuple):
    """Where the reading of a text is."""

    mems: Memory
    """The memory, which has read all tokens but the last."""
    last_token: int | None
    """That token; None at the start of a text."""
    offset: int = 0
    """How many tokens of the present segment the memory has read."""


class Reader:
    """Reads one text piece by piece; predicts each token from all that came before it.

    Segments lie where they would lie if the text had come at once. A piece that ends inside of a
    segment leaves what the segment has read in the memory, beyond ``mem_len``, until the segment
    is full. So each token sees the same positions however the text was cut, and its number
    differs by rounding alone. With ``attn_len`` of at most ``mem_len + 1`` it sees them wherever
    segments lie, and the memory holds ``mem_len`` positions at any moment.

    Some models also depend on how many tokens they read at once (``depends_on_segments``). To them
    one gives whole segments: ``room`` says how many tokens are missing.

    Args:
        model: The model. It reads as in evaluation mode; its mode is restored afterwards.
        lengths: The lengths. What is read is remembered: ``ext_len`` counts as 0.
        place: Where to go on. None: at the start of a text.

    Raises:
        ValueError: The memory does not fit the model, or the machine once it is full.
    """

    def __init__(self, model: LanguageModel, lengths: Lengths, place: Place | None = None) -> None:
        self.model, self.lengths = model, lengths._replace(ext_len=0)
        mem_len = lengths.mem_len
        require_capacity(model, mem_len, remedy="remember fewer positions")
        mems, last_token, offset = place or Place(model.start_memory(1, mem_len), None)
        # A segment that was longer than these are is over.
        offset = offset if offset < lengths.segment_len else 0
        model.require_memory(mems, 1)
        if model.remembers_positions:
            # So is a memory that was longer.
            mems = mems.last(mem_len + offset)
        self.place = Place(model.keep(mems), last_token, offset)

    @property
    def most_positions(self) -> int:
        """How many positions the memory holds at most, while a segment is being filled."""
        lengths = self.lengths
        return lengths.mem_len + (0 if lengths.is_windowed else lengths.segment_len - 1)

    @property
    def room(self) -> int:
        """How many tokens it takes to fill the present segment."""
        is_first = self.place.last_token is None
        return self.lengths.segment_len - self.place.offset + is_first

    @torch.no_grad()
    def read(self, ids: Any, *, scored: bool = True) -> list[float | None]:
        """Read tokens; return the log-probability of each, in nats; None for the first of a text.

        Args:
            ids: The tokens, in any array, tensor or sequence.
            scored: Whether to predict them. If not, nothing is returned.

        Raises:
            ValueError: They are no integers, or one is outside the vocabulary.
        """
        tokens = as_tokens(ids, self.model.config).tolist()
        found: list[float | None] = []
        start = 0
        if self.place.last_token is None and tokens:
            self.place, start = self.place._replace(last_token=tokens[0]), 1
            found += [None] * scored
        with evaluating(self.model):
            while start < len(tokens):
                stop = start + self.room
                found += self._read(tokens[start:stop], scored)
                start = stop
        return found

    def _read(self, targets: list[int], scored: bool) -> list[float]:
        """Read the last token and all of these but their last, within a segment."""
        mems, last_token, offset = self.place
        assert last_token is not None
        offset = (offset + len(targets)) % self.lengths.segment_len
        lengths = self.lengths
        if not lengths.is_windowed:
            # Until the segment is full, all of it is remembered.
            lengths = lengths._replace(mem_len=lengths.mem_len + offset)
        tokens = torch.tensor([[last_token, *targets[:-1]]])
        asked = torch.tensor([targets]) if scored else None
        (piece,) = read(self.model, tokens, lengths, mems, targets=asked)
        # All at once: an interrupt before this line leaves a place that can be gone on from.
        self.place = Place(piece.mems, targets[-1], offset)
        return [] if piece.nll is None else (-piece.nll[0]).tolist()
