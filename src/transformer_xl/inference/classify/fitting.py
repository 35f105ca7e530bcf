"""Learning to classify documents of any length, in the memory of one segment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from transformer_xl.config.checks import Count, NotNegative, Positive, Share, check, no_type_check
from transformer_xl.inference.classify.classifier import LongDocumentClassifier
from transformer_xl.model.wrapping import evaluating
from transformer_xl.ops.nll import IGNORED

Documents = Sequence[Int[Tensor, " _"]]
Labels = Int[Tensor, " documents"] | Sequence[int]


@no_type_check
@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a classifier learns.

    Raises:
        ValueError: A setting is out of range.
    """

    epochs: Count = 10
    """How often each document is read."""
    batch_size: Count = 16
    """Documents read side by side, and between two updates of the weights."""
    lr: Positive = 1e-3
    """Largest learning rate; it rises over the first twentieth and falls in a line to zero."""
    weight_decay: NotNegative = 0.01
    """Of matrices."""
    every_segment: Share = 0.5
    """Share of the loss that asks for the class after every segment, not only after the last."""
    seed: int = 0
    """Of the order of the documents."""

    def __post_init__(self) -> None:
        check(self)


def fit(
    classifier: LongDocumentClassifier,
    documents: Documents,
    labels: Labels,
    settings: Fit | None = None,
    say: Callable[[int, float], None] | None = None,
) -> None:
    """Teach a classifier, segment by segment; a batch of documents is an update.

    Args:
        classifier: What learns.
        documents: Tokens of each document, of any lengths.
        labels: Its class; a document whose label is -100 is left out of the loss.
        settings: How. None: the defaults.
        say: Is told the loss after each epoch.

    Raises:
        ValueError: There are not as many labels as documents, or none but -100; or one is no class.
    """
    settings = Fit() if settings is None else settings
    if not 0 < len(documents) == len(labels):
        raise ValueError(f"{len(documents)} documents and {len(labels)} labels: one for each")
    labels, n_classes = torch.as_tensor(labels), classifier.head.out_features
    known = labels[labels != IGNORED]
    if not len(known):
        raise ValueError(f"all labels are {IGNORED}: one at least must be a class")
    least, most = int(known.min()), int(known.max())
    if least < 0 or most >= n_classes:
        wrong = least if least < 0 else most
        raise ValueError(
            f"label {wrong} is no class: with n_classes={n_classes} 0 to {n_classes - 1}"
        )
    weights = list(classifier.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in weights if p.ndim == 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in weights if p.ndim != 2], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(0.9, 0.98),
    )
    n_steps = settings.epochs * -(-len(documents) // settings.batch_size)
    warmup = n_steps // 20 + 1
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1 - step / n_steps)
    )
    draw = torch.Generator().manual_seed(settings.seed)
    classifier.train()
    for epoch in range(settings.epochs):
        total = 0.0
        order = torch.randperm(len(documents), generator=draw)
        for rows in order.split(settings.batch_size):
            batch = [documents[row] for row in rows.tolist()]
            total += _learn(classifier, batch, labels[rows], settings.every_segment)
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
    """Return the share of documents whose class is found, of those whose label is not -100."""
    labels = torch.as_tensor(labels)
    # Of about equal lengths, side by side.
    order = torch.tensor([len(document) for document in documents]).argsort()
    right = 0
    with evaluating(classifier):
        for rows in order.split(batch_size):
            found = classifier([documents[row] for row in rows.tolist()]).argmax(1)
            right += int((found.cpu() == labels[rows]).sum())
    return right / int((labels != IGNORED).sum())


def _learn(
    classifier: LongDocumentClassifier, batch: Documents, labels: Tensor, every_segment: Share
) -> float:
    """Add the gradients of a batch, one segment at a time; return the sum of its last losses."""
    n_segments = torch.tensor([-(-len(x) // classifier.lengths.segment_len) for x in batch])
    total, n_known = 0.0, max(int((labels != IGNORED).sum()), 1)
    for rows, logits, is_whole in classifier.read(batch):
        device = logits.device
        targets = labels[rows].to(device)
        loss = F.cross_entropy(logits.float(), targets, reduction="none", ignore_index=IGNORED)
        share = every_segment / n_segments[rows] + (1 - every_segment) * is_whole
        (loss * share.to(device)).sum().div(n_known).backward()
        total += float((loss.detach() * is_whole.to(device)).sum())
    return total
