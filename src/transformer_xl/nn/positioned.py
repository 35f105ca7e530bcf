"""The part of the network that knows where tokens stand."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.nn.layer import DecoderLayer
from transformer_xl.nn.memory import KeptMemory, Memory
from transformer_xl.nn.positions import Positions, distances, relative_positions
from transformer_xl.ops import dropout


class PositionedModel(nn.Module):
    """Positions of every kind: parameters that a model has for them, and what layers are given.

    Attributes:
        config: The settings.
        layers: The layers, which project encodings each with a matrix of its own.
    """

    config: ModelConfig
    layers: Sequence[DecoderLayer]

    @property
    def device(self) -> torch.device:
        """Where the weights are when they are used."""
        weight = self.layers[0].attention_norm.weight
        if weight.is_meta and (hook := getattr(self.layers[0].attention_norm, "_hf_hook", None)):
            # Kept elsewhere until it is used, by the library accelerate.
            return torch.device(hook.execution_device)
        return weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self.layers[0].attention_norm.weight.dtype

    def _add_positions(self, config: ModelConfig) -> None:
        n_layer, n_head, d_head = config.n_layer, config.n_head, config.head_width
        # One bias for all layers, or one for each.
        n_biases = 1 if config.tie_biases else n_layer
        if config.attn_type in (0, 1):
            self.content_bias = nn.Parameter(torch.empty(n_biases, n_head, d_head))
        if config.attn_type == 0:
            self.position_bias = nn.Parameter(torch.empty(n_biases, n_head, d_head))
        # Tables have a row for each distance, the nearest first.
        rows = config.n_positions or 0
        if config.attn_type == 1:
            self.distance_embedding = nn.Parameter(torch.empty(n_layer, rows, n_head, d_head))
            self.distance_bias = nn.Parameter(torch.empty(n_layer, rows, n_head))
        if config.attn_type == 3:
            self.position_embedding = nn.Parameter(torch.empty(n_layer, rows, config.d_model))

    def _drop_input(self, x: Tensor) -> Tensor:
        config = self.config
        return dropout(x, config.dropouts.input, self.training, config.variational_dropout)

    def _relative_positions(
        self, S: int, mems: Memory | KeptMemory, clamp_len: int | None
    ) -> Sequence[Positions | None]:
        """Return the positions of S keys for each layer."""
        config = self.config
        if config.attn_type in (2, 3):
            return [None] * config.n_layer
        content_bias = self.content_bias.expand(config.n_layer, -1, -1)
        if config.attn_type == 1:
            row = distances(S, self._last_row(clamp_len), self.device)
            no_bias = torch.zeros_like(content_bias[0])
            return [
                Positions(r[row], u, no_bias, b[row])
                for r, u, b in zip(
                    self.distance_embedding, content_bias, self.distance_bias, strict=True
                )
            ]
        position_bias = self.position_bias.expand(config.n_layer, -1, -1)
        keys = self._position_keys(S, mems, clamp_len)
        return [Positions(*each) for each in zip(keys, content_bias, position_bias, strict=True)]

    def _absolute_positions(
        self, layer: int, S: int, clamp_len: int | None
    ) -> Float[Tensor, "S D"] | None:
        """Return what is added to the S states that a layer reads, if anything."""
        if self.config.attn_type == 3:
            row = distances(S, self._last_row(None), self.device)
            return self.position_embedding[layer, row]
        if self.config.attn_type == 2 and layer == 0:
            return self._drop_input(self._encoding(S, clamp_len))
        return None

    def _last_row(self, clamp_len: int | None) -> int:
        assert self.config.n_positions is not None
        last = self.config.n_positions - 1
        return last if clamp_len is None else min(last, clamp_len)

    def _position_keys(
        self, S: int, mems: Memory | KeptMemory, clamp_len: int | None
    ) -> list[Float[Tensor, "S H K"]]:
        """Project the encodings of all distances for each layer."""
        if isinstance(mems, KeptMemory):
            # What was projected in half precision stays so, and is of no use outside autocast.
            key = clamp_len, torch.is_autocast_enabled(self.device.type)
            kept = mems.positions.get(key)
            if kept is None or kept[0].shape[0] < S:
                encoding = self._encoding(1 << (S - 1).bit_length(), clamp_len)
                kept = mems.positions[key] = [
                    # Stored heads first, as the attention reads them.
                    layer.attention.positions(encoding).transpose(0, 1).contiguous().transpose(0, 1)
                    for layer in self.layers
                ]
            return [r[-S:] for r in kept]
        encoding = self._drop_input(self._encoding(S, clamp_len))
        return [layer.attention.positions(encoding) for layer in self.layers]

    def _encoding(self, S: int, clamp_len: int | None) -> Float[Tensor, "S D"]:
        is_exact = "exact_frequencies" in self.config.quirks
        precision = torch.float64 if is_exact else torch.float32
        d_model = self.config.d_model
        return relative_positions(S, d_model, clamp_len, self.dtype, self.device, precision)
