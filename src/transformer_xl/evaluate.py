"""How well a model predicts a text, with any memory length."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from transformer_xl.nn import KeptMemory, Memory, TransformerXL
from transformer_xl.nn.memory import join


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What an evaluation measured, and with which lengths."""

    nll: float
    """Mean of -log p, nats per token."""
    ppl: float
    """Perplexity, exp(nll)."""
    bpc: float
    """Bits per token: per character or byte where these are the tokens."""
    bits_per_byte: float | None
    """Bits per byte of text; None where tokens do not stand for bytes."""
    tokens: int
    """Predicted tokens: all but the first, each once."""
    segment_len: int
    mem_len: int
    attn_len: int | None
    clamp_len: int | None
    ext_len: int
    batch_size: int
    seconds: float
    tokens_per_second: float


@torch.no_grad()
def evaluate(
    model: TransformerXL,
    ids: Sequence[int] | Integer[np.ndarray | Tensor, " length"],
    *,
    segment_len: int = 128,
    mem_len: int | None = None,
    attn_len: int | None = None,
    clamp_len: int | None = None,
    ext_len: int | None = None,
    batch_size: int = 1,
    token_bytes: Integer[np.ndarray, " V"] | None = None,
) -> Result:
    """Predict every token of a text but the first, once, with the memory carried along.

    With ``batch_size`` B the text is divided into B parts that are read side by side. Each part
    first reads, uncounted, the ``mem_len`` tokens before it, so that its memory is warm.

    Args:
        model: The model; its mode is restored afterwards.
        ids: The text in tokens.
        segment_len: Tokens read at once. With enough memory it changes the speed alone.
        mem_len: Remembered positions. None: as the model is configured.
        attn_len: Keys a query sees, counting its own. None: as the model is configured.
        clamp_len: Largest distance told apart. None: as the model is configured.
        ext_len: Tokens before each segment that are read again with it, instead of being
            remembered; the first segment of a part has none. None: as the model is configured.
        batch_size: Parts read side by side.
        token_bytes: For each token the bytes of text it stands for; gives ``bits_per_byte``.

    Raises:
        ValueError: The text has fewer than two tokens, or one outside the vocabulary; a length
            is out of range.
    """
    config = model.config
    mem_len = config.mem_len if mem_len is None else mem_len
    ext_len = config.ext_len if ext_len is None else ext_len
    for name, value, least in (
        ("segment_len", segment_len, 1),
        ("mem_len", mem_len, 0),
        ("ext_len", ext_len, 0),
        ("batch_size", batch_size, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    text = ids.cpu() if isinstance(ids, Tensor) else torch.from_numpy(np.array(ids))
    text = text.to(torch.int64)
    n = len(text) - 1
    if n < 1:
        raise ValueError(f"a text of {len(text)} tokens: at least 2 are needed to predict one")
    if text.max() >= config.vocab_size or text.min() < 0:
        raise ValueError(
            f"the text has tokens from {text.min()} to {text.max()}, the model knows 0 to "
            f"{config.vocab_size - 1}: it was made with another vocabulary"
        )

    B = min(batch_size, n)
    # Rounded up, so that no part is longer than the first.
    starts = [-(-b * n // B) for b in range(B + 1)]
    lengths = {"mem_len": mem_len, "attn_len": attn_len, "clamp_len": clamp_len}
    was_training = model.training
    model.eval()
    began = time.perf_counter()
    try:
        mean = _total_nll(model, text, starts, segment_len, ext_len, lengths) / n
    finally:
        model.train(was_training)
    seconds = time.perf_counter() - began

    bits = mean / math.log(2)
    n_bytes = None if token_bytes is None else int(np.asarray(token_bytes)[text[1:]].sum())
    return Result(
        nll=mean,
        ppl=math.exp(mean) if mean < 700 else math.inf,
        bpc=bits,
        bits_per_byte=None if not n_bytes else bits * n / n_bytes,
        tokens=n,
        segment_len=segment_len,
        mem_len=mem_len,
        attn_len=config.attn_len if attn_len is None else attn_len,
        clamp_len=config.clamp_len if clamp_len is None else clamp_len,
        ext_len=ext_len,
        batch_size=B,
        seconds=seconds,
        tokens_per_second=n / seconds,
    )


def _total_nll(
    model: TransformerXL,
    text: Tensor,
    starts: list[int],
    segment_len: int,
    ext_len: int,
    lengths: dict[str, int | None],
) -> float:
    """Add up -log p of all tokens but the first; ``starts`` ends with the end of the text."""
    device = model.device
    # Parts differ by one token at most. A shorter one begins with the last token of the part before
    # it, uncounted, so that all end together: absolute positions are counted from the end.
    longest = starts[1]
    firsts = [end - longest for end in starts[1:]]
    mems = _warm_memory(model, text, firsts, segment_len, lengths)
    start, first = (torch.tensor(places)[:, None] for places in (starts[:-1], firsts))
    nll = torch.zeros((), dtype=torch.float64, device=device)
    for offset in range(0, longest, segment_len):
        # At the beginning of a part all is in the memory that was warmed up.
        context = min(ext_len, offset)
        place = first + offset + torch.arange(-context, min(segment_len, longest - offset))
        predicting = place[:, context:]
        counted = (predicting >= start).to(device)
        targets = text[predicting + 1].to(device)
        out = model(
            text[place].to(device), mems, targets, ext_len=ext_len, context=context, **lengths
        )
        mems = out.mems
        nll += (out.nll.double() * counted).sum()
    return nll.item()


def _warm_memory(
    model: TransformerXL,
    text: Tensor,
    firsts: list[int],
    segment_len: int,
    lengths: dict[str, int | None],
) -> Memory | KeptMemory:
    """Return the memory with which each part of the text begins."""
    mem_len = lengths["mem_len"]
    device = model.device
    first = model.keep(model.start_memory(1, mem_len))
    if len(firsts) == 1:
        return first
    others = torch.tensor(firsts[1:])
    # Where the text before a part is shorter than the memory, all parts warm up on less.
    W = min(mem_len or 0, firsts[1])
    mems = model.keep(model.start_memory(len(others), mem_len))
    for offset in range(0, W, segment_len):
        T = min(segment_len, W - offset)
        place = others[:, None] - W + offset + torch.arange(T)
        _, mems = model.read(text[place].to(device), mems, ext_len=0, **lengths)
    return join([first, mems])  # pyright: ignore[reportArgumentType]


def score(
    model: TransformerXL,
    ids: Sequence[int],
    *,
    segment_len: int = 128,
    mem_len: int | None = None,
) -> Iterator[float | None]:
    """Yield the log-probability of each token given all before it, in nats; None for the first.

    Raises:
        ValueError: A token is outside the vocabulary.
    """
    device = model.device
    mems = model.keep(model.start_memory(1, mem_len))
    yield from [None] * bool(len(ids))
    for start in range(0, len(ids) - 1, segment_len):
        window = torch.tensor([ids[start : start + segment_len + 1]], device=device)
        for token in (int(window.min()), int(window.max())):
            if not 0 <= token < model.config.vocab_size:
                raise ValueError(
                    f"token {token} is outside the vocabulary of {model.config.vocab_size}"
                )
        # Not around the yield: between two values the switch is the caller's.
        with torch.no_grad():
            out = model(window[:, :-1], mems, window[:, 1:], mem_len=mem_len, ext_len=0)
        mems = out.mems
        yield from (-out.nll[0]).tolist()
