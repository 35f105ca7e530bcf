"""Transformer-XL: embedding, layers with memory, softmax."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError
from transformer_xl.model.calling import adapters, evaluating
from transformer_xl.model.keys_and_values import KeysAndValues
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.layer import Attention, DecoderLayer, RelAttention, draw_weights
from transformer_xl.model.memory import Memory
from transformer_xl.model.parts import InputStage, Residuals, keep_input, remember
from transformer_xl.model.positions import PositionScheme, RelativeSinusoids
from transformer_xl.model.segment import Lengths, Segment, View
from transformer_xl.model.variants.attention_spans import make_spans
from transformer_xl.model.variants.enhanced_recurrence import keep_output
from transformer_xl.model.variants.input_recurrence import InputRecurrence
from transformer_xl.model.variants.norms import make_norm
from transformer_xl.model.variants.positions import (
    AbsoluteSinusoids,
    AbsoluteTable,
    ContentAttention,
    ShawTable,
)
from transformer_xl.model.variants.quirks import AuthorsMemory, RawQueryLayer
from transformer_xl.model.variants.residuals import EmbeddingResiduals

_SCHEMES = RelativeSinusoids, ShawTable, AbsoluteSinusoids, AbsoluteTable
"""The schemes of positions by ``attn_type``."""


class TransformerXL(LanguageModel):
    r"""The language model of the paper: predicts each token from the segment and the memory.

    The memory of layer n holds the inputs of that layer, $h^{n-1}$ (section 3.2). Variants are
    components, chosen by the settings when the model is built: :mod:`transformer_xl.model.variants`
    has their equations.

    Rows of a batch may be padded on the right (``lengths``), contain several documents (``starts``
    for packed documents; ``mems.reset(rows)`` between segments; ``reset_at``, a token that always
    starts a document), or be vectors instead of tokens (``inputs_embeds``). With relative
    positions, each document gets the same results as if it were alone. Absolute positions
    (``attn_type`` 2 and 3) are counted from the last real token of a row, and so depend on what
    follows a document. Padding and positions before a document are computed and masked, so neither
    saves time.

    Args:
        config: Widths, lengths and options. Its ``vocab_size`` must be set.
        positions: The scheme of positions. None: that of ``attn_type``.

    Raises:
        SettingsError: The size of the vocabulary is not set, or ``kind`` is that of another class.

    Example:
        >>> config = ModelConfig(
        ...     vocab_size=20, n_layer=2, n_head=2, d_model=16, d_inner=32, mem_len=8
        ... )
        >>> out = TransformerXL(config)(torch.randint(20, (3, 5)))
        >>> out.log_probs.shape, len(out.mems)
        (torch.Size([3, 5, 20]), 5)
    """

    kind = "transformer_xl"
    _title = "Transformer-XL"
    has_attention = True
    recomputes = True
    # u and v of section 3.3.
    content_bias: nn.Parameter
    position_bias: nn.Parameter
    # Of variants.
    distance_embedding: nn.Parameter
    distance_bias: nn.Parameter
    position_embedding: nn.Parameter
    embedding_own: nn.Parameter | None
    embedding_first: nn.Parameter | None
    input_decay: nn.Parameter | None

    def __init__(self, config: ModelConfig, positions: PositionScheme | None = None) -> None:
        super().__init__(config, positions=positions)

    def _build(self, config: ModelConfig, positions: PositionScheme | None) -> None:
        scheme = positions or _SCHEMES[config.attn_type]()
        layer = RawQueryLayer if "raw_queries" in config.quirks else DecoderLayer

        def attention() -> Attention:
            if scheme.is_absolute:
                return ContentAttention(config)
            return RelAttention(config, has_r_proj=scheme.has_projection)

        # A ModuleList has no element type.
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            layer(config, n, attention()) for n in range(config.n_layer)
        )
        self.positions = scheme
        self.residuals = EmbeddingResiduals() if config.embedding_residual else Residuals()
        self.input_stage = InputRecurrence() if config.input_recurrence else InputStage()
        self.spans = make_spans(config)
        self.memory_state = keep_output if config.enhanced_recurrence else keep_input
        stores, swaps = (x in config.quirks for x in ("stored_positions", "swapped_ext_len"))
        self.remember: Callable[..., Memory] = remember
        if stores or swaps:
            self.remember = AuthorsMemory(stores=stores, swaps=swaps)
        if "exact_frequencies" in config.quirks:
            self.frequency_precision = torch.float64
        self.embedding_own = self.embedding_first = self.input_decay = None
        for part in (self.positions, self.residuals, self.input_stage):
            # Under the names that these parameters have had in files from the first version on.
            part.add_parameters(self)
        self.final_norm = make_norm(config) if config.final_norm else nn.Identity()

    def init_weights(self) -> None:
        """Draw the initial weights, by the names of the parameters."""
        draw_weights(self.named_parameters(), self.config)

    def _read(
        self, x: Float[Tensor, "B T D"], memory: Memory, view: View
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        T = x.shape[1]
        x = self.input_stage(self, x, memory, view)
        positions = self.positions.encode(self, memory.length + T, T, view)
        layer_input, states = self.residuals(self, x), []
        of_layers = self.spans(memory.pasts(x), positions, view)
        for layer, (past, position, layer_view) in zip(self.layers, of_layers, strict=True):
            # The input of the layer: x itself, in the paper.
            h = layer_input(layer.number, x)
            past, placed = position.placed(past, h)
            x = self._through(layer.number, layer, placed, past, position, layer_view)
            states.append(self.memory_state(layer, h, x, layer_view))
        return self.final_norm(x), self.remember(memory, states, positions, view)

    @property
    def _weight(self) -> Tensor:
        return self.layers[0].attention_norm.weight

    @property
    def device(self) -> torch.device:
        """Device on which the model computes."""
        norm = self.layers[0].attention_norm
        if norm.weight.is_meta and (hook := getattr(norm, "_hf_hook", None)):
            # Offloaded by accelerate, and loaded when used.
            return torch.device(hook.execution_device)
        return self._weight.device

    def require_readable(self, segment: Segment, mems: Memory, lengths: Lengths) -> None:
        """Require that a memory can be continued with a segment."""
        super().require_readable(segment, mems, lengths)
        if isinstance(mems, KeysAndValues):
            if torch.is_grad_enabled():
                raise InputError(
                    "a memory of keys and values needs fixed weights: use it under torch.no_grad()"
                )
            if not torch.compiler.is_compiling():
                self.bind_adapters(mems)

    @torch.no_grad()
    def bind_adapters(self, memory: KeysAndValues) -> None:
        """Bind keys and values to the active adapters, or check that they are bound to these.

        The projections of a memory depend on the adapters of its model. A memory whose adapters are
        unknown, such as one from a file, is bound to those of this model: they are stored in
        ``memory.adapters``. The cached position keys, which must come from the same weights, are
        then dropped if the weights have changed. :meth:`keep` returns memories that are bound.

        Args:
            memory: The keys and values; modified in place if their adapters are unknown.

        Raises:
            InputError: They were projected with other adapters.
        """
        if memory.adapters is None:
            self.positions.renew(self)
        memory.bind_adapters(adapters(self))

    @torch.no_grad()
    def keep(self, memory: Memory) -> Memory:
        """Convert a memory of hidden states to keys and values, for fixed weights.

        Results are the same, but the memory is not projected again for each segment. A memory of
        keys and values is returned unchanged, and so is any memory with absolute positions
        (``attn_type`` 2 and 3), whose keys change with each segment.
        """
        if memory.has_keys or self.positions.is_absolute:
            return memory
        keys, values = [], []
        with evaluating(self):
            if not torch.compiler.is_compiling():
                self.positions.renew(self)
            for layer, state in zip(self.layers, memory.states, strict=True):
                k, v = layer.keys_and_values(state)
                keys.append(k.permute(2, 0, 1, 3).contiguous())
                values.append(v.permute(2, 0, 1, 3).contiguous())
        inputs = []
        if self.config.input_recurrence:
            exact = torch.promote_types(memory.states[0].dtype, torch.float32)
            inputs = [memory.states[0][None].to(exact, copy=True)]
        return KeysAndValues(
            keys, values, inputs, forgotten=memory.forgotten, adapters=adapters(self)
        )

    @property
    def _state_width(self) -> int:
        return self.config.d_model

    def is_own(self, mems: Memory) -> bool:
        """Whether a memory has the number of layers and the widths of this model."""
        if not isinstance(mems, KeysAndValues):
            return super().is_own(mems)
        heads = [(self.config.n_head, self.config.head_width)] * self.config.n_layer
        inputs = [self.config.d_model] * self.config.input_recurrence
        # With absolute positions, keys change with each segment and cannot be cached.
        if self.positions.is_absolute or [x.shape[3] for x in mems.inputs] != inputs:
            return False
        return all(
            [(x.shape[0], x.shape[3]) for x in tensors] == heads
            for tensors in (mems.keys, mems.values)
        )

    @property
    def depends_on_segments(self) -> bool:
        """Whether results depend on the segmentation, even with enough memory.

        Absolute positions are counted from the end of the segment, and enhanced recurrence caches
        other states than those that the segment attends to.
        """
        return self.positions.is_absolute or self.config.enhanced_recurrence
