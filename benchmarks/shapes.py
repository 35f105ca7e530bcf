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

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


SHAPES = {
    "base": Shape(12, 512, 8, 2048, 512, 512, 2),
    "small": Shape(6, 256, 8, 1024, 128, 128, 16),
    "demo": Shape(4, 192, 4, 768, 128, 128, 16, 4096),
    "tiny": Shape(2, 32, 2, 64, 8, 8, 2, 50),
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
    # Not at the head: the revision of ours that is compared with may have no such file.
    from transformer_xl.bench.work import forward_flops, training_flops

    config = model_config(shape, attn_type=0 if has_positions else 2)
    sizes = shape.batch, shape.length, shape.mem_len, shape.length
    if work == "training":
        return training_flops(config, *sizes)
    return forward_flops(config, *sizes, is_kept=True)


def model_config(shape: Shape, **settings: Any) -> ModelConfig:
    """Return the settings of a model of ours."""
    names = ("n_layer", "d_model", "n_head", "d_inner", "mem_len")
    sizes = {name: getattr(shape, name) for name in names}
    return ModelConfig(vocab_size=shape.vocab, **sizes, **settings)


def read_bytes(shape: Shape, precision: Precision) -> int:
    """Return the bytes of weights, keys and values that a step of one token for each stream reads.

    Without the projection of positions, which is not needed then, and without the projected
    positions themselves.
    """
    D = shape.d_model
    weight = {"float32": 4, "bfloat16": 4, "bfloat16_weights": 2, "int8_weights": 1}[precision]
    # What is remembered has the precision of the products' results.
    kept = 4 if precision == "float32" else 2
    weights = shape.n_layer * (4 * D * D + 2 * D * shape.d_inner) + shape.vocab * D
    remembered = shape.n_layer * 2 * shape.batch * shape.mem_len * D
    return weights * weight + remembered * kept
