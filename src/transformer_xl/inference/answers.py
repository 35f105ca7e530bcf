"""What a model says of texts: how likely they are, what they are about, and how they go on.

Texts of any length are read with the memory carried, several as a batch. Dimension key: N texts,
D width of the model, V size of the vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transformer_xl.data import Vocab
from transformer_xl.errors import InputError, SettingsError
from transformer_xl.inference.generate import Sampling, generate_batch
from transformer_xl.model import LanguageModel, Lengths, Piece, evaluating, read, whole

Texts = Sequence[Sequence[int]]


def _require_texts(
    model: LanguageModel, texts: Texts, lengths: Lengths, batch_size: int, least: int = 1
) -> None:
    """Require at least one text, ``least`` tokens in each, and a memory between segments.

    Raises:
        SettingsError: The memory length is 0, or the batch size is out of range.
        InputError: There are too few texts or tokens.
    """
    if model.remembers_positions and not lengths.mem_len:
        raise SettingsError(
            "mem_len=0: nothing is remembered from segment to segment; give a mem_len, such as the "
            "context of the training"
        )
    whole("batch_size", batch_size, 1)
    if not len(texts):
        raise InputError("texts is empty: give at least one")
    if (shortest := min(map(len, texts))) < least:
        raise InputError(f"each text needs {least} or more tokens: the shortest has {shortest}")


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
    _require_texts(model, texts, lengths, batch_size, least=2)
    nll = [np.empty(0)] * len(texts)
    # Texts of different lengths cannot share the positions that are read again.
    rows_at_once = 1 if lengths.ext_len else batch_size
    with evaluating(model):
        for rows, pieces in read_each(
            model, texts, lengths, batch_size=rows_at_once, predicts=True
        ):
            of_rows = torch.cat([piece.nll for piece in pieces if piece.nll is not None], 1)
            for row, of_text in zip(rows, of_rows.double().cpu().numpy(), strict=True):
                nll[row] = of_text[: len(texts[row]) - 1]
    return nll


@torch.no_grad()
def features_of(
    model: LanguageModel,
    texts: Texts,
    lengths: Lengths,
    *,
    is_mean: bool = False,
    batch_size: int = 32,
) -> Float[Tensor, "N D"]:
    """Return a vector for each text: the output of the layers after its last token.

    The last token attends to its segment and, through the memory, to earlier ones. A linear
    classifier on these vectors, as of scikit-learn, classifies whole documents, and
    ``model.head.log_probs`` of them are those of the next token, as of a label after a document.

    Args:
        model: The model; its mode is restored afterwards.
        texts: The texts in tokens, of any lengths.
        lengths: How they are read; ``ext_len`` is not used.
        is_mean: Return the mean of the outputs after all tokens instead.
        batch_size: Texts in a batch, those of similar length together.

    Raises:
        ValueError: There is no text, one is empty, or the model keeps nothing between segments.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> texts = [vocab.encode(text) for text in ("ROMEO", "JULIET")]
        >>> features_of(model, texts, Lengths.of(model.config)).shape == (2, model.config.d_model)
        True
    """
    _require_texts(model, texts, lengths, batch_size)
    features = torch.zeros(len(texts), model.config.d_model, device=model.device, dtype=model.dtype)
    sizes = torch.tensor([len(text) for text in texts], device=model.device)
    lengths = lengths._replace(ext_len=0)
    with evaluating(model):
        for rows, pieces in read_each(model, texts, lengths, batch_size=batch_size):
            for piece in pieces:
                places = torch.arange(piece.hidden.shape[1], device=model.device) + piece.start
                last = sizes[rows, None] - 1
                counts = places <= last if is_mean else places == last
                # What follows the end of a text may be any number.
                counted = piece.hidden.masked_fill(~counts[..., None], 0)
                features[rows] += counted.sum(1).to(features.dtype)
    return features / sizes[:, None] if is_mean else features


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
) -> list[str]:
    """Return what a model writes after each text, each time the most likely token, up to ``stop``.

    Args:
        model: The model; its mode is restored afterwards.
        vocab: Its vocabulary.
        texts: The texts.
        lengths: How they are read; ``ext_len`` is not used.
        length: Tokens of a continuation at most.
        stop: The text at which one ends, which is not part of it.
        batch_size: Texts in a batch, those of similar length together.

    Raises:
        ValueError: There is no text, one is empty, or the model keeps nothing between segments.
    """
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
            last, greedy = [texts[row][-1:] for row in rows], Sampling(temperature=0)
            batch = generate_batch(model, last, greedy, length=length, mems=mems, mem_len=mem_len)
            for row, output in zip(rows, batch.decode(vocab, stop=stop), strict=True):
                outputs[row] = output
    return outputs


def read_each(
    model: LanguageModel,
    texts: Texts,
    lengths: Lengths,
    *,
    batch_size: int,
    predicts: bool = False,
) -> Iterator[tuple[list[int], Iterator[Piece]]]:
    """Read texts of any lengths from their start, those of similar length as a padded batch.

    Args:
        model: The model, as for :func:`read`.
        texts: The texts in tokens; none is empty.
        lengths: The lengths.
        batch_size: Texts in a batch, at most.
        predicts: Whether the tokens but the first are predicted. The last one is then not read.

    Returns:
        For each batch the indices of its texts, and what reading their segments yields; positions
        behind the end of a text are of no meaning.
    """
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        batch = [texts[row] for row in rows]
        targets = _padded([text[1:] for text in batch])[0] if predicts else None
        tokens, sizes = _padded([text[:-1] for text in batch] if predicts else batch)
        mems = model.keep(model.start_memory(len(rows), lengths.mem_len))
        yield rows, read(model, tokens, lengths, mems, targets=targets, sizes=sizes)


def _padded(
    texts: Texts,
) -> tuple[Int[Tensor, "N longest"], Tensor | None]:
    """Return texts as rows padded with 0, and their lengths; None if all are equally long."""
    sizes = torch.tensor([len(text) for text in texts])
    rows = [torch.as_tensor(text, dtype=torch.int64) for text in texts]
    tokens = pad_sequence(rows, batch_first=True)
    return tokens, sizes if int(sizes.min()) < tokens.shape[1] else None
