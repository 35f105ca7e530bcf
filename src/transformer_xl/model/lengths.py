"""Segment, memory and attention lengths, resolved in one place."""

from typing import Any, NamedTuple

import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model.arguments import whole

SEGMENT_LEN = 128
"""Default segment length."""

_NAMES = ("mem_len", "attn_len", "clamp_len", "ext_len")


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
    def of(
        cls,
        config: ModelConfig,
        *,
        segment_len: Any = SEGMENT_LEN,
        mem_len: Any = None,
        attn_len: Any = None,
        clamp_len: Any = None,
        ext_len: Any = None,
        requires_effect: bool = True,
    ) -> "Lengths":
        """Resolve lengths against the settings of a model; None: as configured.

        Args:
            config: The settings of the model.
            segment_len: As the attribute.
            mem_len: As the attribute.
            attn_len: As the attribute.
            clamp_len: As the attribute.
            ext_len: As the attribute.
            requires_effect: Whether to refuse a length that has no effect in such a model.

        Raises:
            ValueError: A length is no integer, out of range, or without effect.
        """
        # Lengths were validated in an eager call before tracing.
        if not torch.compiler.is_compiling():
            segment_len = whole("segment_len", segment_len, 1)
            mem_len, attn_len = whole("mem_len", mem_len), whole("attn_len", attn_len, 1)
            clamp_len, ext_len = whole("clamp_len", clamp_len), whole("ext_len", ext_len)
            if requires_effect:
                _require_effect(config, mem_len, attn_len, clamp_len, ext_len)
        return cls(
            segment_len,
            config.mem_len if mem_len is None else mem_len,
            config.attn_len if attn_len is None else attn_len,
            config.clamp_len if clamp_len is None else clamp_len,
            config.ext_len if ext_len is None else ext_len,
        )

    @property
    def arguments(self) -> dict[str, int | None]:
        """The lengths as keyword arguments of a forward pass: all but ``segment_len``."""
        return {
            "mem_len": self.mem_len,
            "attn_len": self.attn_len,
            "clamp_len": self.clamp_len,
            "ext_len": self.ext_len,
        }

    @property
    def is_windowed(self) -> bool:
        """Whether every token sees the same number of positions, whatever the segmentation."""
        return self.attn_len is not None and self.attn_len <= self.mem_len + 1

    def windowed(self) -> "Lengths":
        """Return lengths with which every token sees ``mem_len`` positions and itself."""
        window = self.mem_len + 1
        return self._replace(
            attn_len=window if self.attn_len is None else min(self.attn_len, window)
        )


def _require_effect(config: ModelConfig, *given: int | None) -> None:
    changed = {
        name: x
        for name, x in zip(_NAMES, given, strict=True)
        if x is not None and x != getattr(config, name)
    }
    if not changed:
        return
    for name, beside, _ in config.unused():
        if name in changed:
            raise ValueError(f"{name}={changed[name]} has no effect with {beside}; leave it out")
