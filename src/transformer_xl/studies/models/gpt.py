"""GPT: a decoder with rotary positions, to compare with.

Its layers are those of :class:`~transformer_xl.model.transformer_xl.TransformerXL`, pre-norm with a
final normalization, with rotary positions (Su et al., 2021, arXiv 2104.09864) in place of relative
ones. With ``mem_len=0`` it is the usual GPT, whose context is one segment. Otherwise it has a
sliding window of keys and values (a KV cache) that is carried from segment to segment, in training
too, where the weights that made them are older than those that read them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model import (
    ContentAttention,
    DecoderLayer,
    LanguageModel,
    Memory,
    View,
    draw_weights,
    make_norm,
    make_spans,
    sinusoids,
)


class GPT(LanguageModel):
    """A language model with causal attention and rotary positions.

    The memory of a layer holds its keys, before they are rotated, and its values, (B, M, 2 H K).
    They are rotated by their place in memory and segment, so that no position exceeds their length.
    Lengths, padding and documents are those of a Transformer-XL, but ``clamp_len``, which has no
    effect.

    Args:
        config: Widths, lengths and options. Its ``vocab_size`` must be set.

    Raises:
        SettingsError: The size of the vocabulary is not set, or ``kind`` is that of another class.
    """

    kind = "gpt"
    _title = "GPT"
    recomputes = True

    def _build(self, config: ModelConfig) -> None:
        # With absolute positions (`attn_type` 2) the layers of a Transformer-XL have no parameters
        # for them. Rotary positions take their place.
        layer_config = replace(config, kind="transformer_xl", attn_type=2, norm_first=True)
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            DecoderLayer(layer_config, n, RotaryAttention(layer_config))
            for n in range(config.n_layer)
        )
        self.final_norm, self.spans = make_norm(config), make_spans(config)

    def init_weights(self) -> None:
        """Draw the initial weights, by the names of the parameters."""
        draw_weights(self.named_parameters(), self.config)

    @property
    def _weight(self) -> Tensor:
        return self.layers[0].attention_norm.weight

    @property
    def _state_width(self) -> int:
        return 2 * self.config.n_head * self.config.head_width

    def _read(
        self, x: Float[Tensor, "B T D"], memory: Memory, view: View
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        T = x.shape[1]
        S, width, precision = memory.length + T, self.config.head_width, self.frequency_precision
        positions = RotaryPositions(*rotary(S, width, self.dtype, self.device, precision))
        seen = [*self.spans(memory.states, [positions] * len(self.layers), view)]
        cache, nothing = _KeysAndValues([past for past, *_ in seen]), x[:, :0]
        for n, (_, position, layer_view) in enumerate(seen):
            layer_view = layer_view._replace(join=cache.join)
            x = self._through(n, self.layers[n], x, nothing, position, layer_view)
        return self.final_norm(x), view.remember(memory, cache.states)


class RotaryPositions(NamedTuple):
    """Sine and cosine of the angles of all keys, the oldest first."""

    sin: Float[Tensor, "S half"]
    cos: Float[Tensor, "S half"]

    def placed(
        self, past: Float[Tensor, "B M D"], x: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B T D"]]:
        """Return memory and segment as they are: queries and keys are rotated."""
        return past, x

    def without(self, n: int) -> "RotaryPositions":
        """Return the positions without those of the ``n`` oldest keys."""
        return RotaryPositions(self.sin[n:], self.cos[n:])


class RotaryAttention(ContentAttention):
    """Attention whose queries and keys are rotated by their positions."""

    def forward(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S H K"],
        v: Float[Tensor, "B S H K"],
        positions: object,
        view: View = View(),  # noqa: B008  (a tuple)
    ) -> Float[Tensor, "B T D"]:
        """Attend with the queries of a segment to the keys and values of memory and segment."""
        assert isinstance(positions, RotaryPositions)
        sin, cos = positions
        M = k.shape[1] - q.shape[1]
        q, k = rotated(q, sin[M:], cos[M:]), rotated(k, sin, cos)
        return super().forward(q, k, v, positions, view)


class _KeysAndValues:
    """The memory of a GPT, to which layers append their keys and values.

    Args:
        pasts: What each layer sees of the memory.

    Attributes:
        states: What the memory keeps of the segment, of each layer.
    """

    def __init__(self, pasts: Sequence[Float[Tensor, "B M two_H_K"]]) -> None:
        self._pasts = pasts
        self.states: list[Float[Tensor, "B T two_H_K"]] = [*pasts]

    def join(
        self, layer: int, k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H K"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """Return the keys and values of memory and segment, given those of the segment."""
        self.states[layer] = torch.cat([k.flatten(2), v.flatten(2)], -1).detach()
        past = self._pasts[layer]
        if not past.shape[1]:
            return k, v
        heads = (y.unflatten(-1, k.shape[2:]).to(k.dtype) for y in past.chunk(2, -1))
        k, v = (torch.cat(pair, 1) for pair in zip(heads, (k, v), strict=True))
        return k, v


def rotary(
    S: int,
    d_head: int,
    dtype: torch.dtype,
    device: torch.device,
    precision: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "S half"], Float[Tensor, "S half"]]:
    """Return sine and cosine of the angles of the positions 0 to S - 1, for :func:`rotated`.

    Frequencies are rounded to ``precision``.
    """
    # Not in half precision, in which angles of long contexts would be far off.
    dtype = torch.promote_types(dtype, torch.float32)
    table = sinusoids(S, d_head, dtype, device, precision)[:S]
    sin, cos = table.chunk(2, -1)
    return sin, cos


def rotated(
    x: Float[Tensor, "B S H K"], sin: Float[Tensor, "S half"], cos: Float[Tensor, "S half"]
) -> Float[Tensor, "B S H K"]:
    """Rotate queries or keys by their positions (RoPE; Su et al., 2021, arXiv 2104.09864).

    Products of rotated queries and keys depend on the difference of their positions only. Features
    m and m + K / 2 are a pair.
    """
    first, second = x.chunk(2, -1)
    sin, cos = sin[:, None], cos[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
