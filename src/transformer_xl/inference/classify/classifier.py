"""A classifier on top of a model that remembers."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from transformer_xl.model import LanguageModel, Memory
from transformer_xl.model.lengths import SEGMENT_LEN, Lengths
from transformer_xl.model.reading import read
from transformer_xl.model.wrapping import projected


class Reading(NamedTuple):
    """What is known of documents after one more segment of each."""

    rows: Int[Tensor, " going"]
    """Documents that this segment belongs to, by their place among those given."""
    logits: Float[Tensor, "going classes"]
    """Scores of the classes for each of them, from its last token so far."""
    is_whole: Bool[Tensor, " going"]
    """Whether the document ends with this segment."""


class LongDocumentClassifier(nn.Module):
    """Reads documents of any length, segment after segment, and classifies them at their ends.

    Nothing is cut off and the cost of a segment does not grow. A document's class is read from the
    last hidden state, which sees its own segment and, through the memory, those before. Where a
    document is no whole number of segments, the first one is the shorter.

    Gradients reach the segment they come from, and no other: the memory is detached, as it is in
    the paper. What a segment should leave in the memory for later ones is therefore not learned
    from the end of the document; it is learned because every segment has to tell the class as well
    as it can (:func:`~transformer_xl.inference.classify.fit`), and so writes into its states what
    it knows.
    How far that is handed on depends on the model: at most ``n_layer * mem_len`` tokens with the
    paper's memory, without limit with ``enhanced_recurrence`` (Ding et al., 2021).

    Args:
        model: What reads. Its softmax is not used.
        n_classes: How many classes.
        segment_len: Tokens read at once.
        mem_len: Remembered positions; 0: each segment is read by itself. None: as configured.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        model: LanguageModel,
        n_classes: int,
        *,
        segment_len: int = SEGMENT_LEN,
        mem_len: int | None = None,
    ) -> None:
        super().__init__()
        if n_classes < 2:
            raise ValueError(f"n_classes={n_classes} must be at least 2")
        # What is read is remembered; nothing is read again.
        self.lengths = Lengths.of(model.config, segment_len=segment_len, mem_len=mem_len, ext_len=0)
        self.model = model
        self.head = nn.Linear(model.config.d_model, n_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def read(self, documents: Sequence[Int[Tensor, " _"]]) -> Iterator[Reading]:
        """Read documents side by side; after each segment say what is known.

        A document that has ended costs nothing from then on. To train, call ``backward`` on each
        reading before the next one is taken: then no more than a segment is held.

        Raises:
            ValueError: A document is empty.
        """
        lengths = torch.tensor([len(document) for document in documents])
        if len(lengths) and int(lengths.min()) == 0:
            raise ValueError(f"document {int(lengths.argmin())} is empty: there is nothing to read")
        rows, left = torch.arange(len(documents)), lengths.clone()
        mems: Memory = self.model.start_memory(len(documents), self.lengths.mem_len)
        while len(rows):
            if not torch.is_grad_enabled():
                mems = self.model.keep(mems)
            # What is left over is read first, so that the end is read in a whole segment.
            here = (left - 1) % self.lengths.segment_len + 1
            tokens = torch.zeros(len(rows), int(here.max()), dtype=torch.int64)
            for own, row, n_left, n in zip(tokens, rows.tolist(), left, here, strict=True):
                start = len(documents[row]) - int(n_left)
                own[: int(n)] = documents[row][start : start + int(n)]
            sizes = None if int(here.min()) == tokens.shape[1] else here
            (piece,) = read(self.model, tokens, self.lengths, mems, sizes=sizes)
            mems = piece.mems
            last = piece.hidden[torch.arange(len(rows)), here - 1]
            left = left - here
            is_whole = left == 0
            yield Reading(rows, projected(self.head, last), is_whole)
            if is_whole.any():
                mems = mems.select((~is_whole).nonzero()[:, 0])
                rows, left = rows[~is_whole], left[~is_whole]

    def forward(self, documents: Sequence[Int[Tensor, " _"]]) -> Float[Tensor, "documents classes"]:
        """Return the scores of the classes for whole documents."""
        found = torch.zeros(len(documents), self.head.out_features, device=self.model.device)
        for rows, logits, is_whole in self.read(documents):
            ended = rows[is_whole].to(found.device)
            found = found.index_copy(0, ended, logits[is_whole.to(logits.device)].to(found.dtype))
        return found
