"""What all models share: the inputs and outputs of a call, embedding and softmax, loading."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeGuard, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError, SettingsError
from transformer_xl.model.arguments import explain_unknown, require_tensor, shown
from transformer_xl.model.building import BUILDERS, build_model, builder, weight_shapes
from transformer_xl.model.calling import evaluating, unwrapped
from transformer_xl.model.layer import DecoderLayer
from transformer_xl.model.limits import require_bytes
from transformer_xl.model.memory import Memory
from transformer_xl.model.mixture import Mixture, MixtureHead
from transformer_xl.model.observing import Observed, observed
from transformer_xl.model.pretrained import ModelFolder
from transformer_xl.model.segment import Lengths, Segment, View
from transformer_xl.model.tokens import (
    CalledSoftmax,
    Embedding,
    FeatureEmbedding,
    Predictor,
    Softmax,
    embedded,
)
from transformer_xl.model.variants.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from transformer_xl.ops import IGNORED, dropout


@dataclass(kw_only=True)
class Output:
    """The output of a forward pass."""

    hidden: Float[Tensor, "B T D"]
    """Output of the layers, after dropout while training."""
    raw_hidden: Float[Tensor, "B T D"]
    """Output of the layers before dropout; the same tensor as ``hidden`` without dropout."""
    mems: Memory
    """The memory after this segment, to be passed with the next one."""
    nll: Float[Tensor, "B predicted"] | None = None
    """-log p of each target in nats, in token order, with ``n_mixtures`` of its density; 0 for
    padding and for targets of -100 (of NaN); None without targets."""
    is_real: Bool[Tensor, "B predicted"] | None = None
    """Mask of the targets that are no padding; None: all, or no targets."""
    targets: Int[Tensor, "B predicted"] | Float[Tensor, "B predicted"] | None = None
    """The targets that were given."""
    mixture: Mixture | None = None
    """With ``n_mixtures``, the distribution of the next value; None as for ``log_probs``."""
    log_probs: Float[Tensor, "B T V"] | None = None
    """Log-probabilities of the next token; None with targets, with ``predicts=False``, or with
    ``n_mixtures``."""

    @cached_property
    def loss(self) -> Float[Tensor, ""] | None:
        """The mean of ``nll`` over the targets that are neither padding nor -100 (NaN).

        Without any such target it is 0, and so are its gradients, where
        ``torch.nn.functional.cross_entropy`` returns NaN. None where no targets were given.
        """
        if self.nll is None or self.targets is None:
            return None
        counted = counted_targets(self.targets)
        if self.is_real is not None:
            return self.nll.sum() / (counted & self.is_real).sum().clamp(min=1)
        # The factor is exactly 1 where no target is -100.
        return self.nll.mean() * (counted.numel() / counted.sum().clamp(min=1))


def counted_targets(targets: Tensor) -> Bool[Tensor, "*batch"]:
    """Mark the targets that are predicted: those that are not -100, or NaN if they are real."""
    return ~targets.isnan() if targets.is_floating_point() else targets != IGNORED


@runtime_checkable
class SavesItself(Protocol):
    """The interface of a vocabulary that a model folder needs."""

    def save(self, folder: Path) -> None:
        """Write the vocabulary to a folder."""
        ...


class LanguageModel(nn.Module, ABC):
    """An embedding, a recurrent body that reads a segment with its memory, and a softmax.

    With ``n_features``, the embedding projects real vectors; with ``n_mixtures``, a mixture of
    normal distributions is in the place of the softmax.

    A subclass implements the body: its layers and :meth:`_read`.

    Args:
        config: Widths, lengths and options. Its ``vocab_size`` must be set, except with
            ``n_mixtures``.

    Attributes:
        kind: Value of ``config.kind`` that the class implements.
        has_attention: Whether :meth:`attention_weights` is available.
        remembers_positions: Whether the memory holds up to ``mem_len`` positions. False: it holds
            a single recurrent state.
        recomputes: Whether ``recompute`` has an effect.
        recompute: Activation checkpointing: recompute the activations of the layers in the
            backward pass (Chen et al., arXiv 1604.06174). True, or a function that calls a layer
            with its arguments in the place of :func:`torch.utils.checkpoint.checkpoint`.
        frequency_precision: To which the frequencies of sinusoidal positions are rounded.
        recompute_every: Of so many layers, only the first one is recomputed.
        preface: Tokens that are read into the memory before a text is generated, of models that
            write poorly without context; ``()`` for none. Texts that continue a memory, scores,
            evaluation and compression do without.
        left_out: Settings of the model folder that have no effect; archives that earlier versions
            compressed with the model depend on them.

    Raises:
        SettingsError: The size of the vocabulary is not set, or ``kind`` is that of another class.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> isinstance(model, LanguageModel), model.kind, model.has_attention
        (True, 'transformer_xl', True)
    """

    kind: ClassVar[str]
    _title: ClassVar[str]
    has_attention: ClassVar[bool] = False
    remembers_positions: ClassVar[bool] = True
    recomputes: ClassVar[bool] = False
    recompute: bool | Callable[..., Tensor] = False
    recompute_every = 1
    frequency_precision: torch.dtype = torch.float32
    preface: tuple[int, ...] = ()
    left_out: Mapping[str, object] = {}

    def __init__(self, config: ModelConfig, **parts: Any) -> None:
        super().__init__()
        if config.kind != self.kind:
            raise SettingsError(
                f"kind={config.kind!r} is no {self._title}: transformer_xl.model.build_model and "
                "load_model make models of every kind"
            )
        if config.vocab_size < 1 and not config.n_mixtures:
            raise SettingsError(f"vocab_size={config.vocab_size} must be the size of a vocabulary")
        self.config = config
        if config.n_features:
            self.embedding = FeatureEmbedding(config)
        else:
            self.embedding = AdaptiveEmbedding(config) if config.div_val > 1 else Embedding(config)
        self._build(config, **parts)
        is_adaptive = config.cutoffs or config.div_val > 1
        if config.n_mixtures:
            # Under the name of what it replaces, which those of the weights begin with.
            self.softmax = MixtureHead(config)
        else:
            embedding: Any = self.embedding
            self.softmax = (AdaptiveSoftmax if is_adaptive else Softmax)(config, embedding)
        self.init_weights()

    @abstractmethod
    def _build(self, config: ModelConfig, *args: Any, **kwargs: Any) -> None:
        """Create the modules between the embedding and the softmax.

        Further arguments are those of the class, components that replace some of ``config``.
        """

    @abstractmethod
    def init_weights(self) -> None:
        """Draw the initial weights."""

    @property
    @abstractmethod
    def _weight(self) -> Tensor:
        """A weight that stands for all."""

    @property
    def device(self) -> torch.device:
        """Device on which the model computes."""
        return self._weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self._weight.dtype

    @abstractmethod
    def _read(
        self, x: Float[Tensor, "B T D"], memory: Memory, view: View
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        """Read an embedded segment; return the output of the layers and the memory after it."""

    @property
    @abstractmethod
    def _state_width(self) -> int:
        """Width of the hidden states of a memory."""

    def start_memory(self, batch_size: int, mem_len: int | None = None) -> Memory:
        """Return the initial memory of a text, empty or zeros; ``mem_len`` None: as configured."""
        mem_len = Lengths.of(self.config, mem_len=mem_len).mem_len
        M = mem_len if self.config.start_memory == "zeros" else 0
        shape = batch_size, M, self._state_width
        zeros = torch.zeros(shape, device=self.device, dtype=self.dtype)
        return Memory([zeros] * self.config.n_layer)

    def memory_bytes(self, mem_len: int) -> int:
        """Return the bytes of a full memory of one stream."""
        start = self.keep(self.start_memory(1, 0))
        widths = [x.shape[:-2].numel() * x.shape[-1] * x.element_size() for x in start.tensors]
        # A recurrent model has a single state.
        return sum(widths) * (mem_len if self.remembers_positions else 1)

    def require_capacity(self, mem_len: int, n_texts: int = 1, n_tokens: int | None = None) -> None:
        """Require that a full memory fits, and those of texts of at most ``n_tokens`` tokens.

        Raises:
            MemoryLimitError: They do not fit.
        """
        shorter = mem_len if n_tokens is None else min(mem_len, n_tokens)
        for positions, n in ((mem_len, 1), (shorter, n_texts)):
            settings = {"mem_len": positions} | ({"texts": n} if n > 1 else {})
            settings |= {name: getattr(self.config, name) for name in ("n_layer", "d_model")}
            remedy = "remember fewer positions, or generate fewer texts at once"
            needed = n * self.memory_bytes(positions)
            require_bytes("the memory, once full,", needed, self.device, settings, remedy)

    def require_trainable(self) -> None:
        """Require weights that can learn: those of every model but a compact one."""

    def require_mem_len(self, mem_len: object) -> None:
        """Require ``mem_len`` None of a model with a single recurrent state.

        Raises:
            SettingsError: ``mem_len`` would have no effect.
        """
        if mem_len is not None and not self.remembers_positions:
            raise SettingsError(
                f"mem_len={mem_len} has no effect with kind={self.kind!r}, which remembers one "
                "state of all that it has read; leave it out"
            )

    def is_own(self, mems: Memory) -> bool:
        """Whether a memory has the number of layers and the widths of this model."""
        widths = [self._state_width] * self.config.n_layer
        return not mems.has_keys and [x.shape[2] for x in mems.states] == widths

    def keep(self, memory: Memory) -> Memory:
        """Convert a memory to the fastest form for fixed weights; by default, return it."""
        return memory

    @property
    def can_rewind(self) -> bool:
        """Whether a memory without its newest positions is that of the text before them."""
        return self.remembers_positions and not self.depends_on_segments

    @property
    def depends_on_segments(self) -> bool:
        """Whether results depend on the segmentation, even with enough memory."""
        return False

    def forward(
        self,
        tokens: Integer[Tensor, "B T"] | Float[Tensor, "B T F"] | None = None,
        mems: Memory | None = None,
        targets: Integer[Tensor, "B predicted"] | Float[Tensor, "B predicted"] | None = None,
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
            tokens: The segment: tokens or, with ``n_features``, real vectors.
            mems: The ``mems`` of the previous call. None: start of a text.
            targets: The next token of each token but the first ``context``; with ``n_features``,
                the class or (``n_mixtures``) the number that each position predicts. A target of
                -100, or NaN, is ignored: its ``nll`` is 0 and it does not count in ``loss``.
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
            InputError: An argument is not a tensor of the right type; shapes are inconsistent or do
                not fit the memory; a length is out of range; a token or target is outside the
                vocabulary (not on a GPU, where a device-side assertion fails, or the loss is NaN);
                both or neither of ``tokens`` and ``inputs_embeds`` are given; ``lengths`` with
                ``ext_len``.
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
            kind = "real numbers" if self.config.n_mixtures else "integers"
            targets = require_tensor("targets", targets, kind=kind)
            least, most = (0, resolved.ext_len) if context is None else (context, context)
            B, T = segment.shape
            is_pair = targets.ndim == 2 and targets.numel() and len(targets) == B
            if not (is_pair and least <= T - targets.shape[1] <= most):
                raise InputError(
                    f"targets of shape {tuple(targets.shape)} must have the shape of the tokens, "
                    f"{B, T}" + f", but for the first {most}" * (most > 0)
                )
        if mems is None:
            mems = self.start_memory(segment.shape[0], resolved.mem_len)
        self.require_readable(segment, mems, resolved)
        # First, as a token outside the vocabulary raises here.
        x = self._embedded(segment)
        # A recurrent state is no positions, to which others are appended.
        T, appends = segment.shape[1], self.remembers_positions
        memory = mems.with_capacity(T, resolved.mem_len) if appends else mems
        raw, after = self._read(x, memory, View.of(segment, memory, resolved))
        hidden = self._dropped(raw, self.config.dropouts.output)
        out = Output(hidden=hidden, raw_hidden=raw, mems=after, targets=targets)
        mixture = self.softmax if isinstance(self.softmax, MixtureHead) else None
        if targets is None:
            if predicts and mixture is not None:
                out.mixture = mixture.mixture(hidden)
            elif predicts:
                out.log_probs = self.head.log_probs(hidden)
            return out
        head = mixture or self.head
        n = targets.shape[1]
        if segment.short is not None:
            out.is_real = segment.is_real(n)
            targets = targets.masked_fill(~out.is_real, 0)
        try:
            nll = head.nll(hidden[:, -n:], targets)
        except (IndexError, RuntimeError):
            if mixture is None:
                explain_unknown(targets, self.config.vocab_size, " of the targets", IGNORED)
            raise
        out.nll = nll if out.is_real is None else nll.masked_fill(~out.is_real, 0.0)
        return out

    def read(
        self, tokens: Tensor | None = None, mems: Memory | None = None, **options: Any
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        """Return the hidden states of a segment and the memory, without computing the softmax.

        Arguments and errors are those of :meth:`forward`.
        """
        # Through __call__, so that hooks run.
        out: Output = self(tokens, mems, **options, predicts=False)
        return out.hidden, out.mems

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
            InputError: The model has no attention, or the memory does not fit it or the segment.
        """
        with evaluating(self), self.observed(attentions=True) as record:
            self.read(tokens, mems, **options)
        return record.attentions

    def observed(self, *, attentions: bool = False) -> AbstractContextManager[Observed]:
        """Record what the layers compute in a ``with`` block; see :func:`observing.observed`.

        Raises:
            InputError: The model has no layers of this package, or no attention.
        """
        layers: Any = getattr(self, "layers", ())
        if attentions and not self.has_attention:
            raise InputError(f"a model of kind={self.config.kind!r} has no attention to look at")
        if not layers or not all(isinstance(layer, DecoderLayer) for layer in layers):
            raise InputError(
                f"a model of kind={self.config.kind!r} has no layers whose hidden states could be "
                "returned: only its last ones are, which transformer_xl.TransformerXL.read returns"
            )
        return observed(layers, attentions=attentions)

    @property
    def head(self) -> Predictor:
        """The output layer: ``softmax``, or a wrapper around what replaced it.

        Raises:
            InputError: The model has a mixture instead.
        """
        if self.config.n_mixtures:
            raise InputError(
                f"n_mixtures={self.config.n_mixtures}: the model predicts real numbers, and has no "
                "probabilities of tokens; transformer_xl.tasks.series.forecast draws what follows"
            )
        return self.softmax if isinstance(self.softmax, Predictor) else CalledSoftmax(self.softmax)

    def widened(self, embedded: Float[Tensor, "B T E"]) -> Float[Tensor, "B T D"]:
        """Project vectors of the width of the table of embeddings to that of the model."""
        embedding = unwrapped(self.embedding, "widened")
        is_narrow = embedded.shape[-1] == getattr(embedding, "embedding_dim", None)
        return embedding.widened(embedded) if is_narrow else embedded

    def _embedded(self, segment: Segment) -> Float[Tensor, "B T D"]:
        """Return the input of the first layer."""
        if segment.tokens is not None:
            x = embedded(self.embedding, segment.tokens)
        else:
            x = segment.inputs.to(self.dtype)
        return self.dropped_input(x)

    def _through(self, n: int, layer: nn.Module, *arguments: object) -> Tensor:
        """Call layer ``n``, whose activations may be recomputed in the backward pass."""
        if not (self.recompute and torch.is_grad_enabled()) or n % self.recompute_every:
            return layer(*arguments)
        if callable(self.recompute):
            return self.recompute(layer, *arguments)
        return checkpoint(layer, *arguments, use_reentrant=False)

    def _dropped(self, x: Tensor, p: float) -> Tensor:
        return dropout(x, p, self.training, self.config.variational_dropout)

    def dropped_input(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Apply the dropout of what the first layer reads, embeddings and positions."""
        return self._dropped(x, self.config.dropouts.input)

    def require_memory(self, mems: object, batch_size: int | None = None) -> None:
        """Require a memory of this model, with ``batch_size`` streams unless None.

        Raises:
            InputError: It is no memory, or differs in depth, width or batch size.
        """
        if not isinstance(mems, Memory):
            raise InputError(
                f"mems={shown(mems)} is no memory: hand in what an earlier call returned as mems, "
                "or None to begin anew"
            )
        if not self.is_own(mems):
            raise InputError(
                f"the memory is that of another model: this one has {self.config.n_layer} layers "
                f"of width {self._state_width}; use mems=None to begin anew"
            )
        if batch_size is not None and mems.batch_size != batch_size:
            raise InputError(
                f"the memory holds {mems.batch_size} streams and the segment {batch_size}; "
                "use mems.select(rows), or mems=None to begin anew"
            )

    def require_readable(self, segment: Segment, mems: Memory, lengths: Lengths) -> None:
        """Require a memory that can be continued with a segment.

        Raises:
            InputError: It is no memory of this model, or padded rows are to be read again.
        """
        if segment.short is not None and lengths.ext_len:
            raise InputError(
                f"lengths with ext_len={lengths.ext_len}: rows that end at different places cannot "
                "be read again from one place on; set ext_len to 0"
            )
        self.require_memory(mems, segment.shape[0])

    def save_pretrained(self, folder: Path | str, vocab: SavesItself | None = None) -> None:
        """Write ``config.json``, ``model.safetensors`` and, if given, the vocabulary.

        Raises:
            InputError: A part was replaced, or is not what the settings say; or the preface is not
                of the vocabulary.
        """
        with torch.device("meta"):
            described = build_model(self.config)
        kinds = [type(getattr(model, "positions", None)) for model in (described, self)]
        if kinds[0] is not kinds[1]:
            raise InputError(
                f"positions={kinds[1].__name__}: kind={self.config.kind!r} does not say so, and no "
                "folder could be loaded again; register_model adds a kind that has them"
            )
        self.require_own_weights()
        if not self.is_preface(self.preface, self.config.vocab_size):
            raise InputError(
                f"preface={self.preface!r:.60} must be tokens below {self.config.vocab_size}; "
                "model.preface = () goes without one"
            )
        about = {"preface": list(self.preface)} if self.preface else {}
        ModelFolder(Path(folder)).write(self.config, self.named_weights(), about)
        if vocab is not None:
            vocab.save(Path(folder))

    @classmethod
    def from_pretrained(cls, name: Path | str) -> "LanguageModel":
        """Load a model by its folder or name, as :func:`load_model` does.

        A subclass of a model of this package is built itself, if it has the same parameters.

        Raises:
            InputError: The model is of another kind than such a subclass, or has other parameters.
        """
        kind = getattr(cls, "kind", None)
        is_described = kind not in BUILDERS or builder(kind) is cls
        return ModelFolder.find(name).load(build_model if is_described else cls)

    def named_weights(self) -> dict[str, Tensor]:
        """Return the weights by name, on the CPU, tied weights once."""
        # named_parameters() omits the second name of a tied weight.
        return {name: x.detach().cpu().contiguous() for name, x in self.named_parameters()}

    @torch.no_grad()
    def copy_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights into the model, by name."""
        for name, parameter in self.named_parameters():
            parameter.copy_(weights[name])

    def require_own_weights(self) -> None:
        """Require exactly the parameters that ``config`` implies, as a model folder holds them.

        Raises:
            InputError: A parameter is missing or unexpected.
        """
        expected = weight_shapes(self.config).keys()
        names = {name for name, _ in self.named_parameters()}
        for other, what in ((names - expected, "has"), (expected - names, "lacks")):
            if other:
                raise InputError(
                    f"the model {what} {min(other)}, as a part of it was wrapped or replaced: no "
                    "model folder can hold that. Save the adapter alone (the save_pretrained of "
                    "PEFT's model), or merge it first (model.merge_and_unload())"
                )

    @staticmethod
    def is_preface(tokens: object, vocab_size: int) -> TypeGuard[Sequence[int]]:
        """Whether a value is a list of tokens of a vocabulary."""
        if not isinstance(tokens, list | tuple):
            return False
        return all(type(x) is int and 0 <= x < vocab_size for x in tokens)
