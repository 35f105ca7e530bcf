"""Where in a text a model predicts well: by place in the segment, by distance from its start."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.inference.evaluate.streams import (
    Text,
    as_text,
    evaluating,
    read_parts,
    require_at_least,
)
from transformer_xl.model import LanguageModel
from transformer_xl.model.lengths import SEGMENT_LEN, Lengths
from transformer_xl.model.reading import read


@torch.no_grad()
def loss_in_segment(
    model: LanguageModel,
    ids: Text,
    *,
    segment_len: int = SEGMENT_LEN,
    mem_len: int | None = None,
    attn_len: int | None = None,
    clamp_len: int | None = None,
    ext_len: int | None = None,
    batch_size: int = 1,
) -> Float[np.ndarray, " T"]:
    """Return the mean loss, in nats, of the first, second, ... token that a segment predicts.

    Without memory the first ones have next to no context: what segments cost. With memory all
    places are alike. Every token of the text but the first counts once, as in :func:`evaluate`.

    Raises:
        ValueError: The text has fewer than two tokens, or one outside the vocabulary; a length is
            out of range.
    """
    require_at_least(1, batch_size=batch_size)
    lengths = Lengths.of(
        model.config,
        segment_len=segment_len,
        mem_len=mem_len,
        attn_len=attn_len,
        clamp_len=clamp_len,
        ext_len=ext_len,
    )
    text = as_text(ids, model.config)
    batch_size = min(batch_size, len(text) - 1)
    sums = torch.zeros(2, lengths.segment_len, dtype=torch.float64, device=model.device)
    with evaluating(model):
        for nll, counted in read_parts(model, text, lengths=lengths, batch_size=batch_size):
            _add(sums[:, : nll.shape[1]], nll, counted)
    # A text that is shorter than a segment has no token in its last places.
    return _mean(sums[:, sums[1] > 0])


@torch.no_grad()
def loss_from_start(
    model: LanguageModel,
    ids: Text,
    *,
    length: int,
    segment_len: int = SEGMENT_LEN,
    mem_len: int | None = None,
    attn_len: int | None = None,
    clamp_len: int | None = None,
    ext_len: int | None = None,
    batch_size: int = 1,
) -> Float[np.ndarray, " places"]:
    """Return the mean loss, in nats, by how many tokens a text has already.

    The text is cut into pieces of ``length`` predicted tokens, each read with an empty memory at
    its start: what one more token of context is worth. A rest that is shorter is left out.

    Args:
        model: The model; its mode is restored afterwards.
        ids: The text in tokens.
        length: Tokens predicted in each piece; the first of them has one token before it.
        segment_len: Tokens read at once.
        mem_len: Remembered positions. None: as the model is configured.
        attn_len: Keys a query sees, counting its own. None: as the model is configured.
        clamp_len: Largest distance told apart. None: as the model is configured.
        ext_len: Tokens before each segment of a piece that are read again with it. None: as the
            model is configured.
        batch_size: Pieces read side by side.

    Raises:
        ValueError: The text is shorter than a piece, or has a token outside the vocabulary; a
            length is out of range.
    """
    require_at_least(1, length=length, batch_size=batch_size)
    lengths = Lengths.of(
        model.config,
        segment_len=segment_len,
        mem_len=mem_len,
        attn_len=attn_len,
        clamp_len=clamp_len,
        ext_len=ext_len,
    )
    text = as_text(ids, model.config)
    n_pieces = (len(text) - 1) // length
    if not n_pieces:
        raise ValueError(f"length={length} needs a text of {length + 1} tokens, not {len(text)}")
    pieces = text.unfold(0, length + 1, length)[:n_pieces]
    sums = torch.zeros(2, length, dtype=torch.float64, device=model.device)
    with evaluating(model):
        for some in pieces.split(batch_size):
            mems = model.keep(model.start_memory(len(some), lengths.mem_len))
            for piece in read(model, some[:, :-1], lengths, mems, targets=some[:, 1:]):
                start, nll = piece.start, piece.nll
                assert nll is not None
                _add(sums[:, start : start + nll.shape[1]], nll, torch.ones_like(nll))
    return _mean(sums)


def spans(losses: Sequence[float] | Float[np.ndarray, " length"]) -> list[dict[str, float]]:
    """Take the mean over spans that grow, four to a doubling of the place, counted from 1.

    Returns:
        For each span its ``first`` and ``last`` place and the mean ``nll``.
    """
    edges = np.unique(np.round(2 ** np.arange(0, np.log2(len(losses) + 1) + 0.25, 0.25)))
    edges = [int(x) for x in edges if x <= len(losses)] + [len(losses) + 1]
    values = np.asarray(losses, dtype=float)
    return [
        {"first": first, "last": stop - 1, "nll": float(np.mean(values[first - 1 : stop - 1]))}
        for first, stop in pairwise(edges)
    ]


def _add(sums: Tensor, nll: Tensor, counted: Tensor) -> None:
    sums += torch.stack([(nll.double() * counted).sum(0), counted.double().sum(0)])


def _mean(sums: Tensor) -> np.ndarray:
    return (sums[0] / sums[1]).cpu().numpy()
