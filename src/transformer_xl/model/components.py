"""The components of a :class:`TransformerXL`, chosen once by its settings when it is built."""

from collections.abc import Callable
from typing import NamedTuple

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
    residuals: Residuals
    """Residual connections to the first layer."""
    input_stage: InputStage
    """What happens to embeddings before the first layer."""
    spans: Callable[..., Seen]
    """What each layer sees of the memory, as :func:`~transformer_xl.model.parts.whole_memory`."""
    memory_state: Callable[..., Tensor]
    """What the memory keeps of a layer, as :func:`~transformer_xl.model.parts.keep_input`."""
    remember: Callable[..., Memory]
    """The memory after a segment, as :func:`~transformer_xl.model.parts.remember`."""


def components(config: ModelConfig, positions: PositionScheme | None) -> Components:
    """Return the components that settings ask for, with a scheme of positions unless None."""
    stores, swaps = (x in config.quirks for x in ("stored_positions", "swapped_ext_len"))
    has_residuals = config.value_residual or config.embedding_residual
    lens, cuts = config.layer_attn_lens, not config.value_residual
    return Components(
        positions or _SCHEMES[config.attn_type](),
        FirstLayerResiduals() if has_residuals else Residuals(),
        InputRecurrence() if config.input_recurrence else InputStage(),
        AttentionSpans(lens, cuts=cuts) if lens else whole_memory,
        keep_output if config.enhanced_recurrence else keep_input,
        AuthorsMemory(stores=stores, swaps=swaps) if stores or swaps else remember,
    )


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
