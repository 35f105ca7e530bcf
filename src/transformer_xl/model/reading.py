"""The reader: advances a memory over texts, segment by segment.

:func:`read` is the loop over a batch of complete texts, and :class:`Reader` reads a single text
that is streamed in pieces of any length.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_xl.model.arguments import as_tokens
from transformer_xl.model.calling import evaluating
from transformer_xl.model.language_model import LanguageModel, Output
from transformer_xl.model.memory import Memory
from transformer_xl.model.segment import Lengths

Texts = (
    Int[Tensor, "B L"]
    | Float[Tensor, "B L F"]
    | Sequence[Int[Tensor, " L"]]
    | Sequence[Float[Tensor, "L F"]]
)
"""Texts in tokens or, with ``n_features``, real vectors, all of one length, on any device."""

Targets = (
    Int[Tensor, "B predicted"]
    | Float[Tensor, "B predicted"]
    | Sequence[Int[Tensor, " predicted"]]
    | Sequence[Float[Tensor, " predicted"]]
)
"""What the last columns of :data:`Texts` predict: the next tokens, or the targets of vectors."""


class Piece(NamedTuple):
    """The result of reading one segment."""

    start: int
    """Index of its first column in the text, after the ``ext_len`` columns that are read again."""
    hidden: Float[Tensor, "B T D"]
    """Output of the layers, including the columns that are read again."""
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
    """Read a batch of texts segment by segment, passing the memory on.

    The caller sets the mode of the model and enables or disables gradients. Segments are computed
    lazily, so the weights may be updated between two of them.

    Args:
        model: The model.
        texts: The tokens. None: ``inputs_embeds`` is given.
        lengths: The lengths. With ``ext_len``, each segment but the first begins with up to that
            many tokens of the previous one, which are not predicted again.
        mems: The initial memory, one stream per text. None: start of a text.
        targets: The next token of each token; with fewer columns than the texts, of the last ones.
        sizes: Number of real tokens in each text; the rest is padding. None: all.
        starts: Where documents begin, as in ``TransformerXL.forward``.
        inputs_embeds: Vectors instead of tokens, as in ``TransformerXL.forward``.

    Raises:
        ValueError: As in ``TransformerXL.forward``.
    """
    segment_len, device = lengths.segment_len, model.device
    n = _width(inputs_embeds if texts is None else texts)
    unasked = n - _width(targets)
    # In traced code n may be a symbol, which range() and min() would make a constant.
    is_one = 0 < n <= segment_len
    for start in (0,) if is_one else range(0, n, segment_len):
        stop = n if is_one else min(start + segment_len, n)
        read_again = start - min(lengths.ext_len, start)
        # The first of these columns that has a target.
        first = max(start, unasked)
        predicted = None
        if targets is not None and first < stop:
            predicted = _columns(targets, first - unasked, stop - unasked, device)
        out: Output = model(
            _columns(texts, read_again, stop, device),
            mems,
            predicted,
            lengths=None if sizes is None else (sizes - start).clamp(0, stop - start).to(device),
            starts=_columns(starts, read_again, stop, device),
            inputs_embeds=_columns(inputs_embeds, read_again, stop, device),
            context=None if predicted is None else first - read_again,
            predicts=predicted is not None,
            **lengths.arguments,
        )
        mems = out.mems
        yield Piece(start, out.hidden, out.nll, mems)


def read_all(
    model: LanguageModel,
    texts: Texts,
    lengths: Lengths,
    mems: Memory,
    *,
    sizes: Int[Tensor, " B"] | None = None,
    starts: Bool[Tensor, "B L"] | None = None,
) -> Memory:
    """Read texts as :func:`read` does; return the final memory."""
    for piece in read(model, texts, lengths, mems, sizes=sizes, starts=starts):
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
    is_tensor = isinstance(rows, Tensor)
    columns = rows[:, start:stop] if is_tensor else torch.stack([row[start:stop] for row in rows])
    return columns.to(device)


class ReaderState(NamedTuple):
    """The state of a :class:`Reader`."""

    mems: Memory
    """The memory of all tokens but the last."""
    last_token: int | None
    """The last token, not read yet; None at the start of a text."""
    offset: int = 0
    """How many tokens of the current segment are in the memory."""


class Reader:
    """Reads one text in pieces; predicts each token from all tokens before it.

    Segment boundaries do not depend on the pieces. If a piece ends inside a segment, the memory
    grows beyond ``mem_len`` until the segment is complete, so each token sees the same positions
    however the text was split, and its log-probability is the same up to rounding. With
    ``attn_len`` of at most ``mem_len + 1`` (with ``key_offset``, ``mem_len``) boundaries have no
    effect, and the memory never exceeds ``mem_len`` positions.

    Models with ``depends_on_segments`` must be given complete segments: ``remaining`` is the
    number of tokens to the next boundary.

    Args:
        model: The model. It reads in evaluation mode; its mode is restored afterwards.
        lengths: The lengths; ``ext_len`` is not used.
        state: The state to resume from. None: start of a text.

    Raises:
        ValueError: The memory does not fit the model, or a full memory does not fit the machine.
    """

    def __init__(
        self, model: LanguageModel, lengths: Lengths, state: ReaderState | None = None
    ) -> None:
        self.model, self.lengths = model, lengths._replace(ext_len=0)
        mem_len = lengths.mem_len
        model.require_capacity(mem_len)
        mems, last_token, offset = state or ReaderState(model.start_memory(1, mem_len), None)
        # The state may be of a reader with longer segments.
        offset = offset if offset < lengths.segment_len else 0
        model.require_memory(mems, 1)
        if model.remembers_positions:
            # Or with a longer memory.
            mems = mems.last(mem_len + offset)
        self.state = ReaderState(model.keep(mems), last_token, offset)

    @property
    def most_positions(self) -> int:
        """Maximum length of the memory, reached one token before a segment boundary."""
        lengths = self.lengths
        is_windowed = lengths.is_windowed(self.model.config)
        return lengths.mem_len + (0 if is_windowed else lengths.segment_len - 1)

    @property
    def remaining(self) -> int:
        """Number of tokens to the next segment boundary."""
        is_first = self.state.last_token is None
        return self.lengths.segment_len - self.state.offset + is_first

    @torch.no_grad()
    def read(self, ids: object, *, scored: bool = True) -> list[float | None]:
        """Read tokens; return the log-probability of each, in nats; None for the first of a text.

        Args:
            ids: The tokens, in any array, tensor or sequence.
            scored: False: do not predict them, and return an empty list.

        Raises:
            ValueError: The tokens are no integers, or one is outside the vocabulary.
        """
        tokens = as_tokens(ids, self.model.config).tolist()
        scores: list[float | None] = []
        start = 0
        if self.state.last_token is None and tokens:
            self.state, start = self.state._replace(last_token=tokens[0]), 1
            scores += [None] * scored
        with evaluating(self.model):
            while start < len(tokens):
                stop = start + self.remaining
                scores += self._read(tokens[start:stop], scored)
                start = stop
        return scores

    def _read(self, targets: list[int], scored: bool) -> list[float]:
        """Read the last token and all targets but the last one, within a segment."""
        mems, last_token, offset = self.state
        assert last_token is not None
        offset = (offset + len(targets)) % self.lengths.segment_len
        lengths = self.lengths
        if not lengths.is_windowed(self.model.config):
            # The memory holds all of an incomplete segment.
            lengths = lengths._replace(mem_len=lengths.mem_len + offset)
        tokens = torch.tensor([[last_token, *targets[:-1]]])
        predicted = torch.tensor([targets]) if scored else None
        (piece,) = read(self.model, tokens, lengths, mems, targets=predicted)
        # In one assignment, so that an interrupt leaves a consistent state.
        self.state = ReaderState(piece.mems, targets[-1], offset)
        return [] if piece.nll is None else (-piece.nll[0]).tolist()
