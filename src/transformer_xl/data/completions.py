"""Which tokens of a text are completions: what follows a separator, up to the next document.

A document is a prompt, the separator ``completion_at``, and a completion, which ends with the
token ``reset_at`` at which the next document begins. With the separator a tab and ``reset_at`` a
line end, these are the lines of a table with two columns. The end of a completion is part of it.
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
        >>> in_completion(np.array([0, 7, 7, 1, 8, 8, 0, 7, 1, 9]), config).astype(int).tolist()
        [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    """
    begins, ends = tokens == config.completion_at, tokens == config.reset_at
    place = np.where(begins | ends, np.arange(tokens.shape[-1]), -1)
    latest = np.maximum.accumulate(place, axis=-1)
    found = np.take_along_axis(begins, np.maximum(latest, 0), axis=-1)
    return np.where(latest < 0, np.asarray(before)[..., None], found)
