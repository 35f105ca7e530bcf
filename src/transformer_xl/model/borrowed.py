"""Models whose layers are those of the library ``transformers``, for comparisons.

Embedding, softmax and the API are those of :class:`LanguageModel`; the layers between, their final
normalization and their initial weights are the library's. It is imported when such a model is
built, and needs ``pip install 'transformer-xl[hf]'``.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.recurrent import RecurrentModel

CHUNK = 64
"""Tokens that a scan computes at once; shorter segments are padded to it."""


_NO_VOCABULARY = {"vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


class BorrowedModel(RecurrentModel):
    """A recurrent model with the layers of ``transformers``.

    The memory holds its states in float32, or float64 with such weights.

    Args:
        config: Widths and options. Its ``vocab_size`` must be set.

    Attributes:
        body: The library's model without its embedding.

    Raises:
        ModuleNotFoundError: ``transformers`` is not installed.
        ValueError: The size of the vocabulary is not set, or ``kind`` is that of another class.
    """

    body: Any

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the initial weights of embedding and softmax; the library has drawn its own."""
        for name, parameter in self.named_parameters():
            if name.startswith("body."):
                continue
            if name.endswith("bias"):
                parameter.zero_()
            else:
                is_projection = "proj" in name
                std = self.config.proj_init_std if is_projection else self.config.init_std
                parameter.normal_(0.0, std)

    @property
    def _weight(self) -> Tensor:
        return next(self.body.parameters())

    @property
    def _state_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class Mamba2Model(BorrowedModel):
    """Mamba-2 (Dao and Gu, arXiv 2405.21060), with the layers of ``transformers``.

    Of the settings of layers, ``n_layer``, ``d_model``, ``expand``, ``n_head``, ``state_size``,
    ``conv_width`` and ``norm_eps`` are used. Dropout is that on the embeddings and on the output.
    The state of a layer is the input of its convolution at the last ``conv_width - 1`` positions,
    and the state of its scan.
    """

    kind = "mamba2"
    _title = "Mamba-2"

    def _build(self, config: ModelConfig) -> None:
        library = _library(self.kind)
        inner = config.expand * config.d_model
        settings = library.Mamba2Config(
            **_NO_VOCABULARY,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layer,
            num_heads=config.n_head,
            head_dim=inner // config.n_head,
            state_size=config.state_size,
            expand=config.expand,
            conv_kernel=config.conv_width,
            n_groups=1,
            chunk_size=CHUNK,
            layer_norm_epsilon=config.norm_eps,
        )
        self.body = _without_embedding(library.Mamba2Model(settings))
        self._shapes = (
            (inner + 2 * config.state_size, config.conv_width - 1),
            (config.n_head, inner // config.n_head, config.state_size),
        )

    @property
    def _state_width(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self._shapes)

    def _advance(
        self, x: Float[Tensor, "B T D"], state: Float[Tensor, "N B W"]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N B W"]]:
        cache = _ScanStates(split(state, self._shapes))
        # The library computes a single token by writing to the state in place.
        with _copying() if x.shape[1] == 1 and torch.is_grad_enabled() else nullcontext():
            out = self.body(inputs_embeds=x, cache_params=cache, use_cache=True)
        return out.last_hidden_state, joined(cache.states)


class _ScanStates:
    """What Mamba-2 layers ask of a cache, without writing in place, so that gradients flow."""

    def __init__(self, states: list[list[Tensor]]) -> None:
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.states[layer_idx][0]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.states[layer_idx][1]

    def update_conv_state(self, x: Tensor, layer_idx: int, conv_kernel_size: int) -> Tensor:
        joined = torch.cat([self.states[layer_idx][0].to(x.dtype), x], -1)
        self.states[layer_idx][0] = joined[..., joined.shape[-1] - conv_kernel_size + 1 :]
        return joined

    def update_recurrent_state(self, state: Tensor, layer_idx: int) -> None:
        self.states[layer_idx][1] = state

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def split(state: Float[Tensor, "N B W"], shapes: Sequence[tuple[int, ...]]) -> list[list[Tensor]]:
    """Return copies of the tensors of each layer's state, (B, *shape) each."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [
        [part.unflatten(1, shape).clone() for part, shape in zip(parts, shapes, strict=True)]
        for parts in (layer.split(sizes, 1) for layer in state)
    ]


def joined(states: Sequence[Sequence[Tensor]]) -> Float[Tensor, "N B W"]:
    """Flatten the tensors of each layer's state, the inverse of :func:`split`."""
    return torch.stack([torch.cat([x.flatten(1) for x in layer], 1) for layer in states])


def _copying() -> AbstractContextManager[None]:
    """Save copies for the backward pass, so that what was saved may be written to."""
    unpack: Callable[[Tensor], Tensor] = torch.Tensor.detach
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack)


def _library(kind: str) -> Any:
    """Import ``transformers``."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"kind={kind!r} has the layers of transformers 5: pip install 'transformer-xl[hf]'"
        ) from error
    return transformers


def _without_embedding(body: Any) -> Any:
    body.set_input_embeddings(nn.Identity())
    return body
