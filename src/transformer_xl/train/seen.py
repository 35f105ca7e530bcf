"""What the memory of a model does, measured for its report.

``memory.json`` of a run folder holds a ``Seen`` of :mod:`transformer_xl.train.report`, measured on
the first tokens of the text of the evaluation, or where these have no completion, on those from the
first document with one. The text is read by segments, with the lengths of the evaluation; its
``window`` and ``dynamic`` are for ``results.json``.
"""

from typing import Any

import numpy as np
from jaxtyping import Integer

from transformer_xl.config import EvalConfig, ModelConfig
from transformer_xl.inference.evaluate import loss_from_start, loss_in_segment, spans
from transformer_xl.model import LanguageModel, Lengths, Text

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
