"""Settings of kNN-LM over the past of a text."""

from dataclasses import dataclass
from typing import Annotated

from transformer_xl.config.checks import Count, Positive, Range, check


@dataclass(frozen=True, kw_only=True, slots=True)
class KnnConfig:
    """kNN-LM over the past of a text: its nearest positions vote for the next token."""

    k: Count = 64
    """How many of the most similar past positions vote; at least knn.window: all, as in a neural
    cache."""
    share: Annotated[float, Range(gt=0, lt=1)] = 0.2
    """Share of the nearest positions in the probability of the next token; that of the model is the
    rest."""
    temperature: Positive = 0.015
    """Temperature of the softmax over the nearest positions, whose logits are minus the mean
    squared difference of their hidden states to the present one."""
    window: Count = 10_000
    """How many of the last positions are remembered, each with a hidden state in float32."""

    def __post_init__(self) -> None:
        check(self, "knn")
