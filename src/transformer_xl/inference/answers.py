"""What a model says of texts: how likely they are, which token comes next, or how they go on.

Texts of any length are read with the memory carried, several as a batch. Dimension key: N texts,
D width of the model, V size of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.data import Vocab
from transformer_xl.inference.generate import Sampling, Searching, beam_search, generate_batch
from transformer_xl.model import LanguageModel
from transformer_xl.model.arguments import require_at_least
from transformer_xl.model.calling import evaluating
from transformer_xl.model.limits import require_remembering
from transformer_xl.model.reading import read, read_all
from transformer_xl.model.segment import Lengths

Texts = Sequence[Sequence[int]]


def padded(texts: Texts) -> tuple[Int[Tensor, "N longest"], Int[Tensor, " N"] | None]:
    """Return texts as rows padded with 0, and their lengths; None if all are equally long."""
    sizes = torch.tensor([len(text) for text in texts])
    tokens = torch.zeros(len(texts), int(sizes.max()), dtype=torch.long)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.as_tensor(text)
    return tokens, sizes if int(sizes.min()) < tokens.shape[1] else None


def by_length(texts: Texts, batch_size: int) -> Iterator[list[int]]:
    """Yield the indices of batches of texts of similar length.

    Raises:
        ValueError: There is no text, one is empty, or ``batch_size`` is below 1.

    Example:
        >>> list(by_length([[1, 2, 3], [4], [5, 6]], batch_size=2))
        [[1, 2], [0]]
    """
    require_at_least(1, batch_size=batch_size)
    if not len(texts) or not all(map(len, texts)):
        raise ValueError(f"{len(texts)} texts, at least one, of at least one token each are needed")
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    for first in range(0, len(order), batch_size):
        yield order[first : first + batch_size]


@torch.no_grad()
def states_at(
    model: LanguageModel,
    texts: Texts,
    places: Int[Tensor, "N n"],
    lengths: Lengths,
) -> Float[Tensor, "N n D"]:
    """Read texts as one batch; return the hidden states at places of each text.

    From the state at a place, the token after it is predicted. Nothing is read again, whatever
    ``ext_len`` is. The caller sets the evaluation mode.
    """
    lengths = lengths._replace(ext_len=0)
    tokens, sizes = padded(texts)
    mems = model.keep(model.start_memory(len(texts), lengths.mem_len))
    rows = torch.arange(len(texts))[:, None].expand_as(places)
    shape = *places.shape, model.config.d_model
    found = torch.zeros(shape, device=model.device, dtype=model.dtype)
    for piece in read(model, tokens, lengths, mems, sizes=sizes):
        here = (piece.start <= places) & (places < piece.start + piece.hidden.shape[1])
        if here.any():
            states = piece.hidden[rows[here], places[here] - piece.start]
            found[rows[here], here.nonzero()[:, 1]] = states.to(found.dtype)
    return found


@torch.no_grad()
def losses(
    model: LanguageModel, texts: Texts, lengths: Lengths, *, batch_size: int = 16
) -> list[Float[np.ndarray, " predicted"]]:
    """Return -log p, in nats, of every token but the first of each text, each read by itself.

    With ``ext_len``, a token is predicted from what its segment reads again, too, as in
    :func:`~transformer_xl.evaluate`; texts are then read one at a time.

    Raises:
        ValueError: There is no text, one has fewer than two tokens, or the model keeps nothing
            between segments.
    """
    require_remembering(model, lengths)
    if lengths.ext_len:
        # Texts of different lengths cannot share the positions that are read again.
        require_at_least(1, batch_size=batch_size)
        batch_size = 1
    found: dict[int, np.ndarray] = {}
    with evaluating(model):
        for rows in by_length([text[1:] for text in texts], batch_size):
            some = [texts[row] for row in rows]
            tokens, sizes = padded([text[:-1] for text in some])
            targets, _ = padded([text[1:] for text in some])
            mems = model.keep(model.start_memory(len(some), lengths.mem_len))
            pieces = read(model, tokens, lengths, mems, targets=targets, sizes=sizes)
            nll = torch.cat([x.nll for x in pieces if x.nll is not None], 1).double().cpu().numpy()
            found |= {row: own[: len(texts[row]) - 1] for row, own in zip(rows, nll, strict=True)}
    return [found[row] for row in range(len(texts))]


@torch.no_grad()
def next_log_probs(
    model: LanguageModel, texts: Texts, lengths: Lengths, *, batch_size: int = 32
) -> Float[Tensor, "N V"]:
    """Return the log-probabilities of the token after each text, as of a label after a document.

    The ``ext_len`` of ``lengths`` is not used.

    Raises:
        ValueError: There is no text, one is empty, or the model keeps nothing between segments.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> texts = [vocab.encode(text) for text in ("ROMEO", "JULIET")]
        >>> log_probs = next_log_probs(model, texts, Lengths.of(model.config))
        >>> vocab.decode(log_probs.argmax(1).tolist())
        '::'
    """
    require_remembering(model, lengths)
    found = torch.zeros(len(texts), model.config.vocab_size)
    with evaluating(model):
        for rows in by_length(texts, batch_size):
            some = [texts[row] for row in rows]
            last = torch.tensor([[len(text) - 1] for text in some])
            states = states_at(model, some, last, lengths)[:, 0]
            found[rows] = model.head.log_probs(states).float().cpu()
    return found


@torch.no_grad()
def continuations(
    model: LanguageModel,
    vocab: Vocab,
    texts: Texts,
    lengths: Lengths,
    *,
    length: int,
    stop: str,
    batch_size: int = 32,
    beam_size: int | None = None,
    length_penalty: float = 1.0,
) -> list[str]:
    """Return what a model writes after each text, each time the most likely token, up to ``stop``.

    With ``beam_size``, it is the best hypothesis of beam search instead.

    Args:
        model: The model; its mode is restored afterwards.
        vocab: Its vocabulary.
        texts: The texts.
        lengths: How they are read; ``ext_len`` is not used.
        length: Tokens of a continuation at most.
        stop: The text at which one ends, which is not part of it.
        batch_size: Texts in a batch, those of similar length together.
        beam_size: As for :func:`~transformer_xl.beam_search`. None: greedy.
        length_penalty: As for :func:`~transformer_xl.beam_search`.

    Raises:
        ValueError: There is no text, one is empty, or the model keeps nothing between segments.
    """
    require_at_least(1, length=length)
    require_remembering(model, lengths)
    # What is read again would be missing in the memory from which the writing begins.
    lengths = lengths._replace(ext_len=0)
    outputs = [""] * len(texts)
    with evaluating(model):
        for rows in by_length(texts, batch_size):
            some = [texts[row] for row in rows]
            mems = model.keep(model.start_memory(len(some), lengths.mem_len))
            # All but the last token, from which the writing begins.
            if max(map(len, some)) > 1:
                tokens, sizes = padded([text[:-1] for text in some])
                mems = read_all(model, tokens, lengths, mems, sizes=sizes)
            last = [text[-1:] for text in some]
            mem_len = lengths.mem_len if model.remembers_positions else None
            begun: Any = {"length": length, "mems": mems, "mem_len": mem_len}
            if beam_size is None:
                batch = generate_batch(model, last, Sampling(temperature=0), **begun)
                written = batch.decode(vocab, stop=stop)
            else:
                search = Searching(beam_size=beam_size, length_penalty=length_penalty, stop=stop)
                found = beam_search(model, last, search, vocab=vocab, **begun)
                written = [best.text for (best,) in found]
            for row, output in zip(rows, written, strict=True):
                outputs[row] = output
    return outputs
