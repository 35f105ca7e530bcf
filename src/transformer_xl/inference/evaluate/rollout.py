"""Which past tokens a prediction attends to, directly and through the layers of memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.inference.evaluate.streams import as_text
from transformer_xl.model import LanguageModel, Lengths, Memory, Text, evaluating, read, read_all


@dataclass(frozen=True, kw_only=True)
class Attended:
    """The attention of a model when it predicts one token, and by distance."""

    place: int
    """Index of the predicted token: of the last half segment, the one that gains most by memory."""
    nll: float
    """Its loss in nats, given all of the text before it."""
    nll_without_memory: float
    """Its loss in nats, given its segment only."""
    direct: Float[np.ndarray, "N place"]
    """The attention weights of each layer on the tokens before it, averaged over heads."""
    through: Float[np.ndarray, "N place"]
    """The attention rollout: shares of those tokens in the output of each layer, the top last."""
    by_distance: Float[np.ndarray, "N tokens"]
    """The attention weights of each layer by distance, from 0, averaged over heads and queries."""


@torch.no_grad()
def attended(model: LanguageModel, ids: Text, **lengths: Any) -> Attended:
    r"""Compute the attention rollout of a short text, for a token in its last segment.

    Attention rollout (Abnar and Zuidema, 2020) attributes the output of a layer one half to the
    residual connection and one half to the attention, and multiplies over layers. Here it includes
    the memory: a cached state has shares in tokens before it, so that N layers with M positions of
    memory reach back about $N M$ tokens (section 3.2 of the paper, figure 2).

    Time and memory are quadratic in the length of the text. The ``lengths`` are ``segment_len``,
    ``mem_len``, ``attn_len`` and ``clamp_len``.

    Raises:
        ValueError: The model has no attention; the text has fewer than two tokens, or one outside
            the vocabulary; a length is out of range.
    """
    read_with = Lengths.of(model.config, **lengths, ext_len=0)
    text = as_text(ids, model.config).to(model.device)
    n, N, segment_len = len(text) - 1, model.config.n_layer, read_with.segment_len
    direct = torch.zeros(N, n, n, device=model.device)
    shares = [torch.eye(n, device=model.device), *torch.zeros(N, n, n, device=model.device)]
    by_distance = torch.zeros(N, n, dtype=torch.float64, device=model.device)
    # The first segment may be shorter, so that the last one is complete.
    starts = sorted({0, *range(n % segment_len, n, segment_len)})
    mems: Memory = model.start_memory(1, read_with.mem_len)
    reach: dict[str, Any] = {"attn_len": read_with.attn_len, "clamp_len": read_with.clamp_len}
    # The memory holds the inputs of a layer or, with enhanced recurrence, its outputs.
    above = int(model.config.enhanced_recurrence)
    with evaluating(model):
        for start, stop in zip(starts, [*starts[1:], n], strict=True):
            tokens = text[None, start:stop]
            weights = torch.stack(model.attention_weights(tokens, mems, **reach))
            mems = read_all(model, tokens, read_with, mems)
            # Zeros of an initial memory are no tokens.
            first = max(stop - weights.shape[-1], 0)
            seen_NTS = weights.mean(2)[:, 0, :, first - stop :].float()
            for layer, seen_TS in enumerate(seen_NTS):
                direct[layer, start:stop, first:stop] = seen_TS
                known = [shares[layer + above][first:start], shares[layer][start:stop]]
                brought = seen_TS @ torch.cat(known)
                shares[layer + 1][start:stop] = (shares[layer][start:stop] + brought) / 2
            for t in range(start, stop):
                seen_NS = seen_NTS[:, t - start, : t + 1 - first]
                by_distance[:, : t + 1 - first] += seen_NS.flip(1)
        place, losses = _most_helped(model, text, starts[-1], read_with)
    return Attended(
        place=place,
        nll=losses[0],
        nll_without_memory=losses[1],
        direct=direct[:, place - 1, :place].cpu().numpy(),
        through=torch.stack([x[place - 1, :place] for x in shares[1:]]).cpu().numpy(),
        by_distance=(by_distance / n).cpu().numpy(),
    )


def _most_helped(
    model: LanguageModel, text: Tensor, start: int, lengths: Lengths
) -> tuple[int, tuple[float, float]]:
    """Return the token that gains most by the memory, and its losses with and without it.

    It is in the second half of the segment, as the first half lacks context without memory anyway.
    """
    begun, mems = model.start_memory(1, lengths.mem_len), None
    # As one segment.
    lengths = lengths._replace(segment_len=len(text))
    if start:
        mems = read_all(model, text[None, :start], lengths, begun)
    tokens, targets = text[None, start:-1], text[None, start + 1 :]
    known, alone = (
        piece.nll[0]
        for memory in (mems, None)
        for piece in read(model, tokens, lengths, memory, targets=targets)
        if piece.nll is not None
    )
    half = len(known) // 2
    best = half + int((alone - known)[half:].argmax())
    return start + best + 1, (known[best].item(), alone[best].item())
