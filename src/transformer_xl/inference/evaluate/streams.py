"""Losses of the tokens of a text, read with memory."""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transformer_xl.config import ModelConfig
from transformer_xl.data import Recordings, in_completion
from transformer_xl.errors import DataError, InputError
from transformer_xl.model import (
    SEGMENT_LEN,
    LanguageModel,
    Lengths,
    Memory,
    Reader,
    Text,
    as_tokens,
    evaluating,
    join,
    read,
    read_all,
    read_each,
    require_at_least,
    require_mem_len,
)
from transformer_xl.ops import IGNORED


def as_text(ids: Any, config: ModelConfig) -> Int[Tensor, " length"]:
    """Return a text as :func:`as_tokens` does; require at least two tokens."""
    text = as_tokens(ids, config)
    if len(text) < 2:
        raise InputError(f"a text of {len(text)} tokens: at least 2 are needed to predict one")
    return text


_BLOCK = 1 << 16
"""Positions of recordings that are looked at together."""


class Passage(NamedTuple):
    """What is read and what is predicted at each of n positions, of a text or of recordings."""

    text: Int[Tensor, " length"] | None
    """The text in tokens; None of recordings."""
    inputs: Int[Tensor, " n"] | Float[Tensor, "n F"]
    targets: Int[Tensor, " n"] | Float[Tensor, " n"]
    """The next token, or what the recordings say."""
    counted: Bool[Tensor, " n"] | None
    """Which targets count. None: all."""
    starts: Bool[Tensor, " n"] | None
    """Where recordings begin. None: nowhere, but at ``reset_at``."""

    @classmethod
    def of(cls, source: Text | Recordings, config: ModelConfig) -> "Passage":
        """Return what is read of a text, all but its last token, or of recordings.

        Raises:
            ValueError: The text has fewer than two tokens, or one outside the vocabulary; nothing
                counts; or the recordings do not fit the model.
        """
        if isinstance(source, Recordings):
            require_recordings(source, config)
            inputs, targets, starts = source.at(slice(None))
            counted = torch.from_numpy(source.counted())
            return cls(None, inputs, targets, None if counted.all() else counted, starts)
        text = as_text(source, config)
        inputs, targets = text[:-1], text[1:]
        if config.completion_at is None:
            return cls(text, inputs, targets, None, None)
        completed = torch.from_numpy(in_completion(inputs.numpy(), config))
        if not completed.any():
            raise InputError(
                f"the text has no completion: the token completion_at={config.completion_at} is "
                "not in it; give prompts and completions as in training"
            )
        # No softmax is computed for the others.
        return cls(text, inputs, torch.where(completed, targets.long(), IGNORED), completed, None)

    def is_counted(self, places: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Mark the indices of targets that count; -1 is none."""
        return places >= 0 if self.counted is None else (places >= 0) & self.counted[places]


def require_recordings(source: Recordings, config: ModelConfig) -> None:
    """Require that recordings fit a model and have a target; they are read up to the first.

    Raises:
        DataError: They do not, or have none.
    """
    F, are_real = source.inputs.shape[1], source.are_real
    if (F, are_real) != (config.n_features, config.n_mixtures > 0):
        kind = "numbers" if are_real else "classes"
        raise DataError(
            f"recordings of width {F} with {kind} as targets do not fit a model with "
            f"n_features={config.n_features} and n_mixtures={config.n_mixtures}"
        )
    most = 0 if are_real else int(source.targets.max(initial=-1))
    if not are_real and most >= config.vocab_size:
        raise DataError(
            f"class {most} is not among the {config.vocab_size} that the model knows (vocab_size)"
        )
    blocks = (slice(first, first + _BLOCK) for first in range(0, len(source), _BLOCK))
    if not any(source.counted(block).any() for block in blocks):
        raise DataError("the recordings have no target: all are -100 or NaN")


Losses = tuple[Float[Tensor, "B T"], Int[Tensor, "B T"]]
"""-log p of targets, and their indices in the text, on the CPU; -1: that of another stream."""


def read_parts(
    model: LanguageModel,
    passage: Passage,
    lengths: Lengths,
    batch_size: int = 1,
    max_steps: int | None = None,
) -> Iterator[Losses]:
    """Yield -log p of the targets of each segment.

    The text is divided into ``batch_size`` parts, at most as many as tokens to predict. They are
    read as a batch, each warmed up on the text before it; of each, at most ``max_steps`` segments.
    The caller sets the evaluation mode and disables gradients.
    """
    n = len(passage.targets)
    n_parts = min(batch_size, n)
    # Rounded up, so that no part is longer than the first.
    edges = [-(-b * n // n_parts) for b in range(n_parts + 1)]
    # Lengths differ by one token at most. A shorter part begins one token earlier, which is not
    # counted, so that all end together: absolute positions are counted from the end.
    longest = edges[1]
    firsts = [end - longest for end in edges[1:]]
    mems = _warm_memory(model, passage, firsts, lengths)
    if max_steps is not None:
        longest = min(longest, max_steps * lengths.segment_len)
    parts, targets = (
        [x[p : p + longest] for p in firsts] for x in (passage.inputs, passage.targets)
    )
    starts = passage.starts
    if starts is not None:
        starts = torch.stack([starts[p : p + longest] for p in firsts])
    first_read, first_counted = torch.tensor(firsts)[:, None], torch.tensor(edges[:-1])[:, None]
    for piece in read(model, parts, lengths, mems, targets=targets, starts=starts):
        assert piece.nll is not None
        places = first_read + piece.start + torch.arange(piece.nll.shape[1])
        yield piece.nll, places.masked_fill(places < first_counted, -1)


def _warm_memory(
    model: LanguageModel, passage: Passage, firsts: list[int], lengths: Lengths
) -> Memory:
    """Return the initial memory of each part of the text."""
    mem_len = lengths.mem_len
    first = model.keep(model.start_memory(1, mem_len))
    if len(firsts) == 1:
        return first
    others = firsts[1:]
    mems = model.keep(model.start_memory(len(others), mem_len))
    # Parts near the beginning may have less than a memory before them, and are padded.
    sizes = torch.tensor(others).clamp(max=mem_len)
    before, starts = (
        None
        if x is None
        else pad_sequence([x[max(p - mem_len, 0) : p] for p in others], batch_first=True)
        for x in (passage.inputs, passage.starts)
    )
    assert before is not None
    padded = None if bool((sizes == sizes[0]).all()) else sizes
    # ext_len=0, so that all of it is kept in the memory.
    whole = lengths._replace(ext_len=0)
    return join([first, read_all(model, before, whole, mems, sizes=padded, starts=starts)])


def score(
    model: LanguageModel, ids: Text, *, segment_len: int = SEGMENT_LEN, mem_len: int | None = None
) -> Iterator[float | None]:
    """Yield the log-probability of each token given all before it, in nats; None for the first.

    The arguments are those of :func:`evaluate`, which are checked at the call.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> first, *others = score(model, vocab.encode("ROMEO:"))
        >>> first is None, len(others), max(others) < 0
        (True, 5, True)
    """
    require_mem_len(model, mem_len)
    reader = Reader(model, Lengths.of(model.config, segment_len=segment_len, mem_len=mem_len))
    text = as_tokens(ids, model.config)
    # The first token has no score, and is read with the segment after it.
    parts = (text[:1], *text[1:].split(reader.lengths.segment_len))
    return chain.from_iterable(map(reader.read, parts))


@torch.no_grad()
def loss_in_segment(
    model: LanguageModel, ids: Text, *, batch_size: int = 1, **lengths: Any
) -> Float[np.ndarray, " T"]:
    """Return the mean loss, in nats, by position in the segment.

    Without memory, the first positions have little context (context fragmentation); with memory,
    all are alike. Every token of the text but the first counts once, as in :func:`evaluate`, whose
    lengths this takes.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> loss_in_segment(model, vocab.encode("To be, or not to be"), segment_len=8).shape
        (8,)
    """
    require_at_least(1, batch_size=batch_size)
    read_with = Lengths.of(model.config, **lengths)
    passage = Passage.of(ids, model.config)
    sums = torch.zeros(2, read_with.segment_len, dtype=torch.float64, device=model.device)
    with evaluating(model):
        for nll, places in read_parts(model, passage, read_with, batch_size):
            _add(sums[:, : nll.shape[1]], nll, passage.is_counted(places).to(nll.device))
    # A text shorter than a segment has no tokens at the last positions.
    return _mean(sums[:, : int(sums[1].nonzero().max()) + 1])


@torch.no_grad()
def loss_from_start(
    model: LanguageModel, ids: Text, *, length: int, batch_size: int = 1, **lengths: Any
) -> Float[np.ndarray, " places"]:
    """Return the mean loss, in nats, by the number of tokens of context.

    The text is split into pieces of ``length`` predicted tokens, each read from an initial memory;
    the first token of a piece has one token of context. A shorter rest is left out.

    The other lengths are those of :func:`evaluate`; ``batch_size`` pieces are read as a batch.

    Raises:
        ValueError: The text is shorter than a piece, or has a token outside the vocabulary; a
            length is out of range.
    """
    require_at_least(1, length=length, batch_size=batch_size)
    read_with = Lengths.of(model.config, **lengths)
    passage = Passage.of(ids, model.config)
    text, completed = passage.text, passage.counted
    assert text is not None
    n_pieces = (len(text) - 1) // length
    if not n_pieces:
        raise InputError(f"length={length} needs a text of {length + 1} tokens, not {len(text)}")
    pieces = text.unfold(0, length + 1, length)[:n_pieces]
    counted = torch.ones(len(text) - 1) if completed is None else completed
    counted = counted.to(model.device).unfold(0, length, length)[:n_pieces]
    sums = torch.zeros(2, length, dtype=torch.float64, device=model.device)
    with evaluating(model):
        batches = read_each(model, pieces.tolist(), read_with, batch_size=batch_size, predicts=True)
        for rows, segments in batches:
            for segment in segments:
                assert segment.nll is not None
                place = slice(segment.start, segment.start + segment.nll.shape[1])
                _add(sums[:, place], segment.nll, counted[rows][:, place])
    return _mean(sums)


def spans(losses: Sequence[float] | Float[np.ndarray, " length"]) -> list[dict[str, float]]:
    """Average losses over logarithmic spans of positions, four per doubling, counted from 1.

    Returns:
        The ``first`` and ``last`` position and the mean ``nll`` of each span; a span without any
        counted token, whose losses are NaN, is left out.
    """
    edges = np.unique(np.round(2 ** np.arange(0, np.log2(len(losses) + 1) + 0.25, 0.25)))
    edges = [int(x) for x in edges if x <= len(losses)] + [len(losses) + 1]
    values = np.asarray(losses, dtype=float)
    return [
        {"first": first, "last": stop - 1, "nll": float(np.nanmean(values[first - 1 : stop - 1]))}
        for first, stop in pairwise(edges)
        if not np.isnan(values[first - 1 : stop - 1]).all()
    ]


def _add(sums: Tensor, nll: Tensor, counted: Tensor) -> None:
    sums += torch.stack([(nll.double() * counted).sum(0), counted.double().sum(0)])


def _mean(sums: Tensor) -> np.ndarray:
    # NaN where no token counts.
    return (sums[0] / sums[1]).cpu().numpy()
