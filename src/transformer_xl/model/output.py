"""What a model returns for a segment."""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_xl.model.memory import Memory
from transformer_xl.ops.nll import IGNORED


@dataclass(kw_only=True)
class Output:
    """What a model returns for a segment."""

    hidden: Float[Tensor, "B T D"]
    """Output of the layers, after dropout while training."""
    raw_hidden: Float[Tensor, "B T D"]
    """Output of the layers before dropout; ``hidden`` itself where nothing is dropped."""
    mems: Memory
    """The memory after this segment: the model's argument for the next one."""
    nll: Float[Tensor, "B predicted"] | None = None
    """-log p of each target in nats, in token order; 0 for padding and for targets of -100; None
    without targets."""
    is_real: Bool[Tensor, "B predicted"] | None = None
    """Which targets are no padding; None: all, or no targets."""
    targets: Int[Tensor, "B predicted"] | None = None
    """The targets that were given."""
    log_probs: Float[Tensor, "B T V"] | None = None
    """Logarithms of the probabilities of the next token; None with targets, or unasked."""

    @cached_property
    def loss(self) -> Float[Tensor, ""] | None:
        """The mean of ``nll`` over the targets that are neither padding nor -100.

        Without any such target it is 0, and so are its gradients, where
        ``torch.nn.functional.cross_entropy`` returns NaN. None where no targets were given.
        """
        if self.nll is None or self.targets is None:
            return None
        counted = self.targets != IGNORED
        if self.is_real is not None:
            return self.nll.sum() / (counted & self.is_real).sum().clamp(min=1)
        # Times exactly one where no target is -100.
        return self.nll.mean() * (counted.numel() / counted.sum().clamp(min=1))
