"""Which tokens of a text are completions: what follows a separator, up to the next one.

A document is a prompt, the separator ``completion_at``, and a completion, which ends with the
token ``reset_at`` at which the next document begins, or with another separator, after which a
prompt follows. With the separator a tab and ``reset_at`` a line end, documents are the lines of a
table, and completions its second, fourth, ... column. The end of a completion is part of it.
"""

import numpy as np
from jaxtyping import Bool, Integer

from transformer_xl.config import ModelConfig


def in_completion(
    tokens: Integer[np.ndarray, "*streams length"],
    config: ModelConfig,
    before: Bool[np.ndarray, "*streams"] | bool = False,
) -> Bool[np.ndarray, "*streams length"]:
    """Mark the tokens whose next token belongs to a completion.

    Args:
        tokens: Texts.
        config: Settings of the model, with ``completion_at`` and ``reset_at``.
        before: Whether the text before them ends within a completion.

    Example:
        >>> config = ModelConfig(reset_at=0, completion_at=1)
        >>> in_completion(np.array([0, 7, 1, 8, 8, 1, 7, 1, 8, 0, 7]), config).astype(int).tolist()
        [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]
    """
    separators = (tokens == config.completion_at).cumsum(axis=-1) + np.asarray(before)[..., None]
    # Those before the document, as the count never falls.
    counted = np.where(tokens == config.reset_at, separators, 0)
    return (separators - np.maximum.accumulate(counted, axis=-1)) % 2 == 1
