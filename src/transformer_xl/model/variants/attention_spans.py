"""Attention lengths that differ by layer.

256 in the first of two layers gain 0.013 bits per character of prose in three minutes of training,
0.017 of source code, there within the spread; but a repeated pair is then not found beyond those
256 positions (docs/experiments.md).
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.model.parts import Seen, whole_memory
from transformer_xl.model.positions import LayerPositions
from transformer_xl.model.segment import View


class AttentionSpans:
    """Limits what each layer sees (``layer_attn_lens``), the lowest layer first.

    Positions of the memory that are out of reach of a layer are neither projected nor attended to;
    those of :class:`~transformer_xl.model.keys_and_values.KeysAndValues` are masked.

    Args:
        spans: The attention lengths.
        n_before: How many positions before the first visible key contribute to it: 1 with a key
            offset.
    """

    def __init__(self, spans: Sequence[int], n_before: int = 0) -> None:
        self._spans, self._n_before = tuple(spans), n_before

    def __call__(
        self, pasts: Sequence[Tensor], positions: Sequence[LayerPositions], view: View
    ) -> Seen:
        """Return what each layer sees."""
        for span, past, position in zip(self._spans, pasts, positions, strict=True):
            attn_len = span if view.attn_len is None else min(span, view.attn_len)
            layer_view = view._replace(attn_len=attn_len)
            cut = max(past.shape[1] + 1 - attn_len - self._n_before, 0)
            if view.join is not None or not cut:
                yield past, position, layer_view
                continue
            first_key = view.first_key
            if first_key is not None:
                layer_view = layer_view._replace(first_key=(first_key - cut).clamp(min=0))
            yield past[:, cut:], position.without(cut), layer_view


def make_spans(config: ModelConfig) -> Callable[..., Seen]:
    """Return what chooses the part of the memory that each layer of a model sees."""
    if not config.layer_attn_lens:
        return whole_memory
    return AttentionSpans(config.layer_attn_lens, n_before=int(config.key_offset))
