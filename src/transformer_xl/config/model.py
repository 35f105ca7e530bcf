"""Settings of the models: a class for each kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

from transformer_xl.config.checks import (
    Count,
    Fraction,
    Items,
    Length,
    Positive,
    Range,
    Unused,
    UnusedError,
    check,
    fields_of,
    near,
    plain,
    refuse_unused,
    require,
)
from transformer_xl.config.gone import without_gone
from transformer_xl.config.model_types import Activation, Cluster, Dropouts, Quirk
from transformer_xl.errors import InputError

MOST_CUTOFFS = 1_000
"""Maximum number of cutoffs of an adaptive softmax; the paper has three."""

KINDS: "dict[str, type[ModelConfig]]" = {}
"""The class of the settings of each kind of model."""

_GONE_KINDS = ("mamba2", "rwkv", "xlnet", "xlstm")

_OF_TABLES = (
    *("reset_at", "d_embed", "cutoffs", "div_val", "tie_embeddings", "tie_projections"),
    *("proj_same_dim", "embed_dropout", "completion_at"),
)
"""Settings of the token embeddings, and of what a softmax shares with them."""


class _ByKind(type):
    """Makes the settings of a kind by the class of the kind, whichever class is called."""

    def __call__(cls, **settings: Any) -> Any:
        kind = settings.get("kind", fields_of(cls)["kind"].default)
        if cls in _CLASSES:
            _require_kind(kind)
            cls, settings = _of_kind(kind, without_gone(settings, "model"))
        return super().__call__(**settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(metaclass=_ByKind):
    """Settings that all kinds of models have. Widths are in features, lengths in tokens.

    Each kind has a class with its own settings: :class:`TransformerXLConfig`, :class:`GPTConfig`
    and so on. ``ModelConfig(kind=..., ...)`` makes one of the class of the kind.

    Raises:
        SettingsError: A setting is out of range or incompatible with another one.

    Example:
        >>> type(ModelConfig(kind="lstm")).__name__
        'LSTMConfig'
        >>> ModelConfig(n_layer=0)
        Traceback (most recent call last):
        transformer_xl.errors.SettingsError: model.n_layer=0 must be above 0
    """

    kind: str = "transformer_xl"
    """The architecture: the paper's Transformer-XL; or, to compare with, another one with its
    embedding and softmax: a GPT with rotary positions (with mem_len, its keys and values are
    carried across segments), or an LSTM. One of transformer_xl, gpt, lstm, or a kind that was
    registered (transformer_xl.register_model)."""
    vocab_size: Length = 0
    """Number of tokens in the vocabulary; 0: as in the vocabulary of the corpus."""
    n_features: Length = 0
    """Real-valued inputs: each position is a vector of this many numbers, embedded by a linear
    projection. 0: tokens. With a softmax, vocab_size is the number of classes of the targets."""
    n_mixtures: Length = 0
    """Real-valued outputs, which need n_features: a mixture of this many normal distributions
    (Bishop, 1994) over one number per position. 0: a softmax over the vocabulary."""
    reset_at: Length | None = None
    """ID of a token at which a new text begins: it and what follows attend to nothing before it.
    None: that of data.reset_at, if any."""
    completion_at: Length | None = None
    """ID of a token after which a completion begins, which ends with the next such token or
    reset_at: evaluation and training count only the tokens of completions. None: that of
    data.completion_at, if any."""
    n_layer: Count = 12
    """Number of layers."""
    d_model: Count = 512
    """Width of the hidden states."""
    d_embed: Count | None = None
    """Width of the token embeddings; None: d_model. Another width adds a projection."""
    cutoffs: Annotated[tuple[Count, ...], Items(0, MOST_CUTOFFS)] = ()
    """Adaptive softmax: where, among words sorted by frequency, each further cluster begins."""
    div_val: Count = 1
    """Adaptive softmax: the embeddings of each further cluster are narrower by this factor."""
    mem_len: Length = 512
    """Memory length: how many past positions each layer keeps. 0: no recurrence."""
    tie_embeddings: bool = True
    """Share the weights of the softmax with the token embeddings."""
    tie_projections: bool | tuple[bool, ...] = False
    """Share the projections of the softmax with those of the embeddings; one value, or one for each
    cluster."""
    sample_softmax: Length = 0
    """Of models that earlier versions trained with a sampled softmax; to train, it must be 0."""
    dropout: Fraction = 0.1
    """Dropout on embeddings, positions, block outputs, feed-forward units and the last output."""
    embed_dropout: Fraction = 0.0
    """Embedding dropout: share of the words whose embedding is zero in a step; never that of
    completion_at or reset_at, nor of the first word of a segment."""
    input_dropout: Fraction | None = None
    """Dropout on the embeddings and positions; None: dropout."""
    output_dropout: Fraction | None = None
    """Dropout on the output of the last layer; None: dropout."""
    variational_dropout: bool = False
    """Variational dropout: one mask for all positions of a segment (Gal and Ghahramani, 2016)."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights."""
    proj_init_std: Positive = 0.01
    """Standard deviation of the initial embedding projections."""

    has_attention = False

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A setting that the kind does not have is at its default; see below."""

    @classmethod
    def classes(cls) -> "tuple[type[ModelConfig], ...]":
        """Return the class, or those of all kinds for :class:`ModelConfig` itself."""
        return (AuthorsConfig, *KINDS.values()) if cls is ModelConfig else (cls,)

    @staticmethod
    def register(kind: str, settings_of: str) -> None:
        """Let models of a kind have the settings of another one.

        Raises:
            InputError: ``kind`` is one of this package, or ``settings_of`` is none.
        """
        built_in = {name for name, x in KINDS.items() if fields_of(x)["kind"].default == name}
        if kind in built_in:
            raise InputError(f"kind={kind!r} is one of this package: choose another name")
        if settings_of not in built_in:
            raise InputError(f"settings_of={settings_of!r} is no kind of this package")
        KINDS[kind] = KINDS[settings_of]

    def __post_init__(self) -> None:
        check(self, "model")
        _require_kind(self.kind)
        refuse_unused(self, self.unused())
        require(
            self.n_features > 0 or self.n_mixtures == 0,
            f"n_mixtures={self.n_mixtures} with n_features=0: tokens are followed by tokens, which "
            "have a softmax; set n_features to the width of the real-valued inputs",
        )
        self._check_clusters()
        require(
            self.reset_at is None or self.reset_at < (self.vocab_size or float("inf")),
            f"reset_at={self.reset_at} must be the number of a symbol, from 0 to below "
            f"vocab_size={self.vocab_size}",
        )
        require(
            self.completion_at is None
            or (
                self.reset_at not in (None, self.completion_at)
                and self.completion_at < (self.vocab_size or float("inf"))
            ),
            f"completion_at={self.completion_at} with reset_at={self.reset_at}: a completion ends "
            "where the next document begins, so reset_at must be another token, and both must be "
            f"below vocab_size={self.vocab_size}",
        )
        self._check_own()

    def _check_own(self) -> None:
        """Check what the kind requires."""

    def _check_clusters(self) -> None:
        ends = (0, *self.cutoffs, *([self.vocab_size] if self.vocab_size else []))
        require(
            all(a < b for a, b in pairwise(ends)),
            f"cutoffs={self.cutoffs} must rise from above 0 to below vocab_size={self.vocab_size}",
        )
        last = self.embed_width // self.div_val ** len(self.cutoffs)
        require(
            last > 0,
            f"div_val={self.div_val} leaves nothing of d_embed={self.embed_width} for the last of "
            f"{len(self.cutoffs) + 1} clusters",
        )
        ties = self.tie_projections
        require(
            isinstance(ties, bool) or len(ties) == len(self.cutoffs) + 1,
            f"tie_projections={ties} must be one answer, or one for each of the "
            f"{len(self.cutoffs) + 1} clusters that cutoffs={self.cutoffs} make",
        )

    def unused(self) -> Iterator[Unused]:
        """Yield the settings without effect.

        Settings of absent parts that the paper's own configurations contain are accepted:
        ``variational_dropout`` without dropout, ``tie_projections`` and ``proj_init_std`` without
        projections.
        """
        for name in ("attn_len", "clamp_len", "ext_len"):
            if name not in fields_of(type(self)):
                yield Unused(name, f"kind={self.kind!r}, which has no such part")
        if self.n_features:
            about = f"n_features={self.n_features}: inputs are no tokens, and have no table"
            yield from (Unused(name, about) for name in _OF_TABLES)
        if self.n_mixtures:
            about = f"n_mixtures={self.n_mixtures}: the targets are numbers, not symbols"
            yield from (Unused(name, about) for name in ("vocab_size", "sample_softmax"))

    @property
    def family(self) -> str:
        """The kind of this package whose settings these are: ``kind``, unless it was registered."""
        return str(fields_of(KINDS[self.kind])["kind"].default)

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The clusters of the vocabulary; a single one without ``cutoffs``."""
        ties = self.tie_projections
        ties = (ties,) * (len(self.cutoffs) + 1) if isinstance(ties, bool) else ties
        found = []
        for i, (start, stop) in enumerate(pairwise((0, *self.cutoffs, self.vocab_size))):
            width = self.embed_width // self.div_val**i
            # With one table for all clusters, there is no projection to the same width.
            has_proj = width != self.d_model or (self.div_val > 1 and self.proj_same_dim)
            found.append(Cluster(start, stop, width, has_proj, has_proj and ties[i]))
        return tuple(found)

    @property
    def dropouts(self) -> Dropouts:
        """The resolved dropout probabilities."""
        own = (self.input_dropout, self.ff_dropout, self.output_dropout)
        return Dropouts(*(self.dropout if share is None else share for share in own))

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward layer is gated (GLU)."""
        return self.activation in ("geglu", "swiglu")

    @property
    def head_width(self) -> int:
        """Width of one head, with the default of ``d_head`` resolved."""
        return self.d_head or self.d_model // self.n_head

    @property
    def embed_width(self) -> int:
        """Width of the embeddings, with the default of ``d_embed`` resolved."""
        return self.d_embed or self.d_model


@dataclass(frozen=True, kw_only=True, slots=True)
class _WithHeads(ModelConfig):
    """Settings of attention, of its feed-forward layers and normalizations."""

    n_head: Count = 8
    """Number of attention heads in each layer."""
    d_head: Count | None = None
    """Width of one attention head; None: d_model / n_head."""
    d_inner: Count = 2048
    """Width of the feed-forward layer; with a gated activation, 2/3 of it has as many weights."""
    activation: Activation = "relu"
    """Activation of the feed-forward layer: ReLU (the paper), squared ReLU, GELU, GEGLU or
    SwiGLU."""
    attn_len: Count | None = None
    """Attention length: how many keys a query sees, counting its own; None: all of memory and
    segment."""
    layer_attn_lens: tuple[Count, ...] = ()
    """Attention length of each layer, the lowest first, so that memory lengths differ by layer; all
    store mem_len positions. The smaller of it and attn_len holds; empty: attn_len in all."""
    ext_len: Length = 0
    """Extended context: positions before each segment that are read again with it instead of being
    kept in memory."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm (the paper) or RMSNorm."""
    norm_eps: Positive = 1e-5
    """Epsilon of the normalization."""
    qk_norm: bool = False
    """Normalize the queries and keys of each head before the biases u and v are added; not the keys
    of positions."""
    key_offset: bool = False
    """Partial key offset: the second half of each key is that of the token before, so that one
    layer finds what followed a token (modded-nanogpt)."""
    scalable_softmax: Annotated[int, Range(ge=2)] | None = None
    """Scale queries that see more keys than this with the logarithm of how many, for each head by a
    learned factor, so that more keys do not make attention more diffuse (Nakanishi, 2025)."""
    attn_dropout: Fraction = 0.0
    """Dropout on the attention weights."""
    ff_dropout: Fraction | None = None
    """Dropout on the units inside the feed-forward layers; None: dropout."""

    has_attention = True

    def _check_own(self) -> None:
        require(
            self.d_head is not None or self.d_model % self.n_head == 0,
            f"n_head={self.n_head} must divide d_model={self.d_model}; "
            "change one of them or set d_head",
        )
        require(
            len(self.layer_attn_lens) in (0, self.n_layer),
            f"layer_attn_lens={self.layer_attn_lens} must be one length for each of n_layer="
            f"{self.n_layer} layers, or none",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerXLConfig(_WithHeads):
    """Settings of a Transformer-XL (Dai et al., 2019) and of its variants."""

    attn_type: Annotated[int, Range(ge=0, le=3)] = 0
    """Positions: 0 relative (the paper), 1 learned relative (Shaw et al.), 2 absolute sinusoidal, 3
    absolute learned."""
    n_positions: Count | None = None
    """Rows of the learned table of attn_type 1 and 3, usually segment_len + mem_len; farther
    positions take the last."""
    clamp_len: Length | None = None
    """Relative distances above this one count as this one; None: no clamping."""
    norm_first: bool = False
    """Pre-norm: each block normalizes its input. False (the paper): post-norm."""
    gate: Literal["none", "gru"] = "none"
    """Residual connections (the paper), or the GRU gates of GTrXL, which need pre-norm."""
    final_norm: bool = False
    """Normalize the output of the last layer, for pre-norm; the authors' pre-norm does not."""
    tie_biases: bool = True
    """Share the attention biases u and v across layers (the paper)."""
    embedding_residual: bool = False
    """Embedding residuals: the input of every layer but the first is a learned mix of the output
    of the layer before it and the normalized input of the first layer."""
    input_recurrence: bool = False
    """Add to the embedding of each token the input of the token before it, times a learned factor
    for each feature: a linear recurrence, which the memory carries across segments."""
    enhanced_recurrence: bool = False
    """Keep the output of each layer in its memory instead of its input (ERNIE-Doc)."""

    def _check_own(self) -> None:
        _WithHeads._check_own(self)
        require(
            (self.n_positions is not None) == (self.attn_type in (1, 3)),
            f"attn_type={self.attn_type} with n_positions={self.n_positions}: attn_type 1 and 3 "
            "need it, usually segment_len + mem_len, and the others have no table",
        )
        require(
            self.d_model % 2 == 0 or self.attn_type in (1, 3),
            f"d_model={self.d_model} must be even: position encodings are pairs of sine and cosine",
        )
        require(
            self.gate == "none" or self.norm_first,
            f"gate={self.gate!r} needs norm_first=True: a normalization behind the gates would "
            "undo the way around the layers that they leave open",
        )
        require(
            not (self.enhanced_recurrence and self.attn_type in (2, 3)),
            f"enhanced_recurrence=True with attn_type={self.attn_type}: absolute positions would "
            "be added to states that hold older ones; use attn_type 0 or 1",
        )
        require(
            not (self.key_offset and self.enhanced_recurrence),
            "key_offset=True with enhanced_recurrence=True: a key has a part of the input of the "
            "position before, and the memory holds outputs; choose one",
        )
        require(
            not self.embedding_residual or self.n_layer > 1,
            f"embedding_residual=True with n_layer={self.n_layer}: there is no layer behind the "
            "first",
        )
        require(
            not (self.input_recurrence and self.enhanced_recurrence),
            "input_recurrence=True with enhanced_recurrence=True: the memory of the first layer "
            "holds its outputs, not the input that the recurrence continues; choose one",
        )
        require(
            not (self.input_recurrence and "stored_positions" in self.quirks),
            "input_recurrence=True with the quirk stored_positions: the memory of the first layer "
            "holds inputs with positions added to them; choose one",
        )

    def unused(self) -> Iterator[Unused]:
        """Yield the settings without effect."""
        yield from ModelConfig.unused(self)
        about = f"attn_type={self.attn_type}"
        if self.attn_type == 3:
            yield Unused("clamp_len", f"{about}: distances end with the table, at n_positions")
        if self.attn_type in (2, 3):
            yield Unused("tie_biases", f"{about}, which has no attention biases")


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthorsConfig(TransformerXLConfig):
    """Settings of a Transformer-XL that recipes and checkpoints of other implementations have."""

    start_memory: Literal["empty", "zeros"] = "empty"
    """Memory at the start of a text: empty, or mem_len zero states that are attended to."""
    proj_same_dim: bool = True
    """With div_val > 1: project a cluster that is as wide as the model, too."""
    init: Literal["normal", "uniform"] = "normal"
    """Distribution of the initial weights: normal with init_std, or uniform within init_range of 0.
    Weights of normalizations and projections of embeddings are normal either way."""
    init_range: Positive = 0.1
    """Largest size of the initial weights with init uniform."""
    embed_init: Literal["normal", "uniform"] | None = None
    """Distribution of the initial token embeddings; None: as init."""
    embed_init_range: Positive = 0.01
    """Largest size of the initial token embeddings with embed_init uniform."""
    qkv_dropout: Fraction = 0.0
    """Dropout on queries, keys and values, and on the keys of relative positions."""
    quirks: tuple[Quirk, ...] = ()
    """Deviations of the authors' code on which a converted checkpoint depends."""

    def unused(self) -> Iterator[Unused]:
        """Yield the settings without effect."""
        yield from TransformerXLConfig.unused(self)
        if self.init == "normal":
            yield Unused("init_range", "init='normal'")
        if self.embed_init != "uniform":
            yield Unused("embed_init_range", f"embed_init={self.embed_init!r}")
        about = f"attn_type={self.attn_type}"
        if self.attn_type in (0, 1):
            yield Unused("quirks", f"{about}: no positions are stored", "stored_positions")
        if self.attn_type in (1, 3):
            yield Unused("quirks", f"{about}, which has no sinusoids", "exact_frequencies")
        if not self.norm_first:
            yield Unused("quirks", "norm_first=False: no queries are normalized", "raw_queries")
        widths = [self.embed_width // self.div_val**i for i in range(len(self.cutoffs) + 1)]
        if self.div_val == 1 or self.d_model not in widths:
            about = f"div_val={self.div_val} and clusters of the widths {widths}"
            yield Unused("proj_same_dim", f"{about}: no projection is left out")


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig(_WithHeads):
    """Settings of a GPT with rotary positions."""

    kind: str = "gpt"
    """The kind, or one that was registered with these settings."""

    def _check_own(self) -> None:
        _WithHeads._check_own(self)
        require(
            self.head_width % 2 == 0,
            f"d_head={self.head_width} must be even with kind='gpt': rotary positions rotate pairs",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LSTMConfig(ModelConfig):
    """Settings of an LSTM."""

    kind: str = "lstm"
    """The kind, or one that was registered with these settings."""


KINDS |= {
    "transformer_xl": TransformerXLConfig,
    "lstm": LSTMConfig,
    "gpt": GPTConfig,
}
_CLASSES = {ModelConfig, AuthorsConfig, *KINDS.values()}

for _name, _field in fields_of(ModelConfig).items():
    if _name not in ModelConfig.__dict__:
        setattr(ModelConfig, _name, _field.default)


def _require_kind(kind: object) -> None:
    """Require a kind that is known, before the settings, of which each kind has its own."""
    require(
        kind not in _GONE_KINDS,
        f"model.kind={kind!r} is gone; there are {', '.join(map(repr, KINDS))}; revision 47b3a2d "
        "of transformer_xl trains and loads it",
    )
    nearest = near(kind, KINDS) if isinstance(kind, str) else None
    require(
        isinstance(kind, str) and kind in KINDS,
        f"model.kind={kind!r} is unknown; choose from {', '.join(map(repr, KINDS))}"
        + (f"; did you mean {nearest!r}?" if nearest else "; register_model adds one"),
    )


def _of_kind(kind: str, settings: dict[str, Any]) -> tuple[type[ModelConfig], dict[str, Any]]:
    """Return the class for settings of a kind, and the settings without those it does not have.

    Raises:
        UnusedError: A setting of another kind is not at its default, as earlier versions stored it.
    """
    target, known = KINDS[kind], fields_of(ModelConfig)
    for name in (settings.keys() - fields_of(target).keys()) & known.keys():
        value, default = plain(settings[name]), known[name].default
        if value == default:
            settings.pop(name)
        elif issubclass(target, TransformerXLConfig) and name in fields_of(AuthorsConfig):
            target = AuthorsConfig
        else:
            message = (
                f"{name}={value!r} has no effect with kind={kind!r}, which has no such part; leave "
                f"it at {default!r}, or change the other"
            )
            raise UnusedError(message, target, name, default)
    return target, settings
