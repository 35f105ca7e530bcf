"""Evaluation of a model on a text, and its result."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer, Real
from torch import Tensor

from transformer_xl.config import EvalConfig
from transformer_xl.data import Recordings, Vocab
from transformer_xl.errors import InputError
from transformer_xl.inference.evaluate.dynamic import Dynamic
from transformer_xl.inference.evaluate.ngram_cache import NGramMixture, require_cache
from transformer_xl.inference.evaluate.strategies import SlidingWindow, Strategy, WithMemory
from transformer_xl.inference.evaluate.streams import Passage
from transformer_xl.model import (
    LanguageModel,
    Text,
    evaluating,
    require_bytes,
    require_model,
    shown,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The metrics of an evaluation, and the settings that it used.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> text = vocab.encode("To be, or not to be")
        >>> result = evaluate(model, text, WithMemory(mem_len=64))
        >>> round(result.nll, 2), result.mem_len  # nats per token
        (2.47, 64)
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
    nll_with_cache: float | None = None
    """Nats per token with an n-gram cache; the others are those of the model alone."""
    bits_per_byte_with_cache: float | None = None

    def __repr__(self) -> str:
        known = {name: x for name, x in asdict(self).items() if x is not None}
        return f"Result({', '.join(f'{name}={x!r}' for name, x in known.items())})"

    def row(self, split: str) -> dict[str, Any]:
        """Return it as it is printed and stored, without what is unknown."""
        values = {"split": split, **asdict(self)}
        always = "attn_len", "clamp_len"
        return {name: x for name, x in values.items() if x is not None or name in always}

    @staticmethod
    def line(row: dict[str, Any]) -> str:
        """Write a :meth:`row`, of whatever memory, in a line."""
        name = f"window {row['window']:>5,}" if "window" in row else f"memory {row['mem_len']:>5,}"
        line = f"{name}: {row['nll']:.4f} nats, perplexity {row['ppl']:,.2f}"
        if "bits_per_byte" in row:
            line += f", {row['bits_per_byte']:.4f} bits per byte"
        if "nll_with_cache" in row:
            line += f"; with an n-gram cache {row['nll_with_cache']:.4f} nats"
        if "bits_per_byte_with_cache" in row:
            line += f", {row['bits_per_byte_with_cache']:.4f} bits per byte"
        return line + f"   ({row['tokens']:,} tokens, {row['tokens_per_second']:,.0f} a second)"


def evaluate(
    model: LanguageModel,
    ids: Text | Recordings,
    how: Strategy | None = None,
    *,
    token_bytes: Real[np.ndarray, " V"] | None = None,
    per_character: bool = False,
    **with_memory: Any,
) -> Result:
    """Evaluate a model on a text, predicting every token but the first once.

    If the model has a ``completion_at``, only the tokens of completions count. A model with
    ``n_features`` is evaluated on recordings, of which the targets that are given count; with
    ``n_mixtures`` the nats are those of a density, and may be negative.

    Args:
        model: The model, which is not modified; its mode is restored afterwards.
        ids: The text in tokens, or recordings.
        how: What each token is predicted from: :class:`WithMemory`, :class:`SlidingWindow` or
            :class:`Dynamic`. Recordings are read with memory. None: ``WithMemory()``. Its
            ``ngram_cache`` counts all of the text before each token, whatever the ``batch_size``;
            with ``max_steps``, the tokens between the parts, too.
        token_bytes: The bytes of text of each token, for ``bits_per_byte``; 0: unknown, as of
            ``<unk>``. :func:`token_bytes_in` computes them.
        per_character: Whether the tokens are characters, for ``bpc``.
        with_memory: Settings of :class:`WithMemory`, in place of ``how``: ``mem_len=1024``.

    Returns:
        The metrics, and the settings with which they were measured.

    Raises:
        TypeError: There is no such setting, or there are both ``how`` and settings.
        ValueError: The text has fewer than two tokens, or one outside the vocabulary; a length
            has no effect in the model; or the memory, or the cache, is larger than that of the
            machine.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> evaluate(model, vocab.encode("To be, or not to be"), WithMemory(mem_len=64)).tokens
        18
    """
    config = require_model(model).config
    if how is not None and with_memory:
        raise TypeError(f"evaluate() got how and {', '.join(with_memory)}: give all of them in how")
    how = WithMemory(**with_memory) if how is None else how
    if not isinstance(how, Strategy):
        raise InputError(
            f"how={shown(how)} must be WithMemory(...), SlidingWindow(...) or Dynamic(...)"
        )
    lengths = how.lengths(config)
    is_text = not isinstance(ids, Recordings)
    mixture = how.ngram_cache
    of_text = {"token_bytes": token_bytes is not None, "ngram_cache": mixture is not None}
    of_text[type(how).__name__] = not isinstance(how, WithMemory)
    if not is_text and any(of_text.values()):
        wrong = next(name for name, is_given in of_text.items() if is_given)
        raise InputError(f"{wrong} is for text: leave it out where recordings are evaluated")
    if token_bytes is not None and np.shape(token_bytes) != (config.vocab_size,):
        raise InputError(
            f"token_bytes of shape {np.shape(token_bytes)} must be a number for each of the "
            f"{config.vocab_size} symbols"
        )
    passage = Passage.of(ids, config)
    n = len(passage.targets)
    # Unless it starts with zeros, a memory is never longer than the text: no more is allocated.
    longest = lengths.mem_len if config.start_memory == "zeros" else min(lengths.mem_len, n)
    rows = min(how.batch_size, n)
    require_bytes(
        "the memory",
        rows * model.memory_bytes(longest),
        model.device,
        {"mem_len": longest, "batch_size": rows},
        "shorten the memory, or lower the batch size",
    )
    if mixture is not None:
        require_cache(n)
    # Accumulated on the device, which is synchronized once at the end.
    nats, n_read, n_counted = torch.zeros((), dtype=torch.float64, device=model.device), 0, 0
    counted: list[Tensor] = []
    # -log p of each target, and whether it was predicted and counts.
    each = np.zeros(n if mixture is not None else 0)
    is_scored = np.zeros(len(each), bool)
    began = time.perf_counter()
    with evaluating(model), torch.no_grad():
        for nll, places in how.losses(model, passage, lengths._replace(mem_len=longest)):
            is_counted = passage.is_counted(places)
            nats += (nll.double() * is_counted.to(nll.device)).sum()
            n_read += int((places >= 0).sum())
            n_counted += int(is_counted.sum())
            if token_bytes is not None:
                counted.append(places[is_counted])
            if mixture is not None:
                each[places[is_counted]] = nll.double().cpu()[is_counted]
                is_scored[places[is_counted]] = True
    total = float(nats)
    seconds = time.perf_counter() - began
    if not n_counted:
        what = "completion" if is_text else "target"
        raise InputError(f"max_steps={how.max_steps} reads no {what}: give a larger one")
    mean = total / n_counted
    bits, n_bytes = mean / math.log(2), None
    if token_bytes is not None:
        n_bytes = bytes_of(token_bytes, passage.targets[torch.cat(counted).sort().values])
    result = Result(
        nll=mean,
        ppl=math.exp(mean) if mean < 700 else math.inf,
        bits_per_token=bits,
        bpc=bits if per_character else None,
        bits_per_byte=None if n_bytes is None else bits * n_counted / n_bytes,
        tokens=n_counted,
        **lengths._asdict(),
        batch_size=rows,
        seconds=seconds,
        tokens_per_second=n_read / seconds,
    )
    if mixture is not None and passage.text is not None:
        with_cache = mixture.nats(passage.text.numpy(), each, is_scored) / n_counted
        per_byte = None if n_bytes is None else with_cache / math.log(2) * n_counted / n_bytes
        more = {"nll_with_cache": with_cache, "bits_per_byte_with_cache": per_byte}
        result = replace(result, **more)
    return replace(result, **how.reported())


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


def bytes_of(
    token_bytes: Real[np.ndarray, " V"] | None,
    tokens: Integer[Tensor, " n"] | Integer[np.ndarray, " n"],
) -> float | None:
    """Return the bytes of tokens; None where those of one are unknown."""
    sizes = None if token_bytes is None else np.asarray(token_bytes)[np.asarray(tokens)]
    return None if sizes is None or not sizes.all() else sizes.sum().item()


def evaluate_by(
    settings: EvalConfig,
    model: LanguageModel,
    ids: Sequence[int] | Integer[np.ndarray, " length"] | Recordings,
    *,
    vocab: Vocab | None,
    n_bytes: int,
    segment_len: int,
    how: Dynamic | None = None,
    ngram_cache: NGramMixture | None = None,
) -> Result:
    """Call :func:`evaluate` with the strategy that settings imply.

    Args:
        settings: The settings. ``split``, ``mem_lens``, ``dynamic`` and ``ngram_cache`` are up to
            the caller.
        model: The model.
        ids: The text in tokens, or recordings.
        vocab: The vocabulary; None for recordings.
        n_bytes: Bytes of the text.
        segment_len: Default segment length, as in training.
        how: Strategy in place of the one with memory, or by windows, that the settings imply;
            :func:`plan_dynamic` makes one.
        ngram_cache: That of the strategy; :func:`plan_ngram_cache` makes one.
    """
    strategy: Strategy | None = how
    if strategy is None and settings.window is not None:
        names = ("window", "attn_len", "clamp_len", "batch_size")
        strategy = SlidingWindow(**{name: getattr(settings, name) for name in names})
    elif strategy is None:
        sizes = {"batch_size": settings.batch_size, "max_steps": settings.max_steps}
        strategy = WithMemory(**settings.lengths_after(segment_len), **sizes)
    strategy = replace(strategy, ngram_cache=ngram_cache)
    token_bytes = None
    if vocab is not None and not isinstance(ids, Recordings):
        token_bytes = token_bytes_in(vocab, ids, n_bytes)
    is_per_character = vocab is not None and vocab.kind == "chars"
    return evaluate(model, ids, strategy, token_bytes=token_bytes, per_character=is_per_character)
