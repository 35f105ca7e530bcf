"""Transformer-XL: embedding, layers with memory, softmax."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_xl.config import ModelConfig
from transformer_xl.nn.adaptive import AdaptiveSoftmax
from transformer_xl.nn.embedding import AdaptiveEmbedding, Embedding, embedded
from transformer_xl.nn.initialization import init_weights
from transformer_xl.nn.layer import DecoderLayer
from transformer_xl.nn.lengths import Lengths
from transformer_xl.nn.memory import KeptMemory, Memory
from transformer_xl.nn.mode import evaluating
from transformer_xl.nn.needs import require_weights
from transformer_xl.nn.norm import make_norm
from transformer_xl.nn.output import Output
from transformer_xl.nn.positioned import PositionedModel
from transformer_xl.nn.pretrained import SavesItself, save_model
from transformer_xl.nn.segment import Segment, require_memory
from transformer_xl.nn.softmax import CalledSoftmax, Softmax
from transformer_xl.nn.wrapping import adapters
from transformer_xl.ops import dropout


class TransformerXL(PositionedModel):
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

    Attributes:
        recompute: Compute the inside of the layers once more in the backward pass, instead of
            keeping it (Chen et al., arXiv 1604.06174).
        left_out: Settings of its folder that change nothing; archives that an earlier version made
            with the model were made with them, too.

    Raises:
        ValueError: The size of the vocabulary is not set, or it is another kind of model.
    """

    recompute = False
    left_out: Mapping[str, Any] = {}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.kind != "transformer_xl":
            raise ValueError(
                f"kind={config.kind!r} is no Transformer-XL: nn.build_model and nn.load_model "
                "make models of every kind"
            )
        if config.vocab_size < 1:
            raise ValueError(f"vocab_size={config.vocab_size} must be the size of a vocabulary")
        require_weights(config)
        self.config = config
        self.embedding = AdaptiveEmbedding(config) if config.div_val > 1 else Embedding(config)
        # A ModuleList does not say of what; this does.
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            DecoderLayer(config) for _ in range(config.n_layer)
        )
        self._add_positions(config)
        self.final_norm = None
        if config.final_norm:
            self.final_norm = make_norm(config)
        is_adaptive = config.cutoffs or config.div_val > 1
        self.softmax = (AdaptiveSoftmax if is_adaptive else Softmax)(config, self.embedding)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the initial weights."""
        init_weights(self, self.config)

    def forward(
        self,
        tokens: Integer[Tensor, "B T"] | None = None,
        mems: Memory | KeptMemory | None = None,
        targets: Integer[Tensor, "B predicted"] | None = None,
        *,
        lengths: Integer[Tensor, " B"] | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        mem_len: int | None = None,
        attn_len: int | None = None,
        clamp_len: int | None = None,
        ext_len: int | None = None,
        context: int | None = None,
        predicts: bool = True,
    ) -> Output:
        """Read a segment; predict its targets, or the distribution of every next token.

        Args:
            tokens: The segment.
            mems: What the previous call returned as ``mems``. None: as at the start of a text.
            targets: For each token the one that follows it, but for the first ``context``. Where
                it is -100, nothing is predicted: ``nll`` is 0 there and not counted in ``loss``.
            lengths: How many places of each row are real, the first ones; what stands behind them
                does not matter, and their ``hidden`` means nothing. ``nll`` is 0 there and not
                counted in ``loss``. The memory of each row ends with its own last token; a row of
                length 0 keeps the memory that it had. What is remembered is copied, and the lengths
                are looked at, so that a GPU is waited for. None: all.
            starts: Where documents begin: neither such a token nor what follows it sees anything
                before it, nor what the memory holds, zeros included. None: nowhere but at the
                symbol ``reset_at``, where one is configured.
            inputs_embeds: Vectors in place of tokens, read as they are: no embedding, no scale.
            mem_len: How many positions the returned memory holds at most. None: as configured.
            attn_len: How many keys a query sees, counting its own. None: as configured.
            clamp_len: Distances above it count as it. None: as configured.
            ext_len: How many of the last tokens the next segment begins with again: the returned
                memory leaves them out. None: as configured.
            context: How many of the first tokens have no target. None: as many as ``targets`` are
                short of, if these are at most ``ext_len``.
            predicts: False: compute the hidden states alone, as :meth:`read` does.

        Raises:
            ValueError: Something is no tensor of the right type; the shapes do not fit each other
                or the memory; a length is out of range; there are both tokens and vectors, or
                neither; rows are padded that are to be read again (``ext_len``).
        """
        segment = Segment.of(tokens, inputs_embeds, lengths, starts, self.config)
        resolved = Lengths.of(
            self.config,
            mem_len=mem_len,
            attn_len=attn_len,
            clamp_len=clamp_len,
            ext_len=ext_len,
            # What changes nothing is refused where it is chosen.
            requires_effect=False,
        )
        if targets is not None:
            targets = segment.checked_targets(targets, resolved.ext_len, context)
        raw, mems = self._read(segment, mems, resolved)
        hidden = self._drop_output(raw)
        out = Output(hidden=hidden, raw_hidden=raw, mems=mems, targets=targets)
        if targets is None:
            if predicts:
                out.log_probs = self.head.log_probs(hidden)
            return out
        n = targets.shape[1]
        if segment.short is None:
            out.nll = self.head.nll(hidden[:, -n:], targets)
        else:
            out.is_real = segment.is_real(n)
            nll = self.head.nll(hidden[:, -n:], targets.masked_fill(~out.is_real, 0))
            out.nll = nll.masked_fill(~out.is_real, 0.0)
        return out

    def read(
        self,
        tokens: Integer[Tensor, "B T"] | None = None,
        mems: Memory | KeptMemory | None = None,
        *,
        lengths: Integer[Tensor, " B"] | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        mem_len: int | None = None,
        attn_len: int | None = None,
        clamp_len: int | None = None,
        ext_len: int | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Memory | KeptMemory]:
        """Read a segment without predicting: return the hidden states and the memory.

        The arguments and errors are those of :meth:`forward`. For who wants the hidden states
        alone: the distribution over the vocabulary is not computed.
        """
        # A call of the module: what hangs on it sees this one, too.
        out: Output = self(
            tokens,
            mems,
            lengths=lengths,
            starts=starts,
            inputs_embeds=inputs_embeds,
            mem_len=mem_len,
            attn_len=attn_len,
            clamp_len=clamp_len,
            ext_len=ext_len,
            predicts=False,
        )
        return out.hidden, out.mems

    @torch.no_grad()
    def attention_weights(
        self,
        tokens: Integer[Tensor, "B T"],
        mems: Memory | KeptMemory | None = None,
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
        if self.config.kind != "transformer_xl":
            raise ValueError(f"a model of kind={self.config.kind!r} has no attention to look at")
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
    def head(self) -> Softmax | AdaptiveSoftmax | CalledSoftmax:
        """What predicts tokens from hidden states: ``softmax``, or what was put in its place."""
        softmax = self.softmax
        return softmax if isinstance(softmax, Softmax | AdaptiveSoftmax) else CalledSoftmax(softmax)

    def _embedded(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return embedded(self.embedding, tokens)

    def _drop_output(self, x: Tensor) -> Tensor:
        config = self.config
        return dropout(x, config.dropouts.output, self.training, config.variational_dropout)

    def _read(
        self,
        segment: Segment,
        mems: Memory | KeptMemory | None,
        lengths: Lengths,
    ) -> tuple[Float[Tensor, "B T D"], Memory | KeptMemory]:
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
            require_memory(mems, config, B)
        if isinstance(mems, KeptMemory):
            if torch.is_grad_enabled():
                raise ValueError(
                    "a memory of keys and values needs fixed weights: use it under torch.no_grad()"
                )
            if not torch.compiler.is_compiling():
                mems.require(adapters(self))
            mems = mems.with_room(T, mem_len)
        else:
            mems = mems.detach()

        M = len(mems)
        x = self._drop_input(segment.embedded(self._embedded, self.dtype))
        first_key = segment.first_keys(M, mems.forgotten)
        relative = self._relative_positions(M + T, mems, clamp_len)
        past, present = [], []
        for n, layer in enumerate(self.layers):
            memory = (mems, n) if isinstance(mems, KeptMemory) else mems.states[n]
            remembered = x
            if (absolute := self._absolute_positions(n, M + T, clamp_len)) is not None:
                assert isinstance(memory, Tensor)
                absolute = segment.counted_from_own_end(absolute)
                memory, x = memory + absolute[..., :M, :], x + absolute[..., M:, :]
                if "stored_positions" in config.quirks:
                    past.append(memory.detach())
                    remembered = x
            given = x, memory, relative[n], attn_len, first_key
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, *given, use_reentrant=False)
            else:
                x = layer(*given)
            if config.enhanced_recurrence:
                remembered = x
                if isinstance(mems, KeptMemory):
                    # In the place of those that the segment itself has attended to.
                    mems.write(n, *layer.keys_and_values(x))
            present.append(remembered)
        if self.final_norm is not None:
            x = self.final_norm(x)

        kept = max(T - ext_len, 0)
        if "swapped_ext_len" in config.quirks:
            kept = T - min(M, ext_len, T)
        # Rows that are padded are cut when what is real has moved to their ends.
        most = mem_len if segment.short is None else M + kept
        if isinstance(mems, KeptMemory):
            after = mems.advance(kept, most)
        else:
            if past:
                mems = Memory([*past, *mems.states[len(past) :]], mems.forgotten)
            after = mems.extend([state[:, :kept] for state in present], most)
        return x, segment.left(after, first_key, M, kept, mem_len)

    def save_pretrained(self, folder: Path | str, vocab: SavesItself | None = None) -> None:
        """Write ``config.json`` and ``model.safetensors`` into a folder, and the vocabulary."""
        save_model(self, Path(folder))
        if vocab is not None:
            vocab.save(Path(folder))

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> "TransformerXL":
        """Read a model folder, or the best model of a run folder; in evaluation mode.

        The model is of the kind that its settings name.

        Raises:
            FileNotFoundError: There is no model.
            RuntimeError: A file is damaged.
            ValueError: The settings are wrong.
        """
        # It makes this class and others.
        from transformer_xl.nn.building import load_model

        return load_model(folder)

    def start_memory(self, batch_size: int, mem_len: int | None = None) -> Memory:
        """Return the memory at the start of a text: empty, or zeros, as configured."""
        mem_len = Lengths.of(self.config, mem_len=mem_len).mem_len
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
        with evaluating(self):
            for layer, state in zip(self.layers, memory.states, strict=True):
                for kept, x in zip((keys, values), layer.keys_and_values(state), strict=True):
                    kept.append(x.permute(2, 0, 1, 3).contiguous())
        kept = KeptMemory(keys, values, 0, len(memory), memory.forgotten)
        kept.adapters = adapters(self)
        return kept
