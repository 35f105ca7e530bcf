"""Reading a text with the memory carried along: the losses of its tokens."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.model import LanguageModel, Memory
from transformer_xl.model.arguments import Text as Text
from transformer_xl.model.arguments import as_tokens as as_tokens
from transformer_xl.model.arguments import require_at_least as require_at_least
from transformer_xl.model.lengths import SEGMENT_LEN, Lengths
from transformer_xl.model.memory import join
from transformer_xl.model.needs import require_mem_len
from transformer_xl.model.reading import Reader, read, read_all
from transformer_xl.model.wrapping import evaluating as evaluating


def as_text(ids: Any, config: ModelConfig) -> Int[Tensor, " length"]:
    """Return a text as :func:`as_tokens` does, one in which there is something to predict.

    Raises:
        ValueError: They are no integers, one is outside the vocabulary, or there is nothing to
            predict.
    """
    text = as_tokens(ids, config)
    if len(text) < 2:
        raise ValueError(f"a text of {len(text)} tokens: at least 2 are needed to predict one")
    return text


def read_parts(
    model: LanguageModel,
    text: Int[Tensor, " length"],
    *,
    lengths: Lengths,
    batch_size: int = 1,
) -> Iterator[tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]]:
    """Yield -log p of each segment's tokens, with those that count marked: each token once.

    The text is divided into parts, read side by side, each warmed up on the text before it.

    Args:
        model: The model, in evaluation mode; call this without gradients.
        text: The text.
        lengths: The lengths.
        batch_size: Parts, at most as many as there are tokens to predict.
    """
    n, device = len(text) - 1, model.device
    # Rounded up, so that no part is longer than the first.
    starts = [-(-b * n // batch_size) for b in range(batch_size + 1)]
    # Parts differ by one token at most. A shorter one begins with the last token of the part before
    # it, uncounted, so that all end together: absolute positions are counted from the end.
    longest = starts[1]
    firsts = [end - longest for end in starts[1:]]
    mems = _warm_memory(model, text, firsts, lengths)
    uncounted = (torch.tensor(starts[:-1]) - torch.tensor(firsts))[:, None]
    parts, targets = ([text[p + k : p + k + longest] for p in firsts] for k in (0, 1))
    for piece in read(model, parts, lengths, mems, targets=targets):
        assert piece.nll is not None
        counted = piece.start + torch.arange(piece.nll.shape[1]) >= uncounted
        yield piece.nll, counted.to(device)


def _warm_memory(model: LanguageModel, text: Tensor, firsts: list[int], lengths: Lengths) -> Memory:
    """Return the memory with which each part of the text begins."""
    mem_len = lengths.mem_len
    first = model.keep(model.start_memory(1, mem_len))
    if len(firsts) == 1:
        return first
    # Where the text before a part is shorter than the memory, all parts warm up on less.
    W, others = min(mem_len, firsts[1]), firsts[1:]
    mems = model.keep(model.start_memory(len(others), mem_len))
    # Nothing of this is read again: all of it is to be in the memory.
    before = [text[place - W : place] for place in others]
    return join([first, read_all(model, before, lengths._replace(ext_len=0), mems)])


def score(
    model: LanguageModel,
    ids: Text,
    *,
    segment_len: int = SEGMENT_LEN,
    mem_len: int | None = None,
) -> Iterator[float | None]:
    """Yield the log-probability of each token given all before it, in nats; None for the first.

    Raises:
        ValueError: They are no integers, one is outside the vocabulary, or a length is out of
            range.
    """
    require_mem_len(model, mem_len)
    reader = Reader(model, Lengths.of(model.config, segment_len=segment_len, mem_len=mem_len))
    return _scores(reader, as_tokens(ids, model.config))


def _scores(reader: Reader, text: Int[Tensor, " length"]) -> Iterator[float | None]:
    # Segments begin with the first token; the first prediction is the second's.
    yield from reader.read(text[:1])
    n = reader.lengths.segment_len
    for start in range(1, len(text), n):
        yield from reader.read(text[start : start + n])
