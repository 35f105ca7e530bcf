"""The subject of an estimate: a recipe on some number of processes, and its number of weights."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from transformer_xl.config import Config, ModelConfig
from transformer_xl.model import build_model
from transformer_xl.model.arguments import require_token_inputs
from transformer_xl.model.limits import FLOAT, layer_matrices
from transformer_xl.train.state import longest_segment

Parallel = Literal["ddp", "fsdp"]
_STATES = {"adamw": 2, "lamb": 2, "muon": 2, "adagrad": 1}
"""Numbers of the state for each weight; those of Muon's matrices have one, SGD's its momentum."""


class Weights(NamedTuple):
    """The number of weights; tied weights count once."""

    layer: int
    """Weights of one layer, which is a unit of FSDP."""
    root: int
    """Weights outside the layers: embeddings, softmax, shared biases."""
    largest: int
    """Weights of the largest parameter."""
    total: int


@lru_cache(maxsize=64)
def count_weights(config: ModelConfig) -> Weights:
    """Count the weights of a model by building it on the meta device.

    Raises:
        ValueError: It is another kind of model, or the size of its vocabulary is not set.
    """
    if config.kind != "transformer_xl":
        raise ValueError(
            f"model.kind={config.kind!r}: only a model of kind 'transformer_xl' can be estimated"
        )
    require_token_inputs(config)
    try:
        with torch.device("meta"):
            # Two layers at least: some settings need another one behind the first.
            two, three = (
                build_model(replace(config, n_layer=n, layer_attn_lens=())) for n in (2, 3)
            )
    except RuntimeError as error:
        raise ValueError(
            f"the model is too large for 64-bit sizes: lower its widths ({error})"
        ) from error
    deeper = dict(three.named_parameters())
    # All layers are alike: each adds as much as the third one.
    sizes = {
        name: x.numel() + (config.n_layer - 2) * (deeper[name].numel() - x.numel())
        for name, x in two.named_parameters()
        if not name.startswith("layers.1.")
    }
    layer = sum(n for name, n in sizes.items() if name.startswith("layers."))
    root = sum(sizes.values()) - layer
    return Weights(layer, root, max(sizes.values()), root + config.n_layer * layer)


def muon_weights(config: Config) -> int:
    """Count the weights that Muon updates: none with another optimizer."""
    if config.train.optimizer != "muon":
        return 0
    own = sum(rows * columns for rows, columns in layer_matrices(config.model))
    return config.model.n_layer * own


def optimizer_numbers(config: Config) -> int:
    """Count the numbers of the optimizer state."""
    muon = muon_weights(config)
    states = _STATES.get(config.train.optimizer, int(config.train.momentum > 0))
    return muon + states * (count_weights(config.model).total - muon)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A recipe on a number of processes. Sizes are per process.

    Raises:
        ValueError: The streams cannot be divided evenly, or the vocabulary size is not known.
    """

    config: Config
    """The recipe, with the size of its vocabulary."""
    ranks: int = 1
    """Processes, each with a GPU."""
    parallel: Parallel = "ddp"
    """Every process holds all weights (ddp), or a shard of them (fsdp)."""
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: Literal["cuda", "cpu"] = "cuda"
    """Dropout stores its masks on a GPU; on the CPU it draws them again."""

    def __post_init__(self) -> None:
        settings, step = self.config.train, self.ranks * self.config.train.accumulate
        if self.ranks < 1:
            raise ValueError(f"gpus={self.ranks} must be at least 1")
        if settings.batch_size % step:
            raise ValueError(
                f"train.batch_size={settings.batch_size} streams cannot be divided evenly over "
                f"gpus={self.ranks} with train.accumulate={settings.accumulate}: give a multiple "
                f"of {step} as --train.batch_size, or another --gpus"
            )
        count_weights(self.config.model)

    @property
    def streams(self) -> int:
        """Streams of a process."""
        return self.config.train.batch_size // self.ranks

    @property
    def B(self) -> int:  # noqa: N802
        """Streams of a process in one part of a step (gradient accumulation)."""
        return self.streams // self.config.train.accumulate

    @property
    def T(self) -> int:  # noqa: N802
        """Tokens of the longest segment of the run, with its extended context."""
        return longest_segment(self.config.train) + self.config.model.ext_len

    @property
    def M(self) -> int:  # noqa: N802
        """Positions of the longest memory of the run."""
        return max(self.config.model.mem_len, *(m for *_, m in self.config.train.stages), 0)

    @property
    def operand(self) -> int:
        """Bytes of an operand of a matrix product."""
        return FLOAT if self.precision == "float32" else 2

    @property
    def is_sharded(self) -> bool:
        """Whether weights are sharded over the processes."""
        return self.parallel == "fsdp" and self.ranks > 1
