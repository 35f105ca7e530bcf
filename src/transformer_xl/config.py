"""Settings of a model, its data, its training and its evaluation, as frozen dataclasses.

A recipe file is one :class:`Config`; the command line overrides single fields as
``--section.key value``. The line below a field is its help text. Needs only the standard library.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

FORMAT_VERSION = 1
"""Version of the model folder, the run folder and the corpus folder; older ones keep loading."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _require_fraction(name: str, value: float) -> None:
    _require(0 <= value < 1, f"{name}={value} must be at least 0 and below 1")


def _require_positive(name: str, value: float | None) -> None:
    _require(value is None or value > 0, f"{name}={value} must be above 0")


class Cluster(NamedTuple):
    """Neighbouring words that share the width of their embeddings."""

    start: int
    """Its first word."""
    stop: int
    """The first word behind it."""
    width: int
    """Width of its embeddings."""
    has_proj: bool
    """Its embeddings are projected to the width of the model."""
    ties_proj: bool
    """The softmax uses that projection too."""


Quirk = Literal["stored_positions", "swapped_ext_len", "raw_queries", "exact_frequencies"]
"""Where the authors' code departs from what it means to do.

* ``stored_positions`` (attn_type 2 and 3): the memory is stored with its positions added, and
  they are added again each time that it is read.
* ``swapped_ext_len``: while the memory is shorter than ``ext_len``, it also keeps tokens that are
  going to be read again.
* ``raw_queries`` (attn_type 2 and 3, pre-norm): keys and values are normalized, queries are not.
* ``exact_frequencies``: the frequencies of the sinusoids are not rounded to float32, as
  TensorFlow does not when it computes in float64.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What the network is. Widths and lengths are counts of numbers and of tokens.

    Raises:
        ValueError: A setting is out of range or does not fit another one.
    """

    vocab_size: int = 0
    """Number of symbols; 0 takes it from the vocabulary of the corpus."""
    n_layer: int = 12
    """Number of layers."""
    n_head: int = 8
    """Attention heads in each layer."""
    d_model: int = 512
    """Width of the hidden states."""
    d_head: int | None = None
    """Width of one attention head; None: d_model / n_head."""
    d_inner: int = 2048
    """Width of the feed-forward layer."""
    d_embed: int | None = None
    """Width of the word embeddings; None: d_model. Another width adds a projection."""
    attn_type: Literal[0, 1, 2, 3] = 0
    """Positions: 0 relative (the paper), 1 learned relative (Shaw), 2 sinusoids, 3 learned."""
    n_positions: int | None = None
    """Rows of the table of attn_type 1 and 3, usually segment_len + mem_len; beyond: the last."""
    cutoffs: tuple[int, ...] = ()
    """Adaptive softmax: where, among words sorted by frequency, each further cluster begins."""
    div_val: int = 1
    """Embeddings of each further cluster are narrower by this factor."""
    mem_len: int = 512
    """How many past positions each layer remembers. 0: no recurrence."""
    ext_len: int = 0
    """Positions before each segment that are read again with it instead of being remembered."""
    attn_len: int | None = None
    """How far back a token looks, in tokens, itself included; None: all of memory and segment."""
    clamp_len: int | None = None
    """Distances above this one count as this one; None: no clamping."""
    start_memory: Literal["empty", "zeros"] = "empty"
    """What the first segment finds: nothing, or mem_len zero states that it attends to."""
    norm_first: bool = False
    """Pre-norm: each block normalizes its input. False, the paper: it normalizes its output."""
    final_norm: bool = False
    """A last normalization after the layers; for pre-norm. The authors' pre-norm has none."""
    tie_biases: bool = True
    """All layers share the two attention biases (u and v of the paper); False: each its own."""
    tie_embeddings: bool = True
    """The softmax uses the word embeddings as its weights."""
    tie_projections: bool | tuple[bool, ...] = False
    """The softmax uses the projections of the embeddings too; one answer, or one per cluster."""
    proj_same_dim: bool = True
    """With div_val > 1: a projection also for a cluster as wide as the model."""
    sample_softmax: int = 0
    """Train against this many words drawn log-uniformly instead of all; 0: against all."""
    dropout: float = 0.1
    """Dropout on embeddings, positions, block outputs, feed-forward units and the last layer."""
    attn_dropout: float = 0.0
    """Dropout on the attention weights."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    proj_init_std: float = 0.01
    """Standard deviation of the initial embedding projections."""
    norm_eps: float = 1e-5
    """Constant of the layer normalization."""
    quirks: tuple[Quirk, ...] = ()
    """Deviations of the authors' code on which a converted checkpoint depends."""

    def __post_init__(self) -> None:
        _require(self.vocab_size >= 0, f"vocab_size={self.vocab_size} must be at least 0")
        for name in ("n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "attn_len"):
            _require_positive(name, getattr(self, name))
        for name in ("n_positions", "div_val"):
            _require_positive(name, getattr(self, name))
        for name in ("init_std", "proj_init_std", "norm_eps"):
            _require_positive(name, getattr(self, name))
        for name in ("mem_len", "ext_len", "sample_softmax"):
            _require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be at least 0")
        _require(
            (self.n_positions is not None) == (self.attn_type in (1, 3)),
            f"attn_type={self.attn_type} with n_positions={self.n_positions}: attn_type 1 and 3 "
            "need it, usually segment_len + mem_len, and the others have no table",
        )
        self._check_clusters()
        _require(
            self.clamp_len is None or self.clamp_len >= 0,
            f"clamp_len={self.clamp_len} must be at least 0, or None for no clamping",
        )
        _require(
            self.d_head is not None or self.d_model % self.n_head == 0,
            f"n_head={self.n_head} must divide d_model={self.d_model}; "
            "change one of them or set d_head",
        )
        _require(
            self.d_model % 2 == 0 or self.attn_type in (1, 3),
            f"d_model={self.d_model} must be even: position encodings are pairs of sine and cosine",
        )
        _require_fraction("dropout", self.dropout)
        _require_fraction("attn_dropout", self.attn_dropout)

    def _check_clusters(self) -> None:
        ends = (0, *self.cutoffs, *([self.vocab_size] if self.vocab_size else []))
        _require(
            all(a < b for a, b in pairwise(ends)),
            f"cutoffs={self.cutoffs} must rise from above 0 to below vocab_size={self.vocab_size}",
        )
        last = self.embed_width // self.div_val ** len(self.cutoffs)
        _require(
            last > 0,
            f"div_val={self.div_val} leaves nothing of d_embed={self.embed_width} for the last of "
            f"{len(self.cutoffs) + 1} clusters",
        )
        ties = self.tie_projections
        _require(
            isinstance(ties, bool) or len(ties) == len(self.cutoffs) + 1,
            f"tie_projections={ties} must be one answer, or one for each of the "
            f"{len(self.cutoffs) + 1} clusters that cutoffs={self.cutoffs} make",
        )
        _require(
            not (self.sample_softmax and (self.cutoffs or self.div_val > 1)),
            f"sample_softmax={self.sample_softmax} and cutoffs={self.cutoffs} are two ways to the "
            "same end: choose one",
        )

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The clusters of the vocabulary; a single one without ``cutoffs``."""
        ties = self.tie_projections
        ties = (ties,) * (len(self.cutoffs) + 1) if isinstance(ties, bool) else ties
        ends = (0, *self.cutoffs, self.vocab_size)
        found = []
        for i, (start, stop) in enumerate(pairwise(ends)):
            width = self.embed_width // self.div_val**i
            same = width == self.d_model
            # With one table for all clusters, a projection of the same width is never there.
            has_proj = not same or (self.div_val > 1 and self.proj_same_dim)
            found.append(Cluster(start, stop, width, has_proj, has_proj and ties[i]))
        return tuple(found)

    @property
    def head_width(self) -> int:
        """Width of one head, also where ``d_head`` is left to the default."""
        return self.d_head or self.d_model // self.n_head

    @property
    def embed_width(self) -> int:
        """Width of the embeddings, also where ``d_embed`` is left to the default."""
        return self.d_embed or self.d_model


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which text, cut into which symbols, split how."""

    name: str = ""
    """A corpus known to `txl prepare`, such as tiny-shakespeare; empty: the text at data.path."""
    path: str | None = None
    """File or folder with the text; for a known corpus, a copy of it that is already here."""
    valid_path: str | None = None
    """File or folder with the validation text; None: split it off the text."""
    test_path: str | None = None
    """File or folder with the test text; None: split it off the text."""
    split_by: Literal["fraction", "file"] = "fraction"
    """Split off the end of the text, or whole files spread over the text."""
    valid_fraction: float = 0.05
    """Share of the text held out for validation when no validation text is given."""
    test_fraction: float = 0.05
    """Share of the text held out for the test when no test text is given."""
    vocab: Literal["bytes", "chars", "words", "bpe"] = "bytes"
    """Symbols: bytes, characters, words (an <eos> ends each line), or byte-pair units."""
    vocab_size: int | None = None
    """Largest number of symbols for words and bpe; None: all words, 4,096 byte-pair units."""
    cache_dir: str | None = None
    """Where token files are kept; None: TXL_CACHE, else ~/.cache/transformer_xl."""

    def __post_init__(self) -> None:
        _require_positive("vocab_size", self.vocab_size)
        _require_fraction("valid_fraction", self.valid_fraction)
        _require_fraction("test_fraction", self.test_fraction)
        held_out = self.valid_fraction + self.test_fraction
        _require(
            held_out < 1,
            f"valid_fraction + test_fraction = {held_out} leaves no text to train on",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the model is trained. A step is one update of the weights."""

    steps: int = 10_000
    """Number of steps."""
    minutes: float | None = None
    """Train no longer than this: the cooldown begins early enough. Needs constant_cooldown."""
    batch_size: int = 32
    """Streams of text read side by side; each keeps its own memory."""
    segment_len: int = 128
    """Tokens of each stream in a step."""
    accumulate: int = 1
    """Parts into which the streams of a step are divided to save memory; the sum is the same."""
    loss: Literal["full", "half"] = "full"
    """Learn from all tokens of a segment, or from its second half only (Table 6 of the paper)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for everything, or Muon for the matrices in the layers and AdamW for the rest."""
    lr: float = 2.5e-4
    """Peak learning rate of AdamW."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon."""
    weight_decay: float = 0.0
    """How fast matrices shrink without a gradient, as a share of lr (decoupled weight decay)."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.999
    """AdamW's decay of the mean squared gradient."""
    eps: float = 1e-8
    """AdamW's constant in the denominator."""
    schedule: Literal["cosine", "inverse_sqrt", "constant_cooldown"] = "cosine"
    """Learning rate after the warm-up: half a cosine, step**-0.5, or constant and then linear."""
    warmup_steps: int = 0
    """Steps of linear rise from zero at the beginning."""
    cooldown_fraction: float = 0.3
    """Share of the steps in which constant_cooldown falls."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end (inverse_sqrt: at the least), as a share of the peak."""
    clip_norm: float = 0.25
    """Largest norm of the gradient; larger ones are scaled down. 0: no clipping."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the matrix products; auto: bfloat16 where the hardware has it."""
    compile: bool = False
    """Compile the model with torch.compile: slow to begin, meant for long runs on a GPU."""
    seed: int = 1
    """Seed of the initial weights and of dropout."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    eval_every: int = 500
    """Steps between two evaluations on the validation text; 0: only at the end."""
    save_every: int = 500
    """Steps between two checkpoints; 0: only at the end and when interrupted."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "segment_len", "accumulate", "lr", "muon_lr", "eps"):
            _require_positive(name, getattr(self, name))
        for name in ("log_every", "keep_checkpoints", "minutes"):
            _require_positive(name, getattr(self, name))
        for name in ("warmup_steps", "eval_every", "save_every", "weight_decay", "clip_norm"):
            _require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be at least 0")
        for name in ("beta1", "beta2"):
            _require_fraction(name, getattr(self, name))
        for name in ("cooldown_fraction", "min_lr_ratio"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"{name}={value} must be between 0 and 1")
        _require(
            self.batch_size % self.accumulate == 0,
            f"accumulate={self.accumulate} must divide batch_size={self.batch_size}",
        )
        _require(
            self.minutes is None
            or (self.schedule == "constant_cooldown" and 0 < self.cooldown_fraction < 1),
            f"minutes={self.minutes} needs schedule=constant_cooldown and a cooldown_fraction "
            "above 0 and below 1: only then can the end be chosen while the training runs",
        )
        _require(
            self.warmup_steps <= self.steps,
            f"warmup_steps={self.warmup_steps} is more than steps={self.steps}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How the model is evaluated: lengths that may differ from those of training."""

    split: Literal["train", "valid", "test"] = "valid"
    """Which part of the corpus."""
    segment_len: int | None = None
    """Tokens read at once; None: as in training."""
    mem_len: int | None = None
    """Remembered positions; None: as the model was trained."""
    attn_len: int | None = None
    """How far back a token looks, itself included; None: as trained. A large one: no limit."""
    clamp_len: int | None = None
    """Distances above it count as it; None: as the model was trained. A large one: no limit."""
    ext_len: int | None = None
    """Positions before each segment that are read again with it; None: as the model was trained."""
    batch_size: int = 1
    """Parts of the text read side by side, each warmed up on the text before it."""
    mem_lens: tuple[int, ...] = ()
    """Memory lengths of the table at the end of training."""

    def __post_init__(self) -> None:
        for name in ("segment_len", "attn_len", "batch_size"):
            _require_positive(name, getattr(self, name))
        for name in ("mem_len", "clamp_len", "ext_len"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"{name}={value} must be at least 0")
        for length in self.mem_lens:
            _require(length >= 0, f"mem_lens holds {length}; each must be at least 0")

    @property
    def lengths(self) -> dict[str, int | None]:
        """What overrides the lengths of the model, by name."""
        names = ("mem_len", "attn_len", "clamp_len", "ext_len")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """How text is drawn from the model."""

    prompt: str = "\n"
    """Text to continue."""
    length: int = 500
    """Tokens to write; 0: without end on the command line, none in the report."""
    temperature: float = 1.0
    """Below 1 safer, above 1 wilder; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only; None: from all."""
    top_p: float | None = None
    """Draw from the fewest tokens that together have this probability; None: from all."""
    seed: int = 1
    """Seed of the draw: the same seed writes the same text."""

    def __post_init__(self) -> None:
        _require(self.length >= 0, f"length={self.length} must be at least 0")
        _require(self.temperature >= 0, f"temperature={self.temperature} must be at least 0")
        _require_positive("top_k", self.top_k)
        _require(
            self.top_p is None or 0 < self.top_p <= 1,
            f"top_p={self.top_p} must be above 0 and at most 1",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run needs: one recipe."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
