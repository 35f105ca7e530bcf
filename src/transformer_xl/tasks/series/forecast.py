"""Forecasts: what may follow real-valued series, drawn step by step from the mixture."""

from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.errors import InputError
from transformer_xl.model import (
    Decoder,
    LanguageModel,
    Lengths,
    MixtureHead,
    evaluating,
    read,
)

_BATCH_SIZE = 1_000
"""Streams that are read as a batch, each a path of a series."""


@torch.no_grad()
def forecast(
    model: LanguageModel,
    history: Float[np.ndarray, "B L F"],
    horizon: int,
    *,
    known: Float[np.ndarray, "B horizon others"] | None = None,
    offsets: np.ndarray | None = None,
    paths: int = 100,
    seed: int = 1,
    lengths: Lengths | None = None,
) -> Float[np.ndarray, "B paths horizon"]:
    """Draw paths of the values that follow each of B series.

    The history is read once. Each path then draws a value, and reads it as its next input, of which
    it is the first feature; the others must be known in advance, such as the time of day.

    Args:
        model: A model with ``n_mixtures``; its mode is restored afterwards.
        history: The inputs so far; the last one predicts the first value.
        horizon: Number of values to draw.
        known: The features but the first of the input that has each value; those of the last one
            are not used. None: there are none (``n_features=1``).
        offsets: Added to what is drawn at each step, for models that predict the difference from a
            number known in advance, such as the value of a season ago. None: 0.
        paths: Paths to draw for each series.
        seed: Random seed; the same seed draws the same paths.
        lengths: How the history is read, such as ``Lengths.of(model.config, mem_len=256)``;
            ``ext_len`` is not used. None: as configured.

    Returns:
        The values. Quantiles over the paths are intervals of the forecast.

    Raises:
        InputError: The model has no mixture, or a shape or length does not fit.
    """
    config, must = model.config, f"must be (series, length, {model.config.n_features})"
    if history.ndim != 3:
        raise InputError(f"history of shape {history.shape} {must}")
    B, L, n_features = history.shape
    known = np.zeros((B, horizon, 0)) if known is None else known
    offsets = np.zeros((B, horizon)) if offsets is None else offsets
    for holds, rule in (
        (
            config.n_mixtures > 0,
            "a forecast needs a model that predicts real values (n_mixtures above 0), and this one "
            "predicts symbols",
        ),
        (min(L, horizon, paths) > 0, f"{L=}, {horizon=} and {paths=} must be at least 1"),
        (n_features == config.n_features, f"history of shape {history.shape} {must}"),
        *(
            (x.shape == shape, f"{name} of shape {x.shape} must be {shape}")
            for name, x, shape in (
                ("known", known, (B, horizon, config.n_features - 1)),
                ("offsets", offsets, (B, horizon)),
            )
        ),
    ):
        if not holds:
            raise InputError(rule)
    lengths = (lengths or Lengths.of(config))._replace(ext_len=0)
    draw = torch.Generator(model.device).manual_seed(seed)
    tensors = [
        torch.from_numpy(np.asarray(x)).to(model.device, model.dtype)
        for x in (history, known, offsets)
    ]
    batches = zip(*(x.split(max(1, _BATCH_SIZE // paths)) for x in tensors), strict=True)
    with evaluating(model):
        values = [_drawn(model, x, y, z, lengths, paths, draw) for x, y, z in batches]
    return torch.cat(values).double().cpu().numpy()


def _drawn(
    model: LanguageModel,
    history: Float[Tensor, "B L F"],
    known: Float[Tensor, "B horizon others"],
    offsets: Float[Tensor, "B horizon"],
    lengths: Lengths,
    paths: int,
    draw: torch.Generator,
) -> Float[Tensor, "B paths horizon"]:
    (B, horizon), head = offsets.shape, cast(MixtureHead, model.softmax)
    values = offsets.new_empty(B * paths, horizon)
    rows = torch.arange(B, device=model.device).repeat_interleave(paths)
    mems, hidden = model.keep(model.start_memory(B, lengths.mem_len)), values
    for piece in read(model, history, lengths, mems):
        mems, hidden = piece.mems, piece.hidden[:, -1]
    decoder = Decoder.of(model, lengths, mems.select(rows))
    hidden = hidden[rows]
    for n in range(horizon):
        if n:
            hidden = decoder(torch.cat([values[:, n - 1, None], known[rows, n - 1]], 1))
        values[:, n] = head.mixture(hidden).sample(draw).to(values.dtype) + offsets[rows, n]
    return values.unflatten(0, (B, paths))
