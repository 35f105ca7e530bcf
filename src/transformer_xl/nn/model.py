"""Transformer-XL: embedding, layers with memory, softmax."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.nn.adaptive import AdaptiveSoftmax
from transformer_xl.nn.embedding import AdaptiveEmbedding, Embedding
from transformer_xl.nn.layer import DecoderLayer
from transformer_xl.nn.memory import KeptMemory, Memory
from transformer_xl.nn.positions import Positions, distances, relative_positions
from transformer_xl.nn.pretrained import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    copy_weights,
    find_model_folder,
    load_config,
    read_weights_file,
    save_model,
)
from transformer_xl.nn.softmax import Softmax
from transformer_xl.ops import dropout


@runtime_checkable
class SavesItself(Protocol):
    """A vocabulary, as far as the network needs to know it."""

    def save(self, folder: Path) -> None:
        """Write itself into a folder."""
        ...


@dataclass(kw_only=True)
class Output:
    """What the model returns for a segment."""

    hidden: Float[Tensor, "B T D"]
    """Output of the layers."""
    mems: Memory | KeptMemory
    """The memory after this segment: the model's argument for the next one."""
    nll: Float[Tensor, "B predicted"] | None = None
    """-log p of each target in nats, in token order; None without targets."""
    log_probs: Float[Tensor, "B T V"] | None = None
    """Logarithms of the probabilities of the next token; None with targets."""

    @cached_property
    def loss(self) -> Float[Tensor, ""] | None:
        """The mean of ``nll``; None without targets."""
        return None if self.nll is None else self.nll.mean()


class TransformerXL(nn.Module):
    """The language model of the paper: it predicts each token from the segment and its memory.

    Args:
        config: Widths, lengths and options. Its ``vocab_size`` must be set.

    Raises:
        ValueError: The size of the vocabulary is not set.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError(f"vocab_size={config.vocab_size} must be the size of a vocabulary")
        self.config = config
        self.embedding = AdaptiveEmbedding(config) if config.div_val > 1 else Embedding(config)
        # A ModuleList does not say of what; this does.
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            DecoderLayer(config) for _ in range(config.n_layer)
        )
        self._add_positions(config)
        self.final_norm = None
        if config.final_norm:
            self.final_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        is_adaptive = config.cutoffs or config.div_val > 1
        self.softmax = (AdaptiveSoftmax if is_adaptive else Softmax)(config, self.embedding)
        self.init_weights()

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

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the initial weights: the one table of all initializations (the authors')."""
        config = self.config
        table = (
            # (names end in, mean, standard deviation)
            (("norm.weight",), 1.0, config.init_std),
            (("norm.bias", "inner.bias", "outer.bias", "softmax.bias"), 0.0, 0.0),
            (("cluster_bias", "distance_bias"), 0.0, 0.0),
            (("embedding.proj.weight", "softmax.proj.weight"), 0.0, config.proj_init_std),
            (("_proj.weight", "inner.weight", "outer.weight"), 0.0, config.init_std),
            (("embedding.weight", "softmax.weight", "cluster_weight"), 0.0, config.init_std),
            (("content_bias", "position_bias"), 0.0, config.init_std),
            (("distance_embedding", "position_embedding"), 0.0, config.init_std),
        )
        for name, parameter in self.named_parameters():
            # What each cluster has one of is numbered.
            name = re.sub(r"weights\.\d+", "weight", re.sub(r"projs\.\d+", "proj", name))
            mean, std = next((m, s) for ends, m, s in table if name.endswith(ends))
            parameter.normal_(mean, std)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.layers[0].feed_forward.inner.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self.layers[0].feed_forward.inner.weight.dtype

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        mems: Memory | KeptMemory | None = None,
        targets: Int[Tensor, "B predicted"] | None = None,
        *,
        mem_len: int | None = None,
        attn_len: int | None = None,
        clamp_len: int | None = None,
        ext_len: int | None = None,
        context: int | None = None,
    ) -> Output:
        """Read a segment; predict its targets, or the distribution of every next token.

        Args:
            tokens: The segment.
            mems: What the previous call returned as ``mems``. None: as at the start of a text.
            targets: For each token the one that follows it, but for the first ``context``.
            mem_len: How many positions the returned memory holds at most. None: as configured.
            attn_len: How many keys a query sees, counting its own. None: as configured.
            clamp_len: Distances above it count as it. None: as configured.
            ext_len: How many of the last tokens the next segment begins with again: the returned
                memory leaves them out. None: as configured.
            context: How many of the first tokens have no target. None: as many as ``targets`` are
                short of, if these are at most ``ext_len``.

        Raises:
            ValueError: The shapes do not fit each other or the memory; a length is out of range.
        """
        if targets is not None:
            self._check_targets(tokens, targets, ext_len, context)
        hidden, mems = self.read(
            tokens, mems, mem_len=mem_len, attn_len=attn_len, clamp_len=clamp_len, ext_len=ext_len
        )
        if targets is None:
            return Output(hidden=hidden, mems=mems, log_probs=self.softmax.log_probs(hidden))
        predicting = hidden[:, -targets.shape[1] :]
        return Output(hidden=hidden, mems=mems, nll=self.softmax.nll(predicting, targets))

    def _check_targets(
        self, tokens: Tensor, targets: Tensor, ext_len: int | None, context: int | None
    ) -> None:
        most = least = context
        if most is None or least is None:
            most, least = self.config.ext_len if ext_len is None else ext_len, 0
        missing = tokens.shape[-1] - targets.shape[-1]
        is_pair = tokens.ndim == targets.ndim == 2 and len(tokens) == len(targets)
        if not (is_pair and least <= missing <= most and targets.shape[1]):
            raise ValueError(
                f"targets of shape {tuple(targets.shape)} must have the shape of the tokens, "
                f"{tuple(tokens.shape)}" + f", but for the first {most}" * (most > 0)
            )

    def read(
        self,
        tokens: Int[Tensor, "B T"],
        mems: Memory | KeptMemory | None = None,
        *,
        mem_len: int | None = None,
        attn_len: int | None = None,
        clamp_len: int | None = None,
        ext_len: int | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Memory | KeptMemory]:
        """Read a segment without predicting: return the hidden states and the memory.

        The arguments and errors are those of :meth:`forward`.
        """
        config = self.config
        mem_len = config.mem_len if mem_len is None else mem_len
        attn_len = config.attn_len if attn_len is None else attn_len
        clamp_len = config.clamp_len if clamp_len is None else clamp_len
        ext_len = config.ext_len if ext_len is None else ext_len
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} must be (streams, length) and not empty"
            )
        for name, value in (("mem_len", mem_len), ("clamp_len", clamp_len), ("ext_len", ext_len)):
            if value is not None and value < 0:
                raise ValueError(f"{name}={value} must be at least 0")
        B, T = tokens.shape
        if mems is None:
            mems = self.start_memory(B, mem_len=mem_len)
        elif mems.batch_size != B:
            raise ValueError(
                f"the memory holds {mems.batch_size} streams and the segment {B}; "
                "use mems.select(rows), or mems=None to begin anew"
            )
        if isinstance(mems, KeptMemory):
            if torch.is_grad_enabled():
                raise ValueError(
                    "a memory of keys and values needs fixed weights: use it under torch.no_grad()"
                )
            mems = mems.with_room(T, mem_len)

        M = len(mems)
        x = dropout(self.embedding(tokens), config.dropout, self.training)
        relative = self._relative_positions(M + T, mems, clamp_len)
        past, present = [], []
        for n, layer in enumerate(self.layers):
            memory = (mems, n) if isinstance(mems, KeptMemory) else mems.states[n].detach()
            remembered = x
            if (absolute := self._absolute_positions(n, M + T, clamp_len)) is not None:
                assert isinstance(memory, Tensor)
                memory, x = memory + absolute[:M], x + absolute[M:]
                if "stored_positions" in config.quirks:
                    past.append(memory.detach())
                    remembered = x
            present.append(remembered)
            x = layer(x, memory, relative[n], attn_len, mems.forgotten)
        if self.final_norm is not None:
            x = self.final_norm(x)
        hidden = dropout(x, config.dropout, self.training)

        kept = max(T - ext_len, 0)
        if "swapped_ext_len" in config.quirks:
            kept = T - min(M, ext_len, T)
        if isinstance(mems, KeptMemory):
            return hidden, mems.advance(kept, mem_len)
        if past:
            mems = Memory([*past, *mems.states[len(past) :]], mems.forgotten)
        return hidden, mems.extend([state[:, :kept] for state in present], mem_len)

    def save_pretrained(self, folder: Path | str, vocab: "SavesItself | None" = None) -> None:
        """Write ``config.json`` and ``model.safetensors`` into a folder, and the vocabulary."""
        save_model(self, Path(folder))
        if vocab is not None:
            vocab.save(Path(folder))

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> "TransformerXL":
        """Read a model folder, or the best model of a run folder; in evaluation mode.

        Raises:
            FileNotFoundError: There is no model.
            RuntimeError: A file is damaged.
            ValueError: The settings are wrong.
        """
        folder = find_model_folder(folder)
        config = load_config(folder / CONFIG_FILE)
        weights = read_weights_file(folder / WEIGHTS_FILE, config)
        model = cls(config)
        copy_weights(model, weights)
        return model.eval()

    def start_memory(self, batch_size: int, mem_len: int | None = None) -> Memory:
        """Return the memory at the start of a text: empty, or zeros, as configured."""
        mem_len = self.config.mem_len if mem_len is None else mem_len
        M = mem_len if self.config.start_memory == "zeros" else 0
        zeros = torch.zeros(
            batch_size, M, self.config.d_model, device=self.device, dtype=self.dtype
        )
        return Memory([zeros] * self.config.n_layer)

    @torch.no_grad()
    def keep(self, memory: Memory) -> Memory | KeptMemory:
        """Turn a memory of hidden states into one of keys and values, for fixed weights.

        The results are the same; the memory is not projected again for each segment. Where
        positions are absolute (``attn_type`` 2 and 3) the keys change with each segment, and the
        memory stays as it is.
        """
        if self.config.attn_type in (2, 3):
            return memory
        keys, values = [], []
        for layer, state in zip(self.layers, memory.states, strict=True):
            for kept, x in zip((keys, values), layer.keys_and_values(state), strict=True):
                kept.append(x.permute(2, 0, 1, 3).contiguous())
        return KeptMemory(keys, values, 0, len(memory), memory.forgotten)

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
            return dropout(self._encoding(S, clamp_len), self.config.dropout, self.training)
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
        encoding = dropout(self._encoding(S, clamp_len), self.config.dropout, self.training)
        return [layer.attention.positions(encoding) for layer in self.layers]

    def _encoding(self, S: int, clamp_len: int | None) -> Float[Tensor, "S D"]:
        is_exact = "exact_frequencies" in self.config.quirks
        precision = torch.float64 if is_exact else torch.float32
        d_model = self.config.d_model
        return relative_positions(S, d_model, clamp_len, self.dtype, self.device, precision)
