from .checkpoint.checkpoints import (
    first_damaged,
)
from .checkpoint.run_folder import (
    RunFolder,
)
from .loop import (
    Interrupted,
    train,
)
from .metrics import (
    Progress,
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
    "first_damaged",
    "lr_scale",
    "stepper",
    "train",
]
