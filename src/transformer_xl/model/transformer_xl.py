"""Transformer-XL: embedding, layers with memory, softmax."""

import re
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_xl.config import ModelConfig
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.layer import GATE_BIAS, DecoderLayer, make_norm
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import KeysAndValues, Memory
from transformer_xl.model.positions import (
    Positions,
    ProjectedPositions,
    distances,
    relative_positions,
)
from transformer_xl.model.segment import Segment
from transformer_xl.model.wrapping import adapters, evaluating
from transformer_xl.ops import dropout


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig) -> None:
    """Draw the initial weights of a model by the names of its parameters."""
    table = (
        # (names end in, mean, standard deviation)
        (("norm.weight",), 1.0, config.init_std),
        (("gate.bias",), GATE_BIAS, 0.0),
        (("norm.bias", "inner.bias", "outer.bias", "softmax.bias"), 0.0, 0.0),
        (("cluster_bias", "distance_bias"), 0.0, 0.0),
        (("embedding.proj.weight", "softmax.proj.weight"), 0.0, config.proj_init_std),
        (("_proj.weight", "inner.weight", "outer.weight"), 0.0, config.init_std),
        (("embedding.weight", "softmax.weight", "cluster_weight"), 0.0, config.init_std),
        (("content_bias", "position_bias"), 0.0, config.init_std),
        (("distance_embedding", "position_embedding"), 0.0, config.init_std),
    )
    for name, parameter in model.named_parameters():
        # What each cluster has one of is numbered.
        name = re.sub(r"weights\.\d+", "weight", re.sub(r"projs\.\d+", "proj", name))
        mean, std = next((m, s) for ends, m, s in table if name.endswith(ends))
        # To draw nothing for shapes alone, torch would import its compiler.
        if not parameter.is_meta:
            parameter.normal_(mean, std)


class TransformerXL(LanguageModel):
    r"""The language model of the paper: it predicts each token from the segment and its memory.

    The memory of layer n holds what the layer has read, $h^{n-1}$. With ``enhanced_recurrence``
    (ERNIE-Doc; Ding et al., 2021) it holds what the layer has put out, the last layer too:

    $$\tilde h^{n-1}_{\tau+1} = [\mathrm{SG}(h^n_\tau) \circ h^{n-1}_{\tau+1}]$$

    The segment itself is still attended to as it was read. So the past reaches further than one
    memory a layer, but where a text is cut into segments is no longer invisible: a model should
    read in segments about as long as those that it was trained on, or shorter.

    Rows of a batch need not be alike. They can end at different places (``lengths``, padded on the
    right; who has padding on the left moves it), begin anew in between (``starts``, the documents
    of a pack; ``mems.reset(rows)`` between two segments; ``reset_at``, a symbol at which a text
    always begins anew), and be vectors instead of tokens (``inputs_embeds``). With relative
    positions each document is then read as if it were alone. Absolute positions (``attn_type`` 2
    and 3) are counted from the last real token of a row, so there a document is read as if it stood
    alone at its place, as far from that end. None of this saves work: padding and what lies before
    a document are computed and hidden.

    Args:
        config: Widths, lengths and options. Its ``vocab_size`` must be set.

    Raises:
        ValueError: The size of the vocabulary is not set, or it is another kind of model.
    """

    kind = "transformer_xl"
    _title = "Transformer-XL"
    has_attention = True

    def _build(self, config: ModelConfig) -> None:
        # A ModuleList does not say of what; this does.
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            DecoderLayer(config) for _ in range(config.n_layer)
        )
        self._add_positions(config)
        self.final_norm = None
        if config.final_norm:
            self.final_norm = make_norm(config)
        self._projected = ProjectedPositions()

    def init_weights(self) -> None:
        """Draw the initial weights."""
        init_weights(self, self.config)

    @torch.no_grad()
    def attention_weights(
        self,
        tokens: Integer[Tensor, "B T"],
        mems: Memory | None = None,
        *,
        starts: Bool[Tensor, "B T"] | None = None,
        attn_len: int | None = None,
        clamp_len: int | None = None,
    ) -> list[Float[Tensor, "B H T S"]]:
        """Return, for each layer, how much each token attends to each position it could see.

        Args:
            tokens: A segment, which should be short: its table is as long as memory and segment.
            mems: What came before it, as in :meth:`forward`.
            starts: As in :meth:`forward`.
            attn_len: As in :meth:`forward`.
            clamp_len: As in :meth:`forward`.

        Returns:
            Shares that sum to one over the positions of the memory followed by the segment's. At
            layer n, a position stands for all that layers below it have brought there.

        Raises:
            ValueError: The model has no attention, or the memory does not fit the segment.
        """
        found: list[Tensor] = []
        own_thread = get_ident()

        def look(attention: Any, given: tuple[Any, ...]) -> None:
            # Another thread may be reading with the same model.
            if get_ident() == own_thread:
                # At what the layer hands its attention, but for the values.
                q, k, _, *seen = given
                found.append(attention.weights(q, k, *seen))

        hooks = [layer.attention.register_forward_pre_hook(look) for layer in self.layers]
        try:
            with evaluating(self):
                self.read(tokens, mems, starts=starts, attn_len=attn_len, clamp_len=clamp_len)
        finally:
            for hook in hooks:
                hook.remove()
        return found

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

    def _read(
        self,
        segment: Segment,
        mems: Memory | None,
        lengths: Lengths,
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        config, mem_len, ext_len = self.config, lengths.mem_len, lengths.ext_len
        attn_len, clamp_len = lengths.attn_len, lengths.clamp_len
        if segment.short is not None and ext_len:
            raise ValueError(
                f"lengths with ext_len={ext_len}: rows that end at different places cannot be read "
                "again from one place on; set ext_len to 0"
            )
        B, T = segment.shape
        if mems is None:
            mems = self.start_memory(B, mem_len=mem_len)
        else:
            self.require_memory(mems, B)
        if isinstance(store := mems.store, KeysAndValues):
            if torch.is_grad_enabled():
                raise ValueError(
                    "a memory of keys and values needs fixed weights: use it under torch.no_grad()"
                )
            if not torch.compiler.is_compiling():
                store.require(adapters(self))
        mems = mems.with_room(T, mem_len)

        M = len(mems)
        x = self._drop_input(segment.embedded(self._embedded, self.dtype))
        first_key = segment.first_keys(M, mems.forgotten)
        relative = self._relative_positions(M + T, clamp_len, is_fixed=mems.has_keys)
        positioned, present = [], []
        for n, layer in enumerate(self.layers):
            past, unpositioned = mems.store.past(n), x
            if (absolute := self._absolute_positions(n, M + T, clamp_len)) is not None:
                assert isinstance(past, Tensor)
                absolute = segment.counted_from_own_end(absolute)
                past, x = past + absolute[..., :M, :], x + absolute[..., M:, :]
                if "stored_positions" in config.quirks:
                    positioned.append(past.detach())
            given = x, past, relative[n], attn_len, first_key
            if self.recompute and torch.is_grad_enabled():
                x, remembered = checkpoint(layer, *given, use_reentrant=False)
            else:
                x, remembered = layer(*given)
            if absolute is not None and not (config.enhanced_recurrence or positioned):
                remembered = unpositioned
            present.append(remembered)
        if self.final_norm is not None:
            x = self.final_norm(x)

        kept = max(T - ext_len, 0)
        if "swapped_ext_len" in config.quirks:
            kept = T - min(M, ext_len, T)
        # Rows that are padded are cut when what is real has moved to their ends.
        most = mem_len if segment.short is None else M + kept
        if positioned:
            mems = Memory([*positioned, *mems.states[len(positioned) :]], mems.forgotten)
        after = mems.extend(present, most, kept)
        return x, segment.left(after, first_key, M, kept, mem_len)

    def start_memory(self, batch_size: int, mem_len: int | None = None) -> Memory:
        """Return the memory at the start of a text: empty, or zeros, as configured."""
        mem_len = Lengths.of(self.config, mem_len=mem_len).mem_len
        M = mem_len if self.config.start_memory == "zeros" else 0
        zeros = torch.zeros(
            batch_size, M, self.config.d_model, device=self.device, dtype=self.dtype
        )
        return Memory([zeros] * self.config.n_layer)

    @torch.no_grad()
    def keep(self, memory: Memory) -> Memory:
        """Turn a memory of hidden states into one of keys and values, for fixed weights.

        The results are the same; the memory is not projected again for each segment. Where
        positions are absolute (``attn_type`` 2 and 3) the keys change with each segment, and the
        memory stays as it is; so does one of keys and values.
        """
        if memory.has_keys or self.config.attn_type in (2, 3):
            return memory
        keys, values = [], []
        with evaluating(self):
            if self.config.attn_type == 0 and not torch.compiler.is_compiling():
                self._projected.renew(self._probe())
            for layer, state in zip(self.layers, memory.states, strict=True):
                for kept, x in zip((keys, values), layer.keys_and_values(state), strict=True):
                    kept.append(x.permute(2, 0, 1, 3).contiguous())
        store = KeysAndValues(keys, values)
        store.adapters = adapters(self)
        return Memory(store, memory.forgotten)

    def is_own(self, mems: Memory) -> bool:
        """Whether a memory has the depth and the widths of this model's."""
        config, store = self.config, mems.store
        if not isinstance(store, KeysAndValues):
            return [x.shape[2] for x in mems.states] == [config.d_model] * config.n_layer
        widths = [(config.n_head, config.head_width)] * config.n_layer
        # Where positions are absolute, keys change with each segment and cannot be kept.
        return config.attn_type not in (2, 3) and all(
            [(x.shape[0], x.shape[3]) for x in tensors] == widths
            for tensors in (store.keys, store.values)
        )

    @property
    def depends_on_segments(self) -> bool:
        """Whether the results depend on how many tokens are read at once.

        Absolute positions are counted from the end of what is read, and enhanced recurrence
        remembers something else than a segment itself attends to.
        """
        return self.config.attn_type in (2, 3) or self.config.enhanced_recurrence

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
        self, S: int, clamp_len: int | None, *, is_fixed: bool
    ) -> Sequence[Positions | None]:
        """Return the positions of S keys for each layer; ``is_fixed``: the weights are."""
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
        keys = (self._fixed_keys if is_fixed else self._drawn_keys)(S, clamp_len)
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

    def _drawn_keys(self, S: int, clamp_len: int | None) -> list[Float[Tensor, "S H K"]]:
        """Project the encodings of all distances for each layer."""
        encoding = self._drop_input(self._encoding(S, clamp_len))
        return [layer.attention.positions(encoding) for layer in self.layers]

    def _fixed_keys(self, S: int, clamp_len: int | None) -> list[Float[Tensor, "S H K"]]:
        """Project as :meth:`_drawn_keys` does, once for all calls with the same weights.

        Whether they still are, :meth:`keep` has seen to: all keys and values come from there.
        """
        # What was projected in half precision stays so, and is of no use outside autocast.
        key = clamp_len, torch.is_autocast_enabled(self.device.type)
        projected = self._projected.find(key, S)
        if projected is None:
            # The table grows in powers of two, as a memory that fills up asks for more.
            projected = self.project_positions(1 << (S - 1).bit_length(), clamp_len)
        return [r[-S:] for r in projected]

    @torch.no_grad()
    def project_positions(self, S: int, clamp_len: int | None) -> Sequence[Float[Tensor, "S H K"]]:
        """Project the positions of S keys for each layer, and keep them for as many keys or fewer.

        A call with keys and values does so by itself; a program that is exported after this one
        holds exactly these.
        """
        if self.config.attn_type != 0:
            return ()
        encoding = self._encoding(S, clamp_len)
        projected = [
            # Stored heads first, as the attention reads them.
            layer.attention.positions(encoding).transpose(0, 1).contiguous().transpose(0, 1)
            for layer in self.layers
        ]
        self._projected.put((clamp_len, torch.is_autocast_enabled(self.device.type)), projected)
        return projected

    def _probe(self) -> Float[Tensor, "N 1 HK"]:
        """Return what changes when the weights do that project positions, however that came."""
        probe = torch.linspace(1, 2, self.config.d_model, device=self.device, dtype=self.dtype)
        # A row: adapters may take nothing else.
        probe = probe[None]
        with torch.autocast(self.device.type, enabled=False):
            return torch.stack([layer.attention.r_proj(probe) for layer in self.layers])

    def _encoding(self, S: int, clamp_len: int | None) -> Float[Tensor, "S D"]:
        is_exact = "exact_frequencies" in self.config.quirks
        precision = torch.float64 if is_exact else torch.float32
        d_model = self.config.d_model
        return relative_positions(S, d_model, clamp_len, self.dtype, self.device, precision)
