from .checkpoint.checkpoints import (
    first_damaged,
)
from .checkpoint.run_folder import (
    RunFolder,
)
from .finish import (
    describe,
    held_out,
    memory_line,
)
from .loop import (
    Interrupted,
    train,
)
from .metrics import (
    Progress,
    reading,
)
from .optim import (
    Optimizer,
    lr_scale,
)
from .state import (
    TrainState,
)
from .step import (
    Diverged,
)
from .stepping import (
    stepper,
)

__all__ = [
    "Diverged",
    "Interrupted",
    "Optimizer",
    "Progress",
    "RunFolder",
    "TrainState",
    "describe",
    "first_damaged",
    "held_out",
    "lr_scale",
    "memory_line",
    "reading",
    "stepper",
    "train",
]
