"""What all models have in common: the ends of the network, the calls, building and loading."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.arguments import shown
from transformer_xl.model.embedding import AdaptiveEmbedding, Embedding, embedded
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import Memory
from transformer_xl.model.needs import require_weights
from transformer_xl.model.pretrained import (
    CONFIG_FILE,
    SavesItself,
    copy_weights,
    find_model_folder,
    load_config,
    model_weights,
    read_config,
    read_weights,
    weights_path,
    write_model,
)
from transformer_xl.model.segment import Output, Segment
from transformer_xl.model.softmax import AdaptiveSoftmax, CalledSoftmax, Softmax
from transformer_xl.ops import dropout

_KINDS: dict[str, type["LanguageModel"]] = {}
"""The classes of models by the ``kind`` of the settings that describe them."""


class LanguageModel(nn.Module, ABC):
    """An embedding, a middle that reads a segment and a memory, and a softmax.

    The middle is what a subclass adds: what it is made of, how it reads, and what it remembers.

    Args:
        config: Widths, lengths and options. Its ``vocab_size`` must be set.

    Attributes:
        kind: The ``kind`` of the settings that describe such a model.
        has_attention: Whether there are weights of attention to be looked at.
        remembers_positions: Whether what is remembered grows with what was read, up to
            ``mem_len`` positions. False: it is one state.
        recompute: Compute the inside of the layers once more in the backward pass, instead of
            keeping it (Chen et al., arXiv 1604.06174).
        left_out: Settings of its folder that change nothing; archives that an earlier version made
            with the model were made with them, too.

    Raises:
        ValueError: The size of the vocabulary is not set, or it is another kind of model.
    """

    kind: ClassVar[str]
    _title: ClassVar[str]
    has_attention: ClassVar[bool] = False
    remembers_positions: ClassVar[bool] = True
    recompute = False
    left_out: Mapping[str, Any] = {}

    def __init_subclass__(cls, **words: Any) -> None:
        super().__init_subclass__(**words)
        if "kind" in vars(cls):
            _KINDS[cls.kind] = cls

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.kind != self.kind:
            raise ValueError(
                f"kind={config.kind!r} is no {self._title}: nn.build_model and nn.load_model "
                "make models of every kind"
            )
        if config.vocab_size < 1:
            raise ValueError(f"vocab_size={config.vocab_size} must be the size of a vocabulary")
        require_weights(config)
        self.config = config
        self.embedding = AdaptiveEmbedding(config) if config.div_val > 1 else Embedding(config)
        self._build(config)
        is_adaptive = config.cutoffs or config.div_val > 1
        self.softmax = (AdaptiveSoftmax if is_adaptive else Softmax)(config, self.embedding)
        self.init_weights()

    @abstractmethod
    def _build(self, config: ModelConfig) -> None:
        """Make what lies between the embedding and the softmax."""

    @abstractmethod
    def init_weights(self) -> None:
        """Draw the initial weights."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are when they are used."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""

    @abstractmethod
    def _read(
        self, segment: Segment, mems: Memory | None, lengths: Lengths
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        """Read a segment; return the output of the layers and the memory after it."""

    @abstractmethod
    def start_memory(self, batch_size: int, mem_len: int | None = None) -> Memory:
        """Return the memory at the start of a text; ``mem_len`` None: as configured."""

    @abstractmethod
    def is_own(self, mems: Memory) -> bool:
        """Whether a memory has the depth and the widths of this model's."""

    def keep(self, memory: Memory) -> Memory:
        """Turn a memory into what is read fastest while the weights are fixed; here, itself."""
        return memory

    @property
    def depends_on_segments(self) -> bool:
        """Whether the results depend on how many tokens are read at once."""
        return False

    def forward(
        self,
        tokens: Integer[Tensor, "B T"] | None = None,
        mems: Memory | None = None,
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
        mems: Memory | None = None,
        *,
        lengths: Integer[Tensor, " B"] | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        mem_len: int | None = None,
        attn_len: int | None = None,
        clamp_len: int | None = None,
        ext_len: int | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
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

        Raises:
            ValueError: The model has no attention, or the memory does not fit the segment.
        """
        raise ValueError(f"a model of kind={self.config.kind!r} has no attention to look at")

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

    def require_memory(self, mems: Any, batch_size: int | None = None) -> None:
        """Check that a memory is one of this model, of so many streams if said.

        Raises:
            ValueError: It is of another depth, width or number of streams, or no memory at all.
        """
        if not isinstance(mems, Memory):
            raise ValueError(
                f"mems={shown(mems)} is no memory: hand in what an earlier call returned as mems, "
                "or None to begin anew"
            )
        if not self.is_own(mems):
            width = self.start_memory(1, 0).states[0].shape[2]
            raise ValueError(
                f"the memory is that of another model: this one has {self.config.n_layer} layers "
                f"of width {width}; use mems=None to begin anew"
            )
        if batch_size is not None and mems.batch_size != batch_size:
            raise ValueError(
                f"the memory holds {mems.batch_size} streams and the segment {batch_size}; "
                "use mems.select(rows), or mems=None to begin anew"
            )

    def save_pretrained(self, folder: Path | str, vocab: SavesItself | None = None) -> None:
        """Write ``config.json`` and ``model.safetensors`` into a folder, and the vocabulary."""
        weights = model_weights(self)
        require_own_weights(weights, self.config)
        write_model(self.config, weights, Path(folder))
        if vocab is not None:
            vocab.save(Path(folder))

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> "LanguageModel":
        """Read a model folder, or the best model of a run folder; in evaluation mode.

        The model is of the kind that its settings name.

        Raises:
            FileNotFoundError: There is no model.
            RuntimeError: A file is damaged.
            ValueError: The settings are wrong.
        """
        return load_model(folder)


def build_model(config: ModelConfig) -> LanguageModel:
    """Build the model that a configuration describes, with initial weights.

    Raises:
        ValueError: The size of the vocabulary is not set.
    """
    return _KINDS[config.kind](config)


def load_model(folder: Path | str) -> LanguageModel:
    """Read a model folder of any kind, or the best model of a run folder; in evaluation mode.

    Raises:
        FileNotFoundError: There is no model.
        RuntimeError: A file is damaged.
        ValueError: The settings are wrong.
    """
    folder = find_model_folder(folder)
    config = load_config(folder / CONFIG_FILE)
    weights = read_model_weights(folder, config)
    model = build_model(config)
    copy_weights(model, weights)
    settings = json.loads(json.dumps(asdict(config)))
    model.left_out = {
        name: value
        for name, value in read_config(folder / CONFIG_FILE).items()
        if name in settings and value != settings[name]
    }
    return model.eval()


def read_model_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Read and verify the weights of a model folder with these settings, by name.

    Raises:
        OSError: A file cannot be read.
        RuntimeError: A file is damaged, or its weights are not those of the model.
    """

    def expected(n_tensors: int) -> dict[str, torch.Size]:
        # Checked before shapes are computed: a hostile n_layer would exhaust time and memory.
        if config.n_layer > n_tensors:
            raise OverflowError(f"n_layer={config.n_layer}")
        return weight_shapes(config)

    return read_weights(weights_path(folder), expected, CONFIG_FILE)


def weight_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of the weights of a model, each once, without making them."""
    with torch.device("meta"):
        return {name: x.shape for name, x in build_model(config).named_parameters()}


def require_own_weights(names: Iterable[str], config: ModelConfig) -> None:
    """Check that a model has the weights that its settings say, and so can be saved as a folder.

    Raises:
        ValueError: It has others.
    """
    own, names = weight_shapes(config).keys(), set(names)
    for other, what in ((names - own, "has"), (own - names, "lacks")):
        if other:
            raise ValueError(
                f"the model {what} {min(other)}, as a part of it was wrapped or replaced: no model "
                "folder can hold that. Save the adapter alone (the save_pretrained of PEFT's "
                "model), or merge it first (model.merge_and_unload())"
            )
