"""Transformer-XL: embedding, layers with memory, softmax."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.layer import DecoderLayer, Mix, draw_weights, make_norm
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import Join, KeysAndValues, Memory, Past
from transformer_xl.model.observing import observed
from transformer_xl.model.positions import Positions, distances, relative_positions
from transformer_xl.model.segment import Segment
from transformer_xl.model.wrapping import adapters, evaluating

_MOST_PROJECTED = 4
"""Most tables of projected positions in the cache, one for each ``clamp_len`` and precision."""


class TransformerXL(LanguageModel):
    r"""The language model of the paper: predicts each token from the segment and the memory.

    The memory of layer n holds the inputs of that layer, $h^{n-1}$ (section 3.2). With
    ``enhanced_recurrence`` (ERNIE-Doc; Ding et al., 2021) it holds the outputs:

    $$\tilde h^{n-1}_{\tau+1} = [\mathrm{SG}(h^n_\tau) \circ h^{n-1}_{\tau+1}]$$

    Within the segment, layers still attend to inputs. So the context grows without limit instead
    of by one memory per layer, but results depend on the segmentation: use segments about as long
    as in training, or shorter.

    With ``value_residual`` (ResFormer; Zhou et al., 2024, arXiv 2410.17897, its learned form) the
    values of layer n > 1 are, with learned $\lambda$, for memory and segment alike

    $$V^n = \lambda^n_1 h^{n-1} W_v^n + \lambda^n_2 h^0 W_v^1$$

    With ``embedding_residual`` the input of layer n > 1 is, with learned $\mu$ and the output
    $\hat h^{n-1}$ of the layer before it,

    $$h^{n-1} = \mu^n_1 \hat h^{n-1} + \mu^n_2 \mathrm{RMSNorm}(h^0)$$

    With ``input_recurrence`` the input of the first layer at position t of a text with embeddings
    $e_t$ is, with a learned $a$ for each feature (the parameter ``input_decay``),

    $$h^0_t = e_t + \tanh(a) \odot h^0_{t-1}$$

    Across segments it goes on from the last position of the first layer's memory, detached, which
    is cached beside keys and values, too. Without a memory it begins anew in each segment. What it
    carries has no limit of length, unlike what attention reaches.

    Rows of a batch may be padded on the right (``lengths``), contain several documents (``starts``
    for packed documents; ``mems.reset(rows)`` between segments; ``reset_at``, a token that always
    starts a document), or be vectors instead of tokens (``inputs_embeds``). With relative
    positions, each document gets the same results as if it were alone. Absolute positions
    (``attn_type`` 2 and 3) are counted from the last real token of a row, and so depend on what
    follows a document. Padding and positions before a document are computed and masked, so neither
    saves time.

    Args:
        config: Widths, lengths and options. Its ``vocab_size`` must be set.

    Raises:
        ValueError: The size of the vocabulary is not set, or ``kind`` is that of another class.

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

    def _build(self, config: ModelConfig) -> None:
        # A ModuleList has no element type.
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            DecoderLayer(config) for _ in range(config.n_layer)
        )
        self._add_positions(config)
        self.value_own = self.value_first = None
        if config.value_residual:
            # Factors of a layer's own values, and of the first layer's, for all layers behind it.
            self.value_own, self.value_first = (
                nn.Parameter(torch.empty(config.n_layer - 1)) for _ in range(2)
            )
        self.embedding_own = self.embedding_first = None
        if config.embedding_residual:
            # Factors of the output of the layer before, and of the embedding.
            self.embedding_own, self.embedding_first = (
                nn.Parameter(torch.empty(config.n_layer - 1)) for _ in range(2)
            )
        self.input_decay = None
        if config.input_recurrence:
            self.input_decay = nn.Parameter(torch.empty(config.d_model))
        self.final_norm = make_norm(config) if config.final_norm else None
        self._projected: dict[tuple[int | None, bool], list[Tensor]] = {}
        self._probe: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy everything but the cache of projected positions."""
        return {**vars(self), "_projected": {}, "_probe": None}

    def init_weights(self) -> None:
        """Draw the initial weights, by the names of the parameters."""
        draw_weights(self.named_parameters(), self.config)

    @torch.no_grad()
    def attention_weights(
        self, tokens: Integer[Tensor, "B T"], mems: Memory | None = None, **options: Any
    ) -> list[Float[Tensor, "B H T S"]]:
        """Return the attention weights of each layer.

        Args:
            tokens: A segment; it should be short, as T x S weights are stored for each head.
            mems: As in :meth:`forward`.
            options: ``starts``, ``attn_len`` and ``clamp_len``, as in :meth:`forward`.

        Returns:
            Weights that sum to one over S: the positions of the memory, then of the segment.

        Raises:
            ValueError: The memory does not fit the model or the segment.
        """
        with evaluating(self), observed(self, attentions=True) as found:
            self.read(tokens, mems, **options)
        return found.attentions

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

    def _read(
        self, segment: Segment, mems: Memory | None, lengths: Lengths
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        B, T = segment.shape
        if mems is None:
            mems = self.start_memory(B, lengths.mem_len)
        self._require_readable(segment, mems, lengths.ext_len)
        mems = mems.with_capacity(T, lengths.mem_len)
        M, first_key = mems.length, segment.first_keys(mems.length, mems.forgotten)
        x = self._embedded(segment)
        if self.input_decay is not None:
            recurrent = self._recurrent(x, self.input_decay, mems, first_key)
            mems.store.append_input(recurrent)
            x = recurrent.to(x.dtype)
        # A prefix that is learned has weights beside it that may be learned, too.
        is_fixed = mems.has_keys and not torch.is_grad_enabled()
        positions = self._relative_positions(M + T, lengths.clamp_len, is_fixed=is_fixed)
        present, positioned = [], []
        mixes = self.value_mixes(), self.input_mixes(x)
        for n, (layer, mix, mix_input) in enumerate(zip(self.layers, *mixes, strict=True)):
            x = mix_input(x)
            past, unpositioned = mems.store.past(n), x
            if self._is_absolute:
                past, x = self._positioned(n, past, x, segment.short, lengths.clamp_len)
            seen = self._seen(n, past, positions[n], lengths.attn_len, first_key)
            given = x, *seen
            if mix is not None:
                given = *given, mix
            x, remembered = self._through(n, layer, *given)
            if "stored_positions" in self.config.quirks:
                assert isinstance(past, Tensor)
                positioned.append(past.detach())
            elif self._is_absolute:
                remembered = unpositioned
            present.append(remembered)
        if self.final_norm is not None:
            x = self.final_norm(x)

        kept = max(T - lengths.ext_len, 0)
        if "swapped_ext_len" in self.config.quirks:
            kept = T - min(M, lengths.ext_len, T)
        if positioned:
            mems = Memory(positioned, mems.forgotten)
        return x, segment.remembered(mems, present, first_key, lengths.mem_len, kept)

    def _recurrent(
        self,
        x: Float[Tensor, "B T D"],
        decay: Float[Tensor, " D"],
        mems: Memory,
        first_key: Tensor | None,
    ) -> Float[Tensor, "B T D"]:
        """Return embeddings to which the recurrence of the inputs was applied.

        It is computed in log2(T) parallel steps (Hillis and Steele, 1986), each of which doubles
        the number of tokens that have been added up; in float32 at least, as bfloat16 rounds a
        factor near 1 to 1.
        """
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        M, T = mems.length, x.shape[1]
        # How many positions of its document are before each token.
        reach = None
        if first_key is not None:
            first = first_key[:, None] if first_key.ndim == 1 else first_key
            reach = torch.arange(M, M + T, device=x.device) - first
        factor = decay.to(x.dtype).tanh()
        if M:
            before = mems.store.last_input().to(x.dtype) * factor
            if reach is not None:
                before = before.masked_fill((reach[:, :1] < 1)[..., None], 0)
            x = torch.cat([x[:, :1] + before, x[:, 1:]], 1)
        n = 1
        while n < T:
            added = x[:, :-n] * factor
            if reach is not None:
                added = added.masked_fill((reach[:, n:] < n)[..., None], 0)
            x = torch.cat([x[:, :n], x[:, n:] + added], 1)
            factor, n = factor * factor, 2 * n
        return x

    def _seen(
        self, n: int, past: Past, at: Positions | None, attn_len: int | None, first_key: Any
    ) -> tuple[Float[Tensor, "B seen D"] | Join, Positions | None, int | None, Any]:
        """Return what layer ``n`` attends to, without the positions that are out of its reach."""
        if not self.config.layer_attn_lens:
            return past, at, attn_len, first_key
        own = self.config.layer_attn_lens[n]
        attn_len = own if attn_len is None else min(own, attn_len)
        # Keys exist already; and the values of the first layer are mixed with those of the others.
        if not isinstance(past, Tensor) or self.config.value_residual:
            return past, at, attn_len, first_key
        cut = max(past.shape[1] + 1 - attn_len, 0)
        first_key = None if first_key is None else (first_key - cut).clamp(min=0)
        return past[:, cut:], None if at is None else at.without(cut), attn_len, first_key

    def _require_readable(self, segment: Segment, mems: Memory, ext_len: int) -> None:
        """Require that this memory can be continued with this segment."""
        self.require_continued(segment, mems, ext_len)
        if isinstance(mems.store, KeysAndValues):
            if torch.is_grad_enabled() and not mems.store.is_prefix:
                raise ValueError(
                    "a memory of keys and values needs fixed weights: use it under torch.no_grad()"
                )
            if not torch.compiler.is_compiling():
                self.require_own(mems.store)

    @torch.no_grad()
    def require_own(self, store: KeysAndValues) -> None:
        """Require keys and values that were projected with this model's adapters.

        Raises:
            ValueError: The adapters differ.
        """
        if store.adapters is None and self.config.attn_type == 0:
            # Keys and values from a file, for example; `keep` has done this for its own.
            self._renew_projected()
        store.require(adapters(self))

    @torch.no_grad()
    def keep(self, memory: Memory) -> Memory:
        """Convert a memory of hidden states to keys and values, for fixed weights.

        Results are the same, but the memory is not projected again for each segment. A memory of
        keys and values is returned unchanged, and so is any memory with absolute positions
        (``attn_type`` 2 and 3), whose keys change with each segment.
        """
        if memory.has_keys or self._is_absolute:
            return memory
        if self.value_own is not None and self.value_own.is_meta:
            # Offloaded by accelerate, and loaded during a forward pass only.
            return memory
        keys, values = [], []
        with evaluating(self):
            if self.config.attn_type == 0 and not torch.compiler.is_compiling():
                self._renew_projected()
            mixed = zip(self.layers, memory.states, self.value_mixes(), strict=True)
            for layer, state, mix in mixed:
                k, v = layer.keys_and_values(state)
                for kept, x in ((keys, k), (values, v if mix is None else mix(v))):
                    kept.append(x.permute(2, 0, 1, 3).contiguous())
        inputs = []
        if self.config.input_recurrence:
            exact = torch.promote_types(memory.states[0].dtype, torch.float32)
            inputs = [memory.states[0][None].to(exact, copy=True)]
        store = KeysAndValues(keys, values, inputs, adapters=adapters(self))
        return Memory(store, memory.forgotten)

    def value_mixes(self) -> Sequence[Mix | None]:
        """Return, for one pass through the layers, what each does to its values."""
        own, others = self.value_own, self.value_first
        if own is None or others is None:
            return [None] * self.config.n_layer
        first: list[Tensor] = []

        def remember(v: Tensor) -> Tensor:
            first[:] = [v]
            return v

        def mix(n: int, v: Tensor) -> Tensor:
            # The precision of autocast, which the factors do not have.
            return v * own[n].to(v.dtype) + first[0] * others[n].to(v.dtype)

        return [remember, *(partial(mix, n) for n in range(len(own)))]

    def input_mixes(
        self, x: Float[Tensor, "B T D"]
    ) -> Sequence[Callable[[Float[Tensor, "B T D"]], Float[Tensor, "B T D"]]]:
        """Return, for one pass of ``x`` through the layers, what is done to the input of each."""
        own, others = self.embedding_own, self.embedding_first
        if own is None or others is None:
            return [_unchanged] * self.config.n_layer
        first = F.rms_norm(x, (x.shape[-1],), eps=self.config.norm_eps)

        def mix(n: int, h: Tensor) -> Tensor:
            return h * own[n].to(h.dtype) + first * others[n].to(h.dtype)

        return [_unchanged, *(partial(mix, n) for n in range(len(own)))]

    def value_factors(self) -> Sequence[tuple[float, float]]:
        """Return the factors of the own values of each layer, and of those of the first one."""
        return self._factors(self.value_own, self.value_first)

    def embedding_factors(self) -> Sequence[tuple[float, float]]:
        """Return the factors of the input of each layer, and of the normalized embedding."""
        return self._factors(self.embedding_own, self.embedding_first)

    def _factors(self, own: Tensor | None, others: Tensor | None) -> Sequence[tuple[float, float]]:
        if own is None or others is None:
            return [(1.0, 0.0)] * self.config.n_layer
        return [(1.0, 0.0), *zip(own.tolist(), others.tolist(), strict=True)]

    @property
    def _state_width(self) -> int:
        return self.config.d_model

    def is_own(self, mems: Memory) -> bool:
        """Whether a memory has the number of layers and the widths of this model."""
        store = mems.store
        if not isinstance(store, KeysAndValues):
            return super().is_own(mems)
        heads = [(self.config.n_head, self.config.head_width)] * self.config.n_layer
        inputs = [self.config.d_model] * self.config.input_recurrence
        # With absolute positions, keys change with each segment and cannot be cached.
        if self._is_absolute or [x.shape[3] for x in store.inputs] != inputs:
            return False
        return all(
            [(x.shape[0], x.shape[3]) for x in tensors] == heads
            for tensors in (store.keys, store.values)
        )

    @property
    def depends_on_segments(self) -> bool:
        """Whether results depend on the segmentation, even with enough memory.

        Absolute positions are counted from the end of the segment, and enhanced recurrence caches
        other states than those that the segment attends to.
        """
        return self._is_absolute or self.config.enhanced_recurrence

    @property
    def _is_absolute(self) -> bool:
        return self.config.attn_type in (2, 3)

    def _add_positions(self, config: ModelConfig) -> None:
        n_layer, n_head, d_head = config.n_layer, config.n_head, config.head_width
        # One bias for all layers, or one for each.
        biases = 1 if config.tie_biases else n_layer, n_head, d_head
        if config.attn_type in (0, 1):
            self.content_bias = nn.Parameter(torch.empty(biases))
        if config.attn_type == 0:
            self.position_bias = nn.Parameter(torch.empty(biases))
        # Tables have a row for each distance, the nearest first.
        rows = config.n_positions or 0
        if config.attn_type == 1:
            self.distance_embedding = nn.Parameter(torch.empty(n_layer, rows, n_head, d_head))
            self.distance_bias = nn.Parameter(torch.empty(n_layer, rows, n_head))
        if config.attn_type == 3:
            self.position_embedding = nn.Parameter(torch.empty(n_layer, rows, config.d_model))

    def _relative_positions(
        self, S: int, clamp_len: int | None, *, is_fixed: bool
    ) -> Sequence[Positions | None]:
        """Return the positions of S keys for each layer; cached if weights are fixed."""
        n_layer = self.config.n_layer
        if self._is_absolute:
            return [None] * n_layer
        content_bias = self.content_bias.expand(n_layer, -1, -1)
        if self.config.attn_type == 1:
            row = distances(S, self._last_row(clamp_len), self.device)
            zero = torch.zeros_like(content_bias[0])
            tables = zip(self.distance_embedding, content_bias, self.distance_bias, strict=True)
            return [Positions(r[row], u, zero, bias[row]) for r, u, bias in tables]
        if is_fixed:
            keys = self._cached_keys(S, clamp_len)
        else:
            encoding = self._dropped(self._encoding(S, clamp_len), self.config.dropouts.input)
            keys = [layer.attention.positions(encoding) for layer in self.layers]
        position_bias = self.position_bias.expand(n_layer, -1, -1)
        return [Positions(*each) for each in zip(keys, content_bias, position_bias, strict=True)]

    def _positioned(
        self, n: int, past: Past, x: Tensor, short: Tensor | None, clamp_len: int | None
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B T D"]]:
        """Add absolute positions to the memory and the segment, the inputs of layer ``n``.

        They count from the last real token of a row.
        """
        assert isinstance(past, Tensor)
        M, T = past.shape[1], x.shape[1]
        if self.config.attn_type == 3:
            row = distances(M + T, self._last_row(None), self.device)
            positions = self.position_embedding[n, row]
        elif n == 0:
            positions = self._dropped(self._encoding(M + T, clamp_len), self.config.dropouts.input)
        else:
            return past, x
        if short is not None:
            place = torch.arange(M + T, device=x.device) + short[:, None]
            positions = positions[place.clamp(max=M + T - 1)]
            # The memory of a row of padding alone does not change.
            positions = positions.masked_fill((short == T)[:, None, None], 0.0)
        return past + positions[..., :M, :], x + positions[..., M:, :]

    def _last_row(self, clamp_len: int | None) -> int:
        assert self.config.n_positions is not None
        last = self.config.n_positions - 1
        return last if clamp_len is None else min(last, clamp_len)

    def _cached_keys(self, S: int, clamp_len: int | None) -> list[Float[Tensor, "S H K"]]:
        """Return projected encodings for each layer, cached for fixed weights.

        :meth:`keep`, which creates all keys and values, invalidates the cache.
        """
        projected = self._projected.get(self._projected_key(clamp_len))
        if projected is None or len(projected[0]) < S:
            if torch.compiler.is_compiling():
                # A traced program must not set attributes, and lengths may be symbols.
                encoding = self._encoding(S, clamp_len)
                return [layer.attention.positions(encoding) for layer in self.layers]
            # The size grows in powers of two while a memory fills up.
            projected = self.project_positions(1 << (S - 1).bit_length(), clamp_len)
        return [r[-S:] for r in projected]

    @torch.no_grad()
    def project_positions(self, S: int, clamp_len: int | None) -> Sequence[Float[Tensor, "S H K"]]:
        """Project the positions of S keys for each layer, and cache them for up to S keys.

        Calls with keys and values do this on demand; an exported program contains exactly the
        positions projected before.
        """
        if self.config.attn_type != 0:
            return ()
        encoding, key = self._encoding(S, clamp_len), self._projected_key(clamp_len)
        projected = [
            # Heads outermost in memory, as the attention reads them.
            layer.attention.positions(encoding).transpose(0, 1).contiguous().transpose(0, 1)
            for layer in self.layers
        ]
        if key not in self._projected and len(self._projected) == _MOST_PROJECTED:
            self._projected = {}
        self._projected[key] = projected
        return projected

    def _projected_key(self, clamp_len: int | None) -> tuple[int | None, bool]:
        # Under autocast, projections are in half precision and must not be used outside of it.
        return clamp_len, torch.is_autocast_enabled(self.device.type)

    def _renew_projected(self) -> None:
        """Clear the cache if the weights, and so the projections of a fixed vector, changed."""
        vector = torch.linspace(1, 2, self.config.d_model, device=self.device, dtype=self.dtype)
        with torch.autocast(self.device.type, enabled=False):
            # Adapters may require a batch dimension.
            probe = torch.stack([layer.attention.r_proj(vector[None]) for layer in self.layers])
        old = self._probe
        if (
            old is None
            or (old.device, old.dtype) != (probe.device, probe.dtype)
            or not torch.equal(old, probe)
        ):
            self._projected, self._probe = {}, probe

    def _encoding(self, S: int, clamp_len: int | None) -> Float[Tensor, "S D"]:
        is_exact = "exact_frequencies" in self.config.quirks
        precision = torch.float64 if is_exact else torch.float32
        d_model = self.config.d_model
        return relative_positions(S, d_model, clamp_len, self.dtype, self.device, precision)


def _unchanged(x: Tensor) -> Tensor:
    return x
