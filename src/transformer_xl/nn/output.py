"""What a model returns for a segment."""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Bool, Float
from torch import Tensor

from transformer_xl.nn.memory import KeptMemory, Memory


@dataclass(kw_only=True)
class Output:
    """What a model returns for a segment."""

    hidden: Float[Tensor, "B T D"]
    """Output of the layers, after dropout while training."""
    raw_hidden: Float[Tensor, "B T D"]
    """Output of the layers before dropout; ``hidden`` itself where nothing is dropped."""
    mems: Memory | KeptMemory
    """The memory after this segment: the model's argument for the next one."""
    nll: Float[Tensor, "B predicted"] | None = None
    """-log p of each target in nats, in token order; 0 for padding; None without targets."""
    is_real: Bool[Tensor, "B predicted"] | None = None
    """Which targets are no padding; None: all, or no targets."""
    log_probs: Float[Tensor, "B T V"] | None = None
    """Logarithms of the probabilities of the next token; None with targets."""

    @cached_property
    def loss(self) -> Float[Tensor, ""] | None:
        """The mean of ``nll`` over the targets that are no padding; None without targets."""
        if self.nll is None or self.is_real is None:
            return None if self.nll is None else self.nll.mean()
        return self.nll.sum() / self.is_real.sum().clamp(min=1)
