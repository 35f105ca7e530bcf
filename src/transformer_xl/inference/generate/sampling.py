"""Settings of sampling as a value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

from transformer_xl.config import (
    GenerateConfig,
    checked,
    no_type_check,
    require,
)

HOTTEST = 1e30
"""An infinite temperature is replaced by this one, with which all tokens are as likely."""
_DEFAULT = GenerateConfig()


@no_type_check
@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a token is drawn from the distribution of the model.

    Meaning, range and default of each setting are those of :class:`~transformer_xl.GenerateConfig`,
    but for ``dry_sequence_breakers``. The defaults sample from the distribution of the model.

    Args:
        temperature: Sampling temperature; 0: greedy.
        top_k: Sample from the ``top_k`` most likely tokens. None: from all.
        top_p: Nucleus sampling: sample from the fewest tokens with this total probability. None or
            1: from all.
        dry_sequence_breakers: Texts, where there is a vocabulary (:class:`Session`), or tokens;
            ``breaker_tokens(vocab, texts)`` finds them. None: the line break, and no token where
            there is no vocabulary (:func:`generate`).

    Attributes:
        config: The settings as those of a recipe, without breakers that are tokens.

    Raises:
        TypeError: There is no such setting.
        ValueError: A setting is of a wrong type, out of range or without effect.

    Example:
        >>> Sampling(temperature=0.8, top_p=0.95).top_k is None
        True
    """

    temperature: float = _DEFAULT.temperature
    top_k: int | None = _DEFAULT.top_k
    top_p: float | None = _DEFAULT.top_p
    min_p: float | None = _DEFAULT.min_p
    typical_p: float | None = _DEFAULT.typical_p
    repetition_penalty: float = _DEFAULT.repetition_penalty
    presence_penalty: float = _DEFAULT.presence_penalty
    frequency_penalty: float = _DEFAULT.frequency_penalty
    penalty_window: int = _DEFAULT.penalty_window
    dry_multiplier: float = _DEFAULT.dry_multiplier
    dry_base: float = _DEFAULT.dry_base
    dry_allowed_length: int = _DEFAULT.dry_allowed_length
    dry_sequence_breakers: Sequence[str] | Sequence[int] | None = None
    on_loop: Literal["continue", "end", "break"] = _DEFAULT.on_loop
    loop_max_period: int = _DEFAULT.loop_max_period
    loop_min_count: int = _DEFAULT.loop_min_count
    loop_min_length: int = _DEFAULT.loop_min_length
    config: GenerateConfig = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in names_of(Sampling)}
        # Settings of a recipe must be finite, and this is equivalent.
        if values["temperature"] == math.inf:
            values["temperature"] = HOTTEST
        breakers = values["dry_sequence_breakers"]
        is_list = isinstance(breakers, Sequence | np.ndarray) and not isinstance(breakers, str)
        tokens = None
        # Those of an empty list are tokens, too.
        if is_list and all(isinstance(x, int | np.integer) for x in breakers):
            tokens = tuple(int(x) for x in breakers)
        if breakers is None or tokens is not None:
            del values["dry_sequence_breakers"]
        config = GenerateConfig(**checked(GenerateConfig, values))
        settings = {name: getattr(config, name) for name in values} | {"config": config}
        if tokens is not None:
            require(
                not tokens or config.dry_multiplier > 0,
                "dry_sequence_breakers has no effect without DRY",
            )
            settings["dry_sequence_breakers"] = tokens
        for name, value in settings.items():
            object.__setattr__(self, name, value)


def names_of(kind: type) -> list[str]:
    """Return the names of the settings of a dataclass."""
    return [x.name for x in fields(kind) if x.init]
