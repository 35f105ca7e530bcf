"""Models whose layers are those of the library ``transformers``, for comparisons.

Embedding, softmax and the API are those of :class:`LanguageModel`; the layers between, their final
normalization and their initial weights are the library's. It is imported when such a model is
built, and needs ``pip install 'transformer-xl[hf]'``.

RecurrentGemma is not among them: for more than one token, its convolution begins anew instead of
continuing its state, so that a text cannot be read in segments (transformers 5.23).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError
from transformer_xl.model import LanguageModel, Lengths, Memory, Segment, View
from transformer_xl.studies.models.recurrent import RecurrentModel, pieces, refuse_ext_len

CHUNK = 64
"""Tokens that a scan computes at once; shorter segments are padded to it."""


class BorrowedModel(LanguageModel):
    """A model with the layers of ``transformers``.

    Args:
        config: Widths and options. Its ``vocab_size`` must be set.

    Attributes:
        body: The library's model without its embedding.

    Raises:
        RuntimeError: ``transformers`` is not installed.
        SettingsError: The size of the vocabulary is not set, or ``kind`` is that of another class.
    """

    body: Any
    # The library computes parts in float32, whatever the precision of the weights.
    is_exact = False

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the initial weights of embedding and softmax; the library has drawn its own."""
        for name, parameter in self.named_parameters():
            # On the meta device, normal_ would import torch's compiler.
            if name.startswith("body.") or parameter.is_meta:
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


class _BorrowedRecurrentModel(BorrowedModel, RecurrentModel):
    """A recurrent one; its states are kept in float32, or float64 with such weights."""

    @property
    def _state_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class Mamba2Model(_BorrowedRecurrentModel):
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
            **_no_vocabulary(),
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


class RWKVModel(_BorrowedRecurrentModel):
    """RWKV-4 (Peng et al., arXiv 2305.13048), with the layers of ``transformers``.

    Of the settings of layers, ``n_layer`` (at least 2), ``d_model``, ``d_inner`` and ``norm_eps``
    are used. Dropout is that on the embeddings and on the output. The state of a layer is the last
    input of its two blocks, and numerator, denominator and largest exponent of its average. On a
    CPU the library computes one position after another.
    """

    kind = "rwkv"
    _title = "RWKV"

    def _build(self, config: ModelConfig) -> None:
        library = _library(self.kind)
        settings = library.RwkvConfig(
            **_no_vocabulary(),
            hidden_size=config.d_model,
            intermediate_size=config.d_inner,
            num_hidden_layers=config.n_layer,
            layer_norm_epsilon=config.norm_eps,
            # For half precision; it would change the weights between training and evaluation.
            rescale_every=0,
        )
        self.body = _without_embedding(library.RwkvModel(settings))

    @property
    def _state_width(self) -> int:
        return 5 * self.config.d_model

    def _initial_state(self) -> Float[Tensor, "N 1 W"]:
        state = super()._initial_state()
        # The largest exponent of none.
        state[..., -self.config.d_model :] = -1e30
        return state

    def _advance(
        self, x: Float[Tensor, "B T D"], state: Float[Tensor, "N B W"]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N B W"]]:
        # For a single token, their code adds the last input to its input without a time dimension.
        is_single = x.shape[1] == 1
        # Last inputs have the precision of inputs, averages that of the state.
        parts = [
            _Replaced([*(part.to(x.dtype) if n < 2 else part)], has_time=is_single and n < 2)
            for n, part in enumerate(state.chunk(5, -1))
        ]
        out = self.body(inputs_embeds=x, state=parts, use_cache=True)
        after = torch.cat([torch.stack(part.layers) for part in parts], -1)
        return out.last_hidden_state, after


class _Replaced:
    """A tensor of RWKV's state, (B, D, N) for the library.

    What is written replaces the tensor of a layer, so that gradients flow.
    """

    def __init__(self, layers: list[Float[Tensor, "B D"]], has_time: bool) -> None:
        self.layers, self._has_time = layers, has_time

    def __getitem__(self, index: tuple[slice, slice, int]) -> Tensor:
        x = self.layers[index[2]]
        return x[:, None] if self._has_time else x

    def __setitem__(self, index: tuple[slice, slice, int], x: Tensor) -> None:
        self.layers[index[2]] = x


class XLSTMModel(_BorrowedRecurrentModel):
    """xLSTM with mLSTM blocks (Beck et al., arXiv 2503.13427), with the layers of ``transformers``.

    Of the settings of layers, ``n_layer``, ``d_model``, ``n_head``, ``d_inner`` and ``norm_eps``
    are used; queries and keys have half the width of the model. Dropout is that on the embeddings
    and on the output. The logits are not capped. The state of a layer is the matrix, the
    normalizer and the largest exponent of each head.
    """

    kind = "xlstm"
    _title = "xLSTM"

    def _build(self, config: ModelConfig) -> None:
        library, D = _library(self.kind), config.d_model
        settings = library.xLSTMConfig(
            **_no_vocabulary(),
            hidden_size=D,
            num_hidden_layers=config.n_layer,
            num_heads=config.n_head,
            # Rounded down by the library.
            ffn_proj_factor=(config.d_inner + 0.5) / D,
            ffn_round_up_to_multiple_of=1,
            norm_eps=config.norm_eps,
            autocast_kernel_dtype="float32",
            # What is left over is computed one position after another.
            chunk_size=CHUNK // 2,
        )
        self.body = _without_embedding(library.xLSTMModel(settings))
        H = config.n_head
        self._shapes = (H, D // 2 // H, D // H), (H, D // 2 // H), (H, 1)

    @property
    def _state_width(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self._shapes)

    def _advance(
        self, x: Float[Tensor, "B T D"], state: Float[Tensor, "N B W"]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N B W"]]:
        # Their model would write to the states in place, and theirs have the precision of weights.
        states = split(state.to(self.dtype), self._shapes)
        for n, block in enumerate(self.body.blocks):
            x, after = block(x, tuple(states[n]))
            states[n] = [*after]
        return self.body.out_norm(x), joined(states)


class XLNetModel(BorrowedModel):
    """XLNet (Yang et al., arXiv 1906.08237) from left to right; layers of ``transformers``.

    A Transformer-XL with biases of each layer's own and GELU. Of the settings of layers,
    ``n_layer``, ``d_model``, ``n_head``, ``d_inner``, ``dropout``, ``mem_len``
    and ``norm_eps`` are used. The memory is that of a Transformer-XL. The batch is split
    at every position where a document begins in any row, and into rows that see equally much.
    """

    kind = "xlnet"
    _title = "XLNet"

    def _build(self, config: ModelConfig) -> None:
        library = _library(self.kind)
        settings = library.XLNetConfig(
            **_no_vocabulary(),
            d_model=config.d_model,
            n_layer=config.n_layer,
            n_head=config.n_head,
            d_inner=config.d_inner,
            attn_type="uni",
            initializer_range=config.init_std,
            layer_norm_eps=config.norm_eps,
            dropout=config.dropout,
        )
        self.body = _without_embedding(library.XLNetModel(settings))
        # Embeddings and output have the dropout of all models.
        self.body.dropout = nn.Identity()
        # For masked words and pairs of texts.
        self.body.mask_emb = None
        for layer in self.body.layer:
            layer.rel_attn.seg_embed = layer.rel_attn.r_s_bias = None

    @property
    def _state_width(self) -> int:
        return self.config.d_model

    @property
    def limits_attention(self) -> bool:
        """False: a token attends to the memory and to all of its segment before it."""
        return False

    def require_readable(self, segment: Segment, mems: Any, lengths: Lengths) -> None:
        """Require a memory of this model, and no limits of attention."""
        refuse_ext_len(self.kind, lengths)
        for name in ("attn_len", "clamp_len"):
            if (n := getattr(lengths, name)) is not None:
                raise InputError(
                    f"{name}={n}: a model of kind={self.kind!r} attends to all of its memory, so "
                    "leave the limit out"
                )
        super().require_readable(segment, mems, lengths)

    def _read(
        self, x: Float[Tensor, "B T D"], memory: Memory, view: View
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        (B, T, _), M = x.shape, len(memory)
        past = [state.to(x.dtype) for state in memory.states]
        # The first position that each row sees.
        first = memory.forgotten if memory.forgotten is not None else _zeros(B, self.device)
        parts = []
        for start, stop in pieces(view, T):
            if view.starts is not None:
                first = torch.where(view.starts[:, start], M + start, first)
            part, present = self._advance(x[:, start:stop], past, first)
            past = [torch.cat(pair, 1) for pair in zip(past, present, strict=True)]
            parts.append(part)
        present = [state[:, M:] for state in past]
        most = view.mem_len if view.padding is None else M + T
        after = memory.extend(present, most)
        if first.any():
            after = after.forgetting(first - (M + T - len(after)))
        if view.padding is not None:
            after = after.realigned(view.padding, view.mem_len)
        return torch.cat(parts, 1), after

    def _advance(
        self,
        x: Float[Tensor, "B T D"],
        past: Sequence[Float[Tensor, "B M D"]],
        first: Int[Tensor, " B"],
    ) -> tuple[Float[Tensor, "B T D"], list[Float[Tensor, "B T D"]]]:
        """Return the output of the layers and the input of each; rows see ``past[first:]``."""
        out, inputs = torch.empty_like(x), [torch.empty_like(x) for _ in past]
        for n in first.unique().tolist():
            rows = (first == n).nonzero()[:, 0]
            found = self.body(
                inputs_embeds=x[rows],
                mems=[state[rows, n:].transpose(0, 1) for state in past],
                use_mems=False,
                output_hidden_states=True,
            )
            out = out.index_copy(0, rows, found.last_hidden_state.to(out.dtype))
            inputs = [
                state.index_copy(0, rows, own.to(state.dtype))
                for state, own in zip(inputs, found.hidden_states[:-1], strict=True)
            ]
        return out, inputs


def _zeros(B: int, device: torch.device) -> Int[Tensor, " B"]:
    return torch.zeros(B, dtype=torch.int64, device=device)


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
        raise RuntimeError(
            f"kind={kind!r} has the layers of transformers 5: pip install 'transformer-xl[hf]'"
        ) from error
    return transformers


def _no_vocabulary() -> dict[str, Any]:
    """Return settings of the library for a model without embedding."""
    return {"vocab_size": 1} | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


def _without_embedding(body: Any) -> Any:
    body.set_input_embeddings(nn.Identity())
    return body
