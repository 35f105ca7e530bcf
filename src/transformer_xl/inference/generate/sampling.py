"""Settings of sampling as a value."""

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from transformer_xl.config import GenerateConfig, validate_settings

HOTTEST = 1e30
"""An infinite temperature is replaced by this one, with which all tokens are as likely."""
_DEFAULT = GenerateConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a token is drawn from the distribution of the model.

    Meaning, range and default of each setting are those of :class:`~transformer_xl.GenerateConfig`.
    The defaults sample from the distribution of the model.

    Args:
        temperature: Sampling temperature; 0: greedy.
        top_k: Sample from the ``top_k`` most likely tokens. None: from all.
        top_p: Nucleus sampling: sample from the fewest tokens with this total probability. None or
            1: from all.

    Attributes:
        config: The settings as those of a recipe.

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
    repetition_penalty: float = _DEFAULT.repetition_penalty
    dry_multiplier: float = _DEFAULT.dry_multiplier
    dry_allowed_length: int = _DEFAULT.dry_allowed_length
    on_loop: Literal["continue", "break"] = _DEFAULT.on_loop
    loop_min_length: int = _DEFAULT.loop_min_length
    config: GenerateConfig = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = {x.name: getattr(self, x.name) for x in fields(self) if x.init}
        # Settings of a recipe must be finite, and this is equivalent.
        if values["temperature"] == math.inf:
            values["temperature"] = HOTTEST
        config = GenerateConfig(**validate_settings(GenerateConfig, values))
        settings = {name: getattr(config, name) for name in values}
        for name, value in (settings | {"config": config}).items():
            object.__setattr__(self, name, value)
