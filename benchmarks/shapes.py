"""What is measured: the shapes of the models, what one process has to do, and how much that is."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from transformer_xl.config import ModelConfig

Work = Literal["training", "evaluation", "generation"]
Precision = Literal["float32", "bfloat16", "bfloat16_weights", "int8_weights"]


@dataclass(frozen=True)
class Shape:
    """A model, and what it reads in one step."""

    n_layer: int
    d_model: int
    n_head: int
    d_inner: int
    length: int
    mem_len: int
    batch: int
    vocab: int = 205
    cutoffs: tuple[int, ...] = ()
    """Where the clusters of an adaptive softmax begin; only ours has one."""
    div_val: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


_WORDS = (267_735, (19_997, 39_997, 199_997))
SHAPES = {
    "base": Shape(12, 512, 8, 2048, 512, 512, 2),
    "small": Shape(6, 256, 8, 1024, 128, 128, 16),
    "demo": Shape(4, 192, 4, 768, 128, 128, 16, 4096),
    # The paper's enwik8, and NVIDIA's two for WikiText-103, of the second as many streams as leave
    # room on 80 GB for two ways at once.
    "enwik8": Shape(12, 512, 8, 2048, 512, 512, 22, 204),
    "nvidia-base": Shape(16, 512, 8, 2048, 192, 192, 256, *_WORDS),
    "nvidia-large": Shape(18, 1024, 16, 4096, 384, 384, 48, *_WORDS, 4),
    # The recipe ptb-word: heads of width 38.
    "ptb-word": Shape(16, 380, 10, 900, 70, 70, 128, 10_000),
    "tiny": Shape(2, 32, 2, 64, 8, 8, 2, 50),
    "tiny-words": Shape(2, 32, 2, 64, 8, 8, 2, 50, (10, 30), 2),
}


@dataclass(frozen=True)
class Job:
    """What one process does; all that take turns do the same."""

    work: Work
    shape: Shape
    precision: Precision
    dropout: float = 0.0
    device: str = "cpu"
    compiled: bool = False

    @property
    def product_dtype(self) -> torch.dtype:
        """Precision of the operands of products."""
        return torch.float32 if self.precision == "float32" else torch.bfloat16

    def to_json(self) -> str:
        """Return the job as a word of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Read what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        values["shape"]["cutoffs"] = tuple(values["shape"]["cutoffs"])
        values["shape"] = Shape(**values["shape"])
        return cls(**values)


def step_flops(work: Work, shape: Shape, *, has_positions: bool = True) -> float:
    """Return the floating-point operations that a step needs, counted from its matrix products.

    A product of (a, b) and (b, c) counts 2 a b c. What is counted is what the step cannot do
    without, not what a program happens to do: pairs of a query and a key of its future are left
    out; in training the memory is projected to keys and values anew, as the paper does, and gets
    no gradient, nor do the sinusoids; in evaluation and generation keys, values and projected
    positions are there already. All but products is left out: norms, softmax, optimizer.

    Args:
        work: Training counts the backward pass, too.
        shape: Sizes.
        has_positions: Whether scores have a position term, the product of queries with projected
            encodings of distances.
    """
    B, T, M, D = shape.batch, shape.length, shape.mem_len, shape.d_model
    pairs = B * (T * M + T * (T + 1) // 2)
    # Multiplications: queries, keys, values and output of a token, the feed-forward, and scores.
    layer = B * T * (4 * D * D + 2 * D * shape.d_inner) + (2 + has_positions) * D * pairs
    # The projections of the memory and of positions, which have no gradient of their input.
    past = B * 2 * M * D * D + has_positions * (M + T) * D * D
    outside = B * T * _outside(shape)
    if work == "training":
        return 2 * (shape.n_layer * (3 * layer + 2 * past) + 3 * outside)
    return 2 * (shape.n_layer * layer + outside)


def _outside(shape: Shape) -> float:
    """Return the multiplications of embedding and softmax for words drawn uniformly."""
    clusters, D = model_config(shape).clusters, shape.d_model
    shares = [(x.stop - x.start) / shape.vocab for x in clusters]
    embedding = sum(p * x.has_proj * x.width * D for p, x in zip(shares, clusters, strict=True))
    head, *tails = clusters
    softmax = head.width * (head.stop + len(tails) + head.has_proj * D)
    for p, x in zip(shares[1:], tails, strict=True):
        softmax += p * x.width * (x.stop - x.start + x.has_proj * D)
    return embedding + softmax


def model_config(shape: Shape, **settings: Any) -> ModelConfig:
    """Return the settings of a model of ours."""
    names = ("n_layer", "d_model", "n_head", "d_inner", "mem_len", "cutoffs", "div_val")
    sizes = {name: getattr(shape, name) for name in names}
    if shape.cutoffs:
        # As NVIDIA's recipes have it.
        settings["tie_projections"] = (False, *(True for _ in shape.cutoffs))
    return ModelConfig(vocab_size=shape.vocab, **sizes, **settings)


def read_bytes(shape: Shape, precision: Precision) -> int:
    """Return the bytes of weights, keys and values that a step of one token for each stream reads.

    Without the projection of positions, which is not needed then, and without the projected
    positions themselves. All words are scored.
    """
    D = shape.d_model
    weight = {"float32": 4, "bfloat16": 4, "bfloat16_weights": 2, "int8_weights": 1}[precision]
    # What is remembered has the precision of the products' results.
    kept = 4 if precision == "float32" else 2
    weights = shape.n_layer * (4 * D * D + 2 * D * shape.d_inner)
    weights += sum(
        x.width * (x.stop - x.start + x.has_proj * D) for x in model_config(shape).clusters
    )
    remembered = shape.n_layer * 2 * shape.batch * shape.mem_len * D
    return weights * weight + remembered * kept
