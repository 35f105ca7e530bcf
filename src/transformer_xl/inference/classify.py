"""Classification of documents of any length, with memory instead of truncation.

A classifier on top of a language model, and its training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from transformer_xl.config import Count, NotNegative, Positive, Share, check, no_type_check
from transformer_xl.errors import InputError
from transformer_xl.model import (
    SEGMENT_LEN,
    LanguageModel,
    Lengths,
    Memory,
    evaluating,
    padded,
    read,
    require_token_inputs,
)
from transformer_xl.ops import IGNORED

__all__ = ["Fit", "LongDocumentClassifier", "Reading", "accuracy", "fit"]


class Reading(NamedTuple):
    """The class scores of a batch of documents after a segment of each."""

    rows: Int[Tensor, " going"]
    """Indices of the documents that have not ended before this segment."""
    logits: Float[Tensor, "going classes"]
    """Class logits of each of them, from its last token so far."""
    is_whole: Bool[Tensor, " going"]
    """Whether the document ends with this segment."""


class LongDocumentClassifier(nn.Module):
    """Classifies documents of any length, reading them segment by segment.

    There is no truncation, and the cost per segment is constant. The class is predicted from the
    last hidden state, which attends to its segment and, through the memory, to earlier ones. If the
    length of a document is no multiple of ``segment_len``, its first segment is shorter.

    Gradients do not flow through the memory, as in the paper, so the end of a document cannot teach
    earlier segments what to store. Instead, every segment is trained to predict the class
    (:func:`~transformer_xl.inference.classify.fit`), and so its states hold what is known so far.
    Information travels at most ``n_layer * mem_len`` tokens with the memory of the paper, and
    without limit with ``enhanced_recurrence`` (Ding et al., 2021) or ``input_recurrence``.

    The softmax of the model is not used. With ``mem_len`` 0, segments are read independently.
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
            raise InputError(f"n_classes={n_classes} must be at least 2")
        require_token_inputs(model.config)
        # ext_len=0, as nothing is read again.
        self.lengths = Lengths.of(model.config, segment_len=segment_len, mem_len=mem_len, ext_len=0)
        self.model = model
        self.head = nn.Linear(model.config.d_model, n_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def read(self, documents: Sequence[Int[Tensor, " _"]]) -> Iterator[Reading]:
        """Read a batch of documents; yield the class scores after each segment.

        Documents that have ended are removed from the batch. To train, call ``backward`` for each
        reading before the next one, to keep only one segment in memory.

        Raises:
            ValueError: A document is empty.
        """
        left = torch.tensor([len(document) for document in documents])
        if not left.all():
            raise InputError(f"document {int(left.argmin())} is empty: there is nothing to read")
        rows, T = torch.arange(len(documents)), self.lengths.segment_len
        mems: Memory = self.model.start_memory(len(documents), self.lengths.mem_len)
        while len(rows):
            if not torch.is_grad_enabled():
                mems = self.model.keep(mems)
            # The shorter segment comes first, so that the last one is complete.
            here = (left - 1) % T + 1
            places = zip(rows.tolist(), left.tolist(), here.tolist(), strict=True)
            segments = [documents[row][len(documents[row]) - m :][:n] for row, m, n in places]
            tokens, sizes = padded(segments)
            (piece,) = read(self.model, tokens, self.lengths, mems, sizes=sizes)
            left = left - here
            is_whole = left == 0
            yield Reading(
                rows, self.head(piece.hidden[torch.arange(len(rows)), here - 1]), is_whole
            )
            mems = piece.mems
            if is_whole.any():
                mems, rows, left = mems.select(~is_whole), rows[~is_whole], left[~is_whole]

    def forward(self, documents: Sequence[Int[Tensor, " _"]]) -> Float[Tensor, "documents classes"]:
        """Return the class logits of complete documents."""
        scores = torch.zeros(len(documents), self.head.out_features, device=self.model.device)
        for rows, logits, is_whole in self.read(documents):
            ended = rows[is_whole].to(scores.device)
            whole = logits[is_whole.to(logits.device)].to(scores.dtype)
            scores = scores.index_copy(0, ended, whole)
        return scores


Documents = Sequence[Int[Tensor, " _"]]
Labels = Int[Tensor, " documents"] | Sequence[int]


@no_type_check
@dataclass(frozen=True, kw_only=True)
class Fit:
    """Training settings of a classifier."""

    epochs: Count = 10
    """Passes over the documents."""
    batch_size: Count = 16
    """Documents in a batch; an update for each."""
    lr: Positive = 1e-3
    """Peak learning rate, with 5 % linear warmup and linear decay to zero."""
    weight_decay: NotNegative = 0.01
    """Weight decay of matrices."""
    every_segment: Share = 0.5
    """Share of the loss that is computed after every segment instead of only after the last."""
    seed: int = 0
    """Seed of the order of the documents."""

    def __post_init__(self) -> None:
        check(self)


def fit(
    classifier: LongDocumentClassifier,
    documents: Documents,
    labels: Labels,
    settings: Fit | None = None,
    say: Callable[[int, float], None] | None = None,
) -> None:
    """Train a classifier, with an update for each batch of documents.

    Args:
        classifier: The classifier.
        documents: Tokens of each document, of any lengths.
        labels: The class of each document; -100 is ignored.
        settings: Training settings.
        say: Called with the epoch and its mean loss.

    Raises:
        ValueError: The number of labels is wrong, all are -100, or one is no class.
    """
    settings = Fit() if settings is None else settings
    labels, known = _labelled(documents, labels)
    n_classes = classifier.head.out_features
    if len(wrong := known[(known < 0) | (known >= n_classes)]):
        raise InputError(
            f"label {wrong[0]} is no class: with n_classes={n_classes} 0 to {n_classes - 1}"
        )
    weights = list(classifier.parameters())
    groups = [
        {"params": [p for p in weights if p.ndim == 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in weights if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98))
    n_steps = settings.epochs * -(-len(documents) // settings.batch_size)
    warmup = n_steps // 20 + 1
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1 - step / n_steps)
    )
    draw = torch.Generator().manual_seed(settings.seed)
    segment_len = classifier.lengths.segment_len
    n_segments = torch.tensor([-(-len(document) // segment_len) for document in documents])
    classifier.train()
    for epoch in range(settings.epochs):
        total = 0.0
        order = torch.randperm(len(documents), generator=draw)
        for batch in order.split(settings.batch_size):
            read = classifier.read([documents[row] for row in batch.tolist()])
            n_known = max(int((labels[batch] != IGNORED).sum()), 1)
            # A backward pass for each segment.
            for rows, logits, is_whole in read:
                targets, whole = (x.to(logits.device) for x in (labels[batch[rows]], is_whole))
                loss = F.cross_entropy(
                    logits.float(), targets, reduction="none", ignore_index=IGNORED
                )
                each = settings.every_segment / n_segments[batch[rows]].to(logits.device)
                share = each + (1 - settings.every_segment) * whole
                (loss * share).sum().div(n_known).backward()
                total += float((loss.detach() * whole).sum())
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if say is not None:
            say(epoch + 1, total / len(known))
    classifier.eval()


@torch.no_grad()
def accuracy(
    classifier: LongDocumentClassifier,
    documents: Documents,
    labels: Labels,
    batch_size: int = 64,
) -> float:
    """Return the share of correctly classified documents; labels of -100 are ignored.

    Raises:
        ValueError: The number of labels is wrong, or all are -100.
    """
    labels, known = _labelled(documents, labels)
    # Batched by length.
    order = torch.tensor([len(document) for document in documents]).argsort()
    right = 0
    with evaluating(classifier):
        for rows in order.split(batch_size):
            predicted = classifier([documents[row] for row in rows.tolist()]).argmax(1)
            right += int((predicted.cpu() == labels[rows]).sum())
    return right / len(known)


def _labelled(documents: Documents, labels: Labels) -> tuple[Tensor, Tensor]:
    """Return the labels of documents, and those that are not ignored: one at least."""
    if not 0 < len(documents) == len(labels):
        raise InputError(f"{len(documents)} documents and {len(labels)} labels: one for each")
    labels = torch.as_tensor(labels)
    known = labels[labels != IGNORED]
    if not len(known):
        raise InputError(f"all labels are {IGNORED}: one at least must be a class")
    return labels, known
