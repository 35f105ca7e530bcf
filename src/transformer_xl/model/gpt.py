"""GPT: a decoder with rotary positions, to compare with.

Its layers are those of :class:`~transformer_xl.model.transformer_xl.TransformerXL`, pre-norm with a
final normalization, with rotary positions (Su et al., 2021, arXiv 2104.09864) in place of relative
ones. With ``mem_len=0`` it is the usual GPT, whose context is one segment. Otherwise it has a
sliding window of keys and values (a KV cache) that is carried from segment to segment, in training
too, where the weights that made them are older than those that read them.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.layer import DecoderLayer, draw_weights, make_norm
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import Memory
from transformer_xl.model.positions import rotary, rotated
from transformer_xl.model.segment import Segment
from transformer_xl.ops import attention


class GPT(LanguageModel):
    """A language model with causal attention and rotary positions.

    The memory of a layer holds its keys, before they are rotated, and its values, (B, M, 2 H K).
    They are rotated by their place in memory and segment, so that no position exceeds their length.
    Lengths, padding and documents are those of a Transformer-XL, but ``clamp_len``, which has no
    effect.

    Args:
        config: Widths, lengths and options. Its ``vocab_size`` must be set.

    Attributes:
        frequency_precision: To which the frequencies of the positions are rounded.

    Raises:
        ValueError: The size of the vocabulary is not set, or ``kind`` is that of another class.
    """

    frequency_precision: torch.dtype = torch.float32
    kind = "gpt"
    _title = "GPT"
    recomputes = True

    def _build(self, config: ModelConfig) -> None:
        # The layers of a model whose positions are none of their business.
        own = replace(config, kind="transformer_xl", attn_type=2, norm_first=True)
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            DecoderLayer(own) for _ in range(config.n_layer)
        )
        self.final_norm = make_norm(config)

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
        self, segment: Segment, mems: Memory | None, lengths: Lengths
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        B, T = segment.shape
        if mems is None:
            mems = self.start_memory(B, lengths.mem_len)
        self.require_continued(segment, mems, lengths.ext_len)
        mems = mems.with_capacity(T, lengths.mem_len)
        M, first_key = mems.length, segment.first_keys(mems.length, mems.forgotten)
        width, precision = self.config.head_width, self.frequency_precision
        sin, cos = rotary(M + T, width, self.dtype, self.device, precision)
        dropped = self.config.attn_dropout if self.training else 0.0

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = rotated(q, sin[M:], cos[M:]), rotated(k, sin, cos)
            seen = {"attn_len": lengths.attn_len, "first_key": first_key}
            return attention(q, k, v.to(q.dtype), dropout=dropped, **seen)

        x, present = self._embedded(segment), []
        for n, (layer, state) in enumerate(zip(self.layers, mems.states, strict=True)):
            join = _Join(state, self.config.n_head)
            x, _ = self._through(n, layer, x, join, attend)
            present.append(join.present)
        kept = max(T - lengths.ext_len, 0)
        mems = segment.remembered(mems, present, first_key, lengths.mem_len, kept)
        return self.final_norm(x), mems


class _Join:
    """Appends the keys and values of a segment to those of one layer's memory.

    Attributes:
        present: What the memory stores of the segment, (B, T, 2 H K).
    """

    present: Tensor

    def __init__(self, state: Float[Tensor, "B M two_H_K"], n_head: int) -> None:
        self.past = [x.unflatten(-1, (n_head, -1)) for x in state.chunk(2, -1)]

    def __call__(
        self, k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H K"]
    ) -> tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        self.present = torch.cat([k.flatten(2), v.flatten(2)], -1).detach()
        if not self.past[0].shape[1]:
            return k, v
        before, values = (x.to(k.dtype) for x in self.past)
        return torch.cat([before, k], 1), torch.cat([values, v], 1)
