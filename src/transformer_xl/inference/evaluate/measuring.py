"""Evaluation of a model on a text, and its result."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Integer, Real
from torch import Tensor

from transformer_xl.config import EvalConfig
from transformer_xl.config.checks import names_nearest
from transformer_xl.config.knn import KnnConfig
from transformer_xl.data import Vocab
from transformer_xl.data.recordings import Recordings
from transformer_xl.inference.evaluate.dynamic import Dynamic, DynamicEvaluation
from transformer_xl.inference.evaluate.streams import (
    Passage,
    as_text,
    places_read,
    read_parts,
    window_nll,
)
from transformer_xl.inference.knn import knn_nll
from transformer_xl.model import LanguageModel
from transformer_xl.model.arguments import Text, require_at_least, require_model, whole
from transformer_xl.model.calling import evaluating
from transformer_xl.model.lengths import SEGMENT_LEN, Lengths
from transformer_xl.model.limits import require_reading


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The metrics of an evaluation, and the settings that it used.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> result = evaluate(model, vocab.encode("To be, or not to be"), mem_len=64)
        >>> round(result.nll, 2), result.mem_len  # nats per token
        (2.46, 64)
    """

    nll: float
    """Mean of -log p, nats per token."""
    ppl: float
    """Perplexity, exp(nll)."""
    bits_per_token: float
    """Mean of -log2 p: nll / ln 2."""
    bpc: float | None
    """Bits per character; None where the tokens are not characters."""
    bits_per_byte: float | None
    """Bits per byte of text; None where the bytes of a predicted token are unknown."""
    tokens: int
    """Number of predicted tokens that count: all but the first, or those of completions; fewer with
    ``max_steps``."""
    segment_len: int
    mem_len: int
    attn_len: int | None
    clamp_len: int | None
    ext_len: int
    batch_size: int
    seconds: float
    tokens_per_second: float
    window: int | None = None
    """Length of the sliding window; None: evaluated with memory."""
    dynamic: str | None = None
    """Update rule of dynamic evaluation; None: static weights."""
    dynamic_lr: float | None = None
    dynamic_decay: float | None = None
    dynamic_eps: float | None = None
    knn_k: int | None = None
    """Nearest positions of kNN-LM; None: the distribution of the model alone."""
    knn_share: float | None = None
    knn_temperature: float | None = None
    knn_window: int | None = None

    def __repr__(self) -> str:
        known = {name: x for name, x in asdict(self).items() if x is not None}
        return f"Result({', '.join(f'{name}={x!r}' for name, x in known.items())})"


@names_nearest
@torch.no_grad()
def evaluate(
    model: LanguageModel,
    ids: Text | Recordings,
    *,
    segment_len: int = SEGMENT_LEN,
    mem_len: int | None = None,
    attn_len: int | None = None,
    clamp_len: int | None = None,
    ext_len: int | None = None,
    batch_size: int = 1,
    max_steps: int | None = None,
    token_bytes: Real[np.ndarray, " V"] | None = None,
    per_character: bool = False,
    window: int | None = None,
    dynamic: Dynamic | None = None,
    knn: KnnConfig | None = None,
) -> Result:
    """Evaluate a model on a text, predicting every token but the first once, with memory.

    If the model has a ``completion_at``, only the tokens of completions count. A model with
    ``n_features`` is evaluated on recordings, of which the targets that are given count; with
    ``n_mixtures`` the nats are those of a density, and may be negative.

    With ``batch_size`` B the text is divided into B parts, read as a batch. The memory of each part
    is warmed up on the ``mem_len`` tokens before it.

    Args:
        model: The model, which is not modified; its mode is restored afterwards.
        ids: The text in tokens, or recordings.
        segment_len: Segment length. With enough memory it only affects the speed.
        mem_len: Memory length. None: as configured.
        attn_len: Keys a query sees, counting its own. None: as configured.
        clamp_len: Distances above it count as it. None: as configured.
        ext_len: Tokens before each segment that are read again with it instead of being kept in
            memory; the first segment of a part has none. None: as configured.
        batch_size: Number of parts, or of windows, in a batch.
        max_steps: Read only this many segments of each part, from its beginning. None: all.
        token_bytes: The bytes of text of each token, for ``bits_per_byte``; 0: unknown, as of
            ``<unk>``. :func:`token_bytes_in` computes them.
        per_character: Whether the tokens are characters, for ``bpc``.
        window: Sliding window instead of memory: predict each token from this many tokens before
            it, read anew (:func:`window_nll`).
        dynamic: Dynamic evaluation (:class:`DynamicEvaluation`), in one stream.
        knn: Mix the distribution with that of the nearest past positions of the text (kNN-LM), in
            one stream. None: do not.

    Raises:
        ValueError: The text has fewer than two tokens, or one outside the vocabulary; a length
            is out of range; two settings exclude each other.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> evaluate(model, vocab.encode("To be, or not to be"), mem_len=64).tokens
        18
    """
    config = require_model(model).config
    require_at_least(1, window=window, segment_len=segment_len, max_steps=max_steps)
    if dynamic is not None and not isinstance(dynamic, Dynamic):
        raise ValueError(f"dynamic={dynamic!r} must be a Dynamic, as plan_dynamic returns one")
    if window is not None:
        _require_none(f"window={window} reads anew what", mem_len=mem_len, ext_len=ext_len)
        if max_steps is not None:
            raise ValueError(
                f"max_steps={max_steps} with window={window}: windows are not divided into "
                "segments; leave out one of them"
            )
        mem_len, ext_len, segment_len = 0, 0, window
    if dynamic is not None:
        _require_none("dynamic evaluation reads once what", ext_len=ext_len)
        ext_len = 0
        if window is not None or batch_size != 1:
            raise ValueError(
                f"dynamic evaluation reads one stream with memory: window={window} and "
                f"batch_size={batch_size} must be None and 1"
            )
    if knn is not None and (window is not None or dynamic is not None or batch_size != 1):
        raise ValueError(
            f"knn searches the past of one stream: batch_size={batch_size} must be 1, window="
            f"{window} None, and dynamic evaluation, which changes what hidden states mean, off"
        )
    batch_size = whole("batch_size", batch_size, 1)
    reach: dict[str, Any] = {"attn_len": attn_len, "clamp_len": clamp_len}
    lengths = Lengths.of(config, segment_len=segment_len, mem_len=mem_len, ext_len=ext_len, **reach)
    text = ids if isinstance(ids, Recordings) else as_text(ids, config)
    if not isinstance(text, Tensor):
        of_text: dict[str, Any] = {"window": window, "dynamic": dynamic, "knn": knn}
        of_text |= {"token_bytes": token_bytes}
        for name, value in of_text.items():
            if value is not None:
                raise ValueError(f"{name} is for text: leave it out where recordings are evaluated")
    if token_bytes is not None and np.shape(token_bytes) != (config.vocab_size,):
        raise ValueError(
            f"token_bytes of shape {np.shape(token_bytes)} must be a number for each of the "
            f"{config.vocab_size} symbols"
        )
    passage = Passage.of(text, config)
    n, completed = len(passage.targets), passage.counted
    batch_size, seen = min(batch_size, n), text
    if max_steps is not None:
        steps = {"segment_len": lengths.segment_len, "max_steps": max_steps}
        places = places_read(n, batch_size=batch_size, **steps)
        n = len(places)
        if isinstance(text, Tensor):
            seen = torch.cat([text[:1], text[1:][places]])
        completed = None if completed is None else completed[places]
        if completed is not None and not completed.any():
            what = "completion" if isinstance(text, Tensor) else "target"
            raise ValueError(f"max_steps={max_steps} reads no {what}: give a larger one")
    require_reading(
        model, n, batch_size=batch_size, segment_len=lengths.segment_len, mem_len=lengths.mem_len
    )
    # Unless it starts with zeros, a memory is never longer than the text: no more is allocated.
    most = lengths.mem_len if config.start_memory == "zeros" else min(lengths.mem_len, n)
    began = time.perf_counter()
    with evaluating(model):
        if dynamic is not None:
            learning = DynamicEvaluation(
                model, dynamic, segment_len=segment_len, mem_len=most, **reach
            )
            assert isinstance(seen, Tensor)
            nll = learning.read(seen)
            total = _sum(nll, completed)
            rest = None if completed is None else completed[len(nll) :]
            total += _sum(learning.finish(), rest)
        elif window is not None:
            assert isinstance(text, Tensor)
            total = _sum(window_nll(model, text, window, batch_size=batch_size, **reach), completed)
        elif knn is not None:
            assert isinstance(seen, Tensor)
            fitting = lengths._replace(mem_len=most)
            total = _sum(torch.cat([*knn_nll(model, seen, fitting, knn)]), completed)
        else:
            fitting = lengths._replace(mem_len=most)
            parts = read_parts(
                model, text, lengths=fitting, batch_size=batch_size, max_steps=max_steps
            )
            # Accumulated on the device, which is synchronized once at the end.
            total = sum((nll.double() * once).sum() for nll, once in parts)
    total = float(total)
    seconds = time.perf_counter() - began

    n_counted = n if completed is None else int(completed.sum())
    mean = total / n_counted
    bits = mean / math.log(2)
    n_bytes = None
    if isinstance(seen, Tensor):
        n_bytes = predicted_bytes(token_bytes, seen, completed)
    return Result(
        nll=mean,
        ppl=math.exp(mean) if mean < 700 else math.inf,
        bits_per_token=bits,
        bpc=bits if per_character else None,
        bits_per_byte=None if n_bytes is None else bits * n_counted / n_bytes,
        tokens=n_counted,
        **lengths._asdict(),
        batch_size=batch_size,
        seconds=seconds,
        tokens_per_second=n / seconds,
        window=window,
        dynamic=dynamic and dynamic.rule,
        dynamic_lr=dynamic and dynamic.lr,
        dynamic_decay=dynamic and dynamic.decay,
        dynamic_eps=dynamic and (dynamic.eps if dynamic.rule == "rms" else None),
        **({} if knn is None else {f"knn_{name}": x for name, x in asdict(knn).items()}),
    )


def token_bytes_in(
    vocab: Vocab, ids: Sequence[int] | Integer[np.ndarray, " length"], n_bytes: int
) -> Real[np.ndarray, " V"] | None:
    """Return the bytes of each symbol of a vocabulary, given a text.

    The bytes of the text that no known symbol accounts for are divided evenly among its ``<unk>``
    and other symbols without bytes, so that the total is right.

    Returns:
        Bytes by symbol, 0 if unknown; None for words, whose whitespace is not known.
    """
    known = vocab.token_bytes
    if known is None:
        return None
    sizes = known[np.asarray(ids, dtype=np.int64)]
    n_unknown = np.count_nonzero(sizes == 0)
    left = max(n_bytes - int(sizes.sum()), 0)
    return np.where(known == 0, left / n_unknown, known) if n_unknown else known


def predicted_bytes(
    token_bytes: Real[np.ndarray, " V"] | None,
    text: Integer[Tensor, " length"] | Integer[np.ndarray, " length"],
    completed: Bool[Tensor, " predicted"] | None = None,
) -> float | None:
    """Return the bytes of all tokens but the first; None where those of a token are unknown.

    With a mask ``completed`` of them, only those count.
    """
    predicted = text[1:] if completed is None else text[1:][completed]
    sizes = None if token_bytes is None else np.asarray(token_bytes)[predicted]
    return None if sizes is None or not sizes.all() else sizes.sum().item()


def evaluate_by(
    settings: EvalConfig,
    model: LanguageModel,
    ids: Sequence[int] | Integer[np.ndarray, " length"] | Recordings,
    *,
    vocab: Vocab | None,
    n_bytes: int,
    segment_len: int,
    mem_len: int | None = None,
    dynamic: Dynamic | None = None,
    knn: KnnConfig | None = None,
) -> Result:
    """Call :func:`evaluate` with the arguments that settings imply.

    ``split``, ``mem_lens`` and ``dynamic`` of the settings are up to the caller: a ``mem_len``
    overrides that of the settings, and :func:`plan_dynamic` makes a ``dynamic``; with that or
    ``knn``, the text is read in one stream. The text has ``n_bytes`` bytes; ``segment_len`` is the
    default segment length, as in training.
    """
    lengths = settings.lengths_after(segment_len)
    if mem_len is not None:
        lengths["mem_len"] = mem_len
    token_bytes = None
    if vocab is not None and not isinstance(ids, Recordings):
        token_bytes = token_bytes_in(vocab, ids, n_bytes)
    return evaluate(
        model,
        ids,
        batch_size=settings.batch_size if dynamic is None and knn is None else 1,
        token_bytes=token_bytes,
        per_character=vocab is not None and vocab.kind == "chars",
        max_steps=settings.max_steps,
        window=settings.window,
        dynamic=dynamic,
        knn=knn,
        **lengths,
    )


def cost_of(settings: EvalConfig, n_tokens: int) -> str | None:
    """Describe the cost of an evaluation by sliding windows; None for other evaluations."""
    if settings.window is None:
        return None
    return (
        f"window={settings.window}: each of {n_tokens:,} tokens is predicted from a window read "
        f"anew, about {min(settings.window, n_tokens):,} times the work of reading the text once"
    )


def _sum(nll: Tensor, completed: Tensor | None) -> Tensor:
    if completed is not None:
        nll = nll * completed[: len(nll)].to(nll.device)
    return nll.sum(dtype=torch.float64)


def _require_none(why: str, **lengths: Any) -> None:
    for name, value in lengths.items():
        if value:
            raise ValueError(
                f"{why} {name}={value} would have kept or read again: leave it out, or set it to 0"
            )
