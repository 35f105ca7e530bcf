"""Losses of the tokens of a text, read with memory."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transformer_xl.config import ModelConfig
from transformer_xl.data import Recordings, in_completion
from transformer_xl.errors import DataError, InputError
from transformer_xl.model import (
    SEGMENT_LEN,
    LanguageModel,
    Lengths,
    Memory,
    Reader,
    Text,
    as_tokens,
    read,
    read_all,
)
from transformer_xl.ops import IGNORED


def as_text(ids: object, config: ModelConfig) -> Int[Tensor, " length"]:
    """Return a text as :func:`as_tokens` does; require at least two tokens."""
    text = as_tokens(ids, config)
    if len(text) < 2:
        raise InputError(f"a text of {len(text)} tokens: at least 2 are needed to predict one")
    return text


_BLOCK = 1 << 16
"""Positions of recordings that are looked at together."""


class Passage(NamedTuple):
    """What is read and what is predicted at each of n positions, of a text or of recordings."""

    text: Int[Tensor, " length"] | None
    """The text in tokens; None of recordings."""
    inputs: Int[Tensor, " n"] | Float[Tensor, "n F"]
    targets: Int[Tensor, " n"] | Float[Tensor, " n"]
    """The next token, or what the recordings say."""
    counted: Bool[Tensor, " n"] | None
    """Which targets count. None: all."""
    starts: Bool[Tensor, " n"] | None
    """Where recordings begin. None: nowhere, but at ``reset_at``."""

    @classmethod
    def of(cls, source: Text | Recordings, config: ModelConfig) -> "Passage":
        """Return what is read of a text, all but its last token, or of recordings.

        Raises:
            ValueError: The text has fewer than two tokens, or one outside the vocabulary; nothing
                counts; or the recordings do not fit the model.
        """
        if isinstance(source, Recordings):
            require_recordings(source, config)
            inputs, targets, starts = source.at(slice(None))
            counted = torch.from_numpy(source.counted())
            return cls(None, inputs, targets, None if counted.all() else counted, starts)
        text = as_text(source, config)
        inputs, targets = text[:-1], text[1:]
        if config.completion_at is None:
            return cls(text, inputs, targets, None, None)
        completed = torch.from_numpy(in_completion(inputs.numpy(), config))
        if not completed.any():
            raise InputError(
                f"the text has no completion: the token completion_at={config.completion_at} is "
                "not in it; give prompts and completions as in training"
            )
        # No softmax is computed for the others.
        return cls(text, inputs, torch.where(completed, targets.long(), IGNORED), completed, None)

    def is_counted(self, places: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Mark the indices of targets that count; -1 is none."""
        return places >= 0 if self.counted is None else (places >= 0) & self.counted[places]


def require_recordings(source: Recordings, config: ModelConfig) -> None:
    """Require that recordings fit a model and have a target; they are read up to the first.

    Raises:
        DataError: They do not, or have none.
    """
    F, are_real = source.inputs.shape[1], source.are_real
    if (F, are_real) != (config.n_features, config.n_mixtures > 0):
        kind = "numbers" if are_real else "classes"
        raise DataError(
            f"recordings of width {F} with {kind} as targets do not fit a model with "
            f"n_features={config.n_features} and n_mixtures={config.n_mixtures}"
        )
    most = 0 if are_real else int(source.targets.max(initial=-1))
    if not are_real and most >= config.vocab_size:
        raise DataError(
            f"class {most} is not among the {config.vocab_size} that the model knows (vocab_size)"
        )
    blocks = (slice(first, first + _BLOCK) for first in range(0, len(source), _BLOCK))
    if not any(source.counted(block).any() for block in blocks):
        raise DataError("the recordings have no target: all are -100 or NaN")


Losses = tuple[Float[Tensor, "B T"], Int[Tensor, "B T"]]
"""-log p of targets, and their indices in the text, on the CPU; -1: that of another stream."""


def read_parts(
    model: LanguageModel,
    passage: Passage,
    lengths: Lengths,
    batch_size: int = 1,
    max_steps: int | None = None,
) -> Iterator[Losses]:
    """Yield -log p of the targets of each segment.

    The text is divided into ``batch_size`` parts, at most as many as tokens to predict. They are
    read as a batch, each warmed up on the text before it; of each, at most ``max_steps`` segments.
    The caller sets the evaluation mode and disables gradients.
    """
    n = len(passage.targets)
    n_parts = min(batch_size, n)
    # Rounded up, so that no part is longer than the first.
    edges = [-(-b * n // n_parts) for b in range(n_parts + 1)]
    # Lengths differ by one token at most. A shorter part begins one token earlier, which is not
    # counted, so that all end together: absolute positions are counted from the end.
    longest = edges[1]
    firsts = [end - longest for end in edges[1:]]
    mems = _warm_memory(model, passage, firsts, lengths)
    if max_steps is not None:
        longest = min(longest, max_steps * lengths.segment_len)
    parts, targets = (
        [x[p : p + longest] for p in firsts] for x in (passage.inputs, passage.targets)
    )
    starts = passage.starts
    if starts is not None:
        starts = torch.stack([starts[p : p + longest] for p in firsts])
    first_read, first_counted = torch.tensor(firsts)[:, None], torch.tensor(edges[:-1])[:, None]
    for piece in read(model, parts, lengths, mems, targets=targets, starts=starts):
        assert piece.nll is not None
        places = first_read + piece.start + torch.arange(piece.nll.shape[1])
        yield piece.nll, places.masked_fill(places < first_counted, -1)


def _warm_memory(
    model: LanguageModel, passage: Passage, firsts: list[int], lengths: Lengths
) -> Memory:
    """Return the initial memory of each part of the text."""
    mem_len = lengths.mem_len
    first = model.keep(model.start_memory(1, mem_len))
    if len(firsts) == 1:
        return first
    others = firsts[1:]
    mems = model.keep(model.start_memory(len(others), mem_len))
    # Parts near the beginning may have less than a memory before them, and are padded.
    sizes = torch.tensor(others).clamp(max=mem_len)
    before, starts = (
        None
        if x is None
        else pad_sequence([x[max(p - mem_len, 0) : p] for p in others], batch_first=True)
        for x in (passage.inputs, passage.starts)
    )
    assert before is not None
    padded = None if bool((sizes == sizes[0]).all()) else sizes
    # ext_len=0, so that all of it is kept in the memory.
    whole = lengths._replace(ext_len=0)
    return Memory.cat([first, read_all(model, before, whole, mems, sizes=padded, starts=starts)])


def score(
    model: LanguageModel, ids: Text, *, segment_len: int = SEGMENT_LEN, mem_len: int | None = None
) -> Iterator[float | None]:
    """Yield the log-probability of each token given all before it, in nats; None for the first.

    The arguments are those of :func:`evaluate`, which are checked at the call.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> first, *others = score(model, vocab.encode("ROMEO:"))
        >>> first is None, len(others), max(others) < 0
        (True, 5, True)
    """
    model.require_mem_len(mem_len)
    reader = Reader(model, Lengths.of(model.config, segment_len=segment_len, mem_len=mem_len))
    text = as_tokens(ids, model.config)
    # The first token has no score, and is read with the segment after it.
    parts = (text[:1], *text[1:].split(reader.lengths.segment_len))
    return chain.from_iterable(map(reader.read, parts))
