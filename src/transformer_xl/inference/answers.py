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
from transformer_xl.errors import InputError, SettingsError
from transformer_xl.inference.generate import Sampling, Searching, beam_search, generate_batch
from transformer_xl.model import (
    LanguageModel,
    Lengths,
    evaluating,
    read_each,
    require_at_least,
)

Texts = Sequence[Sequence[int]]


def _require_texts(
    model: LanguageModel, texts: Texts, lengths: Lengths, batch_size: int, least: int = 1
) -> None:
    """Require texts of ``least`` tokens, and a model that remembers what it has read of them."""
    if model.remembers_positions and not lengths.mem_len:
        raise SettingsError(
            "mem_len=0: nothing is remembered from segment to segment; give a mem_len, such as the "
            "context of the training"
        )
    require_at_least(1, batch_size=batch_size)
    if not len(texts) or min(map(len, texts)) < least:
        size = "one token" if least == 1 else f"{least} tokens"
        raise InputError(f"{len(texts)} texts, at least one, of at least {size} each are needed")


def _states(
    model: LanguageModel,
    texts: Texts,
    places: Int[Tensor, "N n"],
    lengths: Lengths,
    batch_size: int,
) -> Iterator[tuple[list[int], Float[Tensor, "B n D"]]]:
    """Yield the indices of the texts of each batch, and the states at their places."""
    lengths = lengths._replace(ext_len=0)
    for rows, pieces in read_each(model, texts, lengths, batch_size=batch_size):
        shape = len(rows), places.shape[1], model.config.d_model
        states = torch.zeros(shape, device=model.device, dtype=model.dtype)
        for piece in pieces:
            columns = places[rows] - piece.start
            text, n = ((columns >= 0) & (columns < piece.hidden.shape[1])).nonzero(as_tuple=True)
            states[text, n] = piece.hidden[text, columns[text, n]].to(states.dtype)
        yield rows, states


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
    _require_texts(model, texts, lengths, batch_size, least=2)
    # Texts of different lengths cannot share the positions that are read again.
    nll = dict(losses_each(model, texts, lengths, 1 if lengths.ext_len else batch_size))
    return [nll[n].double().numpy() for n in range(len(texts))]


def losses_each(
    model: LanguageModel, texts: Texts, lengths: Lengths, batch_size: int
) -> Iterator[tuple[int, Float[Tensor, " predicted"]]]:
    """Yield the index of each text, and -log p of its tokens but the first, on the CPU."""
    with evaluating(model):
        batches = read_each(model, texts, lengths, batch_size=batch_size, predicts=True)
        while True:
            # Between batches the caller has its own mode.
            with torch.no_grad():
                if (batch := next(batches, None)) is None:
                    return
                rows, pieces = batch
                nll = torch.cat([piece.nll for piece in pieces if piece.nll is not None], 1).cpu()
            for row, losses_of_text in zip(rows, nll, strict=True):
                yield row, losses_of_text[: len(texts[row]) - 1]


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
    _require_texts(model, texts, lengths, batch_size)
    last = torch.tensor([[len(text) - 1] for text in texts])
    log_probs = torch.zeros(len(texts), model.config.vocab_size)
    with evaluating(model):
        for rows, states in _states(model, texts, last, lengths, batch_size):
            log_probs[rows] = model.head.log_probs(states[:, 0]).float().cpu()
    return log_probs


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
    _require_texts(model, texts, lengths, batch_size)
    # What is read again would be missing in the memory from which the writing begins.
    lengths = lengths._replace(ext_len=0)
    mem_len = lengths.mem_len if model.remembers_positions else None
    outputs = [""] * len(texts)
    with evaluating(model):
        # All but the last token, from which the writing begins.
        before = [text[:-1] for text in texts]
        for rows, pieces in read_each(model, before, lengths, batch_size=batch_size):
            mems = model.keep(model.start_memory(len(rows), lengths.mem_len))
            for piece in pieces:
                mems = piece.mems
            last = [texts[row][-1:] for row in rows]
            begun: Any = {"length": length, "mems": mems, "mem_len": mem_len}
            if beam_size is None:
                batch = generate_batch(model, last, Sampling(temperature=0), **begun)
                written = batch.decode(vocab, stop=stop)
            else:
                search = Searching(beam_size=beam_size, length_penalty=length_penalty, stop=stop)
                hypotheses = beam_search(model, last, search, vocab=vocab, **begun)
                written = [best.text for (best,) in hypotheses]
            for row, output in zip(rows, written, strict=True):
                outputs[row] = output
    return outputs
