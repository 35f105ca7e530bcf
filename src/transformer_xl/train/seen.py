"""What the memory of a model does, measured for its report.

``memory.json`` of a run folder holds a ``Seen`` of :mod:`transformer_xl.train.report`, measured on
the first tokens of the text of the evaluation, or where these have no completion, on those from the
first document with one. The text is read by segments, with the lengths of the evaluation; its
``window`` and ``dynamic`` are for ``results.json``.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from transformer_xl.config import EvalConfig, ModelConfig
from transformer_xl.errors import InputError
from transformer_xl.inference.evaluate import Passage
from transformer_xl.inference.evaluate.streams import read_parts
from transformer_xl.model import (
    LanguageModel,
    Lengths,
    Text,
    evaluating,
    read_each,
    require_at_least,
)

MEMORY_FILE = "memory.json"
TOKENS = 50_000
"""Tokens of the text that are read."""
READINGS = 3
"""How often they are read: by segments without memory and with it, and by pieces."""
PIECES = 32
"""Least number of pieces whose starts are averaged, in a long text."""


def see_memory(
    model: LanguageModel, ids: Text, settings: EvalConfig, segment_len: int
) -> dict[str, Any]:
    """Measure what ``memory.json`` holds, but for the name of the split.

    Args:
        model: The model.
        ids: The text in tokens, at least two.
        settings: Of the evaluation: its lengths, and how many parts are read side by side.
        segment_len: Tokens read at once, where the settings do not say.
    """
    ids = excerpt(ids, model.config)
    lengths = Lengths.of(model.config, **settings.lengths_after(segment_len))
    return {
        "tokens": len(ids) - 1,
        "segment_len": lengths.segment_len,
        "mem_len": lengths.mem_len,
        **loss_by_position(model, ids, settings, segment_len),
        "attention": None,
    }


def excerpt(ids: Text, config: ModelConfig) -> Integer[np.ndarray, " read"]:
    """Return the tokens that are read, among which, if the text has any, are completions."""
    tokens, begin, separator = np.asarray(ids), 0, config.completion_at
    if separator is not None and separator not in tokens[:TOKENS]:
        first = int((tokens[:-1] == separator).argmax())
        resets = np.flatnonzero(tokens[: first + 1] == config.reset_at)
        # Of a long prompt the end alone, so that the completion is read.
        begin = max(int(resets.max(initial=0)), first - TOKENS // 2)
    return tokens[begin : begin + TOKENS + 1]


def loss_by_position(
    model: LanguageModel, ids: Text, settings: EvalConfig, segment_len: int
) -> dict[str, Any]:
    """Measure ``in_segment`` and ``from_start``; the arguments are those of :func:`see_memory`."""
    lengths = Lengths.of(model.config, **settings.lengths_after(segment_len))
    segment_len, mem_len, n = lengths.segment_len, lengths.mem_len, len(ids) - 1
    reading = {"batch_size": settings.batch_size, **lengths._asdict()}
    in_segment = []
    for each in sorted({0, mem_len}):
        losses = loss_in_segment(model, ids, **{**reading, "mem_len": each})
        in_segment.append({"mem_len": each, "spans": spans(losses)})
    # To where a full memory and a segment end, and as far again, if that leaves enough pieces.
    length = min(2 * (mem_len + segment_len), max(n // PIECES, min(n, segment_len)))
    losses = loss_from_start(model, ids, length=length, **reading)
    from_start = {"mem_len": mem_len, "pieces": n // length, "spans": spans(losses)}
    return {"in_segment": in_segment, "from_start": from_start}


@torch.no_grad()
def loss_in_segment(
    model: LanguageModel, ids: Text, *, batch_size: int = 1, **lengths: Any
) -> Float[np.ndarray, " T"]:
    """Return the mean loss, in nats, by position in the segment.

    Without memory, the first positions have little context (context fragmentation); with memory,
    all are alike. Every token of the text but the first counts once, as in :func:`evaluate`, whose
    lengths this takes.

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
