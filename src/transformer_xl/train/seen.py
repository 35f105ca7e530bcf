"""What the memory of a model does, measured for its report.

``memory.json`` of a run folder holds a ``Seen`` of :mod:`transformer_xl.train.report`, measured on
the first tokens of the text of the evaluation, or where these have no completion, on those from the
first document with one. The text is read by segments, with the lengths of the evaluation; its
``window`` and ``dynamic`` are for ``results.json``. Attention is measured without ``ext_len``.
"""

from typing import Any

import numpy as np
from jaxtyping import Integer

from transformer_xl.config import EvalConfig, ModelConfig
from transformer_xl.data import Vocab
from transformer_xl.inference.evaluate import attended, loss_from_start, loss_in_segment, spans
from transformer_xl.model import LanguageModel, Lengths, Text

MEMORY_FILE = "memory.json"
TOKENS = 50_000
"""Tokens of the text that are read."""
READINGS = 3
"""How often they are read: by segments without memory and with it, and by pieces."""
PIECES = 32
"""Least number of pieces whose starts are averaged, in a long text."""
ATTENDED = 1024
"""Tokens before the prediction whose attention is shown."""


def see_memory(
    model: LanguageModel, ids: Text, vocab: Vocab, settings: EvalConfig, segment_len: int
) -> dict[str, Any]:
    """Measure what ``memory.json`` holds, but for the name of the split.

    Args:
        model: The model.
        ids: The text in tokens, at least two.
        vocab: The vocabulary of the model.
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
        "attention": _attention(model, ids, vocab, lengths) if model.has_attention else None,
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


def _attention(model: LanguageModel, ids: Text, vocab: Vocab, lengths: Lengths) -> dict[str, Any]:
    options = lengths._asdict()
    del options["ext_len"]
    rollout = attended(model, ids[: ATTENDED + 1], **options)
    decoder = vocab.stream_decoder()
    texts = [decoder.push(int(token)) for token in ids[: rollout.place + 1]]
    shares = rollout.through[-1]
    # What the top layer does not reach need not be shown.
    first = min(int(np.argmax(shares > 0)), max(len(shares) - lengths.segment_len, 0))
    return {
        "nll": rollout.nll,
        "nll_without_memory": rollout.nll_without_memory,
        "texts": texts[first:-1],
        "predicted": texts[-1],
        "shares": [_rounded(x) for x in shares[first:].tolist()],
        "direct": _by_distance(rollout.by_distance),
        # The token itself, at distance 0, stands last.
        "through": _by_distance(rollout.through[:, ::-1]),
    }


def _by_distance(weights: np.ndarray) -> list[dict[str, Any]]:
    """Add up weights of each layer over spans of distances, as far as there are any."""
    reach = 1 + int(np.flatnonzero(weights.any(0)).max(initial=0))
    rows = []
    for layers in zip(*(spans(layer) for layer in weights[:, :reach]), strict=True):
        first, last = layers[0]["first"], layers[0]["last"]
        shares = [_rounded(x["nll"] * (last - first + 1)) for x in layers]
        rows.append({"first": first - 1, "last": last - 1, "shares": shares})
    return rows


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
