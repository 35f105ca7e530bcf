"""The paper's Table 9: the time per token with a recomputed window, and with a memory.

The window's model is that of Al-Rfou et al. (2018): absolute positions, no memory. Ours has the
same shape with relative positions. Both have random weights, which do not change the speed; both
attend to the same number of keys for each token.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from transformer_xl.apps.bench.speed import (
    circumstances,
    full_memory,
    reading_step,
    require_transformer_xl,
)
from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_xl.config.device import autocast, pick_device, pick_precision
from transformer_xl.inference.evaluate import window_nll
from transformer_xl.model import TransformerXL
from transformer_xl.model.segment import Lengths
from transformer_xl.ops.timing import median_and_range, timed

SLOWDOWNS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""How many times slower the window was in the paper's Table 9, on one GPU, by attention length."""


def evaluation_speed(
    model: ModelConfig,
    attn_lens: tuple[int, ...] = tuple(SLOWDOWNS),
    *,
    segment_len: int = 128,
    batch_size: int = 1,
    windows: tuple[int, ...] = (1, 4),
    rounds: int = 3,
    precision: Any = "float32",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure the time per token of both methods, alternating, at each attention length.

    Args:
        model: The shape; its positions and its memory are set here.
        attn_lens: Keys that a token attends to: the window, and our memory.
        segment_len: Tokens of a segment of ours.
        batch_size: Streams that ours reads batched.
        windows: Batch sizes of windows: each is measured, the fastest is reported.
        rounds: Measured rounds, after one for warm-up.
        precision: Precision of matrix products.
        say: Called with a message for each row.

    Returns:
        The environment and a row for each length: seconds per token by ``window`` and by
        ``memory``, with their ranges, how many times slower the window is, and the paper's number.

    Raises:
        ValueError: A number is below 1, or it is another kind of model.
    """
    require_transformer_xl(model)
    numbers = {"segment_len": (segment_len,), "batch_size": (batch_size,), "rounds": (rounds,)}
    for name, values in {"attn_lens": attn_lens, "windows": windows, **numbers}.items():
        if not values or min(values) < 1:
            raise ValueError(f"{name}={values} must be at least 1 each")
    device = pick_device()
    config = Config(model=model, data=DataConfig(), train=TrainConfig(precision=precision))
    sizes = {"segment_len": segment_len, "batch_size": batch_size, "rounds": rounds}
    rows = []
    with torch.no_grad(), autocast(precision, device):
        for attn_len in attn_lens:
            rows.append(_row(model, attn_len, windows, device, **sizes))
            say(f"{attn_len:,} keys: {rows[-1]['slowdown']:,.0f} times slower")
    dtype = pick_precision(precision, device)
    return {**circumstances(config, device), "dtype": dtype, **sizes, "rows": rows}


def _row(
    model: ModelConfig,
    attn_len: int,
    windows: tuple[int, ...],
    device: torch.device,
    *,
    segment_len: int,
    batch_size: int,
    rounds: int,
) -> dict[str, Any]:
    """Measure one length; alternating, so that changes of the machine's speed affect all alike."""
    ways = {B: _window_step(_with_positions(model, attn_len, device), attn_len, B) for B in windows}
    step = _memory_step(_with_memory(model, attn_len, device), segment_len, batch_size)
    window: dict[int, list[float]] = {B: [] for B in ways}
    memory: list[float] = []
    for turn in range(rounds + 1):
        # A step of ours is short compared with a window, so several are measured.
        ours = timed(step, 5, device, warm_up=2 if turn == 0 else 0)["seconds"]
        theirs = {B: timed(way, 1, device, warm_up=0)["seconds"] / B for B, way in ways.items()}
        if turn:
            memory.append(ours / (segment_len * batch_size))
            for B, seconds in theirs.items():
                window[B].append(seconds)
    best = min(window, key=lambda B: statistics.median(window[B]))
    by_window, by_memory = median_and_range(window[best]), median_and_range(memory)
    return {
        "attn_len": attn_len,
        "window": by_window | {"batch_size": best},
        "memory": by_memory,
        "slowdown": by_window["seconds"] / by_memory["seconds"],
        "paper": SLOWDOWNS.get(attn_len),
    }


def _with_positions(model: ModelConfig, window: int, device: torch.device) -> TransformerXL:
    # The table ends with the window, so no distance is clamped.
    settings = {"attn_type": 3, "n_positions": window, "mem_len": 0}
    config = replace(model, **settings, attn_len=None, clamp_len=None)
    return TransformerXL(config).to(device).eval()


def _with_memory(model: ModelConfig, attn_len: int, device: torch.device) -> TransformerXL:
    config = replace(model, attn_type=0, n_positions=None, mem_len=attn_len, attn_len=attn_len)
    return TransformerXL(config).to(device).eval()


def _window_step(model: TransformerXL, window: int, B: int) -> Callable[[], object]:
    """Return a function that predicts B tokens, each from a window of its own."""
    # The first windows of a text are shorter: only full ones are timed.
    text = torch.randint(model.config.vocab_size, (window + B,))
    return lambda: window_nll(model, text, window, batch_size=B, first=window)


def _memory_step(model: TransformerXL, T: int, B: int) -> Callable[[], object]:
    """Return a function that predicts a segment of each stream, with a full memory."""
    window = torch.randint(model.config.vocab_size, (B, T + 1), device=model.device)
    mems = model.keep(full_memory(model, B, model.config.mem_len))
    lengths = Lengths.of(model.config)
    return reading_step(model, window[:, :-1], window[:, 1:], lengths, mems)
