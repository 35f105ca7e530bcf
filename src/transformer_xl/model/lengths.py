"""Segment, memory and attention lengths, resolved in one place."""

from typing import Any, NamedTuple

import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model.arguments import whole

SEGMENT_LEN = 128
"""Default segment length."""

_LEAST = {"segment_len": 1, "attn_len": 1}


class Lengths(NamedTuple):
    """The lengths with which a model reads a text.

    Everything that reads a text takes them, and :meth:`of` resolves and validates them, so that
    all code paths treat a length alike.
    """

    segment_len: int
    """Tokens read at once, at most."""
    mem_len: int
    """Positions remembered, at most."""
    attn_len: int | None
    """Keys a query sees at most, counting its own; None: all."""
    clamp_len: int | None
    """Largest distance told apart; None: any."""
    ext_len: int
    """Last tokens of a segment that are read again with the next one, and not remembered."""

    @classmethod
    def of(cls, config: ModelConfig, *, requires_effect: bool = True, **given: Any) -> "Lengths":
        """Resolve lengths, given by name, against the settings of a model; None: as configured.

        Args:
            config: The settings of the model.
            requires_effect: Whether to refuse a length that has no effect in such a model.
            given: Any of the attributes.

        Raises:
            TypeError: It is no length.
            ValueError: A length is no integer, out of range, or without effect.
        """
        # Lengths were validated in an eager call before tracing.
        if not torch.compiler.is_compiling():
            given = _require_lengths(config, given, requires_effect)
        own = cls(SEGMENT_LEN, config.mem_len, config.attn_len, config.clamp_len, config.ext_len)
        return own._replace(**{name: x for name, x in given.items() if x is not None})

    @property
    def arguments(self) -> dict[str, int | None]:
        """The lengths as keyword arguments of a forward pass: all but ``segment_len``."""
        arguments = self._asdict()
        del arguments["segment_len"]
        return arguments

    @property
    def is_windowed(self) -> bool:
        """Whether every token sees the same number of positions, whatever the segmentation."""
        return self.attn_len is not None and self.attn_len <= self.mem_len + 1

    def windowed(self) -> "Lengths":
        """Return lengths with which every token sees ``mem_len`` positions and itself."""
        return self if self.is_windowed else self._replace(attn_len=self.mem_len + 1)


def _require_lengths(
    config: ModelConfig, given: dict[str, Any], requires_effect: bool
) -> dict[str, int | None]:
    if unknown := given.keys() - set(Lengths._fields):
        raise TypeError(f"{min(unknown)} is no length: they are {', '.join(Lengths._fields)}")
    for name, x in given.items():
        # Lengths from other code are plain integers, and are checked in each call of a model.
        if x is not None and (type(x) is not int or x < _LEAST.get(name, 0)):
            given[name] = whole(name, x, _LEAST.get(name, 0))
    for name, beside, _ in config.unused() if requires_effect else ():
        x = given.get(name)
        if x is not None and x != getattr(config, name):
            raise ValueError(f"{name}={x} has no effect with {beside}; leave it out")
    return given
