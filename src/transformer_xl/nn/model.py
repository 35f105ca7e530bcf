"""Transformer-XL: embedding, layers with memory, softmax."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.nn.embedding import Embedding, relative_positions
from transformer_xl.nn.layer import DecoderLayer
from transformer_xl.nn.memory import KeptMemory, Memory
from transformer_xl.nn.pretrained import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    find_model_folder,
    load_config,
    load_weights,
    save_model,
)
from transformer_xl.nn.softmax import Softmax


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
    nll: Float[Tensor, "B T"] | None = None
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
        self.embedding = Embedding(config)
        # A ModuleList does not say of what; this does.
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            DecoderLayer(config) for _ in range(config.n_layer)
        )
        # One pair of biases for all layers, or a pair for each.
        n_biases = 1 if config.tie_biases else config.n_layer
        self.content_bias = nn.Parameter(torch.empty(n_biases, config.n_head, config.head_width))
        self.position_bias = nn.Parameter(torch.empty(n_biases, config.n_head, config.head_width))
        self.final_norm = None
        if config.final_norm:
            self.final_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.softmax = Softmax(config, self.embedding)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the initial weights: the one table of all initializations (the authors')."""
        config = self.config
        table = (
            # (names end in, mean, standard deviation)
            (("norm.weight",), 1.0, config.init_std),
            (("embedding.proj.weight", "softmax.proj.weight"), 0.0, config.proj_init_std),
            (("_proj.weight", "inner.weight", "outer.weight"), 0.0, config.init_std),
            (("embedding.weight", "softmax.weight"), 0.0, config.init_std),
            (("content_bias", "position_bias"), 0.0, config.init_std),
            (("norm.bias", "inner.bias", "outer.bias", "softmax.bias"), 0.0, 0.0),
        )
        for name, parameter in self.named_parameters():
            mean, std = next((m, s) for ends, m, s in table if name.endswith(ends))
            parameter.normal_(mean, std)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        mems: Memory | KeptMemory | None = None,
        targets: Int[Tensor, "B T"] | None = None,
        *,
        mem_len: int | None = None,
        attn_len: int | None = None,
        clamp_len: int | None = None,
    ) -> Output:
        """Read a segment; predict its targets, or the distribution of every next token.

        Args:
            tokens: The segment.
            mems: What the previous call returned as ``mems``. None: as at the start of a text.
            targets: For each token the one that follows it.
            mem_len: How many positions the returned memory holds at most. None: as configured.
            attn_len: How many keys a query sees, counting its own. None: as configured.
            clamp_len: Distances above it count as it. None: as configured.

        Raises:
            ValueError: The shapes do not fit each other or the memory; a length is out of range.
        """
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(
                f"targets of shape {tuple(targets.shape)} must have the shape of the tokens, "
                f"{tuple(tokens.shape)}"
            )
        hidden, mems = self.read(
            tokens, mems, mem_len=mem_len, attn_len=attn_len, clamp_len=clamp_len
        )
        if targets is None:
            return Output(hidden=hidden, mems=mems, log_probs=self.softmax.log_probs(hidden))
        return Output(hidden=hidden, mems=mems, nll=self.softmax.nll(hidden, targets))

    def read(
        self,
        tokens: Int[Tensor, "B T"],
        mems: Memory | KeptMemory | None = None,
        *,
        mem_len: int | None = None,
        attn_len: int | None = None,
        clamp_len: int | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Memory | KeptMemory]:
        """Read a segment without predicting: return the hidden states and the memory.

        The arguments and errors are those of :meth:`forward`.
        """
        config = self.config
        mem_len = config.mem_len if mem_len is None else mem_len
        attn_len = config.attn_len if attn_len is None else attn_len
        clamp_len = config.clamp_len if clamp_len is None else clamp_len
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} must be (streams, length) and not empty"
            )
        for name, value in (("mem_len", mem_len), ("clamp_len", clamp_len)):
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

        x = F.dropout(self.embedding(tokens), config.dropout, self.training)
        positions = self._positions(len(mems) + T, mems, clamp_len)
        content_bias = self.content_bias.expand(config.n_layer, -1, -1)
        position_bias = self.position_bias.expand(config.n_layer, -1, -1)
        states = []
        for n, layer in enumerate(self.layers):
            states.append(x)
            memory = (mems, n) if isinstance(mems, KeptMemory) else mems.states[n].detach()
            biases = content_bias[n], position_bias[n]
            x = layer(x, memory, positions[n], *biases, attn_len, mems.forgotten)
        if self.final_norm is not None:
            x = self.final_norm(x)
        hidden = F.dropout(x, config.dropout, self.training)
        if isinstance(mems, KeptMemory):
            return hidden, mems.advance(T, mem_len)
        return hidden, mems.extend(states, mem_len)

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
        model = cls(load_config(folder / CONFIG_FILE))
        load_weights(model, folder / WEIGHTS_FILE)
        return model.eval()

    def start_memory(self, batch_size: int, mem_len: int | None = None) -> Memory:
        """Return the memory at the start of a text: empty, or zeros, as configured."""
        mem_len = self.config.mem_len if mem_len is None else mem_len
        M = mem_len if self.config.start_memory == "zeros" else 0
        zeros = self.content_bias.new_zeros(batch_size, M, self.config.d_model)
        return Memory([zeros] * self.config.n_layer)

    @torch.no_grad()
    def keep(self, memory: Memory) -> KeptMemory:
        """Turn a memory of hidden states into one of keys and values, for fixed weights.

        The results are the same; the memory is not projected again for each segment.
        """
        keys, values = [], []
        for layer, state in zip(self.layers, memory.states, strict=True):
            for kept, x in zip((keys, values), layer.keys_and_values(state), strict=True):
                kept.append(x.permute(2, 0, 1, 3).contiguous())
        return KeptMemory(keys, values, 0, len(memory), memory.forgotten)

    def _positions(
        self, S: int, mems: Memory | KeptMemory, clamp_len: int | None
    ) -> list[Float[Tensor, "S H K"]]:
        """Project the encodings of all distances for each layer."""
        if isinstance(mems, KeptMemory):
            kept = mems.positions.get(clamp_len)
            if kept is None or kept[0].shape[0] < S:
                encoding = self._encoding(1 << (S - 1).bit_length(), clamp_len)
                kept = mems.positions[clamp_len] = [
                    # Stored heads first, as the attention reads them.
                    layer.attention.positions(encoding).transpose(0, 1).contiguous().transpose(0, 1)
                    for layer in self.layers
                ]
            return [r[-S:] for r in kept]
        encoding = F.dropout(self._encoding(S, clamp_len), self.config.dropout, self.training)
        return [layer.attention.positions(encoding) for layer in self.layers]

    def _encoding(self, S: int, clamp_len: int | None) -> Float[Tensor, "S D"]:
        like = self.content_bias
        return relative_positions(S, self.config.d_model, clamp_len, like.dtype, like.device)
