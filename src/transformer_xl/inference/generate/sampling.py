"""Settings of sampling as a value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Literal

from transformer_xl.config import GenerateConfig, require, validate_settings
from transformer_xl.data import Vocab
from transformer_xl.model import shown, whole

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
        dry_sequence_breakers: Tokens that no repetition contains, as :func:`breaker_tokens` returns
            them. A :class:`Session` knows them by itself.

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
    dry_sequence_breakers: Sequence[int] = ()
    config: GenerateConfig = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = {x.name: getattr(self, x.name) for x in fields(self) if x.init}
        tokens = values.pop("dry_sequence_breakers") or ()
        breakers = tuple(whole("dry_sequence_breakers", token) for token in tokens)
        require(
            bool(self.dry_multiplier) or not breakers,
            f"dry_sequence_breakers={shown(breakers)} has no effect with dry_multiplier=0",
        )
        # Settings of a recipe must be finite, and this is equivalent.
        if values["temperature"] == math.inf:
            values["temperature"] = HOTTEST
        config = GenerateConfig(**validate_settings(GenerateConfig, values))
        settings = {name: getattr(config, name) for name in values}
        settings |= {"config": config, "dry_sequence_breakers": breakers}
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, settings: GenerateConfig, vocab: Vocab) -> "Sampling":
        """Return the settings of a recipe, with the line breaks of its vocabulary for DRY."""
        values = settings.sampling
        breakers = breaker_tokens(vocab) if "dry_multiplier" in values else ()
        return cls(**values, dry_sequence_breakers=breakers)


@lru_cache(maxsize=4)
def breaker_tokens(vocab: Vocab) -> tuple[int, ...]:
    """Return the tokens that contain a line break, for ``Sampling.dry_sequence_breakers``.

    In a vocabulary whose tokens have no bytes, ``<eos>`` counts as one.
    """

    def breaks_line(token: int) -> bool:
        if vocab.token_bytes is not None and token != vocab.unk_id:
            return b"\n" in vocab.decode_bytes([token])
        return token == vocab.eos_id or "\n" in vocab.symbols[token]

    return tuple(token for token in range(len(vocab)) if breaks_line(token))
