"""The components of a :class:`TransformerXL`, chosen once by its settings when it is built."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.model.layer import Attention, DecoderLayer, RelAttention
from transformer_xl.model.memory import Memory
from transformer_xl.model.parts import (
    InputStage,
    Residuals,
    Seen,
    keep_input,
    remember,
    whole_memory,
)
from transformer_xl.model.positions import PositionScheme, RelativeSinusoids
from transformer_xl.model.variants.attention_spans import AttentionSpans
from transformer_xl.model.variants.enhanced_recurrence import keep_output
from transformer_xl.model.variants.input_recurrence import InputRecurrence
from transformer_xl.model.variants.positions import (
    AbsoluteSinusoids,
    AbsoluteTable,
    ContentAttention,
    ShawTable,
)
from transformer_xl.model.variants.quirks import AuthorsMemory, RawQueryLayer
from transformer_xl.model.variants.residuals import FirstLayerResiduals

_SCHEMES = RelativeSinusoids, ShawTable, AbsoluteSinusoids, AbsoluteTable
"""The schemes of positions by ``attn_type``."""


class Components(NamedTuple):
    """What a model is put together from, beside its layers."""

    positions: PositionScheme
    """How layers know where a key is."""
    residuals: Residuals = Residuals()
    """Residual connections to the first layer."""
    input_stage: InputStage = InputStage()
    """What happens to embeddings before the first layer."""
    spans: Callable[..., Seen] = whole_memory
    """What each layer sees of the memory."""
    memory_state: Callable[..., Tensor] = keep_input
    """What the memory keeps of a layer."""
    remember: Callable[..., Memory] = remember
    """The memory after a segment."""


def components(config: ModelConfig, positions: PositionScheme | None) -> Components:
    """Return the components that settings ask for, with a scheme of positions unless None."""
    variants: dict[str, Any] = {}
    if config.value_residual or config.embedding_residual:
        variants["residuals"] = FirstLayerResiduals()
    if config.input_recurrence:
        variants["input_stage"] = InputRecurrence()
    if spans := config.layer_attn_lens:
        variants["spans"] = AttentionSpans(spans, cuts=not config.value_residual)
    if config.enhanced_recurrence:
        variants["memory_state"] = keep_output
    stores, swaps = (x in config.quirks for x in ("stored_positions", "swapped_ext_len"))
    if stores or swaps:
        variants["remember"] = AuthorsMemory(stores=stores, swaps=swaps)
    return Components(positions or _SCHEMES[config.attn_type](), **variants)


def make_layer(config: ModelConfig, number: int, positions: PositionScheme) -> DecoderLayer:
    """Create a layer of the kind that settings ask for."""
    attention: Attention = (
        ContentAttention(config)
        if positions.is_absolute
        else RelAttention(config, has_r_proj=positions.has_projection)
    )
    layer = RawQueryLayer if "raw_queries" in config.quirks else DecoderLayer
    return layer(config, number, attention)


def frequency_precision(config: ModelConfig) -> torch.dtype:
    """Return the precision to which the frequencies of sinusoids are rounded."""
    return torch.float64 if "exact_frequencies" in config.quirks else torch.float32
