"""The base class of all models: embedding and softmax, forward pass, building and loading."""

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
from transformer_xl.model.limits import require_weights
from transformer_xl.model.memory import Memory
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
    """An embedding, a recurrent body that reads a segment with its memory, and a softmax.

    A subclass implements the body: its layers, :meth:`_read` and :meth:`start_memory`.

    Args:
        config: Widths, lengths and options. Its ``vocab_size`` must be set.

    Attributes:
        kind: Value of ``config.kind`` that the class implements.
        has_attention: Whether :meth:`attention_weights` is available.
        remembers_positions: Whether the memory holds up to ``mem_len`` positions. False: it holds
            a single recurrent state.
        recompute: Activation checkpointing: recompute the activations of the layers in the
            backward pass (Chen et al., arXiv 1604.06174).
        left_out: Settings of the model folder that have no effect; archives that earlier versions
            compressed with the model depend on them.

    Raises:
        ValueError: The size of the vocabulary is not set, or ``kind`` is that of another class.
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
                f"kind={config.kind!r} is no {self._title}: transformer_xl.model.build_model and "
                "load_model make models of every kind"
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
        """Create the modules between the embedding and the softmax."""

    @abstractmethod
    def init_weights(self) -> None:
        """Draw the initial weights."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device on which the model computes."""

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
        """Return the initial memory of a text; ``mem_len`` None: as configured."""

    @abstractmethod
    def is_own(self, mems: Memory) -> bool:
        """Whether a memory has the number of layers and the widths of this model."""

    def keep(self, memory: Memory) -> Memory:
        """Convert a memory to the fastest form for fixed weights; by default, return it."""
        return memory

    @property
    def depends_on_segments(self) -> bool:
        """Whether results depend on the segmentation, even with enough memory."""
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
        """Read a segment; return the loss of its targets, or the next-token log-probabilities.

        Args:
            tokens: The segment.
            mems: The ``mems`` of the previous call. None: start of a text.
            targets: The next token of each token but the first ``context``. A target of -100 is
                ignored: its ``nll`` is 0 and it does not count in ``loss``.
            lengths: Number of real tokens in each row; the rest is padding on the right, whose
                ``hidden`` is undefined and whose ``nll`` is 0 and does not count in ``loss``. The
                memory of each row ends with its own last token; a row of length 0 keeps its
                memory. Copies the memory and synchronizes the device. None: no padding.
            starts: Where documents begin: such a token and those after it attend to nothing before
                it, including the memory and its zeros. None: only at ``reset_at``, if configured.
            inputs_embeds: Vectors instead of tokens, used without embedding or scaling.
            mem_len: Maximum length of the returned memory. None: as configured.
            attn_len: How many keys a query sees, counting its own. None: as configured.
            clamp_len: Distances above it count as it. None: as configured.
            ext_len: How many of the last tokens the next segment reads again: the returned memory
                leaves them out. None: as configured.
            context: How many of the first tokens have no target. None: the difference between the
                lengths of ``tokens`` and ``targets``, at most ``ext_len``.
            predicts: False: return the hidden states alone, as :meth:`read` does.

        Raises:
            ValueError: An argument is no tensor of the right type; shapes are inconsistent or do
                not fit the memory; a length is out of range; both or neither of ``tokens`` and
                ``inputs_embeds`` are given; ``lengths`` with ``ext_len``.
        """
        segment = Segment.of(tokens, inputs_embeds, lengths, starts, self.config)
        resolved = Lengths.of(
            self.config,
            mem_len=mem_len,
            attn_len=attn_len,
            clamp_len=clamp_len,
            ext_len=ext_len,
            # Callers that let users choose lengths check this.
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
        """Return the hidden states of a segment and the memory, without computing the softmax.

        Arguments and errors are those of :meth:`forward`.
        """
        # Through __call__, so that hooks run.
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
        """Return the attention weights of each layer.

        Raises:
            ValueError: The model has no attention, or the memory does not fit the segment.
        """
        raise ValueError(f"a model of kind={self.config.kind!r} has no attention to look at")

    @property
    def head(self) -> Softmax | AdaptiveSoftmax | CalledSoftmax:
        """The output layer: ``softmax``, or a wrapper around what replaced it."""
        softmax = self.softmax
        return softmax if isinstance(softmax, Softmax | AdaptiveSoftmax) else CalledSoftmax(softmax)

    def _embedded(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return embedded(self.embedding, tokens)

    def _drop_output(self, x: Tensor) -> Tensor:
        config = self.config
        return dropout(x, config.dropouts.output, self.training, config.variational_dropout)

    def require_memory(self, mems: Any, batch_size: int | None = None) -> None:
        """Require a memory of this model, with ``batch_size`` streams unless None.

        Raises:
            ValueError: It is no memory, or differs in depth, width or batch size.
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
        """Write ``config.json``, ``model.safetensors`` and, if given, the vocabulary."""
        weights = model_weights(self)
        require_own_weights(weights, self.config)
        write_model(self.config, weights, Path(folder))
        if vocab is not None:
            vocab.save(Path(folder))

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> "LanguageModel":
        """Load a model folder, or the best model of a run folder; as :func:`load_model` does."""
        return load_model(folder)


def build_model(config: ModelConfig) -> LanguageModel:
    """Build a model of ``config.kind`` with initial weights.

    Raises:
        ValueError: The size of the vocabulary is not set.
    """
    return _KINDS[config.kind](config)


def load_model(folder: Path | str) -> LanguageModel:
    """Load a model folder of any kind, or the best model of a run folder, in evaluation mode.

    Raises:
        FileNotFoundError: The folder holds no model.
        RuntimeError: A file is damaged.
        ValueError: The settings are invalid.
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
    """Load and verify the weights of a model folder, by name.

    Raises:
        OSError: A file cannot be read.
        RuntimeError: A file is damaged, or the names or shapes do not match ``config``.
    """

    def expected(n_tensors: int) -> dict[str, torch.Size]:
        # Checked before shapes are computed: a hostile n_layer would exhaust time and memory.
        if config.n_layer > n_tensors:
            raise OverflowError(f"n_layer={config.n_layer}")
        return weight_shapes(config)

    return read_weights(weights_path(folder), expected, CONFIG_FILE)


def weight_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of the parameters of a model, without allocating them."""
    with torch.device("meta"):
        return {name: x.shape for name, x in build_model(config).named_parameters()}


def require_own_weights(names: Iterable[str], config: ModelConfig) -> None:
    """Require exactly the parameters that ``config`` implies, as a model folder holds them.

    Raises:
        ValueError: A parameter is missing or unexpected.
    """
    own, names = weight_shapes(config).keys(), set(names)
    for other, what in ((names - own, "has"), (own - names, "lacks")):
        if other:
            raise ValueError(
                f"the model {what} {min(other)}, as a part of it was wrapped or replaced: no model "
                "folder can hold that. Save the adapter alone (the save_pretrained of PEFT's "
                "model), or merge it first (model.merge_and_unload())"
            )
